"""HQQ with an index: the group of every weight is looked up once, and the rest is elementwise."""

from typing import ClassVar

import numpy as np

from lowbit.arrays import F32, Array
from lowbit.backend import Declaration
from lowbit.contract.rounding import Arithmetic, any_order
from lowbit.quantization.hqq import HqqMatrix
from lowbit.quantization.hqq_numbers import EightBit, Numbers
from lowbit.quantization.packing import Codes
from lowbit_numpy.codes import unpack_bits

# Roundings of a step: a sum of g terms with two each, one for the last difference and one for the mean.
DECLARED = {
    "hqq.codes": Declaration(),
    "hqq.step": Declaration(arithmetic=Arithmetic("direct", "float32", lambda rows, _: rows + 4)),
    "hqq.dequantize": Declaration(),
    "hqq.qgemv": Declaration(arithmetic=Arithmetic("dequantised", "float32", any_order)),
}


class HqqOperations:
    """The hooks of `hqq.codes`, `hqq.step`, `hqq.dequantize` and `hqq.qgemv`."""

    declared: ClassVar[dict[str, Declaration]] = DECLARED

    def _hqq_codes(self, weights: F32, scales: F32, zeros: F32, bits: int) -> Codes:
        with np.errstate(over="ignore"):
            real = np.rint(weights / scales + zeros)
        return np.asarray(np.clip(real, 0, 2**bits - 1), np.uint8)

    def _hqq_step(self, weights: F32, codes: Codes, scales: F32, zeros: F32, p: float, beta: float) -> F32:
        q = codes.astype(np.float32)
        errors = weights - scales * (q - zeros)
        sizes = np.abs(errors)
        with np.errstate(divide="ignore"):
            kept = np.copysign(np.maximum(sizes - sizes ** np.float32(p - 1) / np.float32(beta), 0), errors)
        return np.asarray(np.mean(q - (weights - kept) / scales, axis=0, dtype=np.float32))

    def _hqq_dequantize(self, matrix: HqqMatrix) -> F32:
        """float32, K × N: every weight by the scale and the zero of its group."""
        number = np.arange(matrix.rows * matrix.columns).reshape(matrix.columns, matrix.rows).T  # flat index into N × K
        group = number // matrix.group_size if matrix.axis == 1 else number % matrix.groups
        codes = unpack_bits(matrix.words, matrix.bits).astype(np.float32)
        return np.asarray(_plain(matrix.scales)[group] * (codes - _plain(matrix.zeros)[group]))

    def _hqq_qgemv(self, x: F32, matrix: HqqMatrix) -> F32:
        with np.errstate(invalid="ignore", over="ignore"):
            return x @ self._hqq_dequantize(matrix)


def _plain(numbers: Numbers) -> Array:
    """The numbers in float32, whatever their storage."""
    if not isinstance(numbers, EightBit):
        return numbers.astype(np.float32)
    group = np.arange(len(numbers.codes)) % len(numbers.scales)
    scales, zeros = numbers.scales.astype(np.float32)[group], numbers.zeros.astype(np.float32)[group]
    return np.asarray(scales * (numbers.codes.astype(np.float32) - zeros))
