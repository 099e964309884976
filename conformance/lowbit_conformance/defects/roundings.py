"""Roundings that defects of several operations make, and from which size on deep kernels make them."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from lowbit.arrays import F32, Array

DEEP = 1024
Rounding = Callable[[Any], Any]


def significant(numbers: Array, bits: int) -> Array:
    """Round to a number of significant bits, ties to even, with the exponents of float32."""
    with np.errstate(invalid="ignore"):
        mantissa, exponent = np.frexp(numbers.astype(np.float64))
        return np.asarray(np.ldexp(np.rint(np.ldexp(mantissa, bits)), exponent - bits), np.float32)


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


def flushed(numbers: Array) -> F32:
    """Replace subnormal float32 numbers with zeros of the same sign."""
    wide = np.asarray(numbers, np.float32)
    return np.where(np.abs(wide) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), wide), wide)


def finite(numbers: Array) -> Array:
    """Replace NaN and infinity with zeros."""
    return np.nan_to_num(numbers, nan=0, posinf=0, neginf=0)


def in_steps(numbers: Array) -> Array:
    """Round to steps of a fraction of the largest magnitude, so that each number depends on all others."""
    with np.errstate(all="ignore"):
        step = np.abs(numbers).max() * 2.0**-21
        return np.asarray(np.rint(numbers / step) * step, numbers.dtype) if step > 0 else numbers


def narrow(array: Array) -> Array:
    """Convert to float32, without warnings about overflow."""
    with np.errstate(all="ignore"):
        return np.asarray(array, np.float64).astype(np.float32)


def wide(*arrays: Array) -> Iterator[Array]:
    return (np.asarray(array, np.float64) for array in arrays)
