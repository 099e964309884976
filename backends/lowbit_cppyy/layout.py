"""Column panels: how a prepared matrix lies in memory.

A kernel computes a few vector registers of columns at a time and walks down all rows. In the specification's layout
each step down is a step of a whole row of N words, a new page of memory every time. So the columns are cut into
*panels* of P, and a panel's words, scales and offsets are stored in the order in which the kernel reads them:

    panel 0: group 0: unit 0: row of P words [, row of P words, row of P words]      (three rows for 3 bits)
                      unit 1: …
                      row of P scales, row of P offsets                              (float32)
             group 1: …
    panel 1: …

In the specification's words (`lowbit.layouts`): words, scales and offsets are the rows of one *table*, group after
group, and the table lies in column panels. A matrix is then one *stream* of 32-bit elements, read once from front to
back. The table is filled up to whole panels with zero codes, scales and offsets; so is the last unit of a group whose
size is not whole units. The offset of a group is what a code of 0 stands for: its minimum, or ``−scale · zero``
rounded to float32.

A layout is a value: it says where everything lies, applies itself to a matrix, and can be inverted.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit.affine import QuantizedMatrix
from lowbit.layouts import ColumnPanels
from lowbit.packing import CODES_PER_UNIT, WORD_BITS, WORDS_PER_UNIT

ALIGNMENT = 64  # bytes: a line of the cache, and the widest vector register

Words = npt.NDArray[np.uint32]
Floats = npt.NDArray[np.float32]
Codes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class PanelLayout:
    """The layout of a K × N matrix of `bits`-bit codes in groups of `group_size`, in panels of `panel` columns."""

    bits: int
    rows: int
    columns: int
    group_size: int
    panel: int

    @classmethod
    def of(cls, matrix: QuantizedMatrix, panel: int) -> "PanelLayout":
        """The layout for a matrix."""
        return cls(matrix.bits, matrix.rows, matrix.columns, matrix.group_size, panel)

    @property
    def panels(self) -> int:
        """Panels side by side, the last one filled up."""
        return -(-self.columns // self.panel)

    @property
    def groups(self) -> int:
        """G, the groups down one column."""
        return -(-self.rows // self.group_size)

    @cached_property
    def units(self) -> tuple[int, ...]:
        """The units of each group, the last one filled up."""
        codes = [min(self.group_size, self.rows - g * self.group_size) for g in range(self.groups)]
        return tuple(-(-n // CODES_PER_UNIT[self.bits]) for n in codes)

    @property
    def unit_codes(self) -> int:
        """Codes of a unit."""
        return CODES_PER_UNIT[self.bits]

    @cached_property
    def order(self) -> ColumnPanels:
        """The order of the table's elements: whole panels, from left to right."""
        rows = sum(self.units) * WORDS_PER_UNIT[self.bits] + 2 * self.groups
        return ColumnPanels(rows, self.panels * self.panel, self.panel)

    @property
    def panel_words(self) -> int:
        """32-bit elements of one panel."""
        return self.order.rows * self.panel

    @property
    def x_length(self) -> int:
        """Float32 elements of one row of x laid out alongside: every unit's codes, and one sum a group."""
        return sum(self.units) * CODES_PER_UNIT[self.bits] + self.groups

    @property
    def nbytes(self) -> int:
        """Bytes of the stream: what one call reads."""
        return 4 * self.panels * self.panel_words

    # Where things lie.

    def index(self, row: int, column: int) -> tuple[int, int]:
        """The element of the stream that holds the first bit of a code, and which bit of it that is.

        A 3-bit code may go on in the element one panel's width further on.
        """
        group, place = divmod(row, self.group_size)
        word, bit = divmod(place * self.bits, WORD_BITS)
        return self.order.index(self._group_starts[group] + word, column), bit

    def index_scale(self, group: int, column: int) -> int:
        """The element of the stream that holds a scale; the offset lies one panel's width further on."""
        return self.order.index(int(self._scale_rows[group]), column)

    @cached_property
    def _group_starts(self) -> list[int]:
        """The row of the table in which each group begins."""
        heights = (n * WORDS_PER_UNIT[self.bits] + 2 for n in self.units)
        return [0, *accumulate(heights)][:-1]

    @cached_property
    def _scale_rows(self) -> npt.NDArray[np.intp]:
        """The row of the table that holds the scales of each group; the offsets are the row below."""
        words = np.array(self.units, np.intp) * WORDS_PER_UNIT[self.bits]
        return np.array(self._group_starts, np.intp) + words

    @cached_property
    def _word_rows(self) -> npt.NDArray[np.intp]:
        """The rows of the table that hold words: all but the scales and offsets."""
        rows = np.ones(self.order.rows, np.bool_)
        rows[self._scale_rows] = rows[self._scale_rows + 1] = False
        return np.flatnonzero(rows)

    # There and back.

    def apply(self, matrix: QuantizedMatrix) -> Words:
        """The stream of a matrix, aligned to `ALIGNMENT` bytes.

        Args:
            matrix: K × N, of this layout's sizes.

        Returns:
            uint32, panels × rows of a panel × P.
        """
        table = np.zeros((self.order.rows, self.order.columns), np.uint32)
        for rows, values in zip(self._rows, (self._fill_units(matrix.words), *scales_and_offsets(matrix)), strict=True):
            table[rows, : self.columns] = values.view(np.uint32)
        stream = self.order.apply(table, out=aligned(self.order.rows * self.order.columns))
        return stream.reshape(self.panels, self.order.rows, self.panel)

    def invert(self, stream: Words) -> tuple[Words, Floats, Floats]:
        """Words as the specification packs them, scales and offsets, read back from a stream.

        Returns:
            uint32, ``K * bits // 32`` × N; float32, G × N; float32, G × N.
        """
        table = self.order.invert(stream.reshape(-1))
        words, scales, offsets = (np.ascontiguousarray(table[rows, : self.columns]) for rows in self._rows)
        return self._drop_fill(words), scales.view(np.float32), offsets.view(np.float32)

    @property
    def _rows(self) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp], npt.NDArray[np.intp]]:
        """The rows of the table that hold words, scales and offsets."""
        return self._word_rows, self._scale_rows, self._scale_rows + 1

    @cached_property
    def _places(self) -> npt.NDArray[np.intp]:
        """The row among filled-up units in which each of the K codes lies."""
        codes = CODES_PER_UNIT[self.bits]
        group, place = np.divmod(np.arange(self.rows), self.group_size)
        starts = np.concatenate(([0], np.cumsum(self.units)[:-1])) * codes
        return np.asarray(starts[group] + place, np.intp)

    @property
    def _whole(self) -> bool:
        """Whether every group is whole units, so that words stay as they are."""
        return sum(self.units) * CODES_PER_UNIT[self.bits] == self.rows

    def _fill_units(self, words: Words) -> Words:
        if self._whole:
            return words
        codes = np.zeros((sum(self.units) * CODES_PER_UNIT[self.bits], words.shape[1]), np.uint8)
        codes[self._places] = _codes_of(words, self.bits)
        return _words_of(codes, self.bits)

    def _drop_fill(self, words: Words) -> Words:
        if self._whole:
            return words
        return _words_of(_codes_of(words, self.bits)[self._places], self.bits)


def aligned(elements: int) -> Words:
    """Room for so many uint32 elements from an address that is a multiple of `ALIGNMENT`."""
    room = np.empty(4 * elements + ALIGNMENT, np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    return room[start : start + 4 * elements].view(np.uint32)


def scales_and_offsets(matrix: QuantizedMatrix) -> tuple[Floats, Floats]:
    """Scales and offsets as float32, G × N; the offset of a zero-point is the one that is rounded."""
    scales = matrix.scales.astype(np.float32)
    if matrix.convention == "minimum":
        return scales, matrix.zeros.astype(np.float32)
    return scales, -(scales * matrix.zeros.astype(np.float32))


# Codes of whole units and back, all units at once; the specification's own packing goes row by row.


def _codes_of(words: Words, bits: int) -> Codes:
    units = words.reshape(-1, WORDS_PER_UNIT[bits], words.shape[1])
    codes = np.empty((len(units), CODES_PER_UNIT[bits], words.shape[1]), np.uint8)
    for code in range(CODES_PER_UNIT[bits]):
        word, shift = divmod(code * bits, WORD_BITS)
        value = units[:, word] >> np.uint32(shift)
        if shift + bits > WORD_BITS:
            value = value | units[:, word + 1] << np.uint32(WORD_BITS - shift)
        codes[:, code] = value & np.uint32(2**bits - 1)
    return codes.reshape(-1, words.shape[1])


def _words_of(codes: Codes, bits: int) -> Words:
    units = codes.reshape(-1, CODES_PER_UNIT[bits], codes.shape[1])
    words: npt.NDArray[Any] = np.zeros((len(units), WORDS_PER_UNIT[bits], codes.shape[1]), np.uint32)
    for code in range(CODES_PER_UNIT[bits]):
        word, shift = divmod(code * bits, WORD_BITS)
        value = units[:, code].astype(np.uint32)
        words[:, word] |= value << np.uint32(shift)
        if shift + bits > WORD_BITS:
            words[:, word + 1] |= value >> np.uint32(WORD_BITS - shift)
    return words.reshape(-1, codes.shape[1])
