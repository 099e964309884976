"""Results to which those before them are added, since a sum is not set to 0: by the order in which they are computed.

A kernel computes its results in an order, in tiles of some rows or columns, and each place of a tile has a sum of its
own. If this sum is never set to 0, a result is the right one plus all before it at its place. What the sums held before
the first result may come from a call before, so it is solved for from that result.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit.arrays import F64, Array
from lowbit.contract.rounding import UNIT_ROUNDOFF
from lowbit_conformance.defects.defect import Defect, arithmetical
from lowbit_conformance.defects.places import right_answer

WIDTHS = (1, 2, 4, 8, 16, 32)
LEAST = 4
"""Least number of results at one place of a tile in some failure, because two could be anything."""
Lanes = npt.NDArray[np.int64]
"""Places x steps: the flat indices of results that are added to each other; -1 for none."""


def lanes_of(shape: tuple[int, int], axis: int, width: int, tiles_first: bool) -> Lanes:
    """The order of results with two axes that are computed in tiles along one axis.

    Args:
        shape: of the result.
        axis: along which tiles lie.
        width: of a tile.
        tiles_first: whether the loop over tiles is the outer one.
    """
    along, other = shape[axis], shape[1 - axis]
    tiles = -(-along // width)
    place, tile, line = np.meshgrid(np.arange(width), np.arange(tiles), np.arange(other), indexing="ij")
    at = tile * width + place
    flat = np.where(at < along, at * shape[1] + line if axis == 0 else line * shape[1] + at, -1)
    return (flat if tiles_first else flat.swapaxes(1, 2)).reshape(width, -1)


def summed(lanes: Lanes, right: F64, begun: F64) -> F64:
    """The running sums of results, from the initial value of each sum."""
    flat = np.append(right.reshape(-1), 0.0)
    totals = np.cumsum(flat[lanes], axis=1) + begun[:, np.newaxis]
    found = np.empty(right.size + 1)
    found[lanes.reshape(-1)] = totals.reshape(-1)
    return found[:-1].reshape(right.shape)


def begun_with(lanes: Lanes, right: F64, given: F64) -> F64:
    """What each sum held before its first result."""
    first = lanes[:, 0]
    known = first >= 0
    return np.where(known, given.reshape(-1)[first] - right.reshape(-1)[first], 0.0)


def replayed(
    operation: str, failures: list[Any], order: Callable[[tuple[int, int]], Lanes], *given: Any, **choices: Any
) -> Array:
    """The returned result where it was wrong, as sums of right results; right results elsewhere."""
    right = np.asarray(right_answer(operation, given, choices), np.float64)
    for each in failures:
        if len(each.arguments) == len(given) and all(map(lambda a, b: a is b, each.arguments, given)):
            wide, own = np.atleast_2d(right), np.atleast_2d(each.given).astype(np.float64)
            lanes = order((wide.shape[0], wide.shape[1]))
            return summed(lanes, wide, begun_with(lanes, wide, own)).reshape(right.shape)
    return right


def summable(failure: Any) -> bool:
    """Whether a result has one or two axes and finite floats; a NaN would explain everything after it."""
    given, right = failure.given, failure.right
    if not isinstance(given, np.ndarray) or given.dtype.kind not in "fV" or given.shape != np.shape(right):
        return False
    return 1 <= given.ndim <= 2 and bool(np.isfinite(given.astype(np.float64)).all())


def of_running(failures: list[Any], operation: str) -> Iterator[Defect]:
    """The orders in which results may be added to those before them, for results of at most two axes."""
    if not all(summable(each) for each in failures):
        return
    shapes = [np.shape(each.given) for each in failures]
    sizes = [(1, *shape)[-2:] for shape in shapes]
    for axis, (things, others) in enumerate((("rows", "columns"), ("columns", "rows"))):
        for width in WIDTHS:
            if max(one * other // width for one, other in sizes) < LEAST:
                continue
            for tiles_first, words in ((True, f"tile by tile and then over {others}"), (False, f"over {others} first")):
                tiles = f"tiles of {width} {things}, {words}" if width > 1 else f"{things} and {others}, {words}"
                cause = (
                    f"Each result is added to those that were computed before it: sums are not set to 0, in {tiles}."
                )
                order = partial(lanes_of, axis=axis, width=width, tiles_first=tiles_first)
                run = partial(replayed, operation, failures, order)
                yield arithmetical("result-added-to-those-before", cause, "", {operation: run})


# **From call to call.**

CLEARLY = 4.0
"""Factor by which right results must exceed rounding errors for growth by them to be significant."""
ENOUGH = 3
"""Least number of calls whose results clearly grow."""


def grown(failure: Any) -> bool | None:
    """Whether the second result of a call is the first plus the right one; None if rounding hides it."""
    first, second = (np.asarray(each).astype(np.float64) for each in (failure.call.given, failure.call.again))
    right = np.asarray(failure.exact, np.float64)
    if not first.shape == second.shape == right.shape:
        return False
    unit = UNIT_ROUNDOFF.get(failure.call.given.dtype.name, 0.0)
    room = 2 * unit * (np.abs(first) + np.abs(second)) + (0.0 if failure.limits is None else 2 * failure.limits)
    there = np.isfinite(first) & np.isfinite(second) & np.isfinite(right)
    first, second, right, room = first[there], second[there], right[there], room[there]
    if (np.abs(second - first - right) > room).any():
        return False
    return True if np.linalg.norm(right) > CLEARLY * np.linalg.norm(room) else None


def of_kept_sums(failures: list[Any]) -> tuple[Defect, ...]:
    """Sums that are kept between calls: a repeated call gives its first result plus the right one."""
    found = [grown(each) for each in failures if getattr(each.call, "again", None) is not None]
    if False in found or found.count(True) < ENOUGH:
        return ()
    cause = "Results are added to those of the call before: sums are not set to 0 when a call begins."
    return (arithmetical("result-added-to-the-call-before", cause, "", {}),)
