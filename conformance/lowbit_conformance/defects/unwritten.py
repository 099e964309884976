"""Results that are wrong in one place only, or of one kind: not computed, not written, or NaN.

What stands where nothing was written may be anything, so no defect gives it. What counts is where it stands: all wrong
elements lie in rows or columns that a loop may leave out, and most elements there are wrong.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from lowbit.arrays import Array
from lowbit_conformance.defects.defect import Defect, arithmetical
from lowbit_conformance.defects.places import AXES, DROPPED, Kept, right_answer

MOST = 0.75
"""Of the elements of each line, which are wrong where nothing was written."""
HALF = 0.5
"""Of the lines at most, which are said not to be written."""

KINDS: tuple[tuple[str, str, Callable[[Array], Array]], ...] = (
    ("nan", "NaN", np.isnan),
    ("infinite", "infinite", np.isinf),
)


def wrong_in(seen: Any) -> Array:
    """Which elements are visibly wrong."""
    if seen.given.dtype.kind not in "fV":
        return np.asarray(seen.given != seen.right)
    with np.errstate(all="ignore"):
        given, right = seen.given.astype(np.float64), seen.right.astype(np.float64)
        far = np.abs(given - right) > (0.0 if seen.limits is None else seen.limits)
        both = np.isnan(given) & np.isnan(right)
    return np.asarray((far | (np.isfinite(given) != np.isfinite(right)) | (np.isnan(given) != np.isnan(right))) & ~both)


def outside(kept: Kept, axis: int, shape: tuple[int, ...]) -> Array:
    """The places along an axis that a loop leaves out.

    Raises:
        ValueError: there is no such axis.
    """
    if len(shape) <= axis:
        raise ValueError("no such axis")
    there = kept(np.arange(shape[axis]), shape[axis])
    return np.broadcast_to(~there.reshape([-1 if each == axis else 1 for each in range(len(shape))]), shape)


def left_out(wrong: list[Array], places: list[Array], axis: int) -> bool:
    """Whether all that is wrong lies in some places, and most of each line of them is wrong.

    At least one result must be right in at least half of its lines.
    """
    told = False
    for each, place in zip(wrong, places, strict=True):
        lines = np.moveaxis(each, axis, 0).reshape(each.shape[axis], -1).mean(axis=1)
        there = np.moveaxis(place, axis, 0).reshape(each.shape[axis], -1).any(axis=1)
        if lines[~there].any() or (lines[there] < MOST).any():
            return False
        told |= bool(0 < there.mean() <= HALF)
    return told


LARGE = (64, 128, 256, 512)
"""Rows or columns of a tile."""


def whole_tiles(size: int, at: Array, count: int) -> Array:
    return at < count // size * size


def first_tile(size: int, at: Array, count: int) -> Array:
    return at < size


TILES: tuple[tuple[str, str, Kept], ...] = (
    *((f"past-whole-{w}-dropped", f"without what is past the last whole {w}", partial(whole_tiles, w)) for w in LARGE),
    *((f"past-{w}-dropped", f"without what is past the first {w}", partial(first_tile, w)) for w in LARGE),
)

COUNTS = (1, 2, 4, 8, 16, 32)
"""Elements at the end of a result that a loop over whole registers leaves out."""


def at_the_end(wrong: list[Array], count: int) -> list[Array] | None:
    """The last elements of results in the order of memory, if what is wrong is among them and is most of them."""
    places = [np.arange(each.size).reshape(each.shape) >= each.size - count for each in wrong]
    told = any(each.size > 2 * count and each.ndim > 1 for each in wrong)
    for each, place in zip(wrong, places, strict=True):
        if each[~place].any() or each[place].mean() < MOST:
            return None
    return places if told else None


def replayed(operation: str, seen: list[Any], places: list[Array], *given: Any, **choices: Any) -> Any:
    """What came back in some places, and right results elsewhere."""
    right = right_answer(operation, given, choices)
    for each, place in zip(seen, places, strict=True):
        if len(each.arguments) == len(given) and all(map(lambda a, b: a is b, each.arguments, given)):
            return np.where(place, each.given, right)
    return right


def clipped(operation: str, most: float, *given: Any, **choices: Any) -> Any:
    return np.clip(right_answer(operation, given, choices), -most, most)


def of_clamped(failures: list[Any], operation: str) -> Iterator[Defect]:
    """The one magnitude of all wrong elements, where right ones are larger."""
    if any(not isinstance(each.given, np.ndarray) or np.shape(each.given) != np.shape(each.right) for each in failures):
        return
    wrong = [wrong_in(each) for each in failures]
    sizes = np.concatenate(
        [np.abs(each.given.astype(np.float64))[at] for each, at in zip(failures, wrong, strict=True)]
    )
    if not sizes.size or not np.isfinite(sizes).all() or sizes.min() != sizes.max() or sizes[0] == 0:
        return
    cause = f"Results are clamped to -{sizes[0]:g} … {sizes[0]:g}: larger ones, and infinite ones, become that."
    yield arithmetical("result-clamped", cause, "", {operation: partial(clipped, operation, float(sizes[0]))})


def of_unwritten(failures: list[Any], operation: str) -> Iterator[Defect]:
    """The places or kinds that all wrong elements have in common."""
    if any(not isinstance(each.given, np.ndarray) or np.shape(each.given) != np.shape(each.right) for each in failures):
        return
    wrong = [wrong_in(each) for each in failures]

    def defect(name: str, cause: str, places: list[Array]) -> Defect:
        return arithmetical(name, cause, "", {operation: partial(replayed, operation, failures, places)})

    for axis in AXES:
        for name, words, kept in (*DROPPED, *TILES):
            try:
                places = [outside(kept, axis, each.shape) for each in wrong]
            except ValueError:
                continue
            if left_out(wrong, places, axis):
                cause = f"The result is computed {words}, along axis {axis}; what stands there is no such number."
                yield defect(f"result-{name.replace('dropped', 'not-written')}-along-axis-{axis}", cause, places)
    for count in COUNTS:
        if (ends := at_the_end(wrong, count)) is not None:
            cause = f"The result is computed without its last {count} elements, in the order of memory."
            yield defect(f"result-last-{count}-elements-not-written", cause, ends)
    for name, words, test in KINDS:
        if all(each.given.dtype.kind in "fV" for each in failures):
            found = [test(each.given.astype(np.float64)) & far for each, far in zip(failures, wrong, strict=True)]
            if all((far == place).all() for far, place in zip(wrong, found, strict=True)):
                yield defect(f"result-{name}", f"Results are {words}: not computed, or out of range on the way.", found)
