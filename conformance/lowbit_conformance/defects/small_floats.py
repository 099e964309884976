"""Defects of small floats: how patterns are read, and how numbers are rounded to them."""

from collections.abc import Callable
from typing import Any

import numpy as np

from lowbit.arrays import F64, Array
from lowbit.numbers.floats import FLOATS, decode, round_to
from lowbit_conformance.defects.defect import of


def _decoded(change: Callable[[Array, Any], F64]) -> Callable[..., F64]:
    def wrong(patterns: Array, type: str) -> F64:
        return change(patterns, FLOATS[type])

    return wrong


def flushed(patterns: Array, kind: Any) -> F64:
    numbers = decode(patterns, kind.name)
    return np.where(np.abs(numbers) < 2.0 ** (1 - kind.bias), np.copysign(0, numbers), numbers)


def biased(patterns: Array, kind: Any) -> F64:
    return decode(patterns, kind.name) * 2


def special_as_numbers(patterns: Array, kind: Any) -> F64:
    numbers = decode(patterns, kind.name)
    return np.where(np.isfinite(numbers), numbers, np.copysign(kind.largest, numbers))


def unsigned_zero(patterns: Array, kind: Any) -> F64:
    return decode(patterns, kind.name) + 0.0


def through_float32(numbers: F64, type: Any, overflow: Any = "saturate", direction: Any = "nearest") -> Array:
    with np.errstate(over="ignore"):
        near = numbers.astype(np.float32).astype(np.float64)
    return round_to(near, type, overflow, direction)


def truncated(numbers: F64, type: Any, overflow: Any = "saturate", direction: Any = "nearest") -> Array:
    return round_to(numbers, type, overflow, "down")


def half_up(numbers: F64, type: Any, overflow: Any = "saturate", direction: Any = "nearest") -> Array:
    right = round_to(numbers, type, overflow, direction)
    if direction != "nearest":
        return right
    low, high = (round_to(numbers, type, overflow, each) for each in ("down", "up"))
    middle = (decode(low, type) + decode(high, type)) / 2
    return np.where(middle == numbers, high, right)


def other_overflow(numbers: F64, type: Any, overflow: Any = "saturate", direction: Any = "nearest") -> Array:
    if FLOATS[type].specials == "none":
        return round_to(numbers, type, overflow, direction)
    return round_to(numbers, type, "ieee" if overflow == "saturate" else "saturate", direction)


def overflow_downwards(numbers: F64, type: Any, overflow: Any = "saturate", direction: Any = "nearest") -> Array:
    right = round_to(numbers, type, overflow, direction)
    if direction != "down" or overflow != "ieee":
        return right
    beyond = round_to(np.copysign(np.inf, numbers), type, overflow, direction)
    return np.where(np.abs(numbers) > FLOATS[type].largest, beyond, right)


def flushed_rounding(numbers: F64, type: Any, overflow: Any = "saturate", direction: Any = "nearest") -> Array:
    kind = FLOATS[type]
    small = np.abs(numbers) < 2.0 ** (1 - kind.bias)
    return round_to(np.where(small, np.copysign(0, numbers), numbers), type, overflow, direction)


def zero_without_sign(numbers: F64, type: Any, overflow: Any = "saturate", direction: Any = "nearest") -> Array:
    return round_to(np.where(numbers == 0, 0.0, numbers), type, overflow, direction)


def nan_to_zero(numbers: F64, type: Any, overflow: Any = "saturate", direction: Any = "nearest") -> Array:
    return round_to(np.nan_to_num(numbers, posinf=np.inf, neginf=-np.inf), type, overflow, direction)


DECODE, ROUND = "floats.decode", "floats.round"
DEFECTS = (
    of(DECODE, "subnormals-read-as-zero", "Patterns with an exponent field of 0 are zero.", "C1", _decoded(flushed)),
    of(DECODE, "bias-one-too-low", "Every number is twice as large.", "C1", _decoded(biased)),
    of(DECODE, "zero-read-without-sign", "The pattern of -0 is +0.", "C1", _decoded(unsigned_zero)),
    of(
        DECODE,
        "specials-read-as-numbers",
        "NaN and infinity are the largest number.",
        "C2",
        _decoded(special_as_numbers),
    ),
    of(ROUND, "rounded-through-float32", "A number is rounded to float32 first.", "C1", through_float32),
    of(ROUND, "rounded-towards-zero", "A number is cut and not rounded.", "C1", truncated),
    of(ROUND, "ties-away-from-zero", "A tie goes away from zero.", "C1", half_up),
    of(ROUND, "subnormals-rounded-to-zero", "Numbers below the normal range become zero.", "C1", flushed_rounding),
    of(ROUND, "overflow-of-the-other-kind", "Saturation and infinity are exchanged.", "C2", other_overflow),
    of(ROUND, "overflow-downwards", "What overflows is infinite even if it is cut.", "C2", overflow_downwards),
    of(ROUND, "zero-rounded-without-sign", "-0 becomes +0.", "C3", zero_without_sign),
    of(ROUND, "nan-rounded-to-zero", "NaN becomes 0.", "C3", nan_to_zero),
)
