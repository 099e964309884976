"""Roundings to narrow formats, as deep kernels do them, and from which size on they do."""

from collections.abc import Callable
from typing import Any

import numpy as np

from lowbit.arrays import F32, Array

DEEP = 1024
Rounding = Callable[[Any], Any]


def significant(numbers: Array, bits: int) -> Array:
    """Round to a number of significant bits, ties to even, with the exponents of float32."""
    with np.errstate(invalid="ignore"):
        mantissa, exponent = np.frexp(numbers.astype(np.float64))
        rounded: F32 = np.ldexp(np.rint(np.ldexp(mantissa, bits)), exponent - bits).astype(np.float32)
    return rounded


def tensor_float(numbers: Array) -> Array:
    return significant(numbers, 11)


def bfloat16(numbers: Array) -> Array:
    return significant(numbers, 8)


def half(numbers: Array) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        return numbers.astype(np.float16).astype(np.float32)


def fourteen_bits(numbers: Array) -> Array:
    return significant(numbers, 14)


def exactly(numbers: Array) -> Array:
    return numbers
