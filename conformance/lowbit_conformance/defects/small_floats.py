"""Defects of small floats: how patterns are read, and how numbers are rounded to them."""

from typing import Any

import numpy as np

from lowbit.arrays import F64, Array
from lowbit.numbers.floats import FLOATS, decode, round_to
from lowbit_conformance.defects.defect import Defect, of_operation

DEFECTS: list[Defect] = []
of_decode = of_operation(DEFECTS, "floats.decode")
of_round = of_operation(DEFECTS, "floats.round")


def flushed(numbers: F64, type: Any) -> F64:
    """Replace numbers below the normal range of a type with zeros."""
    return np.where(np.abs(numbers) < 2.0 ** (1 - FLOATS[type].bias), np.copysign(0, numbers), numbers)


@of_decode("C1")
def subnormals_read_as_zero(patterns: Array, type: Any) -> F64:
    """Patterns with an exponent field of 0 are zero."""
    return flushed(decode(patterns, type), type)


@of_decode("C2")
def specials_read_as_numbers(patterns: Array, type: Any) -> F64:
    """NaN and infinity are the largest number."""
    numbers = decode(patterns, type)
    return np.where(np.isfinite(numbers), numbers, np.copysign(FLOATS[type].largest, numbers))


of_decode.add("bias-one-too-low", "Every number is twice as large.", "C1", lambda *given: decode(*given) * 2)
of_decode.add("zero-read-without-sign", "The pattern of -0 is +0.", "C1", lambda *given: decode(*given) + 0.0)


@of_round("C1")
def rounded_towards_zero(numbers: F64, type: Any, overflow: Any = "saturate", direction: Any = "nearest") -> Array:
    """A number is truncated instead of rounded."""
    return round_to(numbers, type, overflow, "down")


@of_round("C1")
def ties_away_from_zero(numbers: F64, type: Any, overflow: Any = "saturate", direction: Any = "nearest") -> Array:
    """Ties round away from zero."""
    right = round_to(numbers, type, overflow, direction)
    if direction != "nearest":
        return right
    low, high = (round_to(numbers, type, overflow, each) for each in ("down", "up"))
    middle = (decode(low, type) + decode(high, type)) / 2
    return np.where(middle == numbers, high, right)


@of_round("C2")
def overflow_of_the_other_kind(
    numbers: F64, type: Any, overflow: Any = "saturate", direction: Any = "nearest"
) -> Array:
    """Saturation and infinity are exchanged."""
    if FLOATS[type].specials == "none":
        return round_to(numbers, type, overflow, direction)
    return round_to(numbers, type, "ieee" if overflow == "saturate" else "saturate", direction)


@of_round("C2")
def overflow_downwards(numbers: F64, type: Any, overflow: Any = "saturate", direction: Any = "nearest") -> Array:
    """Numbers that overflow become infinite even with truncation."""
    right = round_to(numbers, type, overflow, direction)
    if direction != "down" or overflow != "ieee":
        return right
    beyond = round_to(np.copysign(np.inf, numbers), type, overflow, direction)
    return np.where(np.abs(numbers) > FLOATS[type].largest, beyond, right)


of_numbers = of_operation(
    DEFECTS,
    "floats.round",
    lambda change: lambda numbers, type, *rest, **choices: round_to(change(numbers, type), type, *rest, **choices),
)
of_numbers.add("subnormals-rounded-to-zero", "Numbers below the normal range become zero.", "C1", flushed)
of_numbers.add(
    "zero-rounded-without-sign", "-0 becomes +0.", "C3", lambda numbers, type: np.where(numbers == 0, 0.0, numbers)
)
of_numbers.add(
    "nan-rounded-to-zero",
    "NaN becomes 0.",
    "C3",
    lambda numbers, type: np.nan_to_num(numbers, posinf=np.inf, neginf=-np.inf),
)


@of_numbers("C1")
def rounded_through_float32(numbers: F64, type: Any) -> F64:
    """A number is rounded to float32 first."""
    with np.errstate(over="ignore"):
        return numbers.astype(np.float32).astype(np.float64)
