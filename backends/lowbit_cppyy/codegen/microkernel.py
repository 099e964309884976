r"""The generator: one micro-kernel program for every recipe.

This is QIGen's Algorithm 3 with Algorithm 2 inside it, for groups (equation 2). Over one panel of columns it computes,
for each of its rows of x and each column j,

.. math:: y_j \mathrel{+}= \sum_g s_{gj} \Bigl(\sum_{k \in g} x_k\, q_{kj}\Bigr) + o_{gj}\, X_g ,
   \qquad X_g = \sum_{k \in g} x_k ,

where the offset :math:`o` is the group's minimum, or minus scale times zero. Lanes are columns, so no register is
ever summed across its lanes. Two streams feed it, each read once from front to back:

- ``w``, of 32-bit elements (`lowbit_cppyy.layout.layout`): for each group, its units of words, its scales and its
  zeros, each row as wide as the panel; ``s`` and ``z`` point into the same stream, for scales and zeros;
- ``x``, of float32 (`lowbit_cppyy.layout.streams`): for each group, what its codes are multiplied by, then :math:`X_g`;
  with several rows of x, their elements lie side by side.

A group is whole units, filled up with zeros on both sides, so the program has no tails. How many groups there are, and
how many turns of the loop each has, are arguments of the call (``groups``, ``turns``): one kernel serves every group
size.

The parts that all recipes share are here; `lowbit_cppyy.recipe.unpacking` takes codes out of words,
`lowbit_cppyy.codegen.integers` has the loop of the integer contract.

Source: QIGen §3, Algorithms 2 and 3, equation 2; errata Q3, Q5, Q7.
"""

from collections.abc import Callable, Iterator

from lowbit.kernels.program import Address, Advance, Comment, Element, Instruction, Loop, Program, Step
from lowbit_cppyy.layout.layout import LINE, row_elements
from lowbit_cppyy.recipe.recipe import Recipe
from lowbit_cppyy.recipe.unpacking import constants, unpack

TABLE = 16  # elements of a table of sums


def micro_kernel(recipe: Recipe, lanes: int) -> Program:
    """The program of a recipe for registers of so many lanes.

    Args:
        recipe: one that `fits`.
        lanes: numbers in one vector register.
    """
    assert not recipe.fits(lanes)
    from lowbit_cppyy.codegen.integers import segments_loop  # which takes its parts from here

    tile = tile_of(recipe)
    places = {(r, j): Address("y", r * recipe.panel + j * lanes) for r, j in tile}
    steps: list[Step] = [Instruction("load_float", f"y_{r}_{j}", (places[r, j],)) for r, j in tile]
    if recipe.integer:
        steps += [*(zero(f"acc_{r}_{j}_0") for r, j in tile), segments_loop(recipe, lanes)]
    else:
        steps.append(groups_loop(recipe, lanes))
    steps += [Instruction("store", "", (places[r, j], f"y_{r}_{j}")) for r, j in tile]
    return Program(lanes, (*_table(recipe, lanes), *constants(steps), *steps))


def tile_of(recipe: Recipe) -> list[tuple[int, int]]:
    """The registers of y: rows of x by registers of columns."""
    return [(r, j) for r in range(recipe.rows) for j in range(recipe.registers)]


def _table(recipe: Recipe, lanes: int) -> Iterator[Step]:
    """The numbers 0 to 15 in a register; they stand in front of x."""
    if recipe.method == "table":
        yield Instruction("load_float", "table", (Address("x"),))
        yield Advance("x", TABLE)


def zero(register: str) -> Instruction:
    """``register = 0``, as every sum begins."""
    return Instruction("broadcast_float", register, (0.0,))


# **One group**: the sums begin at zero, the codes are multiplied and added, the sums are put together, scaled, offset.


def groups_loop(recipe: Recipe, lanes: int) -> Loop:
    """All groups, one after the other."""
    return Loop("g", "groups", tuple(_group(recipe, lanes)))


def _group(recipe: Recipe, lanes: int) -> Iterator[Step]:
    sums = [(r, j, c) for r in range(recipe.rows) for j in range(recipe.registers) for c in range(recipe.chains)]
    for r, j, c in sums:
        yield zero(f"acc_{r}_{j}_{c}")
    body: list[Step] = []
    for number in range(recipe.turn):
        body += prefetch(recipe, number * recipe.unit_words)
        body += _looked_up(recipe, lanes, number) if recipe.method == "sums" else _multiplied(recipe, lanes, number)
    step = x_elements(recipe) * recipe.turn * recipe.rows
    body += [*advance(recipe.turn * recipe.unit_words * recipe.panel), Advance("x", step)]
    yield Loop("u", Element("turns", "g"), tuple(body))
    yield from _put_together(recipe)
    yield from closing(recipe, lanes, lambda r, j: f"acc_{r}_{j}_0")


def advance(elements: int) -> Iterator[Step]:
    """Move on in the stream of weights. Its three pointers differ by a constant: where the tile of columns begins in
    a row of words, of scales and of zeros, whose elements hold one column, one or two, and one to four."""
    for pointer in ("w", "s", "z"):
        yield Advance(pointer, elements)


def x_elements(recipe: Recipe) -> int:
    """Elements of x for one unit and one row."""
    if recipe.method == "sums":
        return 8 * recipe.unit_words * TABLE
    return recipe.unit_codes // 4 if recipe.integer else recipe.unit_codes


def load_words(recipe: Recipe, lanes: int, number: int) -> Iterator[Step]:
    """The words of one unit of the turn, into registers ``w{row}_{j}``."""
    for row in range(recipe.unit_words):
        for j in range(recipe.registers):
            place = (number * recipe.unit_words + row) * recipe.panel + j * lanes
            yield Instruction("load_int", f"w{row}_{j}", (Address("w", place),))


def words_of(recipe: Recipe, j: int) -> list[str]:
    """The registers that `load_words` fills for a column of registers."""
    return [f"w{row}_{j}" for row in range(recipe.unit_words)]


def _multiplied(recipe: Recipe, lanes: int, number: int) -> Iterator[Step]:
    """One unit: each code unpacked, then multiplied and added for each row of x."""
    yield from load_words(recipe, lanes, number)
    for code in range(recipe.unit_codes):
        yield Comment(f"code {number * recipe.unit_codes + code}")
        for r in range(recipe.rows):
            place = (number * recipe.unit_codes + code) * recipe.rows + r
            yield Instruction("broadcast_float", f"x_{r}", (Address("x", place),))
        for j in range(recipe.registers):
            yield from unpack(recipe, code, words_of(recipe, j), f"a_{j}", f"b_{j}", f"l_{j}")
            for r in range(recipe.rows):
                acc = f"acc_{r}_{j}_{code % recipe.chains}"
                yield Instruction("fmadd", acc, (f"x_{r}", f"l_{j}", acc))


def _looked_up(recipe: Recipe, lanes: int, number: int) -> Iterator[Step]:
    """One unit: every four bits of a word are the index of a sum."""
    yield from load_words(recipe, lanes, number)
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


def _put_together(recipe: Recipe) -> Iterator[Step]:
    """The chains of each sum, added in order."""
    for c in range(1, recipe.chains):
        for r in range(recipe.rows):
            for j in range(recipe.registers):
                yield Instruction("add", f"acc_{r}_{j}_0", (f"acc_{r}_{j}_0", f"acc_{r}_{j}_{c}"))


def closing(recipe: Recipe, lanes: int, sums: Callable[[int, int], str]) -> Iterator[Step]:
    """What ends a group: ``y += acc * s + X * o``; then ``w`` and ``x`` stand behind it.

    Args:
        recipe: any.
        lanes: L.
        sums: the register with the sum of row r and the registers of columns j.
    """
    yield Comment("y += acc * s + X * o")
    for r in range(recipe.rows):
        yield Instruction("broadcast_float", f"X_{r}", (Address("x", r),))
    for j in range(recipe.registers):
        yield from _scale_and_offset(recipe, j, j * lanes)
        for r in range(recipe.rows):
            acc = sums(r, j)
            if recipe.method == "mantissa":
                yield Instruction("broadcast_float", "excess", (excess(recipe),))
                yield Instruction("fmadd", acc, (f"X_{r}", "excess", acc))
            yield Instruction("fmadd", f"y_{r}_{j}", (acc, f"s_{j}", f"y_{r}_{j}"))
            yield Instruction("fmadd", f"y_{r}_{j}", (f"X_{r}", f"o_{j}", f"y_{r}_{j}"))
    yield from advance(sum(closing_elements(recipe)))
    yield Advance("x", recipe.rows)


def closing_elements(recipe: Recipe) -> tuple[int, int]:
    """Elements of a group's scales and of its zeros."""
    zeros = recipe.scales if recipe.convention == "minimum" else "uint8"
    return row_elements(recipe.panel, recipe.scales), row_elements(recipe.panel, zeros)


def excess(recipe: Recipe) -> float:
    """What the sum of x is multiplied by to take 2^b from every code; under zero-points X is its own negative."""
    return float(2**recipe.bits) if recipe.convention == "zero_point" else -float(2**recipe.bits)


def _scale_and_offset(recipe: Recipe, j: int, column: int) -> Iterator[Step]:
    """Scale and offset of the columns of one register, to ``s_j`` and ``o_j``."""
    zeros = closing_elements(recipe)[0]
    load, each = ("load_half", 2) if recipe.scales == "float16" else ("load_float", 1)
    yield Instruction(load, f"s_{j}", (Address("s", column // each),))
    if recipe.convention == "minimum":
        yield Instruction(load, f"o_{j}", (Address("z", zeros + column // each),))
        return
    yield Instruction("load_byte", f"z_{j}", (Address("z", zeros + column // 4),))
    yield Instruction("cvt_int_float", f"o_{j}", (f"z_{j}",))
    yield Instruction("multiply", f"o_{j}", (f"s_{j}", f"o_{j}"))  # s·z; X is negative, so no sign is needed


def prefetch(recipe: Recipe, row: int) -> Iterator[Step]:
    """Ask for the lines that lie so far behind the rows of a unit: the processor's own prefetch ends with a page.

    Whole rows of the panel, also where the tile is narrower, because the tiles beside it are next. With one row of x
    each word is used once, and had better not take the place of the activations in the caches; with several, a panel
    is gone through for each few of them.
    """
    word = "prefetch_once" if recipe.rows == 1 else "prefetch"
    if recipe.ahead:
        for place in range(row * recipe.panel, (row + recipe.unit_words) * recipe.panel, LINE):
            yield Instruction(word, "", (Address("w", place + recipe.ahead),))
