"""Codes that are read by a wrong table: which codes, and as what numbers, follows from the wrong results themselves.

A result is linear in the numbers that codes stand for. Where enough results are wrong, least squares finds these
numbers. Whether they explain every result is then tested as for any other defect.
"""

from functools import partial
from typing import Any

import numpy as np

from lowbit.arrays import F64, Array
from lowbit.tensor_formats.stored import Stored
from lowbit.tensor_formats.table import Terms
from lowbit_conformance.defects.defect import Defect, arithmetical
from lowbit_conformance.defects.stored import PRODUCTS
from lowbit_conformance.defects.stored_codes import numbers_of
from lowbit_conformance.defects.stored_family import multiplied
from lowbit_conformance.defects.stored_parts import Parts, parts_of

MOST_CODES = 256
ENOUGH = 8
"""Least number of equations for each code to find a table."""
SAME = 2e-3
"""Relative to the least difference between two codes: nearer numbers count as the right one."""
CLOSE = 0.04
"""Relative to the same: nearer numbers count as one in the table, or as a multiple of its least number."""
SAID = 4
NEGATIVE_ZERO = 2.0**-500
"""Stands for negative zero, with the other sign; it is not the value of a code."""


def reading(values: F64, read: F64, weights: Stored) -> Terms:
    """The numbers with codes of these `values` read as others.

    Raises:
        ValueError: a code has another value.
    """
    parts = parts_of(weights)
    units = signed(parts.units)
    at = np.minimum(np.searchsorted(values, units), len(values) - 1)
    if (values[at] != units).any():
        raise ValueError("a code has another value")
    return Terms(read[at] * parts.scale, parts.offsets)


def signed(units: F64) -> F64:
    """Units in which negative zero has a separate value."""
    return np.where((units == 0) & np.signbit(units), -NEGATIVE_ZERO, units)


def equations(x: F64, parts: Parts, values: F64) -> F64:
    """For each element of the result, the contribution of each code: T·N × codes."""
    units = signed(parts.units)
    owed = [x @ np.where(units == value, parts.scale, 0.0) for value in values]
    return np.stack(owed, axis=-1).reshape(-1, len(values))


def snapped(values: F64, found: F64) -> F64:
    """The exact numbers for those from least squares, each near one in the table."""
    gaps = np.diff(values)
    unit = float(gaps[gaps > NEGATIVE_ZERO].min(initial=np.inf))
    grid = unit * np.round(found / unit)
    inside = values[np.abs(found[:, np.newaxis] - values).argmin(axis=1)]
    near = np.where(np.abs(found - grid) < CLOSE * unit, grid, found)
    near = np.where(np.abs(found - inside) < CLOSE * np.maximum(unit, np.abs(inside)), inside, near)
    return np.where(np.abs(found - values) < np.maximum(SAME * unit, SAME * np.abs(values)), values, near)


def spoken(number: float) -> str:
    return "-0" if number == -NEGATIVE_ZERO else f"{number:.4g}"


def said(values: F64, read: F64) -> str:
    """Which codes are read as what."""
    other = np.flatnonzero(values != read)
    pairs = [f"{spoken(values[i])} as {spoken(read[i])}" for i in other[np.argsort(-np.abs(values[other]))][:SAID]]
    more = f", and {len(other) - SAID} others" if len(other) > SAID else ""
    return f"Codes are read as other numbers: {', '.join(pairs)}{more}."


def of_codes_read(failures: list[Any], operation: str) -> tuple[Defect, ...]:
    """The defect that reads codes by the table that explains these failures best; None if they are too little
    evidence."""
    if operation not in PRODUCTS:
        return ()
    try:
        views = [parts_of(each.arguments[1]) for each in failures]
        if any(np.shape(each.given) != np.shape(each.right) for each in failures):
            return ()
    except (ValueError, IndexError):
        return ()
    values = np.unique(np.concatenate([np.unique(signed(each.units)) for each in views]))
    if len(values) > MOST_CODES:
        return ()
    left: list[F64] = []
    right: list[Array] = []
    for failure, parts in sorted(zip(failures, views, strict=True), key=lambda each: int(each[1].units.size)):
        if left and np.sum([np.count_nonzero(each, axis=0) for each in left], axis=0).min() >= ENOUGH:
            break
        owed = equations(numbers_of(failure.arguments[0]), parts, values)
        sizes = np.abs(owed).sum(axis=1) + np.finfo(float).tiny
        left.append(owed / sizes[:, np.newaxis])
        right.append((np.ravel(failure.given).astype(np.float64) - np.ravel(failure.exact)) / sizes)
    if sum(map(len, left)) < 2 * len(values):
        return ()
    owed, off = np.concatenate(left), np.concatenate(right)
    if not (np.isfinite(owed).all() and np.isfinite(off).all()):
        return ()
    change, *_ = np.linalg.lstsq(owed, off, rcond=1e-9)
    read = snapped(values, values + change)
    if (read == values).all() or not np.isfinite(read).all():
        return ()
    wrong = partial(multiplied, partial(reading, values, read))
    return (arithmetical("stored-codes-read-as-other-numbers", said(values, read), "", {operation: wrong}),)
