"""Steps that every kernel of a matrix is made of: loading words, moving pointers, prefetching, and the epilogue.

`lowbit_cppyy.codegen.floats` and `lowbit_cppyy.codegen.integers` build the loops of the two contracts from them.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Protocol

from lowbit.kernels.program import Address, Advance, Comment, Instruction, Step
from lowbit_cppyy.layout.panels import LINE, row_elements
from lowbit_cppyy.recipe import Recipe

TABLE = 16
"""Elements of a table: of the sixteen sums of method `sums`, or of the sixteen codes of method `table`."""


def tile_of(recipe: Recipe) -> list[tuple[int, int]]:
    """The registers of y: rows of x by registers of columns."""
    return [(r, j) for r in range(recipe.rows) for j in range(recipe.registers)]


def zero(register: str) -> Instruction:
    """``register = 0``, as every sum begins."""
    return Instruction("broadcast_float", register, (0.0,))


def advance(elements: int) -> Iterator[Step]:
    """Move the three pointers into the stream of weights.

    They differ by a constant: the position of the tile's columns in a row of words, of scales and of zeros. An element
    of those rows holds one column, one or two, and one to four.
    """
    for pointer in ("w", "s", "z"):
        yield Advance(pointer, elements)


def x_elements(recipe: Recipe) -> int:
    """Elements of x for one unit and one row."""
    if recipe.method == "sums":
        return 8 * recipe.unit_words * TABLE
    return recipe.unit_codes // 4 if recipe.integer else recipe.unit_codes


def load_words(recipe: Recipe, lanes: int, number: int) -> Iterator[Step]:
    """Load the words of one unit of the iteration into registers ``w{row}_{j}``."""
    for row in range(recipe.unit_words):
        for j in range(recipe.registers):
            offset = (number * recipe.unit_words + row) * recipe.panel + j * lanes
            yield Instruction("load_int", f"w{row}_{j}", (Address("w", offset),))


def words_of(recipe: Recipe, j: int) -> list[str]:
    """The registers that `load_words` fills for a column of registers."""
    return [f"w{row}_{j}" for row in range(recipe.unit_words)]


class Streamed(Protocol):
    """What prefetching needs to know of a recipe."""

    @property
    def rows(self) -> int: ...

    @property
    def panel(self) -> int: ...

    @property
    def ahead(self) -> int: ...


def prefetched(recipe: Streamed, steps: Iterable[Step], first: int, elements: int) -> Iterator[Step]:
    """Steps, and between them prefetches of the lines that lie a fixed distance behind the elements that they read.

    They are needed because the processor's own prefetcher stops at a page. Whole rows of the panel are prefetched, also
    where the tile is narrower, because the tiles beside it are next. With one row of x each word is used once, and
    should not evict the activations from the caches. With several rows a panel is read once for each few of them.

    The prefetches are spread evenly. Side by side they would fill the buffers of the lines that are on their way, and
    the loads behind them would wait.

    Args:
        recipe: any.
        steps: without loops.
        first, elements: of the stream of weights, from the pointer on.
    """
    word, body = "prefetch_once" if recipe.rows == 1 else "prefetch", list(steps)
    lines = range(first, first + elements, LINE) if recipe.ahead else range(0)
    due = defaultdict[int, list[int]](list)
    for number, line in enumerate(lines):
        due[number * len(body) // len(lines)].append(line)
    for place, step in enumerate(body):
        for line in due[place]:
            yield Instruction(word, "", (Address("w", line + recipe.ahead),))
        yield step


# **The epilogue** of a group: its sums are scaled and offset, and added to y.


def epilogue(recipe: Recipe, lanes: int) -> Iterator[Step]:
    """``y += acc * s + X * o`` for the sums ``acc_{r}_{j}_0``; then the pointers move past the group.

    Args:
        recipe: any.
        lanes: L.
    """
    yield Comment("y += acc * s + X * o")
    for r in range(recipe.rows):
        yield Instruction("broadcast_float", f"X_{r}", (Address("x", r),))
    for j in range(recipe.registers):
        yield from _scale_and_offset(recipe, j, j * lanes)
        for r in range(recipe.rows):
            yield Instruction("fmadd", f"y_{r}_{j}", (f"acc_{r}_{j}_0", f"s_{j}", f"y_{r}_{j}"))
            yield Instruction("fmadd", f"y_{r}_{j}", (f"X_{r}", f"o_{j}", f"y_{r}_{j}"))
    yield from advance(_scale_elements(recipe) + _zero_elements(recipe))
    yield Advance("x", recipe.rows)


def _scale_elements(recipe: Recipe) -> int:
    return row_elements(recipe.panel, recipe.scales)


def _zero_elements(recipe: Recipe) -> int:
    return row_elements(recipe.panel, recipe.scales if recipe.convention == "minimum" else "uint8")


def _scale_and_offset(recipe: Recipe, j: int, column: int) -> Iterator[Step]:
    """Load the scales and offsets of one register of columns into ``s_j`` and ``o_j``."""
    zeros = _scale_elements(recipe)
    load, each = ("load_half", 2) if recipe.scales == "float16" else ("load_float", 1)
    yield Instruction(load, f"s_{j}", (Address("s", column // each),))
    if recipe.convention == "minimum":
        yield Instruction(load, f"o_{j}", (Address("z", zeros + column // each),))
        return
    yield Instruction("load_byte", f"z_{j}", (Address("z", zeros + column // 4),))
    yield Instruction("cvt_int_float", f"o_{j}", (f"z_{j}",))
    yield Instruction("multiply", f"o_{j}", (f"s_{j}", f"o_{j}"))  # s·z; X is negative, so no sign is needed
