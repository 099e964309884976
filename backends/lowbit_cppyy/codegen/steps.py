"""Steps that every kernel of a matrix is made of: loading words, moving pointers, prefetching, and the epilogue.

`lowbit_cppyy.codegen.floats` and `lowbit_cppyy.codegen.integers` build the loops of the two contracts from them.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from lowbit.kernels.program import Address, Advance, Comment, Instruction, Step
from lowbit_cppyy.codegen.unpacking import LOWERED
from lowbit_cppyy.layout.panels import LINE, row_elements
from lowbit_cppyy.recipe import Recipe, Tile

TABLE = 16
"""Elements of a table: the sixteen sums of method `sums`, or the sixteen codes of method `table`."""


def added_to_results(tile: Tile, lanes: int, body: Iterable[Step]) -> list[Step]:
    """Steps that add to the registers ``y_{r}_{j}``, preceded by their loads and followed by their stores."""
    addresses = {f"y_{r}_{j}": Address("y", r * tile.panel + j * lanes) for r, j in tile.places}
    loads = [Instruction("load_float", register, (address,)) for register, address in addresses.items()]
    return [*loads, *body, *(Instruction("store", "", (address, name)) for name, address in addresses.items())]


def combined(tile: Tile) -> Iterator[Step]:
    """Add the chains of each sum ``acc_{r}_{j}`` into the first: in fours, then the sums of these."""
    fours = [(own - own % 4, own) for own in range(tile.chains) if own % 4]
    for to, own in (*fours, *((0, own) for own in range(4, tile.chains, 4))):
        for r, j in tile.places:
            yield Instruction("add", f"acc_{r}_{j}_{to}", (f"acc_{r}_{j}_{to}", f"acc_{r}_{j}_{own}"))


def raised(tile: Tile, sums: str) -> Iterator[Step]:
    """Multiply sums, named with places for r and j, by the power of two by which method `subnormal` makes them too
    small."""
    for r, j in tile.places:
        yield Instruction("multiply", sums.format(r, j), (sums.format(r, j), "raise"))


def raising(method: str) -> Iterator[Step]:
    """Load the power of two that `raised` multiplies by, if this method needs it."""
    if method == "subnormal":
        yield Instruction("broadcast_float", "raise", (2.0**LOWERED,))


def zero(register: str) -> Instruction:
    """``register = 0``, the start of every sum."""
    return Instruction("broadcast_float", register, (0.0,))


def advance(elements: int) -> Iterator[Step]:
    """Move the three pointers into the stream of weights.

    They differ by a constant: the position of the tile's columns in a row of words, of scales and of zeros. An element
    of a row of words holds one column, of scales one or two, of zeros one to four.
    """
    for pointer in ("w", "s", "z"):
        yield Advance(pointer, elements)


def x_elements(recipe: Recipe) -> int:
    """The number of elements of x for one unit and one row."""
    if recipe.method == "sums":
        return 8 * recipe.unit_words * TABLE
    return recipe.unit_codes // 4 if recipe.integer else recipe.unit_codes


def load_words(tile: Tile, lanes: int, number: int = 0) -> Iterator[Step]:
    """Load the words of one unit of the iteration into registers ``w{row}_{j}``."""
    for row in range(tile.unit_words):
        for j in range(tile.registers):
            offset = (number * tile.unit_words + row) * tile.panel + j * lanes
            yield Instruction("load_int", f"w{row}_{j}", (Address("w", offset),))


def words_of(tile: Tile, j: int) -> list[str]:
    """The registers that `load_words` fills for a column of registers."""
    return [f"w{row}_{j}" for row in range(tile.unit_words)]


def prefetched(tile: Tile, steps: Iterable[Step], first: int, elements: int) -> Iterator[Step]:
    """Steps, with prefetches between them of the cache lines a fixed distance ahead of the elements that they read.

    They are needed because the hardware prefetcher stops at a page boundary. Whole rows of the panel are prefetched
    even if the tile is narrower, because the adjacent tiles are next. With one row of x each word is used once and
    should not evict the activations from the caches. With several rows a panel is read once for every few rows.

    The prefetches are spread evenly. A run of them would fill the line fill buffers, and the loads after them would
    wait.

    Args:
        tile: of the kernel.
        steps: without loops.
        first, elements: the first element and the number of elements of the stream of weights, counted from the
            pointer.
    """
    word, body = "prefetch_once" if tile.rows == 1 else "prefetch", list(steps)
    lines = range(first, first + elements, LINE) if tile.ahead else range(0)
    due = defaultdict[int, list[int]](list)
    for number, line in enumerate(lines):
        due[number * len(body) // len(lines)].append(line)
    for place, step in enumerate(body):
        for line in due[place]:
            yield Instruction(word, "", (Address("w", line + tile.ahead),))
        yield step


def iteration(recipe: Recipe, lanes: int, products: Callable[[Recipe, int], Iterator[Step]]) -> Iterator[Step]:
    """The units of one loop iteration; `products` gives the steps of one unit after its words are loaded."""
    elements = recipe.unit_words * recipe.panel
    for number in range(recipe.unroll):
        unit = chain(load_words(recipe, lanes, number), products(recipe, number))
        yield from prefetched(recipe, unit, number * elements, elements)
    yield from advance(recipe.unroll * elements)
    yield Advance("x", x_elements(recipe) * recipe.unroll * recipe.rows)


# **The epilogue** of a group: its sums are scaled and offset, and added to y.


def epilogue(recipe: Recipe, lanes: int) -> Iterator[Step]:
    """``y += acc * s + X * o`` for the sums ``acc_{r}_{j}_0``; then the pointers move past the group."""
    elements = _scale_elements(recipe) + _zero_elements(recipe)
    yield from prefetched(recipe, _scaled(recipe, lanes), 0, elements)
    yield from advance(elements)
    yield Advance("x", recipe.rows)


def _scaled(recipe: Recipe, lanes: int) -> Iterator[Step]:
    yield Comment("y += acc * s + X * o")
    for r in range(recipe.rows):
        yield Instruction("broadcast_float", f"X_{r}", (Address("x", r),))
    for j in range(recipe.registers):
        yield from _scale_and_offset(recipe, j, j * lanes)
        for r in range(recipe.rows):
            yield Instruction("fmadd", f"y_{r}_{j}", (f"acc_{r}_{j}_0", f"s_{j}", f"y_{r}_{j}"))
            yield Instruction("fmadd", f"y_{r}_{j}", (f"X_{r}", f"o_{j}", f"y_{r}_{j}"))


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
    yield Instruction("multiply", f"o_{j}", (f"s_{j}", f"o_{j}"))  # s·z; X is negated, so no sign is needed
