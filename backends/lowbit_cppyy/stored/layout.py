"""The stream of a stored matrix: where its words, integers, scales and offsets lie in memory.

As in `lowbit_cppyy.layout.panels`, a kernel computes a *panel* of P columns at a time and reads one stream of 32-bit
elements from front to back::

    panel 0: group 0: unit 0: `bits` rows of P words; or 32 rows of P float16 or float32
                              a row of P integers for each run of the unit, where runs have them
                              a row of P minima for each run, where there are any
                      unit 1: …
                      P scales: float16, float32, or exponents of one byte
                      P offsets: numbers as scales are, zeros as bytes, or the second scales of minima
             group 1: …
    panel 1: …

Codes of 16 and 32 bits are floats. A row of float16 is as an instruction widens it. A word of bfloat16 holds those of
two rows, the first in its lower half, because a shift or a mask makes each of them the upper half of a float32. A
matrix of floats is one group without scales.

Codes take their bits, scales and offsets the bytes that the format gives them. Integers of runs take a byte, where the
format gives them 4 or 6 bits: a block of 256 weights is 148 bytes instead of 144 in Q4_K, 180 instead of 176 in Q5_K,
138 instead of 136 in IQ4_XS, 114 instead of 110 in Q3_K, and 100 instead of 84 in Q2_K. Signed ones are stored plus
128. A group is whole units; what is missing is zeros, as are the columns that a last panel lacks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from lowbit.arrays import I64, U8, U32, Array
from lowbit_cppyy.caching import cached_property
from lowbit_cppyy.layout.interleaving import fields
from lowbit_cppyy.layout.memory import aligned
from lowbit_cppyy.layout.panels import BLOCK_ROWS, row_elements, write_rows
from lowbit_cppyy.stored.parts import U16, UNIT, Parts, Structure

SIGN = np.uint8(128)


def inner_rows(structure: Structure) -> int:
    """The number of rows of bytes after the words of a unit: integers of its runs, and minima."""
    runs = UNIT // structure.run if structure.run else 0
    return runs * (1 + (structure.offset == "minimum"))


def code_elements(structure: Structure, panel: int) -> int:
    """The number of elements of the codes of a unit."""
    if structure.values == "float16":
        return UNIT * row_elements(panel, np.float16)
    return structure.bits * panel


def scale_elements(structure: Structure, panel: int) -> int:
    """The number of elements of a row of scales; 0 without scales."""
    if structure.scale == "one":
        return 0
    return row_elements(panel, "uint8" if structure.scale == "exponent" else structure.scale)


def offset_elements(structure: Structure, panel: int) -> int:
    """The number of elements of a row of offsets; 0 without offsets."""
    if structure.offset in ("none", "center"):
        return 0
    return row_elements(panel, "uint8" if structure.offset == "zero" else structure.scale)


@dataclass(frozen=True)
class StoredLayout:
    """The layout of a K × N matrix of a structure.

    Attributes:
        structure: the kinds of numbers that the matrix has.
        columns: N.
        lengths: rows of each group.
        panel: P, columns of a panel.
        block_rows: rows of a block, rounded to whole groups, at least one group.
    """

    structure: Structure
    columns: int
    lengths: tuple[int, ...]
    panel: int
    block_rows: int = BLOCK_ROWS

    @property
    def panels(self) -> int:
        """The number of panels, the last one padded."""
        return -(-self.columns // self.panel)

    @cached_property
    def units(self) -> list[int]:
        """The number of units of each group, the last one padded."""
        return [-(-length // UNIT) for length in self.lengths]

    @property
    def unit_elements(self) -> int:
        """The number of elements of a unit of a panel."""
        inner = inner_rows(self.structure) * row_elements(self.panel, "uint8")
        return code_elements(self.structure, self.panel) + inner

    @property
    def tail_elements(self) -> int:
        """The number of elements of the scales and offsets of a group of a panel."""
        return scale_elements(self.structure, self.panel) + offset_elements(self.structure, self.panel)

    def runs(self) -> Iterator[tuple[int, int]]:
        """The first and the last row of each run of `UNIT` rows of a group, the last of which may be shorter."""
        first = 0
        for length in self.lengths:
            end = first + length
            yield from ((row, min(row + UNIT, end) - 1) for row in range(first, end, UNIT))
            first = end

    @cached_property
    def group_starts(self) -> I64:
        """The start of each group of a panel, followed by the end of the panel."""
        sizes = np.array(self.units, np.int64) * self.unit_elements + self.tail_elements
        return np.concatenate(([0], np.cumsum(sizes)))

    @property
    def nbytes(self) -> int:
        """The size of the stream in bytes; one call reads all of it."""
        return 4 * self.panels * int(self.group_starts[-1])

    @cached_property
    def firsts(self) -> list[int]:
        """The first group of each block, followed by the number of groups."""
        firsts, rows = [0], 0
        for group, length in enumerate(self.lengths):
            if rows and rows + length > self.block_rows:
                firsts.append(group)
                rows = 0
            rows += length
        return [*firsts, len(self.lengths)]

    @cached_property
    def starts(self) -> I64:
        """The start of each block in the stream: panels × blocks."""
        panels = np.arange(self.panels, dtype=np.int64)[:, None] * self.group_starts[-1]
        return np.ascontiguousarray(panels + self.group_starts[self.firsts[:-1]])

    @property
    def numbers(self) -> I64:
        """The sizes, in the order of ``create_linear``; groups of varying length have no common size."""
        halves, bytes_ = 2, 4  # the number of halves or bytes in an element of the stream
        shape = [sum(self.lengths), 0, 0, 0, UNIT, 0, self.columns, self.panel, self.panels, len(self.firsts) - 1]
        return np.array([*shape, halves, bytes_], np.int64)

    def apply(self, parts: Parts) -> U32:
        """The stream of a matrix, aligned for vectors; uint32, of one dimension."""
        stream = aligned(self.nbytes // 4)
        self.write(parts, stream)
        return stream

    def write(self, parts: Parts, stream: U32) -> None:
        """Write a matrix into a stream of zeros of the right length."""
        panels = stream.reshape(self.panels, -1)
        row = first_unit = 0
        for first, count in self._alike():
            length, units = self.lengths[first], self.units[first]
            start, stop = self.group_starts[first], self.group_starts[first + count]
            groups = panels[:, start:stop].reshape(self.panels, count, -1)
            body = groups[..., : units * self.unit_elements].reshape(self.panels, count, units, -1)
            codes = np.zeros_like(parts.codes, order="C", shape=(count, units * UNIT, self.columns))
            codes[:, :length] = parts.codes[row : row + count * length].reshape(count, length, -1)
            words = in_stream(codes.reshape(-1, UNIT, self.columns), self.structure)
            end = self._write(body, 0, words.reshape(count, units, -1, self.columns))
            runs = UNIT // self.structure.run if self.structure.run else 0
            for integers in self._integers(parts):
                own = integers[first_unit * runs : (first_unit + count * units) * runs]
                end = self._write(body, end, own.reshape(count, units, runs, -1))
            tail = groups[..., units * self.unit_elements :]
            end = 0
            for numbers in self._numbers(parts):
                end = self._write(tail, end, numbers[first : first + count, None])
            row, first_unit = row + count * length, first_unit + count * units

    def _alike(self) -> Iterator[tuple[int, int]]:
        """Runs of groups of equal length: the first group, and the number of groups."""
        first = 0
        for _, alike in groupby(self.lengths):
            count = len(list(alike))
            yield first, count
            first += count

    def _integers(self, parts: Parts) -> Iterator[Array]:
        """The integers of runs, and minima, as bytes."""
        if parts.inner is not None:
            yield parts.inner.view(np.uint8) ^ SIGN if parts.structure.inner == "int8" else parts.inner
        if parts.structure.offset == "minimum":
            assert parts.offsets is not None
            yield parts.offsets

    def _numbers(self, parts: Parts) -> Iterator[Array]:
        """Scales and offsets of groups, in the types of the stream."""
        structure = parts.structure
        if structure.scale == "one":
            return
        dtype = np.dtype(np.uint8 if structure.scale == "exponent" else structure.scale)
        yield parts.scales.astype(dtype)
        if structure.offset in ("number", "zero"):
            assert parts.offsets is not None
            yield parts.offsets.astype(np.uint8 if structure.offset == "zero" else dtype)
        elif structure.offset == "minimum":
            assert parts.offset_scales is not None
            yield parts.offset_scales.astype(dtype)

    def _write(self, to: U32, start: int, values: Array) -> int:
        """Write rows of N numbers, … × rows × N, into panels × … × elements; returns the end of what is written."""
        end: int = start + values.shape[-2] * row_elements(self.panel, values.dtype)
        write_rows(to[..., start:end], values, self.panel)
        return end


def layout_of(parts: Parts, panel: int) -> StoredLayout:
    """The layout of a matrix in panels of this many columns."""
    return StoredLayout(parts.structure, parts.columns, tuple(parts.lengths), panel)


# **Codes and words**, of all units and columns at once.


def in_stream(codes: Array, structure: Structure) -> Array:
    """Units × `UNIT` × N codes as units × rows × N numbers of the stream."""
    if structure.values in ("float16", "float32"):
        return codes
    return paired(codes) if structure.values == "bfloat16" else interleaved(codes, structure.bits)


def paired(codes: U16) -> U32:
    """Units × `UNIT` × N codes of 16 bits as words of two rows, the first in the lower half."""
    return codes[:, ::2].astype(np.uint32) | codes[:, 1::2].astype(np.uint32) << np.uint32(16)


def interleaved(codes: U8, bits: int) -> U32:
    """Units × `UNIT` × N codes as units × bits × N words, by `lowbit_cppyy.layout.interleaving`."""
    words = np.zeros_like(codes, np.uint32, order="C", shape=(len(codes), bits, codes.shape[2]))
    for code in range(UNIT):
        for field in fields(bits, code):
            own = codes[:, code] >> np.uint8(field.first) & np.uint8((1 << field.width) - 1)
            words[:, field.word] |= own.astype(np.uint32) << np.uint32(field.position)
    return words
