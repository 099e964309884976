r"""Layouts of matrices in device memory.

Neighbouring threads read 16 bytes each, and memory is fastest when a block of threads reads one contiguous range. The
words of the chapter `lowbit.quantization.packing` are stored in rows of N, so the words of neighbouring columns are
neighbours, as threads that compute one column each need them. Only the division of rows changes.

**Panels.** The matrix is divided into panels of 32 columns, stored one after another, each row by row. A row of a panel
has 128 bytes, and one block of threads reads a panel from beginning to end as one range of memory. The last panel is
padded with columns of zeros, so no thread needs to check whether its 16 bytes exist. Scales and zeros are divided into
the same panels, with one row per group. Nothing else changes: each word is the word of the chapter.

**Zeros** are stored in the dtype of the scales, including zeros that are codes, which float16 represents exactly. So a
group has two numbers of the same type, whatever the convention.

**A packed matrix** is one contiguous run of bytes: words, scales, zeros. With W the columns rounded up to whole panels,
G the groups and c the bytes of a scale, it has :math:`W (bK/8 + 2cG)` bytes, and each part begins at a multiple of 64.

**Dense matrices**, of float32 or float16 weights, are stored column by column, because there a block of threads
computes one column.

Source: column panels are those of QIGen (§3), see `lowbit.kernels.layouts`.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lowbit.arrays import F32, U8, Array
from lowbit.contract.checks import check_array, check_choice, check_integer
from lowbit.errors import ArgumentError
from lowbit.quantization.affine import CONVENTIONS, SCALE_DTYPES, Convention, QuantizedMatrix, ScaleDtype
from lowbit.quantization.packing import BITS, CODES_PER_UNIT, WORD_BITS, check_rows
from lowbit_cuda.port import Number, Span

PANEL = 32
"""Columns of a panel."""

PART = 16
"""Bytes that a thread reads at once; the alignment of spans that are read in this way."""

MOST = 2**31 - 1
"""Kernels count in int32."""


def up(count: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `count`."""
    return -(-count // multiple) * multiple


# **Panels** of any matrix, and back.


def to_panels(matrix: Array) -> Array:
    """R × N as panels: R · W elements, W being N rounded up to whole panels.

    >>> panels = to_panels(np.arange(1, 67).reshape(2, 33))
    >>> panels.size, panels[[0, 31, 32, 63, 64, 65, 96]].tolist()
    (128, [1, 32, 34, 65, 33, 0, 66])
    """
    rows, columns = matrix.shape
    whole = np.pad(matrix, ((0, 0), (0, up(columns, PANEL) - columns)))
    return np.ascontiguousarray(whole.reshape(rows, -1, PANEL).swapaxes(0, 1)).ravel()


def from_panels(panels: Array, rows: int, columns: int) -> Array:
    """The inverse of `to_panels`: R × N."""
    whole = panels.reshape(-1, rows, PANEL).swapaxes(0, 1).reshape(rows, -1)
    return np.ascontiguousarray(whole[:, :columns])


# **A quantised matrix.**


@dataclass(frozen=True)
class MatrixLayout:
    """The layout of a packed K × N quantised matrix.

    Attributes:
        bits: 2, 3, 4 or 8.
        rows: K.
        columns: N.
        group_size: a multiple of the codes in a unit, or K.
        scale_dtype: of scales and zeros.
        convention: ``minimum`` or ``zero_point``.

    Raises:
        ArgumentError: an attribute is out of range, or there are more elements than an int32 can count.
    """

    bits: int
    rows: int
    columns: int
    group_size: int
    scale_dtype: ScaleDtype = "float16"
    convention: Convention = "minimum"

    def __post_init__(self) -> None:
        check_choice("bits", self.bits, BITS)
        check_integer("rows", self.rows, 1, MOST)
        check_rows("rows", self.rows, self.bits)
        check_integer("columns", self.columns, 1, MOST - PANEL)
        check_choice("scale_dtype", self.scale_dtype, SCALE_DTYPES)
        check_choice("convention", self.convention, CONVENTIONS)
        check_group_size(self.bits, self.rows, self.group_size)
        check_integer("words of the matrix", self.words, 1, MOST)
        check_integer("scales of the matrix", self.scales, 1, MOST)

    @classmethod
    def of(cls, matrix: QuantizedMatrix) -> "MatrixLayout":
        """The layout of this matrix.

        Raises:
            ArgumentError: a group ends inside a unit.
        """
        dtype: ScaleDtype = "float16" if matrix.scales.dtype == np.float16 else "float32"
        return cls(matrix.bits, matrix.rows, matrix.columns, matrix.group_size, dtype, matrix.convention)

    @property
    def width(self) -> int:
        """Columns that are stored."""
        return up(self.columns, PANEL)

    @property
    def groups(self) -> int:
        """G."""
        return -(-self.rows // self.group_size)

    @cached_property
    def words(self) -> int:
        """The number of words."""
        return self.rows * self.bits // WORD_BITS * self.width

    @cached_property
    def scales(self) -> int:
        """The number of scales, which is also the number of zeros."""
        return self.groups * self.width

    @cached_property
    def offsets(self) -> tuple[int, int, int]:
        """Offsets in bytes of words, scales and zeros."""
        words = 4 * self.words
        return 0, words, words + self._scale_bytes

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the packed matrix."""
        return 4 * self.words + 2 * self._scale_bytes

    @cached_property
    def _scale_bytes(self) -> int:
        return self.scales * np.dtype(self.scale_dtype).itemsize

    def apply(self, matrix: QuantizedMatrix) -> U8:
        """A matrix, packed: uint8, `nbytes`.

        Raises:
            ArgumentError: the matrix has another layout.
        """
        if self != MatrixLayout.of(matrix):
            raise ArgumentError("matrix", MatrixLayout.of(matrix), str(self))
        packed = np.zeros(self.nbytes, np.uint8)
        parts = matrix.words, matrix.scales, matrix.zeros.astype(self.scale_dtype)
        for offset, part in zip(self.offsets, parts, strict=True):
            stored = to_panels(part).view(np.uint8)
            packed[offset : offset + stored.size] = stored
        return packed

    def restore(self, packed: U8) -> QuantizedMatrix:
        """The matrix that was packed, the inverse of `apply`.

        Raises:
            ArgumentError: `packed` does not have this layout, or holds no valid matrix.
        """
        check_array("packed", packed, np.uint8, (self.nbytes,))
        kinds, counts = (np.dtype(np.uint32), *(np.dtype(self.scale_dtype),) * 2), (self.words, *(self.scales,) * 2)
        rows = self.rows * self.bits // WORD_BITS, self.groups, self.groups
        words, scales, zeros = (
            from_panels(packed[start : start + count * kind.itemsize].view(kind), height, self.columns)
            for start, kind, count, height in zip(self.offsets, kinds, counts, rows, strict=True)
        )
        if self.convention == "zero_point":
            zeros = zeros.astype(np.uint8)
        return QuantizedMatrix(words, scales, zeros, self.bits, self.rows, self.group_size, self.convention)

    # Arguments of a launch.

    def spans(self, packed: Span, prefix: str = "") -> dict[str, Span]:
        """The arguments ``words``, ``scales`` and ``zeros`` of a kernel, from the span of the packed matrix."""
        sizes = 4 * self.words, self._scale_bytes, self._scale_bytes
        names = ("words", "scales", "zeros")
        return {
            prefix + name: packed.part(offset, size)
            for name, offset, size in zip(names, self.offsets, sizes, strict=True)
        }

    @cached_property
    def numbers(self) -> dict[str, Number]:
        """The arguments of a kernel that state the matrix's size and convention."""
        return {
            "rows": self.rows,
            "columns": self.columns,
            "group_size": self.group_size,
            "zero_point": int(self.convention == "zero_point"),
        }


def check_group_size(bits: int, rows: int, group_size: int) -> None:
    """Refuse groups that end inside a unit: a thread's words belong to one group.

    >>> check_group_size(4, 64, 12)
    Traceback (most recent call last):
    lowbit.errors.ArgumentError: group_size is 12; allowed: a multiple of 8 up to the 64 rows
    """
    unit = CODES_PER_UNIT[bits]
    check_integer("group_size", group_size, 1, rows)
    if group_size % unit:
        raise ArgumentError("group_size", group_size, f"a multiple of {unit} up to the {rows} rows")


# **A dense matrix**, of plain weights.


@dataclass(frozen=True)
class DenseLayout:
    """The layout of a K × N matrix of plain weights, column by column.

    Attributes:
        rows: K, a multiple of 8.
        columns: N.
        dtype: ``float32`` or ``float16``.

    Raises:
        ArgumentError: an attribute is out of range.
    """

    rows: int
    columns: int
    dtype: ScaleDtype = "float32"

    def __post_init__(self) -> None:
        check_integer("rows", self.rows, 1, MOST)
        check_integer("columns", self.columns, 1, MOST)
        check_choice("dtype", self.dtype, SCALE_DTYPES)
        if self.rows % 8:
            raise ArgumentError("rows", self.rows, "a multiple of 8")

    @property
    def nbytes(self) -> int:
        """Bytes of the packed matrix."""
        return self.rows * self.columns * np.dtype(self.dtype).itemsize

    def apply(self, weights: F32) -> U8:
        """Weights, packed, from float32, K × N: uint8, `nbytes`; float16 is rounded to nearest.

        Raises:
            ArgumentError: weights have another dtype or shape, or float16 cannot hold them.
        """
        check_array("weights", weights, np.float32, (self.rows, self.columns))
        with np.errstate(over="ignore"):
            stored = np.ascontiguousarray(weights.T.astype(self.dtype))
        if not np.isfinite(stored).all():
            raise ArgumentError("weights", "not finite, or become so", f"what {self.dtype} can hold")
        return stored.view(np.uint8).ravel()

    def restore(self, packed: U8) -> F32:
        """The weights that were packed: float32, K × N."""
        check_array("packed", packed, np.uint8, (self.nbytes,))
        return np.ascontiguousarray(packed.view(self.dtype).reshape(self.columns, self.rows).T.astype(np.float32))
