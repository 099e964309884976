"""The prepared matrix: how words, scales and zeros lie in memory.

A kernel computes a *panel* of P columns at a time and walks down its rows. In the specification's layout each step
down is a step of a whole row of N words, a new page of memory every time. So a panel's words, scales and zeros are
stored in the order in which the kernel reads them, as one *stream* of 32-bit elements::

    panel 0: group 0: unit 0: row of P words [, row of P words, row of P words]      (three rows for 3 bits)
                      unit 1: …
                      P scales: float32, or float16 in half the elements
                      P zeros:  minima as float32 or float16, or zero-points as bytes
             group 1: …
    panel 1: …

Scales and zeros stand right behind the codes that they are for, as the matrix has them: nothing is widened. Each row
begins on a line of the cache. The table is filled up to whole panels with zeros; so is the last unit of a group whose
size is not whole units. Where in a unit a code lies is told in `lowbit_cppyy.recipe.places`.

**Blocks.** A panel is gone through in blocks of whole groups, m_b rows high, so that with many rows of x the block's
part of them stays in a cache. Where nothing else is said the blocks of a panel follow each other, and the layout is
*column panels*. Or blocks of several panels lie along the Z-curve (`lowbit.kernels.layouts.ZCurve`), as the paper has
them; then the stream is that of the blocks in that order, and a block's panels follow each other.

A layout is a value: it says where everything lies, applies itself to a matrix, and can be inverted.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit.arrays import I64, U8, U32, Array
from lowbit.kernels.layouts import ZCurve
from lowbit.quantization.affine import Convention, QuantizedMatrix, ScaleDtype
from lowbit.quantization.packing import CODES_PER_UNIT, WORD_BITS, WORDS_PER_UNIT
from lowbit_cppyy.layout.memory import ALIGNMENT, aligned
from lowbit_cppyy.lazily import cached_property
from lowbit_cppyy.recipe.places import Field, fields, place, unplace

LINE = ALIGNMENT // 4  # elements
BLOCK_ROWS = 1024  # of a block of column panels: 64 rows of x then take 256 KiB, a part of the second cache

Words = U32
Scales = npt.NDArray[np.floating[Any]]
Starts = I64


def row_elements(columns: int, dtype: npt.DTypeLike) -> int:
    """Elements of a row of so many numbers, whole lines."""
    return -(-columns * np.dtype(dtype).itemsize // ALIGNMENT) * LINE


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
        panel: P, columns of a panel, whole lines.
        block_groups: groups down a block, at most all; m_b in groups.
        block_panels: panels across a block of the Z-curve, t_b in panels; 0 for column panels.
    """

    bits: int
    rows: int
    columns: int
    group_size: int
    scales: ScaleDtype
    convention: Convention
    panel: int
    block_groups: int
    block_panels: int

    @classmethod
    def of(
        cls, matrix: QuantizedMatrix, panel: int, *, block_groups: int | None = None, block_panels: int = 0
    ) -> "PanelLayout":
        """The layout for a matrix: column panels, or blocks of so many groups and panels along the Z-curve."""
        down = min(block_groups or max(1, BLOCK_ROWS // matrix.group_size), matrix.groups)
        scales: ScaleDtype = "float16" if matrix.scales.dtype == np.float16 else "float32"
        sizes = matrix.bits, matrix.rows, matrix.columns, matrix.group_size
        return cls(*sizes, scales, matrix.convention, panel, down, block_panels)

    @property
    def panels(self) -> int:
        """Panels side by side, the last one filled up."""
        return -(-self.columns // self.panel)

    @property
    def groups(self) -> int:
        """G, the groups down one column."""
        return -(-self.rows // self.group_size)

    @property
    def blocks(self) -> int:
        """Blocks down one column."""
        return -(-self.groups // self.block_groups)

    @property
    def unit_codes(self) -> int:
        """Codes of a unit."""
        return CODES_PER_UNIT[self.bits]

    def group_units(self, group: int) -> int:
        """The units of a group, the last one filled up."""
        return -(-min(self.group_size, self.rows - group * self.group_size) // self.unit_codes)

    # Sizes, in elements.

    @property
    def unit_elements(self) -> int:
        """Of one unit of a panel."""
        return WORDS_PER_UNIT[self.bits] * self.panel

    @property
    def scale_elements(self) -> int:
        """Of a panel's scales of one group."""
        return row_elements(self.panel, self.scales)

    @property
    def zero_elements(self) -> int:
        """Of a panel's zeros of one group."""
        return row_elements(self.panel, self.scales if self.convention == "minimum" else np.uint8)

    @property
    def scales_each(self) -> int:
        """Scales in an element."""
        return 4 // np.dtype(self.scales).itemsize

    @property
    def zeros_each(self) -> int:
        """Zeros in an element."""
        return self.scales_each if self.convention == "minimum" else 4

    @cached_property
    def group_starts(self) -> list[int]:
        """Where each group begins in a panel that is one block; and, last, where the panel ends."""
        starts = [0]
        for group in range(self.groups):
            words = self.group_units(group) * self.unit_elements
            starts.append(starts[-1] + words + self.scale_elements + self.zero_elements)
        return starts

    @property
    def panel_elements(self) -> int:
        """Of one panel."""
        return self.group_starts[-1]

    @property
    def nbytes(self) -> int:
        """Bytes of the stream: what one call reads."""
        return 4 * self.panels * self.panel_elements

    @cached_property
    def starts(self) -> Starts:
        """Where each block begins in the stream: panels × blocks."""
        if self.block_panels == 0:
            panels = np.arange(self.panels)[:, None] * self.panel_elements
            return panels + np.array(self.group_starts[: self.groups : self.block_groups], np.int64)
        starts, place = np.empty((self.panels, self.blocks), np.int64), 0
        curve = ZCurve(self.blocks, self.panels, 1, self.block_panels)
        for down, across in curve.starts:
            for panel in curve.spans(down, across)[1]:
                starts[panel, down] = place
                place += self._block_end(down) - self.group_starts[down * self.block_groups]
        return starts

    def _block_end(self, block: int) -> int:
        return self.group_starts[min((block + 1) * self.block_groups, self.groups)]

    # Where things lie.

    def group_start(self, group: int, panel: int) -> int:
        """The element of the stream at which a group of a panel begins."""
        block = group // self.block_groups
        inside = self.group_starts[group] - self.group_starts[block * self.block_groups]
        return int(self.starts[panel, block]) + inside

    def index(self, row: int, column: int) -> list[tuple[int, Field]]:
        """The elements of the stream that hold a code, each with the field that lies there."""
        group, inside = divmod(row, self.group_size)
        unit, code = divmod(inside, self.unit_codes)
        panel, lane = divmod(column, self.panel)
        start = self.group_start(group, panel) + unit * self.unit_elements + lane
        return [(start + field.word * self.panel, field) for field in fields(self.bits, code)]

    def index_scale(self, group: int, panel: int) -> int:
        """The element of the stream at which the scales of a group of a panel begin; its zeros follow."""
        return self.group_start(group, panel) + self.group_units(group) * self.unit_elements

    # There and back.

    def apply(self, matrix: QuantizedMatrix) -> Words:
        """The stream of a matrix, aligned to `ALIGNMENT` bytes.

        Args:
            matrix: K × N, of this layout's sizes.

        Returns:
            uint32, of one dimension.
        """
        stream = aligned(self.nbytes // 4)
        table = np.empty_like(stream) if self.block_panels else stream
        panels = table.reshape(self.panels, self.panel_elements)
        words = self._whole_units(matrix.words)
        for group in range(self.groups):
            of_codes, of_scales, of_zeros = self._parts(panels, group)
            first = self._first_rows[group]
            rows = words[first : first + of_codes.shape[1] // self.panel]
            self._write(of_codes, place(rows, self.bits))
            self._write(of_scales, matrix.scales[group : group + 1])
            self._write(of_zeros, matrix.zeros[group : group + 1])
        if self.block_panels:
            for cell, run in self._cells(stream, panels):
                cell[:] = run
        return stream

    def invert(self, stream: Words) -> tuple[Words, Scales, Array]:
        """Words as the specification packs them, scales and zeros, read back from a stream.

        Returns:
            uint32, ``K * bits // 32`` × N; scales, G × N; zeros, G × N.
        """
        panels = stream.reshape(self.panels, self.panel_elements)
        if self.block_panels:
            panels = np.empty_like(panels)
            for cell, run in self._cells(stream, panels):
                run[:] = cell
        scales = np.dtype(self.scales)
        zeros = scales if self.convention == "minimum" else np.dtype(np.uint8)
        kinds = (np.dtype(np.uint32), scales, zeros)
        parts = [
            [self._read(part, kind) for part, kind in zip(self._parts(panels, group), kinds, strict=True)]
            for group in range(self.groups)
        ]
        words, scale_rows, zero_rows = (np.concatenate(rows) for rows in zip(*parts, strict=True))
        return self._drop_fill(unplace(words, self.bits)), scale_rows, zero_rows

    def _parts(self, panels: Words, group: int) -> tuple[Words, Words, Words]:
        """The codes, the scales and the zeros of a group in every panel; views."""
        start, stop = self.group_starts[group], self.group_starts[group + 1]
        scales = stop - self.zero_elements - self.scale_elements
        zeros = stop - self.zero_elements
        return panels[:, start:scales], panels[:, scales:zeros], panels[:, zeros:stop]

    def _cells(self, stream: Words, panels: Words) -> Iterator[tuple[Words, Words]]:
        """For each block of each panel, where it lies in the stream and where among whole panels."""
        for panel, block in np.ndindex(self.starts.shape):
            start, stop = self.group_starts[block * self.block_groups], self._block_end(block)
            at = self.starts[panel, block]
            yield stream[at : at + stop - start], panels[panel, start:stop]

    def _write(self, part: Words, values: Array) -> None:
        """Rows of N numbers, cut into panels; what is left of a row is zeros."""
        rows = len(values)
        filled = np.zeros((rows, self.panels * self.panel), values.dtype)
        filled[:, : self.columns] = values
        to = part.view(values.dtype).reshape(self.panels, rows, -1)
        to[:, :, : self.panel] = filled.reshape(rows, self.panels, self.panel).swapaxes(0, 1)
        to[:, :, self.panel :] = 0

    def _read(self, part: Words, dtype: np.dtype[Any]) -> Array:
        """The inverse of `_write`."""
        rows = part.shape[1] // self.panel if dtype == np.uint32 else 1
        numbers = np.ascontiguousarray(part).view(dtype).reshape(self.panels, rows, -1)[:, :, : self.panel]
        return numbers.swapaxes(0, 1).reshape(rows, -1)[:, : self.columns]

    # Groups that are not whole units.

    @property
    def _whole(self) -> bool:
        return self.group_size % self.unit_codes == 0 or self.groups == 1

    @cached_property
    def _first_rows(self) -> list[int]:
        """The row of whole units of words in which each group begins."""
        units = np.cumsum([0] + [self.group_units(group) for group in range(self.groups - 1)])
        return [int(first) for first in units * WORDS_PER_UNIT[self.bits]]

    @cached_property
    def _places(self) -> npt.NDArray[np.intp]:
        """The row among filled-up units in which each of the K codes lies."""
        group, inside = np.divmod(np.arange(self.rows), self.group_size)
        starts = np.array(self._first_rows, np.intp) // WORDS_PER_UNIT[self.bits] * self.unit_codes
        return np.asarray(starts[group] + inside, np.intp)

    def _whole_units(self, words: Words) -> Words:
        if self._whole:
            return words
        units = self._first_rows[-1] // WORDS_PER_UNIT[self.bits] + self.group_units(self.groups - 1)
        codes = np.zeros((units * self.unit_codes, words.shape[1]), np.uint8)
        codes[self._places] = _codes_of(words, self.bits)
        return _words_of(codes, self.bits)

    def _drop_fill(self, words: Words) -> Words:
        return words if self._whole else _words_of(_codes_of(words, self.bits)[self._places], self.bits)


# Codes of whole units and back, all units at once; the specification's own packing goes row by row.


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
