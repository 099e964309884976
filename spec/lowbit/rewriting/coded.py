r"""Coded matrices: codes, scales and zeros before they are packed for a format.

Formats pack the same numbers in different ways, and a matrix can move from one to another without a loss where both
hold its numbers. A `CodedMatrix` has these numbers in one form: a weight is

.. math:: w_{kn} = s_{gn}\,(q_{kn} - z_{gn}) \quad\text{or}\quad w_{kn} = s_{gn}\,q_{kn} + m_{gn},

with :math:`g` the group of row *k*. Scales are float16, bfloat16 or float32. Zeros are float64 here: whole numbers in
most formats, and float16 numbers in HQQ's.
"""

import hashlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit.arrays import F32, F64, I32, Array
from lowbit.quantization.packing import Codes


@dataclass(frozen=True, eq=False)
class CodedMatrix:
    """A K × N matrix as codes.

    >>> one = np.ones((1, 1))
    >>> CodedMatrix(np.array([[3]], np.uint8), one.astype("e"), 2 * one, np.zeros(1, np.int32), 4, 1).values
    array([[1.]])

    Attributes:
        codes: uint8, K × N, below ``2**bits``.
        scales: float16, bfloat16 or float32, G × N.
        offsets: float64, G × N: the zeros, or the minima.
        g_idx: int32, K: the group of each row.
        bits: of a code.
        group_size: rows of a group; the last may be short.
        has_minima: whether `offsets` are minima.
    """

    codes: Codes
    scales: Array
    offsets: F64
    g_idx: I32
    bits: int
    group_size: int
    has_minima: bool = False

    @property
    def values(self) -> F64:
        """float64, K × N: the numbers that it stands for, exact for scales of 16 bits."""
        wide, q = self.scales.astype(np.float64)[self.g_idx], self.codes.astype(np.float64)
        rows = self.offsets[self.g_idx]
        return wide * q + rows if self.has_minima else wide * (q - rows)

    @property
    def floats(self) -> F32:
        """float32, K × N: its numbers, each rounded once."""
        return self.values.astype(np.float32)

    @property
    def in_order(self) -> bool:
        """Whether its groups are runs of rows, one after another."""
        return bool(np.array_equal(self.g_idx, runs(len(self.codes), self.group_size)))

    def columns(self, begin: int, end: int) -> "CodedMatrix":
        """Some of its columns."""
        some = slice(begin, end)
        codes, scales, offsets = (
            np.ascontiguousarray(each[:, some]) for each in (self.codes, self.scales, self.offsets)
        )
        return replace(self, codes=codes, scales=scales, offsets=offsets)


def runs(rows: int, group_size: int) -> I32:
    """The group of each row where groups are runs: int32, K.

    >>> runs(5, 2)
    array([0, 0, 1, 1, 2], dtype=int32)
    """
    return (np.arange(rows) // group_size).astype(np.int32)


def digest(numbers: npt.NDArray[np.floating[Any]]) -> str:
    """The SHA-256 of some numbers as float32, row by row, in hexadecimal digits."""
    return hashlib.sha256(np.ascontiguousarray(numbers, "<f4").data).hexdigest()
