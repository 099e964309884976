r"""Arrays: what callers of kernels pass, as linear expressions over unknown sizes.

For each kind of kernel `Arrays` says where its pointers begin and how long their memories are. The numbers come from
the layouts by which the backend allocates (`lowbit_cppyy.layout.panels`, `lowbit_cppyy.stored.layout`, the streams of
activations), and from the C++ that calls kernels (``cpp/linear.h``, ``cpp/decode.h``, ``cpp/blocks.h``).

A *part* of a stream is what one call reads: one block of one panel. The columns of a tile begin at a multiple of its
own number, and the pointers to scales and zeros at the same column, in elements that hold two or four.

**Segments.** Kernels of integers move back by a unit where a segment ends inside one. After the segments up to row p of
a group, :math:`\lfloor p/U \rfloor` units of the group lie behind the pointer, and the next segment ends at most at the
group's last unit, :math:`\lceil \text{size}/U \rceil`. That is an induction over segments. Its step depends on :math:`p
\bmod U`, on the length of a segment and on whether it ends a group; `segments_hold` enumerates them all, with the
backend's own function that makes segments.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from typing import Any

import z3

from lowbit_cppyy.codegen.attention import CHANNELS, sixteens, tile_channels
from lowbit_cppyy.codegen.elementwise import CHUNK
from lowbit_cppyy.codegen.kernels import Kernel
from lowbit_cppyy.codegen.steps import x_elements
from lowbit_cppyy.layout.panels import PanelLayout
from lowbit_cppyy.recipe import SEGMENT, Tile
from lowbit_cppyy.runtime.activations import ActivationStream, Segment
from lowbit_cppyy.stored.activations import elements_of
from lowbit_cppyy.stored.kernel import StoredKernel
from lowbit_cppyy.stored.layout import StoredLayout
from lowbit_cppyy.stored.parts import UNIT
from lowbit_cppyy.stored.recipe import HEAD
from lowbit_prove.accesses import Facts, before, element, total
from lowbit_prove.prepared_setting import smallest

MOST_ROWS, MOST_PANEL = 16, 128
"""The size of a tile of results: ``max_rows`` and ``max_panel`` of ``cpp/linear.h``."""
MANY = 150
"""The number of groups of a call in which small errors add up."""
GROUPS = z3.Int("groups")


@dataclass(frozen=True)
class Call:
    """One call: its sizes, and values of the other unknowns of its arrays."""

    sizes: Mapping[str, Any]
    others: Mapping[str, int] = field(default_factory=dict)

    @property
    def integers(self) -> dict[str, int]:
        """All integers by their names in expressions."""
        found = dict(self.others)
        for name, size in self.sizes.items():
            if isinstance(size, int):
                found[name] = size
            else:
                found[f"sum of {name}"] = sum(size)
        return found


@dataclass(frozen=True)
class Arrays:
    """The arrays of a call.

    Attributes:
        starts: the element of its array at which each pointer begins; 0 if not given.
        lengths: the number of elements of each array.
        facts: conditions on the sizes.
        known: conditions on them in an iteration of a loop, by its index.
        calls: some calls to demonstrate an error.
    """

    lengths: Mapping[str, Any]
    starts: Mapping[str, Any] = field(default_factory=dict)
    facts: Facts = ()
    known: Mapping[str, Facts] = field(default_factory=dict)
    calls: tuple[Call, ...] = ()


# **Matrices.**


def _columns(tile: Tile, lanes: int, halves: int, bytes_: int) -> tuple[dict[str, Any], Facts]:
    """The starts of the pointers for a tile of columns, and conditions on the number of the tile and that of its first
    column."""
    columns, number, first = tile.registers * lanes, z3.Int("tile"), z3.Int("first tile")
    j = columns * number
    starts = {"w": j, "s": j / halves, "z": j / bytes_, "y": j - columns * first}
    return starts, (first >= 0, first <= number, j + columns <= tile.panel, GROUPS >= 1, total("turns") >= 0)


def of_matrix(kernel: Kernel) -> Arrays:
    """The arrays of a kernel of a prepared matrix: for all K, N, group sizes, panels, blocks and rows of x."""
    recipe = kernel.recipe
    layout = smallest(recipe)
    starts, facts = _columns(recipe, kernel.table.lanes, layout.scales_each, layout.zeros_each)
    tail, each, head = (
        layout.scale_elements + layout.zero_elements,
        x_elements(recipe),
        ActivationStream(recipe, layout).head,
    )
    if recipe.integer:
        units, segments = z3.Int("units of groups"), z3.Int("segments")
        facts = (*facts, segments >= 1, total("ends") >= 0)
        x = recipe.unroll * each * total("turns") + segments + total("ends")
        known = {"i": _segment(recipe.unroll, units)}
    else:
        units = recipe.unroll * total("turns")
        x, known = each * units + GROUPS, {}
    stream = layout.unit_elements * units + tail * GROUPS
    lengths = {**dict.fromkeys("wsz", stream), "x": recipe.rows * (head + x), "y": z3.IntVal(MOST_ROWS * MOST_PANEL)}
    return Arrays(lengths, starts, facts, known, tuple(_matrix_calls(kernel, layout)))


def _segment(unroll: int, units: Any) -> Facts:
    """Conditions before a segment, by the induction of `segments_hold`.

    The units that the pointer has passed are those of the earlier groups and :math:`\\lfloor p/U \\rfloor` of this one.
    The units of the segment end inside its group, and there is one more group than have ended.
    """
    behind = unroll * before("turns", "i") - before("back", "i")
    own, back, ends = unroll * element("turns", "i"), element("back", "i"), element("ends", "i")
    inside = (behind >= 0, behind + own <= units, before("ends", "i") + 1 <= GROUPS)
    return (*inside, own >= 1, back <= 1, ends <= 1, z3.Or(back == 0, ends == 0))


@cache
def segments_hold(unit: int) -> int | str:
    """The induction step over segments, for units of `unit` codes.

    Returns:
        The number of steps checked, or a sentence about the one that fails.
    """
    steps = 0
    for p, length, ends in product(range(unit), range(1, SEGMENT + 1), (False, True)):
        segment = Segment.of(0, length, p, unit, ends)
        last = -(-(p + length) // unit)  # the unit of the group in which it ends
        behind = last if ends else (p + length) // unit
        if segment.units != last or segment.units - segment.back != behind or (segment.back and ends):
            return f"a segment of {length} rows from row {p} on has {segment.units} units"
        steps += 1
    return steps


def _matrix_calls(kernel: Kernel, layout: PanelLayout) -> Iterator[Call]:
    """Calls of matrices with one group, two and many, for the first tile and the last."""
    recipe, tiles = kernel.recipe, layout.panel // kernel.columns
    rest = layout.group_size, layout.scales, layout.convention, layout.panel
    sizes_of_rows = layout.group_size, layout.rows, MANY * layout.group_size
    for rows, tile in product(sizes_of_rows, sorted({0, tiles - 1})):
        each = PanelLayout(layout.bits, rows, layout.columns, *rest)
        stream = ActivationStream(recipe, each)
        sizes: dict[str, Any] = {"groups": each.groups, "turns": stream.iterations.tolist()}
        others = {"tile": tile, "first tile": 0}
        if recipe.integer:
            sizes |= {"segments": len(stream.segments), "back": [int(s.back) for s in stream.segments]}
            sizes["ends"] = [int(s.ends) for s in stream.segments]
            others["units of groups"] = sum(each.group_units(group) for group in range(each.groups))
        yield Call(sizes, others)


def of_stored(kernel: StoredKernel) -> Arrays:
    """The arrays of a kernel of a stored matrix."""
    recipe = kernel.recipe
    layout = StoredLayout(recipe.structure, recipe.panel, (UNIT,), recipe.panel)
    starts, facts = _columns(recipe, kernel.table.lanes, *layout.numbers[-2:].tolist())
    unit, group = elements_of(recipe)
    stream = layout.unit_elements * total("turns") + layout.tail_elements * GROUPS
    x = recipe.rows * (HEAD * recipe.headed + unit * total("turns") + group * GROUPS)
    lengths = {**dict.fromkeys("wsz", stream), "x": x, "y": z3.IntVal(MOST_ROWS * MOST_PANEL)}
    last = recipe.panel // kernel.columns - 1
    calls = [
        Call({"groups": len(turns), "turns": turns}, {"tile": tile, "first tile": 0})
        for turns in ([1], [2, 1], [3] * MANY)
        for tile in sorted({0, last})
    ]
    return Arrays(lengths, starts, facts, calls=tuple(calls))


# **Passes over rows, heads and blocks.** One iteration is a chunk, a register of tokens, two tokens, or L blocks.

_CALLS = tuple(Call({"groups": groups}) for groups in (1, 2))


def of_pass(name: str) -> Arrays:
    """The arrays of a pass over a row: whole chunks, with the rest of a row in a separate chunk."""
    row = CHUNK * GROUPS
    y = z3.IntVal(CHUNK) if name in ("squares", "sums", "largest") else row
    scalars = z3.IntVal(2 if name == "capped" else 1)
    return Arrays({"w": row, "s": row, "z": 2 * row, "x": scalars, "y": y}, calls=_CALLS)


def of_scores(head_dim: int, lanes: int, queries: int = 1) -> Arrays:
    """The arrays of scores: whole registers of tokens, and after the last row the extra channels that are read. The
    scores of several queries have rows of `CHUNK`, which is as many tokens as a call has."""
    channels = 16 * sixteens(head_dim)
    keys, before = (lanes * GROUPS - 1) * head_dim + channels, queries - 1
    x = before * (channels + CHANNELS) + channels + 1
    lengths = {"w": keys, "x": z3.IntVal(x), "y": before * CHUNK + lanes * GROUPS}
    return Arrays(lengths, facts=(GROUPS >= 1, *_within(lanes, queries)), calls=_CALLS)


def _within(tokens: int, queries: int) -> tuple[z3.BoolRef, ...]:
    """The limit on the tokens of a call with several queries, given the tokens of one iteration."""
    return (tokens * GROUPS <= CHUNK,) if queries > 1 else ()


def of_mixed(head_dim: int, lanes: int, queries: int = 1) -> Arrays:
    """The arrays of a mix: two tokens per iteration, starting at any tile of channels. The probabilities of several
    queries have rows of `CHUNK`."""
    channels, columns, tile = 16 * sixteens(head_dim), tile_channels(head_dim, lanes), z3.Int("tile")
    x, y = (queries - 1) * CHUNK + 2 * GROUPS, z3.IntVal(queries * channels)
    lengths = {"w": (2 * GROUPS - 1) * head_dim + channels, "x": x, "y": y}
    facts = (GROUPS >= 1, tile >= 0, columns * (tile + 1) <= channels, *_within(2, queries))
    calls = tuple(Call(each.sizes, {"tile": channels // columns - 1}) for each in _CALLS)
    return Arrays(lengths, {"w": columns * tile, "y": columns * tile}, facts, calls=calls)


def of_block_products(columns: int, block: int, lanes: int) -> Arrays:
    """The arrays of integer products of blocks: L blocks of rows, one row, and L sums per iteration."""
    lengths = {"w": lanes * block // 4 * GROUPS, "s": z3.IntVal(columns // 4), "y": lanes * GROUPS}
    return Arrays(lengths, calls=_CALLS)
