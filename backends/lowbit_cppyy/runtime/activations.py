"""Activations as the kernels read them: what stands in their stream, as lists for ``cpp/activations.h``.

A kernel reads activations as one stream (`lowbit_cppyy.codegen.microkernel`). The recipe and the layout of the matrix
determine what stands in it. That is computed once, here; the loops that write the stream at every call are C++.

- *values*: the activations, each times the power of two of its code in the unit;
- *sums*: for every four bits of a unit's words, a table of the sixteen sums that those bits select;
- *mantissas*: bytes, in segments.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lowbit.arrays import F32, I32, I64, Array
from lowbit.linear.integer import segments
from lowbit_cppyy.caching import cached_property
from lowbit_cppyy.codegen.steps import TABLE, x_elements
from lowbit_cppyy.codegen.unpacking import exact_range, lowest_bit, power
from lowbit_cppyy.layout.interleaving import fields
from lowbit_cppyy.layout.panels import PanelLayout
from lowbit_cppyy.recipe import SEGMENT, Recipe

VALUES, SUMS, MANTISSAS = range(3)


@dataclass(frozen=True)
class Segment:
    """A run of rows that share a block of activations and a group.

    Attributes:
        first: its first row.
        length: its number of rows.
        start: its first code in its first unit.
        units: the number of units that it overlaps.
        back: whether the next segment begins in the last unit of this one.
        ends: whether a group ends with it.
    """

    first: int
    length: int
    start: int
    units: int
    back: bool
    ends: bool

    @classmethod
    def of(cls, first: int, length: int, before: int, unit: int, ends: bool) -> "Segment":
        """The segment whose first row has `before` rows of its group before it, in units of `unit` codes."""
        start = before % unit
        stop = start + length
        return cls(first, length, start, -(-stop // unit), not ends and stop % unit > 0, ends)


def bits_of_range(method: str, factors: F32) -> list[int]:
    """The bits of the least and of the first too large magnitude of activations for which factors round nothing; zeros
    if all factors are 1."""
    if (factors == 1).all():
        return [0, 0]
    return [int(each) for each in np.array(exact_range(method), np.float32).view(np.uint32)]


@dataclass(frozen=True)
class ActivationStream:
    """The stream of activations for the kernel of a recipe and a matrix of a layout."""

    recipe: Recipe
    layout: PanelLayout
    route: ClassVar = "route"

    @property
    def kind(self) -> int:
        """One of `VALUES`, `SUMS`, `MANTISSAS`."""
        return MANTISSAS if self.recipe.integer else SUMS if self.recipe.method == "sums" else VALUES

    @property
    def head(self) -> int:
        """The number of elements before each block: the table of codes as floats, if the kernel uses one."""
        return TABLE if self.recipe.method == "table" else 0

    @cached_property
    def factors(self) -> F32:
        """The power of two that multiplies the activation of each code of a unit."""
        method, codes = self.recipe.method, range(self.recipe.unit_codes)
        powers = [power(method, lowest_bit(self.recipe, code)) for code in codes]
        return np.exp2(-np.array(powers, np.float32)).astype(np.float32)

    @cached_property
    def terms(self) -> tuple[I32, F32]:
        """For every four bits of a unit's words, the lowest first: the codes to which they belong, and their
        weights."""
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
        """The segments of the rows of the matrix."""
        layout, found = self.layout, []
        for run in segments(layout.rows, SEGMENT, layout.group_size):
            first, stop = run.rows.start, run.rows.stop
            ends = stop == min((run.group + 1) * layout.group_size, layout.rows)
            before = first - run.group * layout.group_size
            found.append(Segment.of(first, stop - first, before, layout.unit_codes, ends))
        return tuple(found)

    # Arguments of the kernel: lists with an entry for each group, or for each segment.

    @cached_property
    def units(self) -> list[int]:
        """The number of units of each group, or of each segment."""
        if self.recipe.integer:
            return [segment.units for segment in self.segments]
        return [self.layout.group_units(group) for group in range(self.layout.groups)]

    @property
    def iterations(self) -> I32:
        """The number of iterations of the inner loop for each group or segment."""
        return np.array(self.units, np.int32) // self.recipe.unroll

    @property
    def whole(self) -> bool:
        """Whether every group or segment is a whole number of loop iterations."""
        return all(units % self.recipe.unroll == 0 for units in self.units)

    @cached_property
    def firsts(self) -> list[int]:
        """The first entry of each block in the lists, followed by their length."""
        groups = [*range(0, self.layout.groups, self.layout.block_groups), self.layout.groups]
        if not self.recipe.integer:
            return groups
        ends = np.cumsum([0, *(segment.ends for segment in self.segments)])  # groups that ended before each segment
        return [int(np.searchsorted(ends, group)) for group in groups]

    @cached_property
    def starts(self) -> list[int]:
        """The start of each block in the stream of one row of x, followed by the end of the stream."""
        each = x_elements(self.recipe)
        lengths = [units * each + 1 for units in self.units]  # 1: the sum of a group, or the power of two
        if self.recipe.integer:
            lengths = [length + s.ends for length, s in zip(lengths, self.segments, strict=True)]
        starts = np.concatenate(([0], np.cumsum(lengths)))
        return [int(starts[first]) + self.head * block for block, first in enumerate(self.firsts)]

    def lists(self) -> list[Array]:
        """The lists of a route, in the order of ``create_route``."""
        codes, weights = self.terms
        runs = [[s.first, s.length, s.start] for s in self.segments] if self.recipe.integer else [[0, 0, 0]]
        flags = [[s.back, s.ends] for s in self.segments] if self.recipe.integer else [[0, 0]] * len(self.units)
        back, ends = np.array(flags, np.int32).T
        starts = np.array(self.starts[:-1], np.int64)
        segment_list = np.array(runs, np.int32)
        lists = [self.factors, codes, weights, starts, segment_list, self.iterations, back, ends]
        return [np.ascontiguousarray(values) for values in lists]

    def numbers(self, columns: int) -> I64:
        """The numbers of a route, in the order of ``create_route``, for a kernel that computes this many columns."""
        recipe = self.recipe
        tables = 8 * recipe.unit_words
        sizes = [recipe.rows, columns, self.kind, self.head, self.starts[-1], tables]
        return np.array([*sizes, *bits_of_range(recipe.method, self.factors)], np.int64)
