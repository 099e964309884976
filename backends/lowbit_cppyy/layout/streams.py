"""Routes: how the activations for a matrix are laid out for a kernel, as lists that ``cpp/streams.h`` goes by.

A kernel reads activations as one stream (`lowbit_cppyy.codegen.microkernel`). What stands in it follows from the recipe
and from the layout of the matrix; here it is worked out once, and the loops that write the stream at every call are
C++.

- *values*: the activations themselves, times a power of two for each code of a unit;
- *sums*: for every four bits of a unit's words a table of the sixteen sums of what those bits stand for;
- *mantissas*: bytes, in segments.
"""

from dataclasses import dataclass

import numpy as np

from lowbit.arrays import F32, I32, I64, Array
from lowbit.linear.integer import segments
from lowbit_cppyy.codegen.microkernel import TABLE, x_elements
from lowbit_cppyy.layout.layout import PanelLayout
from lowbit_cppyy.lazily import cached_property
from lowbit_cppyy.recipe.places import fields
from lowbit_cppyy.recipe.recipe import SEGMENT, Recipe
from lowbit_cppyy.recipe.unpacking import folded

VALUES, SUMS, MANTISSAS = range(3)


@dataclass(frozen=True)
class Segment:
    """A run of rows that share a block of activations and a group.

    Attributes:
        first: its first row.
        length: rows.
        place: where in its first unit it begins.
        units: units that it touches.
        back: whether its last unit is begun anew by the next segment.
        ends: whether a group ends with it.
    """

    first: int
    length: int
    place: int
    units: int
    back: bool
    ends: bool


@dataclass(frozen=True)
class Stream:
    """The stream of activations of a recipe for a layout."""

    recipe: Recipe
    layout: PanelLayout

    @property
    def kind(self) -> int:
        """One of `VALUES`, `SUMS`, `MANTISSAS`."""
        return MANTISSAS if self.recipe.integer else SUMS if self.recipe.method == "sums" else VALUES

    @property
    def head(self) -> int:
        """Elements in front of each block: the floats of a table of codes, if the kernel has one."""
        return TABLE if self.recipe.method == "table" else 0

    @cached_property
    def factors(self) -> F32:
        """For each code of a unit what its activation is multiplied by."""
        powers = [folded(self.recipe, code) for code in range(self.recipe.unit_codes)]
        return np.exp2(-np.array(powers, np.float32)).astype(np.float32)

    @cached_property
    def terms(self) -> tuple[I32, F32]:
        """For each four bits of a unit's words, lowest first: the codes that they belong to, and what they count."""
        codes = np.zeros((self.recipe.unit_words, 32), np.int32)
        weights = np.zeros((self.recipe.unit_words, 32), np.float32)
        for code in range(self.recipe.unit_codes):
            for field in fields(self.recipe.bits, code):
                for n in range(field.width):
                    codes[field.word, field.position + n] = code
                    weights[field.word, field.position + n] = 2.0 ** (field.first + n)
        return codes.reshape(-1, 4), weights.reshape(-1, 4)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """The segments of the rows."""
        layout, found = self.layout, []
        for run in segments(layout.rows, SEGMENT, layout.group_size):
            start, stop = run.rows.start, run.rows.stop
            inside = start - run.group * layout.group_size
            place = inside % layout.unit_codes
            units = -(-(place + stop - start) // layout.unit_codes)
            ends = stop == min((run.group + 1) * layout.group_size, layout.rows)
            back = not ends and (place + stop - start) % layout.unit_codes > 0
            found.append(Segment(start, stop - start, place, units, back, ends))
        return tuple(found)

    # What the kernel is told: a list with an entry for each group, or for each segment.

    @cached_property
    def units(self) -> list[int]:
        """Units of each group, or of each segment."""
        if self.recipe.integer:
            return [segment.units for segment in self.segments]
        return [self.layout.group_units(group) for group in range(self.layout.groups)]

    @property
    def turns(self) -> I32:
        """Turns of the inner loop of each group or segment."""
        return np.array(self.units, np.int32) // self.recipe.turn

    @property
    def whole(self) -> bool:
        """Whether every group or segment is whole turns."""
        return all(units % self.recipe.turn == 0 for units in self.units)

    @cached_property
    def firsts(self) -> list[int]:
        """For each block, and one more, its first entry in the lists."""
        groups = [*range(0, self.layout.groups, self.layout.block_groups), self.layout.groups]
        if not self.recipe.integer:
            return groups
        ends = np.cumsum([0, *(segment.ends for segment in self.segments)])  # groups that ended before each segment
        return [int(np.searchsorted(ends, group)) for group in groups]

    @cached_property
    def starts(self) -> list[int]:
        """For each block, and one more, where it begins in a laid-out row."""
        each = x_elements(self.recipe)
        lengths = [units * each + 1 for units in self.units]  # 1: the sum of a group, or the power of two
        if self.recipe.integer:
            lengths = [length + s.ends for length, s in zip(lengths, self.segments, strict=True)]
        starts = np.concatenate(([0], np.cumsum(lengths)))
        return [int(starts[first]) + self.head * block for block, first in enumerate(self.firsts)]

    def lists(self) -> list[Array]:
        """The lists of a route, in the order of ``create_route``."""
        codes, weights = self.terms
        runs = [[s.first, s.length, s.place] for s in self.segments] if self.recipe.integer else [[0, 0, 0]]
        flags = [[s.back, s.ends] for s in self.segments] if self.recipe.integer else [[0, 0]] * len(self.units)
        back, ends = np.array(flags, np.int32).T
        starts = np.array(self.starts[:-1], np.int64)
        segment_list = np.array(runs, np.int32)
        lists = [self.factors, codes, weights, starts, segment_list, self.turns, back, ends]
        return [np.ascontiguousarray(values) for values in lists]

    def numbers(self, columns: int) -> I64:
        """The numbers of a route, in the order of ``create_route``, for a kernel of so many columns."""
        recipe = self.recipe
        powers = int((self.factors != 1).any())
        tables = 8 * recipe.unit_words
        return np.array([recipe.rows, columns, self.kind, powers, self.head, self.starts[-1], tables], np.int64)
