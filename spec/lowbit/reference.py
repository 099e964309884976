"""The reference backend: the specification itself behind the interface of a backend.

It is slow and exists so that the suite, the demo and the benchmarks can treat the specification like any other
backend. Every method is one call of a chapter.

Source: the chapters `packing`, `affine` and `linear`.
"""

import numpy as np

from lowbit import affine, linear, packing
from lowbit.affine import Convention, Floats, QuantizedMatrix, ScaleDtype
from lowbit.backend import Backend, Capabilities, Declaration, PreparedLinear
from lowbit.bounds import Arithmetic, one_loop
from lowbit.packing import Codes, Words


class ReferenceLinear(PreparedLinear):
    """Codes unpacked once; each call is Algorithm 1 in float64, rounded to float32 at the end."""

    def __init__(self, matrix: QuantizedMatrix) -> None:
        super().__init__("reference", matrix.rows, matrix.columns, matrix.nbytes)
        self._matrix, self._codes = matrix, packing.unpack(matrix.words, matrix.bits)

    def _qgemv(self, x: Floats, out: Floats) -> None:
        with np.errstate(over="ignore"):
            out[:] = linear.qgemv_codes(x, self._codes, self._matrix)

    def _qgemm(self, x: Floats, out: Floats) -> None:
        for row, result in zip(x, out, strict=True):
            self._qgemv(row, result)


class ReferenceBackend(Backend):
    """The specification as a backend."""

    name = "reference"

    def capabilities(self) -> Capabilities:
        exact = Declaration()
        bounded = Declaration(arithmetic=Arithmetic("factored", "float64", one_loop))
        operations = dict.fromkeys(("packing.pack", "packing.unpack", "affine.quantize", "affine.dequantize"), exact)
        operations |= dict.fromkeys(("linear.qgemv", "linear.qgemm"), bounded)
        return Capabilities(operations, concurrent=True)

    def _pack(self, codes: Codes, bits: int) -> Words:
        return packing.pack(codes, bits)

    def _unpack(self, words: Words, bits: int) -> Codes:
        return packing.unpack(words, bits)

    def _quantize(
        self, weights: Floats, bits: int, group_size: int, convention: Convention, scale_dtype: ScaleDtype
    ) -> QuantizedMatrix:
        return affine.quantize(
            weights, bits=bits, group_size=group_size, convention=convention, scale_dtype=scale_dtype
        )

    def _dequantize(self, matrix: QuantizedMatrix) -> Floats:
        return affine.dequantize(matrix)

    def _prepare(self, matrix: QuantizedMatrix) -> PreparedLinear:
        return ReferenceLinear(matrix)
