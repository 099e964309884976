"""Column panels: how a prepared matrix lies in memory.

A kernel computes a few vector registers of columns at a time and walks down all rows. In the specification's layout
each step down is a step of a whole row of N words, a new page of memory every time. So the columns are cut into
*panels* of P, and a panel's words, scales and offsets are stored in the order in which the kernel reads them:

    panel 0: group 0: unit 0: row of P words [, row of P words, row of P words]      (three rows for 3 bits)
                      unit 1: …
                      row of P scales, row of P offsets                              (float32)
             group 1: …
    panel 1: …

A matrix is then one *stream* of 32-bit elements, read once from front to back. The last panel is filled up with zero
codes, scales and offsets; so is the last unit of a group whose size is not whole units. The offset of a group is what
a code of 0 stands for: its minimum, or ``−scale · zero`` rounded to float32.

A layout is a value: it says where everything lies, applies itself to a matrix, and can be inverted.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit.affine import QuantizedMatrix
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

    @property
    def panel_words(self) -> int:
        """32-bit elements of one panel."""
        return (sum(self.units) * WORDS_PER_UNIT[self.bits] + 2 * self.groups) * self.panel

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
        return self._element(self._group_starts[group] + word, column), bit

    def index_scale(self, group: int, column: int) -> int:
        """The element of the stream that holds a scale; the offset lies one panel's width further on."""
        return self._element(int(self._scale_rows[group]), column)

    def _element(self, row: int, column: int) -> int:
        panel, lane = divmod(column, self.panel)
        return panel * self.panel_words + row * self.panel + lane

    @cached_property
    def _group_starts(self) -> list[int]:
        """The row of a panel in which each group begins."""
        heights = (n * WORDS_PER_UNIT[self.bits] + 2 for n in self.units)
        return [0, *accumulate(heights)][:-1]

    @cached_property
    def _scale_rows(self) -> npt.NDArray[np.intp]:
        """The row of a panel that holds the scales of each group."""
        words = np.array(self.units, np.intp) * WORDS_PER_UNIT[self.bits]
        return np.array(self._group_starts, np.intp) + words

    @cached_property
    def _word_rows(self) -> npt.NDArray[np.intp]:
        """The rows of a panel that hold words: all but the scales and offsets."""
        rows = np.ones(self.panel_words // self.panel, np.bool_)
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
        stream = aligned_zeros(self.panels * self.panel_words).reshape(self.panels, -1, self.panel)
        scales, offsets = scales_and_offsets(matrix)
        self._scatter(stream, self._word_rows, self._fill_units(matrix.words))
        self._scatter(stream, self._scale_rows, scales.view(np.uint32))
        self._scatter(stream, self._scale_rows + 1, offsets.view(np.uint32))
        return stream

    def invert(self, stream: Words) -> tuple[Words, Floats, Floats]:
        """Words as the specification packs them, scales and offsets, read back from a stream.

        Returns:
            uint32, ``K * bits // 32`` × N; float32, G × N; float32, G × N.
        """
        words = self._drop_fill(self._gather(stream, self._word_rows))
        scales = self._gather(stream, self._scale_rows).view(np.float32)
        return words, scales, self._gather(stream, self._scale_rows + 1).view(np.float32)

    def _scatter(self, stream: Words, rows: npt.NDArray[np.intp], values: Words) -> None:
        """Write rows of N values into these rows of every panel."""
        whole, rest = divmod(self.columns, self.panel)
        cut = whole * self.panel
        stream[:whole, rows] = values[:, :cut].reshape(len(rows), whole, self.panel).swapaxes(0, 1)
        if rest:
            stream[whole, rows, :rest] = values[:, cut:]

    def _gather(self, stream: Words, rows: npt.NDArray[np.intp]) -> Words:
        """Read these rows of every panel as rows of N values."""
        values = stream[:, rows].swapaxes(0, 1).reshape(len(rows), -1)
        return np.ascontiguousarray(values[:, : self.columns])

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


def aligned_zeros(elements: int) -> Words:
    """Zeroed uint32 elements from an address that is a multiple of `ALIGNMENT`."""
    room = np.zeros(4 * elements + ALIGNMENT, np.uint8)
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
