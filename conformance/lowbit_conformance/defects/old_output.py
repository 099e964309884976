"""Results that are added to what their memory held before: fresh memory holds one byte everywhere, or anything.

The suite fills memory before a call. So what was added is a number whose bytes are equal, the same for all elements.
Rounding hides it in large elements; small ones show it.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from lowbit.arrays import F64, Array
from lowbit.numbers.floats import FLOATS
from lowbit_conformance.defects.defect import Defect, arithmetical
from lowbit_conformance.defects.places import right_answer
from lowbit_conformance.defects.unwritten import wrong_in

NAME = "result-added-to-old-memory"
LEAST = 2
"""Least number of elements of each result that must be wrong by exactly that amount."""
CALLS = 2
"""Least number of calls whose shapes have no remainder, so that nothing was read past an end."""
WHOLE = 64
"""A number of rows that most tile sizes divide."""
NEARLY = 0.5
"""Relative to the right result: most results with added old numbers are so near to it, and most of them change."""
NEAR = 2.0**-6
"""Relative to the added number: how far the error of an element may differ from it, besides rounding."""
UNITS = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}


def fillings(name: str) -> F64:
    """The finite, nonzero numbers of a type whose bytes are all equal."""
    kind = np.dtype(FLOATS[name].dtype)
    octets = np.repeat(np.arange(1, 256, dtype=np.uint8), kind.itemsize)
    with np.errstate(all="ignore"):
        found = octets.view(kind).astype(np.float64)
    return np.asarray(found[np.isfinite(found)], np.float64)


def added_to(seen: Any) -> float | None:
    """The number that was added to each element of a result; None if no such number explains all of them."""
    given = getattr(seen.call, "given", None)
    if not isinstance(given, np.ndarray) or given.dtype.name not in UNITS or given.shape != np.shape(seen.right):
        return None
    ours, right, wrong = given.astype(np.float64), np.asarray(seen.exact, np.float64), wrong_in(seen)
    if wrong.sum() < LEAST or not (np.isfinite(ours).all() and np.isfinite(right).all()):
        return None
    room = UNITS[given.dtype.name] * (np.abs(ours) + np.abs(right)) + (0.0 if seen.limits is None else seen.limits)
    for one in fillings(given.dtype.name):
        off = np.abs(ours - right - one)
        near = off <= NEAR * abs(one)
        if (near & wrong).sum() >= LEAST and (off <= np.maximum(room, NEAR * abs(one))).all():
            return float(one)
    return None


def replayed(operation: str, failures: list[Any], *given: Any, **choices: Any) -> Any:
    """The returned result where it was wrong; right results for other arguments."""
    for each in failures:
        if len(each.arguments) == len(given) and all(map(lambda a, b: a is b, each.arguments, given)):
            return each.given
    return right_answer(operation, given, choices)


def of_added(failures: list[Any], operation: str) -> Iterator[Defect]:
    """The defect of results to which numbers are added that memory may have held."""
    if failures and all(added_to(each) is not None for each in failures):
        cause = "Results are added to what the output held before the call: fresh memory holds anything."
        run = partial(replayed, operation, failures)
        yield arithmetical(NAME, cause, "", {operation: run})


def added_each_time(seen: Any) -> tuple[Array, Array] | None:
    """Which results of two equal calls are near the right one, and which changed; None with a single call."""
    given, again = (getattr(seen.call, name, None) for name in ("given", "again"))
    if not isinstance(given, np.ndarray) or not isinstance(again, np.ndarray):
        return None
    right = np.asarray(seen.exact, np.float64)
    if not given.shape == again.shape == right.shape or not np.isfinite(right).all():
        return None
    first, second = given.astype(np.float64), again.astype(np.float64)
    with np.errstate(all="ignore"):
        off = np.stack([np.abs(each - right) for each in (first, second)])
        return off[:, right != 0] <= NEARLY * np.abs(right[right != 0]), (first != second)


def of_moving_sums(failures: list[Any]) -> tuple[Defect, ...]:
    """The same for results that differ between calls: most are near the right one, and nearly all differ."""
    found = [added_each_time(each) for each in failures]
    rows = [getattr(each.arguments[1], "rows", 1) if len(each.arguments) > 1 else 1 for each in failures]
    told = [pair for pair, count in zip(found, rows, strict=True) if pair is not None and count % WHOLE == 0]
    if len(told) < CALLS or None in found:
        return ()
    near, moved = (np.concatenate([np.ravel(pair[at]) for pair in told]) for at in (0, 1))
    if near.mean() < NEARLY or moved.mean() < NEARLY:
        return ()
    cause = (
        "Results are added to what their memory held before the call, in the output or in a sum that is not set to 0: "
        "they are right but for something that differs from call to call."
    )
    return (arithmetical(NAME, cause, "", {}),)
