"""Mistakes in lanes: integer sums of every fourth, eighth or sixteenth product, as vector registers hold them."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from lowbit.arrays import F64, Array
from lowbit.tensor_formats.stored import Stored
from lowbit_conformance.defects.stored_codes import like, numbers_of
from lowbit_conformance.defects.stored_parts import parts_of
from lowbit_conformance.defects.stored_sums import (
    constant,
    once,
    quotient,
    runs_of,
    saturated,
    scale_of_x,
    wrapped,
)

Wrong = Callable[..., Array]
LANES = (1, 2, 4, 8, 16, 32)
NEIGHBOURS = (1, 2, 4)
"""Numbers of neighbouring products that are added to one lane."""


def narrow_lanes(
    change: Callable[[F64], F64],
    run: int,
    lanes: int,
    beside: int,
    scaled: bool,
    x: Any,
    weights: Stored,
    result: Any = "float32",
) -> Array:
    """The product with changed integer sums of products in the lanes of each run.

    Args:
        change: of the sum of a lane.
        run: rows that have sums of their own; 0 for a group or a block.
        lanes: how many there are.
        beside: neighbours that are added to one lane.
        scaled: whether products are multiplied by the integer scales of a block's runs before they are added.
        x: the activations.
        weights: the matrix.
        result: the type of the result.

    Raises:
        ValueError: x is not stored, products are not integers, or scales change inside a run.
    """
    if not isinstance(x, Stored) or (scaled and not weights.table.block):
        raise ValueError("sums are no integers")
    parts, own = parts_of(weights), numbers_of(x).T
    outer = once(weights) if scaled else np.broadcast_to(parts.scale, parts.units.shape)
    of_x = once(x) if x.table.block else np.ascontiguousarray(scale_of_x(x).T)
    labels = runs_of(run, weights)
    scale, scale_x = constant(outer, labels), constant(of_x, labels)
    units, numbers = quotient(parts.units * parts.scale, outer), quotient(own, of_x).T
    whole = np.abs(units - np.round(units)).max(initial=0.0) < 1e-6
    if not whole:
        raise ValueError("products are no integers")
    places = np.arange(weights.rows) // beside % lanes
    total = numbers_of(x) @ np.broadcast_to(weights.terms.offsets, units.shape)
    with np.errstate(all="ignore"):
        for number, label in enumerate(np.unique(labels)):
            factor = scale[:, number] * scale_x[:, [number]]
            for lane in range(lanes):
                at = (labels == label) & (places == lane)
                total = total + change(np.round(numbers[:, at] @ units[at])) * factor
    return like(x, total)


STEPS: tuple[tuple[str, str, Callable[[F64], F64]], ...] = (
    ("truncated", "rounded towards zero", np.trunc),
    ("rounded-down", "rounded down", np.floor),
    ("rounded", "rounded to the nearest integer", np.rint),
)


def integer_steps(
    change: Callable[[F64], F64], lanes: int, rest: bool, run: int, x: Any, weights: Stored, result: Any = "float32"
) -> Array:
    """Each lane of a run is an integer, because it is rounded after each term.

    Args:
        change: the rounding.
        lanes: how many there are; 0 where each product is rounded alone.
        rest: whether rows past the last whole register are added to a float.
        run: rows that have sums of their own; 0 for a group or a block.
        x: the activations.
        weights: the matrix.
        result: the type of the result.
    """
    parts, numbers, of_x = parts_of(weights), numbers_of(x), scale_of_x(x)
    units, codes, labels = parts.units - parts.zero, quotient(numbers, of_x), runs_of(run, weights)
    scale, wide = np.broadcast_to(parts.scale, units.shape), max(1, lanes)
    sums = np.zeros((wide, len(numbers), weights.columns))
    total = np.zeros(sums.shape[1:])
    whole = weights.rows // wide * wide if rest else weights.rows
    with np.errstate(all="ignore"):
        for k, row in enumerate(units):
            term = codes[:, [k]] * row
            lane = k % wide
            if k >= whole:
                total = total + term * scale[k] * of_x[:, [k]]
            else:
                sums[lane] = change(sums[lane] + term) if lanes else sums[lane] + change(term)
            if k + 1 == len(units) or labels[k + 1] != labels[k]:
                total = total + sums.sum(axis=0) * scale[k] * of_x[:, [k]]
                sums[:] = 0
    return like(x, total)


def of_lanes() -> Iterator[tuple[str, str, Wrong]]:
    """All kinds of this module."""
    for run in (0, 16, 32):
        said = f"run of {run} rows" if run else "group or block"
        for name, words, change in (
            ("wrap", "wrap around", partial(wrapped, 16)),
            ("saturate", "saturate", partial(saturated, 16)),
        ):
            for scaled, terms in ((True, "scaled products"), (False, "products")):
                for lanes in LANES if scaled else LANES[1:]:
                    for beside in NEIGHBOURS if lanes > 1 else (1,):
                        which = f"in {lanes} lanes of {beside} neighbours" if lanes > 1 else "in one lane"
                        cause = f"Sums of {terms} of a {said} {words} in 16 bits, {which}."
                        change_lanes = partial(narrow_lanes, change, run, lanes, beside, scaled)
                        yield f"stored-sums-of-lanes-{name}-in-16-bits", cause, change_lanes
        for name, words, step in STEPS:
            cause = f"Each product of a {said} is {words} before it is added."
            yield f"stored-products-{name}", cause, partial(integer_steps, step, 0, False, run)
            for lanes in LANES:
                for rest in (False, True) if lanes > 1 else (False,):
                    cause = f"Sums of a {said} are integers in {lanes} lanes: {words} after each term."
                    yield f"stored-sums-of-lanes-{name}", cause, partial(integer_steps, step, lanes, rest, run)
