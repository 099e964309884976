r"""Coded matrices: codes, scales and zeros before they are packed for a format.

Formats pack the same numbers in different ways, and a matrix can move from one to another without a loss where both
hold its numbers. A `CodedMatrix` has these numbers in one form: a weight is

.. math:: w_{kn} = s_{gn}\,(q_{kn} - z_{gn}) \quad\text{or}\quad w_{kn} = s_{gn}\,q_{kn} + m_{gn},

with :math:`g` the group of row *k*. Scales are float16, bfloat16 or float32. Zeros are float64 here: whole numbers in
most formats, and float16 numbers in HQQ's.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit.arrays import F32, F64, I32, Array
from lowbit.errors import ArgumentError
from lowbit.numbers.floats import FLOATS
from lowbit.quantization.affine import Convention
from lowbit.quantization.gptq import grid
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
        """float64, K × N: the numbers it represents, exact for 16-bit scales."""
        wide, q = self.scales.astype(np.float64)[self.g_idx], self.codes.astype(np.float64)
        rows = self.offsets[self.g_idx]
        return wide * q + rows if self.has_minima else wide * (q - rows)

    @property
    def floats(self) -> F32:
        """float32, K × N: its numbers, each rounded once."""
        return self.values.astype(np.float32)

    @property
    def in_order(self) -> bool:
        """Whether its groups are consecutive runs of rows."""
        return bool(np.array_equal(self.g_idx, runs(len(self.codes), self.group_size)))


@dataclass(frozen=True)
class Grid:
    """How the range of a group's numbers maps to codes.

    Attributes:
        group_size: rows of a group.
        symmetric: whether every zero is the middle of the codes.
        convention: ``zero_point``, or ``minimum``.
    """

    group_size: int
    symmetric: bool = False
    convention: Convention = "zero_point"

    def of(self, group: F32, bits: int) -> tuple[npt.NDArray[np.floating], npt.NDArray[np.generic]]:
        """Scale, float16, and zero or minimum of each column of a group.

        Raises:
            ArgumentError: a range that float16 cannot hold.
        """
        return grid(group, bits, self.convention, self.symmetric, "float16")

    def numbers(self, bits: int) -> tuple[int, int, bool]:
        """The last arguments of a `CodedMatrix`."""
        return bits, self.group_size, self.convention == "minimum"


def runs(rows: int, group_size: int) -> I32:
    """The group of each row if groups are runs: int32, K.

    >>> runs(5, 2)
    array([0, 0, 1, 1, 2], dtype=int32)
    """
    return (np.arange(rows) // group_size).astype(np.int32)


def whole_zeros(coded: CodedMatrix, least: int = 0, most: int | None = None) -> npt.NDArray[np.int64]:
    """The zeros as integers in a range, by default that of the codes.

    Raises:
        ArgumentError: minima instead of zeros; a zero that is not whole or lies outside the range.
    """
    if coded.has_minima:
        raise ArgumentError("offsets of the groups", "minima", "zeros: a minimum is rarely a multiple of its scale")
    end = 2**coded.bits - 1 if most is None else most
    wrong = (coded.offsets != np.rint(coded.offsets)) | (coded.offsets < least) | (coded.offsets > end)
    if wrong.any():
        raise ArgumentError("zero of a group", coded.offsets[wrong][0], f"a whole number from {least} to {end}")
    return coded.offsets.astype(np.int64)


def exactly(numbers: Array, dtype: str, what: str) -> Array:
    """Numbers converted to a type of 16 or 32 bits without loss.

    Raises:
        ArgumentError: a number that the type cannot represent.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        found: Array = numbers.astype(FLOATS[dtype].dtype)
    wrong = found.astype(np.float64) != numbers.astype(np.float64)
    if wrong.any():
        raise ArgumentError(what, numbers[wrong][0], f"numbers that {dtype} holds exactly")
    return found


def digest(numbers: npt.NDArray[np.floating[Any]]) -> str:
    """The SHA-256 of numbers as float32, row by row, in hexadecimal digits."""
    return hashlib.sha256(np.ascontiguousarray(numbers, "<f4").data).hexdigest()
