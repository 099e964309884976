"""Results that are wrong in one place only, or of one kind: not computed, not written, or NaN.

Unwritten memory may hold anything, so no defect reproduces it. What counts is its place: all wrong elements lie in rows
or columns that a loop may leave out, and most elements there are wrong.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from lowbit.arrays import Array
from lowbit_conformance.defects.defect import Defect, arithmetical
from lowbit_conformance.defects.places import AXES, DROPPED, Kept, right_answer

MOST = 0.75
"""Fraction of the elements of a line that must be wrong for the line to count as unwritten."""
HALF = 0.5
"""Largest fraction of the lines that is reported as unwritten."""
FAR = 2.0**16
"""Largest ratio of the largest to the smallest magnitude of sums; other bits are further apart."""

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


def moved_in(seen: Any) -> Array:
    """Which elements had different bits when the call was repeated."""
    given, again = getattr(seen.call, "given", None), getattr(seen.call, "again", None)
    if not isinstance(given, np.ndarray) or not isinstance(again, np.ndarray) or given.shape != again.shape:
        return np.zeros(np.shape(seen.right), bool)
    bits = f"u{given.dtype.itemsize}"
    return np.asarray(np.ascontiguousarray(given).view(bits) != np.ascontiguousarray(again).view(bits))


def left_out(wrong: list[Array], places: list[Array], axis: int, moving: bool = False) -> bool:
    """Whether all wrong elements are in some places, and most elements of each line there are wrong.

    Elements that change between calls were not computed, and may be near the right ones by chance; then most elements
    of all lines together must be wrong. At least one result must be right in at least half of its lines.
    """
    told = False
    for each, place in zip(wrong, places, strict=True):
        lines = np.moveaxis(each, axis, 0).reshape(each.shape[axis], -1).mean(axis=1)
        there = np.moveaxis(place, axis, 0).reshape(each.shape[axis], -1).any(axis=1)
        least = lines[there].mean() if moving and there.any() else lines[there].min(initial=1.0)
        if lines[~there].any() or least < (HALF if moving else MOST):
            return False
        told |= bool(0 < there.mean() <= HALF)
    return told


def never_computed(seen: list[Any], places: list[Array]) -> bool:
    """Whether some places hold no results of other sums, but one number, no numbers, or old memory."""
    for each, place in zip(seen, places, strict=True):
        given = each.given.astype(np.float64)[place]
        sizes = np.abs(given[np.isfinite(given) & (given != 0)])
        one = np.isfinite(given).any() and np.ptp(given[np.isfinite(given)]) == 0
        if given.size and not (one or not sizes.size or moved_in(each)[place].any() or sizes.max() > FAR * sizes.min()):
            return False
    return True


LARGE = (64, 128, 256, 512)
"""Numbers of rows or columns of a tile."""


def whole_tiles(size: int, at: Array, count: int) -> Array:
    return at < count // size * size


def first_tile(size: int, at: Array, count: int) -> Array:
    return at < size


TILES: tuple[tuple[str, str, Kept], ...] = (
    *(
        (f"past-whole-{w}-dropped", f"without the remainder past the last whole {w}", partial(whole_tiles, w))
        for w in LARGE
    ),
    *((f"past-{w}-dropped", f"without everything past the first {w}", partial(first_tile, w)) for w in LARGE),
)

COUNTS = (1, 2, 4, 8, 16, 32)
"""Numbers of elements at the end of a result that a loop over whole registers may leave out."""


def at_the_end(wrong: list[Array], count: int) -> list[Array] | None:
    """The last elements of results in memory order, if all wrong elements are among them and are most of them."""
    places = [np.arange(each.size).reshape(each.shape) >= each.size - count for each in wrong]
    told = any(each.size > 2 * count and each.ndim > 1 for each in wrong)
    for each, place in zip(wrong, places, strict=True):
        if each[~place].any() or each[place].mean() < MOST:
            return None
    return places if told else None


def replayed(operation: str, seen: list[Any], places: list[Array], *given: Any, **choices: Any) -> Any:
    """The returned result in some places, and right results elsewhere."""
    right = right_answer(operation, given, choices)
    for each, place in zip(seen, places, strict=True):
        if len(each.arguments) == len(given) and all(map(lambda a, b: a is b, each.arguments, given)):
            return np.where(place, each.given, right)
    return right


def clipped(operation: str, most: float, *given: Any, **choices: Any) -> Any:
    return np.clip(right_answer(operation, given, choices), -most, most)


def of_clamped(failures: list[Any], operation: str) -> Iterator[Defect]:
    """The common magnitude of all wrong elements, if the right ones are larger."""
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


def spared(kept: Kept, axis: int, passes: list[Any]) -> bool:
    """Whether no right result has numbers in the places that a loop leaves out."""
    shapes = [np.shape(each.right) for each in passes]
    found = [outside(kept, axis, shape) for shape in shapes if len(shape) > axis]
    rights = [np.asarray(each.right) for each in passes if len(np.shape(each.right)) > axis]
    return not any(right[place].any() for right, place in zip(rights, found, strict=True))


def of_unwritten(failures: list[Any], operation: str, passes: list[Any]) -> Iterator[Defect]:
    """The places or kinds that all wrong elements have in common, those without right results first."""
    if any(not isinstance(each.given, np.ndarray) or np.shape(each.given) != np.shape(each.right) for each in failures):
        return
    moved = [moved_in(each) for each in failures]
    wrong = [wrong_in(each) | other for each, other in zip(failures, moved, strict=True)]
    moving = all(other.any() for other in moved)

    def defect(name: str, cause: str, places: list[Array]) -> Defect:
        return arithmetical(name, cause, "", {operation: partial(replayed, operation, failures, places)})

    ways = [(axis, *way) for axis in AXES for way in (*DROPPED, *TILES)]
    for consistent in (True, False):
        for axis, name, words, kept in ways:
            if spared(kept, axis, passes) is not consistent:
                continue
            try:
                places = [outside(kept, axis, each.shape) for each in wrong]
            except ValueError:
                continue
            if left_out(wrong, places, axis, moving):
                cause, end = f"The result is computed {words}, along axis {axis}", "not-written"
                if not never_computed(failures, places):
                    cause, end = f"The result is right only {words}, along axis {axis}", "wrong"
                said = f"{cause}; what stands there is no such number."
                yield defect(f"result-{name.replace('dropped', end)}-along-axis-{axis}", said, places)
    for count in COUNTS:
        if (ends := at_the_end(wrong, count)) is not None:
            cause = f"The result is computed without its last {count} elements, in the order of memory."
            yield defect(f"result-last-{count}-elements-not-written", cause, ends)
    for name, words, test in KINDS:
        if all(each.given.dtype.kind in "fV" for each in failures):
            found = [test(each.given.astype(np.float64)) & far for each, far in zip(failures, wrong, strict=True)]
            if all((far == place).all() for far, place in zip(wrong, found, strict=True)):
                yield defect(f"result-{name}", f"Results are {words}: not computed, or out of range on the way.", found)
