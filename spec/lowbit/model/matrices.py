"""The matrices of a decoder: quantised or float weights behind one type.

A linear layer's weights come in three kinds, and a `Matrix` is one of them: codes with scales and zeros, as `affine`
describes them; the bytes of another format, as `lowbit.tensor_formats` does; or plain float32. All are K × N, with K
the features that go in and N those that come out, so that ``y = x W`` reads the same for all. Floats of 16 bits are
also stored as such bytes: half the memory of float32 for the same numbers.

An embedding is also such a matrix, of which only the rows of a few tokens are read.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Self

import numpy as np
import numpy.typing as npt

from lowbit.arrays import F32, I64, Array
from lowbit.quantization.affine import QuantizedMatrix, dequantize
from lowbit.tensor_formats import dense
from lowbit.tensor_formats.stored import Stored
from lowbit.tensor_formats.stored import dequantize as numbers_of

Matrix = QuantizedMatrix | Stored | F32
"""K × N weights: codes with scales and zeros, the bytes of a format, or float32."""


def to_float(matrix: Matrix) -> F32:
    """The float32 weights, K × N; those of a format each rounded once."""
    if isinstance(matrix, Stored):
        if matrix.format in dense.NAMES:  # exact, so float64 is not needed
            return np.ascontiguousarray(matrix.tensors[0].T, np.float32)
        return numbers_of(matrix)
    return dequantize(matrix) if isinstance(matrix, QuantizedMatrix) else matrix


def in_bytes(matrix: F32) -> Stored:
    """A float32 matrix in the format ``float32``, by which backends multiply."""
    rows, columns = matrix.shape
    return Stored("float32", rows, columns, (np.ascontiguousarray(matrix.T),))


def is_float(matrix: Matrix) -> bool:
    """Whether the weights are floats of 32 or 16 bits, not quantised."""
    return matrix.format in dense.NAMES if isinstance(matrix, Stored) else isinstance(matrix, np.ndarray)


def widened(name: str, matrix: Matrix) -> Matrix:
    """Stored floats as float32; a quantised matrix unchanged. The name is not used."""
    return to_float(matrix) if is_float(matrix) else matrix


def shape_of(matrix: Matrix) -> tuple[int, ...]:
    """K and N."""
    return matrix.shape if isinstance(matrix, np.ndarray) else (matrix.rows, matrix.columns)


def select_columns(matrix: Matrix, index: npt.NDArray[np.integer]) -> Matrix:
    """The matrix with column ``index[n]`` as column n; codes, scales and zeros move together, so nothing is rounded.

    >>> select_columns(np.array([[10, 20, 30]], np.float32), np.array([2, 0, 1]))
    array([[30., 10., 20.]], dtype=float32)
    """
    if isinstance(matrix, Stored):
        return matrix.with_columns(index)
    if not isinstance(matrix, QuantizedMatrix):
        return np.ascontiguousarray(matrix[:, index])
    words, scales, zeros = (
        np.ascontiguousarray(part[:, index]) for part in (matrix.words, matrix.scales, matrix.zeros)
    )
    return replace(matrix, words=words, scales=scales, zeros=zeros)


class Embedding:
    """The embedding of a model that is stored as a matrix, hidden × vocabulary: rows are decoded when they are read.

    A large vocabulary takes seconds to decode and gigabytes as float32, and a text reads few of its rows.

    Args:
        shape: vocabulary and hidden.
        columns: returns the matrix of the given columns, in their order.
        matrix: all of it; None if it is not available.
    """

    MOST = 1024
    """The number of rows of single tokens that are cached."""

    def __init__(
        self,
        shape: tuple[int, int],
        columns: Callable[[I64], Matrix],
        matrix: QuantizedMatrix | Stored | None = None,
    ) -> None:
        self.shape, self.dtype, self.matrix, self._columns = shape, np.dtype(np.float32), matrix, columns
        self._kept: dict[int, F32] = {}

    @classmethod
    def of(cls, matrix: QuantizedMatrix | Stored) -> Self:
        """The embedding that a matrix holds."""
        return cls((matrix.columns, matrix.rows), partial(select_columns, matrix), matrix)

    def __getitem__(self, ids: I64, /) -> F32:
        """The rows of tokens: float32, T × hidden."""
        if ids.shape != (1,):
            return self._made(ids)
        row = self._kept.get(token := int(ids[0]))
        if row is None:
            if len(self._kept) >= self.MOST:
                self._kept.clear()
            row = self._kept.setdefault(token, self._made(ids))
        return row

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Array:
        """All rows."""
        return np.asarray(self._made(np.arange(self.shape[0])), dtype)

    def _made(self, ids: I64) -> F32:
        return np.ascontiguousarray(to_float(self._columns(ids)).T)
