"""Mistakes in casts, each in the ways in which kernels divide and round.

A kernel divides by the scale or multiplies by its inverse, and rounds ties to even or away from zero. Each mistake of
`casts` is tried in all of these ways, since few codes tell them apart.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from lowbit.arrays import F32, Array
from lowbit_conformance.defects.casts import (
    divided_by,
    in_eight,
    in_float16,
    in_float32,
    largest,
    not_absolute,
    of_row,
    times_the_inverse,
)
from lowbit_conformance.defects.defect import Defect, arithmetical

OPERATION = "formats.quantize"


def ties_away(numbers: Array) -> Array:
    return np.asarray(np.trunc(numbers + np.copysign(np.float32(0.5), numbers)))


def fraction_doubled(numbers: Array) -> Array:
    """Round ties away from zero by the fraction alone, so that no sum rounds numbers just below a half."""
    whole = np.trunc(numbers)
    return np.asarray(whole + np.trunc(2 * (numbers - whole)))


def half_added(numbers: Array) -> Array:
    return np.asarray(np.trunc(numbers + np.float32(0.5)))


def of_column(x: F32) -> F32:
    """The largest magnitude of all numbers."""
    return np.broadcast_to(np.abs(x).max(), (*x.shape[:2], 1))


def signed(least: float, x: F32) -> F32:
    """The largest number, but at least a limit."""
    found: F32 = np.maximum(x.max(axis=-1, keepdims=True), np.float32(least))
    return found


def zero_for_zero(quotient: Callable[[F32, F32], Array], numbers: F32, d: F32) -> Array:
    """A quotient that is 0 if the scale is 0."""
    with np.errstate(all="ignore"):
        return np.asarray(np.where(d == 0, np.float32(0), quotient(numbers, d)))


def summed(x: F32) -> F32:
    """The mean magnitude in place of the largest."""
    return np.asarray(np.abs(x).mean(axis=-1, keepdims=True))


def clamped(levels: int, integer: Callable[[Array], Array], numbers: Array) -> Array:
    return integer(numbers).clip(-levels, levels)


def wrapped(integer: Callable[[Array], Array], numbers: Array) -> Array:
    """The lowest byte of a 32-bit integer; 0 for numbers that are too large for one, as on x86."""
    whole = integer(numbers)
    return np.asarray(np.where(np.abs(whole) < 2.0**31, (whole + 128) % 256 - 128, 0))


ROUNDED: tuple[tuple[str, str, Callable[[Array], Array]], ...] = (
    ("", "", np.rint),
    ("", "", ties_away),
    ("", "", fraction_doubled),
    ("cast-truncates", "Codes are rounded towards zero.", np.trunc),
    ("cast-rounds-down", "Codes are rounded down.", np.floor),
    ("cast-half-added-to-all", "Codes are truncated after 1/2 is added, to negative numbers as well.", half_added),
)
LEASTS = (-np.inf, 0.0, 1e-10)
OF_SIGNED: tuple[Callable[[F32], F32], ...] = (not_absolute, *(partial(signed, least) for least in LEASTS))
SCALED: tuple[tuple[str, str, Callable[[F32], F32]], ...] = (
    ("", "", largest),
    *(("cast-maximum-of-signed", "The scale comes from the largest number.", way) for way in OF_SIGNED),
    ("cast-scale-of-row", "All blocks of a row have one scale.", of_row),
    ("cast-one-scale", "All numbers have one scale.", of_column),
    ("cast-mean-for-largest", "The scale comes from the mean magnitude.", summed),
)
LEVELS = (127, 128, 126, 120, 255, 256, 63, 64, 7, 8)
SEEN: tuple[tuple[str, str, Callable[[F32], F32]], ...] = (
    ("", "", in_float32),
    ("cast-inverse-of-rounded-scale", "Codes are divided by the float16 scale.", in_float16),
)


def single(mistakes: Iterator[tuple[str, str]]) -> tuple[str, str] | None:
    """The single mistake among several steps; None if there is none, or more than one."""
    found = [each for each in mistakes if each[0]]
    return found[0] if len(found) == 1 else None


def of_casts(operation: str) -> Iterator[Defect]:
    """All members: one step is wrong, the others are right in any allowed way; too large codes may wrap in a byte."""
    if operation != OPERATION:
        return
    for scale in SCALED:
        for levels in LEVELS:
            by = (
                "" if levels == 127 else f"cast-{levels}-levels",
                f"The scale is the largest magnitude over {levels}.",
            )
            for seen in SEEN:
                for integer in ROUNDED:
                    made = single(iter((scale[:2], by, seen[:2], integer[:2])))
                    if made is None:
                        continue
                    plain = (partial(divided_by, seen[2]), partial(times_the_inverse, seen[2]))
                    for way in (*plain, *(partial(zero_for_zero, each) for each in plain)):
                        for ending in (integer[2], partial(clamped, 127, integer[2]), partial(wrapped, integer[2])):
                            cast: Callable[..., Any] = partial(in_eight, scale[2], levels, way, ending)
                            yield arithmetical(made[0], made[1], "", {OPERATION: cast})
    for integer in ROUNDED[:3]:
        for way in (partial(divided_by, in_float32), partial(times_the_inverse, in_float32)):
            for name, cause, change in (
                ("cast-wraps", "Codes wrap around in bytes.", partial(wrapped, integer[2])),
                ("cast-clamped-at-126", "Codes are clamped to 126.", partial(clamped, 126, integer[2])),
            ):
                yield arithmetical(name, cause, "", {OPERATION: partial(in_eight, largest, 127, way, change)})
