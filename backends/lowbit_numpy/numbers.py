"""Floats of 4 to 32 bits: rounding in integers, on the bits of float64 numbers."""

from typing import ClassVar

import ml_dtypes
import numpy as np

from lowbit.arrays import F64, Array
from lowbit.backend import Declaration
from lowbit.numbers.floats import FLOATS, Direction, FloatType, Name, Overflow

BITS = np.uint64(52)
"""Bits of the fraction of a float64."""
ONE = np.uint64(1)


class NumberOperations:
    """The hooks of the chapter `lowbit.numbers.floats`."""

    declared: ClassVar[dict[str, Declaration]] = dict.fromkeys(("floats.decode", "floats.round"), Declaration())

    def _floats_decode(self, patterns: Array, type: Name) -> F64:
        """Decode with the dtypes of ml_dtypes, which define the value of each pattern."""
        with np.errstate(invalid="ignore"):  # a signalling NaN
            numbers: F64 = patterns.view(np.dtype(getattr(ml_dtypes, type, type))).astype(np.float64)
        return numbers

    def _floats_round(
        self, numbers: F64, type: Name, overflow: Overflow = "saturate", direction: Direction = "nearest"
    ) -> Array:
        return patterns_of(numbers, FLOATS[type], overflow, direction)


def patterns_of(numbers: F64, kind: FloatType, overflow: Overflow, direction: Direction = "nearest") -> Array:
    """The pattern of each number: its significand, shifted to the step of its binade, plus the binades below."""
    whole = np.ascontiguousarray(numbers).view(np.uint64)
    binade = (whole >> BITS & np.uint64(0x7FF)).astype(np.int64) - 1023
    significand = (whole & ((ONE << BITS) - ONE)) | np.where(binade > -1023, ONE << BITS, np.uint64(0))
    least = 1 - kind.bias if kind.signed else -kind.bias
    below = np.maximum(least - binade, 0)
    patterns = (binade + below - least) * 2**kind.mantissa + _shifted(
        significand, 52 - kind.mantissa + below, direction
    )
    if not kind.signed:  # pattern 0 is the least power, with significand 1
        patterns = np.maximum(patterns, 1) - 1
    nan = 2 ** (kind.exponent + kind.mantissa) - 1
    beyond = kind.top if overflow == "saturate" else kind.top + 1 if kind.specials == "ieee" else nan
    patterns[patterns > kind.top] = kind.top if direction == "down" else beyond
    patterns[np.isinf(numbers)] = beyond
    if kind.signed:
        patterns |= (whole >> np.uint64(63)).astype(np.int64) << (kind.exponent + kind.mantissa)
    patterns[np.isnan(numbers)] = nan
    found: Array = patterns.astype(kind.pattern_dtype)
    return found


def _shifted(significand: Array, places: Array, direction: Direction) -> Array:
    """Significands rounded to drop their last `places` bits; 60 or more drop all 53 bits."""
    shift = np.minimum(places, 60).astype(np.uint64)
    kept = significand >> shift
    rest, half = significand - (kept << shift), ONE << (shift - ONE)
    if direction == "nearest":
        kept += (rest > half) | ((rest == half) & (kept & ONE == ONE))
    elif direction == "up":
        kept += rest > 0
    return kept.astype(np.int64)


def rounded(numbers: F64, name: str) -> Array:
    """Numbers of any shape, each rounded once to float32, float16 or bfloat16; infinite on overflow."""
    kind = FLOATS[name]
    if kind.native:
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            return numbers.astype(kind.dtype)
    flat = np.ascontiguousarray(numbers).reshape(-1)
    return patterns_of(flat, kind, "ieee").view(kind.dtype).reshape(numbers.shape)
