"""The loop of the float32 contract: one code at a time, or four bits of a word looked up among sums.

For each group the sums begin at zero, codes are multiplied and added to them, the chains of each sum are combined, and
the epilogue scales and offsets the result.

Source: QIGen §3, algorithms 2 and 3.
"""

from collections.abc import Iterator

from lowbit.kernels.program import Address, Comment, Element, Instruction, Loop, Step
from lowbit_cppyy.codegen.steps import TABLE, combined, epilogue, iteration, raised, words_of, zero
from lowbit_cppyy.codegen.unpacking import unpack
from lowbit_cppyy.recipe import Recipe


def groups_loop(recipe: Recipe, lanes: int) -> Loop:
    """All groups, one after the other."""
    return Loop("g", "groups", tuple(_group(recipe, lanes)))


def _group(recipe: Recipe, lanes: int) -> Iterator[Step]:
    for r, j in recipe.places:
        for c in range(recipe.chains):
            yield zero(f"acc_{r}_{j}_{c}")
    products = _looked_up if recipe.method == "sums" else _multiplied
    yield Loop("u", Element("turns", "g"), tuple(iteration(recipe, lanes, products)))
    yield from combined(recipe)
    if recipe.method == "subnormal":
        yield from raised(recipe, "acc_{}_{}_0")
    yield from epilogue(recipe, lanes)


def _multiplied(recipe: Recipe, number: int) -> Iterator[Step]:
    """One unit: each code is unpacked, then multiplied by each row of x and added."""
    for code in range(recipe.unit_codes):
        yield Comment(f"code {number * recipe.unit_codes + code}")
        for r in range(recipe.rows):
            offset = (number * recipe.unit_codes + code) * recipe.rows + r
            yield Instruction("broadcast_float", f"x_{r}", (Address("x", offset),))
        for j in range(recipe.registers):
            yield from unpack(recipe, code, words_of(recipe, j), j)
            for r in range(recipe.rows):
                acc = f"acc_{r}_{j}_{code % recipe.chains}"
                yield Instruction("fmadd", acc, (f"x_{r}", f"l_{j}", acc))


def _looked_up(recipe: Recipe, number: int) -> Iterator[Step]:
    """One unit: every four bits of a word are the index of a sum."""
    for row in range(recipe.unit_words):
        for nibble in range(8):
            table = (number * recipe.unit_words + row) * 8 + nibble
            yield Comment(f"table {table}")
            yield Instruction("load_float", "t", (Address("x", table * TABLE),))
            for j in range(recipe.registers):
                index, acc = f"w{row}_{j}", f"acc_0_{j}_{nibble % recipe.chains}"
                if nibble:
                    yield Instruction("srli", f"a_{j}", (index, 4 * nibble))
                    index = f"a_{j}"
                yield Instruction("permute", f"l_{j}", ("t", index))
                yield Instruction("add", acc, (f"l_{j}", acc))
