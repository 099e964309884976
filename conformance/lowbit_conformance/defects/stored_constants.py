"""Mistakes of a constant: zeros that are off by a number, and numbers that are off by a power of two."""

from collections.abc import Callable
from functools import partial

import numpy as np

from lowbit.arrays import F64
from lowbit.tensor_formats.stored import Stored
from lowbit.tensor_formats.table import Terms
from lowbit_conformance.defects.stored_parts import Named, Parts, changed, in_integers, in_zero, parts_of

STEPS = (2, 3, 4, 7, 8, 15, 16, 127, 128)
"""Possible errors of a zero, besides one: half of a range, a range, or the least or largest code."""
POWERS = (5, 6, 7, 8, 9, 10, 15, 16, 23, 32, 63, 64, 111, 112, 119, 120, 126, 127, 128)
"""Possible errors of binary exponents, besides small ones: from other or missing biases."""


def off_by(by: int, weights: Stored) -> Terms:
    """All zeros are some codes too high; too low if negative.

    Raises:
        ValueError: there are no codes.
    """
    parts = parts_of(weights)
    if not parts.bits:
        raise ValueError("the codes are no integers")
    return Terms(parts.units * parts.scale, parts.offsets - by * parts.scale)


def before_wrapping(change: Callable[[F64], F64], array: F64, bits: int) -> F64:
    """Changed zeros, modulo the number of codes."""
    return np.asarray(change(array) % 2.0**bits)


def added(by: int, array: F64) -> F64:
    return array + by


def scaled(power: int, weights: Stored) -> Terms:
    """All numbers times a power of two, as in a kernel that computes in float32."""
    with np.errstate(all="ignore"):
        values = np.ldexp(weights.values, power).astype(np.float32)
    return Terms(values.astype(np.float64))


def one_for_all(number: float, array: F64, parts: Parts) -> F64:
    return np.full_like(array, number)


def of_constants() -> Named:
    """All kinds of this module."""
    for step in STEPS:
        for by, word in ((step, "high"), (-step, "low")):
            cause = f"The zero is {step} codes too {word}"
            yield "stored-zero-off-by-a-number", f"{cause}.", partial(off_by, by)
            wraps = partial(changed, in_zero, partial(in_integers, partial(before_wrapping, partial(added, by))))
            yield "stored-zero-off-by-a-number", f"{cause}, modulo the number of codes.", wraps
    for number in (0, 1, 7, 8, 15, 127, 128, 255):
        cause = f"All zeros are taken to be {number}."
        yield "stored-zero-taken-as-a-number", cause, partial(changed, in_zero, partial(one_for_all, number))
    for power in POWERS:
        for exponent in (power, -power):
            cause = f"All numbers are those that are right times 2^{exponent}: a bias is missing or another."
            yield "stored-numbers-times-a-power", cause, partial(scaled, exponent)
