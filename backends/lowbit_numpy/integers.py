"""Products of blocks of integers with codes: BLAS on float64, which holds all of these integers exactly."""

from functools import cached_property
from itertools import pairwise

import numpy as np

from lowbit.arrays import F64
from lowbit.quantization.affine import QuantizedMatrix
from lowbit.quantization.bfp import Blocks
from lowbit.quantization.packing import Codes
from lowbit_numpy.codes import unpack_bits


class IntegerMatrix:
    """Codes with scales and offsets; the codes are unpacked when they are first needed."""

    def __init__(self, matrix: QuantizedMatrix) -> None:
        self._words, self._bits, self._group_size = matrix.words.copy(), matrix.bits, matrix.group_size
        self._scales = matrix.scales.astype(np.float64)
        zeros = matrix.zeros.astype(np.float64)
        self._offsets = zeros if matrix.convention == "minimum" else -zeros * self._scales

    @cached_property
    def _codes(self) -> Codes:
        return unpack_bits(self._words, self._bits)

    def multiplied(self, x: Blocks) -> F64:
        """``X W``, float64, T × N: group by group, and in a group by runs of rows that share an exponent."""
        y = np.zeros((x.rows, self._codes.shape[1]))
        for group, (scale, offset) in enumerate(zip(self._scales, self._offsets, strict=True)):
            start = group * self._group_size
            products, totals = self._group(x, start, min(start + self._group_size, x.columns))
            y += products * scale
            y += totals[:, None] * offset
        return y

    def _group(self, x: Blocks, start: int, stop: int) -> tuple[F64, F64]:
        """The sums of a group of rows before its scale and its offset, T × N and T."""
        block = x.format.block
        inside = range(start - start % block + block, stop, block)  # where a new block begins
        products, totals = np.zeros((x.rows, self._codes.shape[1])), np.zeros(x.rows)
        for first, last in pairwise((start, *inside, stop)):
            mantissas = x.mantissas[:, first:last].astype(np.float64)
            powers = np.exp2(x.exponents[:, first // block].astype(np.float64))
            products += (mantissas @ self._codes[first:last].astype(np.float64)) * powers[:, None]
            totals += mantissas.sum(axis=1) * powers
        return products, totals
