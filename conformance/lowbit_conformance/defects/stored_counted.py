"""Mistakes of kernels that divide K: rows that no part takes, that two parts take, or whose part is not added.

A part of K is K divided by the number of workers, in whole words, groups or runs. If that number is rounded down, rows
remain; if each part is read in whole tiles, its last tile may reach into the next part.
"""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from lowbit.arrays import F64
from lowbit.tensor_formats.stored import Stored
from lowbit.tensor_formats.table import Terms
from lowbit_conformance.defects.stored_codes import run_of
from lowbit_conformance.defects.stored_parts import Named

Counts = Callable[[Stored], F64]
"""From a matrix to how often each row is summed."""
COUNTS = (2, 3, 4, 5, 6, 8, 16)
UNITS: tuple[tuple[int, str], ...] = (
    *((0, "whole groups or blocks"), (1, "rows"), (2, "pairs of rows")),
    *((size, f"whole runs of {size} rows") for size in (4, 8, 16, 32, 64, 128, 256)),
)
TILES = (16, 32, 64, 128, 256)


def length_of(count: int, unit: int, up: bool, weights: Stored) -> int:
    """The rows of each of `count` parts of K, in whole units, possibly 0; a unit of 0 means a group."""
    unit = unit or run_of(weights)
    units = -(-weights.rows // unit)
    return (-(-units // count) if up else weights.rows // unit // count) * unit


def remaining(count: int, unit: int, weights: Stored) -> F64:
    """The rows past the last part are left out."""
    return np.where(np.arange(weights.rows) < count * length_of(count, unit, False, weights), 1.0, 0.0)


def overlapping(count: int, unit: int, tile: int, weights: Stored) -> F64:
    """Each part is read in whole tiles, and its last tile reaches into the next part."""
    length, rows = length_of(count, unit, True, weights), np.arange(weights.rows)
    wide = -(-length // tile) * tile
    times = [(rows >= part * length) & (rows < part * length + wide) for part in range(-(-weights.rows // length))]
    return np.asarray(np.sum(times, axis=0), np.float64)


def cut_short(count: int, unit: int, tile: int, weights: Stored) -> F64:
    """Only the whole tiles of each part are summed."""
    length, rows = length_of(count, unit, True, weights), np.arange(weights.rows)
    return np.where(rows % length < length // tile * tile, 1.0, 0.0)


def one_part(count: int, unit: int, up: bool, last: bool, alone: bool, weights: Stored) -> F64:
    """Only the first or the last part is summed, or all but that one.

    Raises:
        ValueError: a part has no rows.
    """
    length, rows = length_of(count, unit, up, weights), np.arange(weights.rows)
    if not length:
        raise ValueError("a part has no rows")
    parts = rows // length
    return np.where((parts == (parts[-1] if last else 0)) == alone, 1.0, 0.0)


def summed(counts: Counts, which: str, weights: Stored) -> Terms:
    """The numbers with rows summed another number of times, in all terms or in one of the two."""
    times, terms = counts(weights)[:, np.newaxis], weights.terms
    products = terms.products if which == "zeros" else terms.products * times
    return Terms(products, terms.offsets if which == "codes" else terms.offsets * times)


def ways() -> Iterator[tuple[str, str, Counts]]:
    """Names, words and counts."""
    for count in COUNTS:
        for unit, said in UNITS:
            divided = f"K is divided in {count} parts of {said}"
            words = f"{divided}, rounded down, and the rows past the last part are left out"
            yield "stored-rows-past-the-last-part-left-out", words, partial(remaining, count, unit)
            for tile in TILES:
                words = f"{divided}, and each is read in whole tiles of {tile}: rows that two parts read count twice"
                yield "stored-rows-of-two-parts-twice", words, partial(overlapping, count, unit, tile)
                words = f"{divided}, and each is read in whole tiles of {tile}: what remains of a part is left out"
                yield "stored-rows-at-the-end-of-parts-left-out", words, partial(cut_short, count, unit, tile)
            for up in (True, False):
                for last in (True, False):
                    part = "last" if last else "first"
                    rounded = f"{divided}, rounded {'up' if up else 'down'}"
                    words = f"{rounded}, and the {part} part alone is the result"
                    yield f"stored-{part}-part-alone", words, partial(one_part, count, unit, up, last, True)
                    words = f"{rounded}, and the {part} part is not added"
                    yield f"stored-{part}-part-left-out", words, partial(one_part, count, unit, up, last, False)


def of_counted() -> Named:
    """All kinds of this module."""
    for name, words, counts in ways():
        yield name, f"{words}.", partial(summed, counts, "all")
    for name, words, counts in ways():
        if name == "stored-rows-past-the-last-part-left-out":
            for which in ("codes", "zeros"):
                yield f"{name}-for-{which}", f"{words}, in sums of {which}.", partial(summed, counts, which)
