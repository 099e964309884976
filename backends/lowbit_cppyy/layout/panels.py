"""The layout of a prepared matrix: where its words, scales and zeros lie in memory.

A kernel computes a *panel* of P columns at a time and walks down its rows. In the specification's layout each step down
crosses a whole row of N words and lands on a new page of memory. So the words, scales and zeros of a panel are stored
in the order in which the kernel reads them, as one *stream* of 32-bit elements::

    panel 0: group 0: unit 0: row of P words [, row of P words, row of P words]      (three rows for 3 bits)
                      unit 1: …
                      P scales: float32, or float16 in half the elements
                      P zeros:  minima as float32 or float16, or zero-points as bytes
             group 1: …
    panel 1: …

Scales and zeros follow the codes that they belong to, in the types that the matrix has; nothing is widened. Each row
begins on a cache line. The last panel is padded with zeros, and so is the last unit of a group whose size is not a
whole number of units. `lowbit_cppyy.layout.interleaving` says where the codes lie inside a unit.

**Blocks.** A panel is processed in blocks of whole groups, so that with many rows of x the block's part of them stays
in a cache. The blocks of a panel follow each other: the layout is *column panels*. The paper arranges blocks of several
panels along the Z-curve (`lowbit.kernels.layouts.ZCurve`); a search measured that this is slower here.

A layout is a value: it says where everything lies, and can be applied to a matrix.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lowbit.arrays import I64, U8, U32, Array
from lowbit.quantization.affine import Convention, QuantizedMatrix, ScaleDtype
from lowbit.quantization.packing import CODES_PER_UNIT, WORD_BITS, WORDS_PER_UNIT
from lowbit_cppyy.caching import cached_property
from lowbit_cppyy.layout.interleaving import Field, fields, interleave
from lowbit_cppyy.layout.memory import ALIGNMENT, aligned

LINE = ALIGNMENT // 4  # elements
BLOCK_ROWS = 1024
"""Rows of a block. 64 rows of x then take 256 KiB, a part of the second-level cache."""

Words = U32


def row_elements(columns: int, dtype: npt.DTypeLike) -> int:
    """The number of elements of a row of this many numbers, padded to whole cache lines."""
    return -(-columns * np.dtype(dtype).itemsize // ALIGNMENT) * LINE


def write_rows(part: Words, values: Array, panel: int) -> None:
    """Write rows of N numbers, … × rows × N, cut into panels; the rest of each row of a panel stays zero.

    Args:
        part: panels × … × elements, a view of a stream.
        values: of any type of 1, 2 or 4 bytes.
        panel: columns of a panel.
    """
    *outer, columns = values.shape
    each = 4 * part.shape[-1] // values.dtype.itemsize // outer[-1]
    padded = np.zeros_like(values, order="C", shape=(*outer, len(part) * panel))
    padded[..., :columns] = values
    rows = np.zeros_like(values, order="C", shape=(len(part), *outer, each))
    rows[..., :panel] = np.moveaxis(padded.reshape(*outer, len(part), panel), -2, 0)
    part[...] = rows.view(np.uint32).reshape(part.shape)


@dataclass(frozen=True)
class PanelLayout:
    """The layout of a K × N matrix of `bits`-bit codes in groups of `group_size`.

    Attributes:
        bits: b, the width of a code.
        rows: K.
        columns: N.
        group_size: rows of a group.
        scales: dtype of the scales, and of minima.
        convention: whether zeros are minima or zero-points.
        panel: P, columns of a panel, whole cache lines.
        block_rows: rows of a block, rounded down to whole groups, at least one group; m_b.
    """

    bits: int
    rows: int
    columns: int
    group_size: int
    scales: ScaleDtype
    convention: Convention
    panel: int
    block_rows: int = BLOCK_ROWS

    @classmethod
    def of(cls, matrix: QuantizedMatrix, panel: int, block_rows: int = BLOCK_ROWS) -> "PanelLayout":
        """The layout for a matrix, in panels of this many columns and blocks of this many rows."""
        scales: ScaleDtype = "float16" if matrix.scales.dtype == np.float16 else "float32"
        sizes = matrix.bits, matrix.rows, matrix.columns, matrix.group_size
        return cls(*sizes, scales, matrix.convention, panel, block_rows)

    @property
    def panels(self) -> int:
        """The number of panels, the last one padded."""
        return -(-self.columns // self.panel)

    @property
    def groups(self) -> int:
        """G, the number of groups of a column."""
        return -(-self.rows // self.group_size)

    @property
    def block_groups(self) -> int:
        """The number of groups of a block."""
        return min(max(1, self.block_rows // self.group_size), self.groups)

    @property
    def blocks(self) -> int:
        """The number of blocks of a column."""
        return -(-self.groups // self.block_groups)

    @property
    def unit_codes(self) -> int:
        """The number of codes of a unit."""
        return CODES_PER_UNIT[self.bits]

    def group_units(self, group: int) -> int:
        """The number of units of a group, the last one padded."""
        return -(-min(self.group_size, self.rows - group * self.group_size) // self.unit_codes)

    # Sizes, in elements.

    @property
    def unit_elements(self) -> int:
        """The number of elements of a unit of a panel."""
        return WORDS_PER_UNIT[self.bits] * self.panel

    @property
    def scale_elements(self) -> int:
        """The number of elements of the scales of a group of a panel."""
        return row_elements(self.panel, self.scales)

    @property
    def zero_elements(self) -> int:
        """The number of elements of the zeros of a group of a panel."""
        return row_elements(self.panel, self.scales if self.convention == "minimum" else np.uint8)

    @property
    def scales_each(self) -> int:
        """The number of scales in each element."""
        return 4 // np.dtype(self.scales).itemsize

    @property
    def zeros_each(self) -> int:
        """The number of zeros in each element."""
        return self.scales_each if self.convention == "minimum" else 4

    @cached_property
    def group_starts(self) -> list[int]:
        """The start of each group of a panel, followed by the end of the panel."""
        starts = [0]
        for group in range(self.groups):
            words = self.group_units(group) * self.unit_elements
            starts.append(starts[-1] + words + self.scale_elements + self.zero_elements)
        return starts

    @property
    def panel_elements(self) -> int:
        """The number of elements of one panel."""
        return self.group_starts[-1]

    @property
    def nbytes(self) -> int:
        """The size of the stream in bytes; one call reads all of it."""
        return 4 * self.panels * self.panel_elements

    @property
    def numbers(self) -> I64:
        """The sizes, in the order of ``create_linear``."""
        groups = [self.rows, self.group_size, self.groups, self.block_groups, self.unit_codes]
        sizes = [int(self.convention == "zero_point"), self.columns, self.panel, self.panels, self.blocks]
        return np.array([*groups, *sizes, self.scales_each, self.zeros_each], np.int64)

    @cached_property
    def starts(self) -> I64:
        """The start of each block in the stream: panels × blocks."""
        panels = np.arange(self.panels)[:, None] * self.panel_elements
        return panels + np.array(self.group_starts[: self.groups : self.block_groups], np.int64)

    # Positions.

    def group_start(self, group: int, panel: int) -> int:
        """The element of the stream at which a group of a panel begins."""
        return panel * self.panel_elements + self.group_starts[group]

    def index(self, row: int, column: int) -> list[tuple[int, Field]]:
        """The elements of the stream that hold a code, each with the field of the code in it."""
        group, inside = divmod(row, self.group_size)
        unit, code = divmod(inside, self.unit_codes)
        panel, lane = divmod(column, self.panel)
        start = self.group_start(group, panel) + unit * self.unit_elements + lane
        return [(start + field.word * self.panel, field) for field in fields(self.bits, code)]

    def index_scale(self, group: int, panel: int) -> int:
        """The element of the stream at which the scales of a group of a panel begin; its zeros follow."""
        return self.group_start(group, panel) + self.group_units(group) * self.unit_elements

    def apply(self, matrix: QuantizedMatrix) -> Words:
        """The stream of a matrix, aligned to `ALIGNMENT` bytes.

        Args:
            matrix: K × N, of this layout's sizes.

        Returns:
            uint32, of one dimension.
        """
        stream = aligned(self.nbytes // 4)
        panels = stream.reshape(self.panels, self.panel_elements)
        words = self._whole_units(matrix.words)
        for group in range(self.groups):
            of_codes, of_scales, of_zeros = self._parts(panels, group)
            first = self._first_rows[group]
            rows = words[first : first + of_codes.shape[1] // self.panel]
            write_rows(of_codes, interleave(rows, self.bits), self.panel)
            write_rows(of_scales, matrix.scales[group : group + 1], self.panel)
            write_rows(of_zeros, matrix.zeros[group : group + 1], self.panel)
        return stream

    def _parts(self, panels: Words, group: int) -> tuple[Words, Words, Words]:
        """The codes, the scales and the zeros of a group in every panel; views."""
        start, stop = self.group_starts[group], self.group_starts[group + 1]
        scales = stop - self.zero_elements - self.scale_elements
        zeros = stop - self.zero_elements
        return panels[:, start:scales], panels[:, scales:zeros], panels[:, zeros:stop]

    # Groups whose size is not a whole number of units.

    @cached_property
    def _first_rows(self) -> list[int]:
        """The row of words, counting padded units, at which each group begins."""
        units = np.cumsum([0] + [self.group_units(group) for group in range(self.groups - 1)])
        return [int(first) for first in units * WORDS_PER_UNIT[self.bits]]

    @cached_property
    def _padded_rows(self) -> npt.NDArray[np.intp]:
        """The row, counting padded units, of each of the K codes."""
        group, inside = np.divmod(np.arange(self.rows), self.group_size)
        starts = np.array(self._first_rows, np.intp) // WORDS_PER_UNIT[self.bits] * self.unit_codes
        return np.asarray(starts[group] + inside, np.intp)

    def _whole_units(self, words: Words) -> Words:
        if self.group_size % self.unit_codes == 0 or self.groups == 1:
            return words
        units = self._first_rows[-1] // WORDS_PER_UNIT[self.bits] + self.group_units(self.groups - 1)
        codes = np.zeros((units * self.unit_codes, words.shape[1]), np.uint8)
        codes[self._padded_rows] = _codes_of(words, self.bits)
        return _words_of(codes, self.bits)


# Packing and unpacking of whole units, all at once. A backend must not call the specification's own packing.


def _codes_of(words: Words, bits: int) -> U8:
    units = words.reshape(-1, WORDS_PER_UNIT[bits], words.shape[1])
    codes = np.empty((len(units), CODES_PER_UNIT[bits], words.shape[1]), np.uint8)
    for code in range(CODES_PER_UNIT[bits]):
        word, shift = divmod(code * bits, WORD_BITS)
        value = units[:, word] >> np.uint32(shift)
        if shift + bits > WORD_BITS:
            value = value | units[:, word + 1] << np.uint32(WORD_BITS - shift)
        codes[:, code] = value & np.uint32(2**bits - 1)
    return codes.reshape(-1, words.shape[1])


def _words_of(codes: U8, bits: int) -> Words:
    units = codes.reshape(-1, CODES_PER_UNIT[bits], codes.shape[1])
    words: Array = np.zeros((len(units), WORDS_PER_UNIT[bits], codes.shape[1]), np.uint32)
    for code in range(CODES_PER_UNIT[bits]):
        word, shift = divmod(code * bits, WORD_BITS)
        value = units[:, code].astype(np.uint32)
        words[:, word] |= value << np.uint32(shift)
        if shift + bits > WORD_BITS:
            words[:, word + 1] |= value >> np.uint32(WORD_BITS - shift)
    return words.reshape(-1, codes.shape[1])
