"""Numbers in narrow formats, by each rounding that is common: what `families` and `variants` round with."""

from collections.abc import Callable

import numpy as np

from lowbit.arrays import Array

Change = Callable[[Array], Array]
LEAST_NORMAL = 2.0**-126


def _cut(bits: int, add: Callable[[Array], Array]) -> Change:
    """Truncate the last bits of a float32; `add` is added to them first."""

    def rounded(numbers: Array) -> Array:
        whole = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
        near = (whole + add(whole)) & np.uint32(2**32 - 2**bits)
        return np.where(np.isfinite(numbers), near, whole).astype(np.uint32).view(np.float32).astype(numbers.dtype)

    return rounded


def _ways(bits: int) -> tuple[Change, ...]:
    """Ties to even, ties away, and towards zero."""
    half = 1 << (bits - 1)
    return (
        _cut(bits, lambda whole: np.uint32(half - 1) + (whole >> np.uint32(bits) & np.uint32(1))),
        _cut(bits, lambda whole: np.full_like(whole, half)),
        _cut(bits, np.zeros_like),
    )


def _half(numbers: Array) -> Array:
    return numbers.astype(np.float16).astype(numbers.dtype)


def _flushed(numbers: Array) -> Array:
    return np.where(np.abs(numbers) < LEAST_NORMAL, np.copysign(numbers.dtype.type(0), numbers), numbers)


FORMATS: dict[str, tuple[str, tuple[Change, ...]]] = {
    "float16": ("rounded to float16", (_half,)),
    "bfloat16": ("rounded to bfloat16", _ways(16)),
    "tf32": ("rounded to TF32, 10 bits after the leading one", _ways(13)),
    "12-bits": ("rounded to 12 bits, as by a fast reciprocal", _ways(12)),
    "normal-range": ("flushed to zero where subnormal", (_flushed,)),
}
