"""Whether two results are alike: to the bit, or except for roundings.

Results are compared leaf by leaf: arrays, fields of dataclasses, elements of tuples.
"""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from lowbit.arrays import Array
from lowbit.numbers.floats import rounded
from lowbit.tensor_formats.stored import RESULTS, Result
from lowbit_conformance.defects.tolerances import UNDERFLOW, UNIT

SLACK = 4.0  # of the bound of a right float32 sum; the sums of a defect have other terms
COMPUTED = 2.0**-60
"""Relative to a limit: roundings leave nothing so small, so a smaller nonzero result was multiplied by a small
number."""
NEARER = 16.0  # factor by which a result must be nearer to a defect's result than to the right one


def nearly(given: Any, other: Any, limits: Array | None) -> bool:
    """Whether two results are equal but for rounding."""
    return identical(given, other) or (limits is not None and _close(given, other, limits, SLACK))


def count(given: Any, right: Any, limits: Array | None) -> int:
    """The number of wrong elements of a result; 1 for a result of the wrong kind."""
    ours, theirs = list(leaves(given)), list(leaves(right))
    count = 0
    for (_, first), (_, second) in zip(ours, theirs, strict=False):
        if isinstance(first, np.ndarray) and isinstance(second, np.ndarray) and first.shape == second.shape:
            with np.errstate(all="ignore"):
                far = np.abs(first.astype(np.float64) - second) > (0.0 if limits is None else limits)
                count += int((far | (np.isfinite(first) != np.isfinite(second))).sum())
        else:
            count += not _same(("", first), ("", second))
    return max(count, int(len(ours) != len(theirs)))


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The arrays and numbers of a value, each with its path.

    >>> [path for path, _ in leaves((1, np.zeros(2)))]
    ['.length', '[0]', '[1]']
    """
    if is_dataclass(value) and not isinstance(value, type):
        for part in fields(value):
            yield from leaves(getattr(value, part.name), f"{path}.{part.name}")
    elif isinstance(value, (tuple, list)):
        yield f"{path}.length", len(value)
        for number, part in enumerate(value):
            yield from leaves(part, f"{path}[{number}]")
    else:
        yield path, value


def floating(array: Array) -> bool:
    """Whether the elements are floats, including bfloat16, which numpy does not count as one."""
    return array.dtype.kind == "f" or array.dtype.name in RESULTS


def gives(wrong: Any, given: Any, right: Any, limits: Array | None, unit: float) -> bool:
    """Whether a defect's result explains the given one: the bits are equal, or differ only by rounding."""
    if wrong is None or identical(wrong, right):
        return False
    if identical(given, wrong):
        return True
    if limits is None or not isinstance(wrong, np.ndarray) or wrong.shape != right.shape:
        return False
    if not wrong.any() and given.any():
        return False  # what is nearly 0 was computed
    if np.shape(given) == wrong.shape and ((wrong == 0) & (given != 0) & (np.abs(given) < COMPUTED * limits)).any():
        return False  # so was what is too small to be left by roundings
    # The terms of a wrong sum may be larger than those of the right one, or elsewhere.
    larger = max(1.0, _largest(wrong) / max(_largest(right), UNDERFLOW))
    widest = (
        limits.max(initial=0.0) * larger
        + UNDERFLOW
        + unit / SLACK * np.abs(np.nan_to_num(wrong, posinf=0.0, neginf=0.0))
    )
    return _close(given, wrong, widest, SLACK) and _nearer(given, wrong, right)


def _largest(numbers: Array) -> float:
    """The largest finite magnitude."""
    sizes = np.abs(numbers.astype(np.float64))
    return float(sizes[np.isfinite(sizes)].max(initial=0.0))


def _nearer(given: Array, wrong: Array, right: Array) -> bool:
    """Whether the given result is much nearer to the defect's than to the right one."""
    own, other = squares(given, wrong.astype(np.float32), right)
    return bool((np.isfinite(given) != np.isfinite(right)).any()) or own * NEARER**2 < other


def squares(given: Array, wrong: Array, right: Array) -> tuple[float, float]:
    """The squared distances of the given result from the defect's and from the right one."""
    with np.errstate(all="ignore"):
        wide = given.astype(np.float64)
        own, other = np.abs(wide - wrong), np.abs(wide - right)
        both = np.isfinite(own) & np.isfinite(other)
        return float(np.square(own[both]).sum()), float(np.square(other[both]).sum())


def identical(given: Any, other: Any) -> bool:
    """Whether two results have equal bits, after a float64 result is rounded to the other's type."""
    both = isinstance(given, np.ndarray) and isinstance(other, np.ndarray)
    if both and other.dtype == np.float64 and (name := given.dtype.name) in RESULTS:
        other = _rounded_once(other, name)
    if both and given.dtype == np.float64 != other.dtype:
        return False
    ours, theirs = list(leaves(given)), list(leaves(other))
    return len(ours) == len(theirs) and all(_same(a, b) for a, b in zip(ours, theirs, strict=True))


def _rounded_once(numbers: Array, type: Result) -> Array:
    """Numbers rounded to another float type; numpy rounds once to its own types, but twice to bfloat16."""
    with np.errstate(all="ignore"):
        return rounded(numbers, type) if type == "bfloat16" else numbers.astype(type)


def _same(ours: tuple[str, Any], theirs: tuple[str, Any]) -> bool:
    (path, first), (other, second) = ours, theirs
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        if (first.dtype, first.shape) != (second.dtype, second.shape):
            return False
        bits = f"u{first.dtype.itemsize}"
        unequal = np.ascontiguousarray(first).view(bits) != np.ascontiguousarray(second).view(bits)
        return not (unequal & ~((first != first) & (second != second))).any()  # a NaN is a NaN
    if isinstance(first, np.ndarray) or isinstance(second, np.ndarray):
        return False
    return path == other and bool(first == second)


def _close(given: Any, other: Any, limits: Array, slack: float) -> bool:
    """Whether two results are equal except for rounding."""
    if (
        not (isinstance(given, np.ndarray) and isinstance(other, np.ndarray))
        or given.shape != other.shape
        or not floating(given)
    ):
        return False
    with np.errstate(all="ignore"):
        near = other.astype(np.float32) if other.dtype != np.float32 else other
        finite = np.isfinite(given) & np.isfinite(near)
        odd = ~finite & ~((given == near) | (np.isnan(given) & np.isnan(near)))
        far = np.abs(given.astype(np.float64) - other) > slack * limits + 4 * UNIT * np.abs(other)
    return not (odd.any() or (far & finite).any())
