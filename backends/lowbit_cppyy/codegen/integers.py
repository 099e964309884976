r"""The loop of the integer contract: four codes by four mantissas at a time.

In a *segment* neither the block of activations nor the group of weights changes (`lowbit.linear.integer`). Its sum of
products is an integer and stays in integer registers. A segment ends with ``acc += 2^e · float(D)``, one rounding; a
group ends with ``y += acc * s + X * o``, as in every kernel.

The stream ``x`` is made of segments. For each unit it holds the mantissas, four bytes an element, with the rows of x
side by side; then :math:`2^e`. After the last segment of a group follows the sum :math:`X = \sum 2^e S`. Three lists
describe the segments:

- ``turns[i]``: iterations of the loop over units;
- ``back[i]``: 1 where the segment ends in the middle of a unit, in which the next one begins. Then ``w`` moves back by
  one unit, and each of the two has zeros where the other has its mantissas;
- ``ends[i]``: 1 where a group ends.

**Through 16 bits** (`pairs`): the older instruction adds two products into 16 bits with saturation. Products of codes
of at most 4 bits and 8-bit mantissas are small enough to add the eight sums of a segment of 32 there, because
:math:`8 \cdot 2 \cdot 15 \cdot 127 < 2^{15}`. They are widened once a segment.
"""

from collections.abc import Iterator

from lowbit.kernels.program import Address, Advance, Comment, Element, Instruction, Loop, Step
from lowbit_cppyy.codegen.steps import advance, epilogue, iteration, words_of, zero
from lowbit_cppyy.codegen.unpacking import four_codes
from lowbit_cppyy.recipe import Recipe

PAIR_OF_ONES = 0x00010001


def segments_loop(recipe: Recipe, lanes: int) -> Loop:
    """All segments; where a segment ends a group, the epilogue follows it."""
    tile = recipe.places
    steps: list[Step] = [Instruction("broadcast_int", f"d_{r}_{j}", (0,)) for r, j in tile]
    steps.append(Loop("u", Element("turns", "i"), tuple(iteration(recipe, lanes, _multiplied))))
    steps += _scaled(recipe)
    steps.append(Loop("b", Element("back", "i"), tuple(advance(-recipe.unit_words * recipe.panel))))
    end = [*epilogue(recipe, lanes), *(zero(f"acc_{r}_{j}_0") for r, j in tile)]
    steps.append(Loop("e", Element("ends", "i"), tuple(end)))
    return Loop("i", "segments", tuple(steps))


def _multiplied(recipe: Recipe, number: int) -> Iterator[Step]:
    """One unit: four codes are unpacked, then multiplied by the mantissas of each row."""
    quarters = recipe.unit_codes // 4
    for quarter in range(quarters):
        yield Comment(f"codes {4 * (number * quarters + quarter)} to {4 * (number * quarters + quarter) + 3}")
        for r in range(recipe.rows):
            offset = (number * quarters + quarter) * recipe.rows + r
            yield Instruction("broadcast_int", f"x_{r}", (Address("x", offset),))
        for j in range(recipe.registers):
            steps, codes = four_codes(recipe.bits, quarter, words_of(recipe, j), f"a_{j}", f"b_{j}")
            yield from steps
            for r in range(recipe.rows):
                yield from _dot(recipe, f"d_{r}_{j}", codes, f"x_{r}")


def _dot(recipe: Recipe, total: str, codes: str, mantissas: str) -> Iterator[Step]:
    if recipe.method == "dot4":
        yield Instruction("dot4", total, (total, codes, mantissas))
    else:
        yield Instruction("dot4_pairs", "p", (codes, mantissas))
        yield Instruction("add_pairs", total, (total, "p"))


def _scaled(recipe: Recipe) -> Iterator[Step]:
    """The end of a segment: its integer sums are scaled and added to those of the group."""
    yield Comment("acc += 2^e * d")
    if recipe.method == "pairs":
        yield Instruction("broadcast_int", "none", (0,))
        yield Instruction("broadcast_int", "ones", (PAIR_OF_ONES,))
        for r, j in recipe.places:
            yield Instruction("dot2", f"d_{r}_{j}", ("none", f"d_{r}_{j}", "ones"))
    for r in range(recipe.rows):
        yield Instruction("broadcast_float", f"e_{r}", (Address("x", r),))
    for r, j in recipe.places:
        yield Instruction("cvt_signed_float", f"f_{j}", (f"d_{r}_{j}",))
        yield Instruction("fmadd", f"acc_{r}_{j}_0", (f"f_{j}", f"e_{r}", f"acc_{r}_{j}_0"))
    yield Advance("x", recipe.rows)
