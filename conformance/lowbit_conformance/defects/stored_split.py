"""Mistakes of kernels that divide K, and pieces of a run that are counted in another order.

A kernel may give each of several workers a part of K. A part is K divided by the number of workers, and then rounded
to whole words or groups. What a part takes from its first row, or counts from there, follows from its length alone.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit.arrays import F64, Array
from lowbit.numbers.floats import FLOATS
from lowbit.tensor_formats.stored import Stored
from lowbit.tensor_formats.table import Terms
from lowbit_conformance.defects.stored_codes import like, numbers_of, run_of
from lowbit_conformance.defects.stored_groups import SIZES, of_rows_like
from lowbit_conformance.defects.stored_parts import PLACED, Named, Where, in_codes

Rows = npt.NDArray[np.int64]
Length = Callable[[Stored], int]
"""From a matrix to the rows of a part of K."""
COUNTS = (2, 3, 4, 8)
UNITS: tuple[tuple[int, str], ...] = (
    *((0, "whole groups"), (1, "rows")),
    *((8, "whole words of 8"), (32, "whole runs of 32")),
)
BELONGING = ("scale", "zero", "scale-and-zero")
BLOCK_BITS = 8
"""Binary digits of a place in a run of at most 256 rows."""


def length_of(count: int, unit: int, up: bool, weights: Stored) -> int:
    """The rows of each of `count` parts of K, in at least one whole unit; a unit of 0 means a group."""
    unit = unit or run_of(weights)
    units = -(-weights.rows // unit)
    return max(1, -(-units // count) if up else units // count) * unit


def fixed(size: int, weights: Stored) -> int:
    return size


def lengths() -> Iterator[tuple[str, Length]]:
    """The lengths that parts of K may have."""
    for count in COUNTS:
        for unit, said in UNITS:
            for up in (True, False):
                words = f"K in {count} parts of {said}, rounded {'up' if up else 'down'}"
                yield words, partial(length_of, count, unit, up)


# **What a part uses from elsewhere.**


def of_its_first(length: int, rows: Rows) -> Rows:
    return rows // length * length


def from_the_start(length: int, rows: Rows) -> Rows:
    return rows % length


def of_the_part_before(length: int, rows: Rows) -> Rows:
    return np.where(rows >= length, rows - length, rows)


TAKEN: tuple[tuple[str, str, Callable[[int, Rows], Rows]], ...] = (
    ("first-of-a-part", "what belongs to the first row of its part", of_its_first),
    ("counted-from-a-part", "what is counted from the start of its part", from_the_start),
    ("part-before", "what belongs to the part before", of_the_part_before),
)


def taken(take: Callable[[int, Rows], Rows], length: Length, where: Where, weights: Stored) -> Terms:
    """Each row uses what belongs to another row, which depends on its part of K."""
    return of_rows_like(where, take(length(weights), np.arange(weights.rows)), weights)


def met(rows: Rows, which: str, weights: Stored) -> Terms:
    """Row k uses x at ``rows[k]``, in all terms, or for products or zeros alone."""
    terms = weights.terms

    def moved(array: F64) -> F64:
        total = np.zeros_like(array)
        np.add.at(total, rows, array)
        return total

    products = np.asarray(terms.products, np.float64)
    offsets = np.broadcast_to(terms.offsets, products.shape)
    return Terms(products if which == "zeros" else moved(products), offsets if which == "products" else moved(offsets))


def x_taken(take: Callable[[int, Rows], Rows], length: Length, which: str, weights: Stored) -> Terms:
    return met(take(length(weights), np.arange(weights.rows)), which, weights)


WHICH: tuple[tuple[str, str], ...] = (
    ("all", ""),
    ("products", " in products of codes alone"),
    ("zeros", " in the sums that meet zeros or minima alone"),
)


def of_split() -> Named:
    """Parts of K that use codes, scales, zeros or x of another place."""
    for size in (0, *SIZES):
        tile: Length = partial(fixed, size) if size else run_of
        said = f"tile of {size} rows" if size else "group or block"
        for which, end in WHICH[1:]:
            cause = f"Each {said} meets x of the first,{end}."
            yield "x-of-the-first-tile", cause, partial(x_taken, from_the_start, tile, which)
        for which, end in WHICH:
            cause = f"Each {said} meets x of the one before,{end or ' in all terms'}."
            yield "x-of-the-tile-before", cause, partial(x_taken, of_the_part_before, tile, which)
    for said, length in lengths():
        for slug, words, take in TAKEN:
            for what, ways in PLACED.items():
                for where in ways:
                    cause = f"With {said}, each row takes {words}: the {what.replace('-', ' ')}."
                    yield f"stored-{what}-{slug}", cause, partial(taken, take, length, where)
            for which, end in WHICH:
                yield (
                    f"x-{slug}",
                    f"With {said}, each row meets{end} {words}: x.",
                    partial(x_taken, take, length, which),
                )


# **Pieces of a run in another order**: the binary digits of a row's place are reordered.


def exchanged(first: int, second: int, wide: int, at: Rows) -> Rows:
    """Two fields of `wide` binary digits are exchanged."""
    mask = (1 << wide) - 1
    low, high = at >> first & mask, at >> second & mask
    return at & ~(mask << first | mask << second) | low << second | high << first


def turned(first: int, end: int, by: int, at: Rows) -> Rows:
    """The binary digits from `first` to `end` are rotated, which transposes a matrix of pieces."""
    wide = end - first
    mask = (1 << wide) - 1
    digits = at >> first & mask
    return at & ~(mask << first) | ((digits << by | digits >> wide - by) & mask) << first


def in_pieces(order: Callable[[Rows], Rows], run: int, weights: Stored) -> Rows:
    """The rows with the pieces of each whole run in another order."""
    rows = np.arange(weights.rows)
    return np.where(rows < weights.rows // run * run, rows // run * run + order(rows % run), rows)


def codes_in_pieces(order: Callable[[Rows], Rows], run: int, weights: Stored) -> Terms:
    return of_rows_like(in_codes, in_pieces(order, run, weights), weights)


def x_in_pieces(order: Callable[[Rows], Rows], run: int, which: str, weights: Stored) -> Terms:
    return met(in_pieces(order, run, weights), which, weights)


def orders() -> Iterator[tuple[str, int, Callable[[Rows], Rows]]]:
    for wide in (1, 2, 3):
        for first in range(BLOCK_BITS):
            for second in range(first + wide + 1, BLOCK_BITS - wide + 1):
                run = 1 << second + wide
                words = f"the {1 << wide} pieces of {1 << second} and the {1 << wide} of {1 << first} counted crosswise"
                yield words, run, partial(exchanged, first, second, wide)
    for end in range(2, BLOCK_BITS + 1):
        for first in range(end - 1):
            for by in range(1, end - first):
                words = f"pieces of {1 << first} counted as the transpose of {1 << by} x {1 << end - first - by}"
                yield words, 1 << end, partial(turned, first, end, by)


def of_pieces() -> Named:
    """Codes or x whose pieces in each run are in another order."""
    for words, run, order in orders():
        cause = f"In each run of {run}, codes are taken with {words}."
        yield "stored-codes-in-pieces", cause, partial(codes_in_pieces, order, run)
        for which, end in WHICH[:2]:
            cause = f"In each run of {run}, x is taken with {words}{',' + end if end else ''}."
            yield "x-in-pieces", cause, partial(x_in_pieces, order, run, which)


def chosen(where: Where, to: int, by: int, wide: int, weights: Stored) -> Terms:
    """Each row uses what belongs to another run of ``2 ** to`` rows, chosen by the binary digits from `by` on."""
    rows, mask = np.arange(weights.rows), (1 << wide) - 1
    taken = (rows & ~(mask << to)) | (rows >> by & mask) << to
    return of_rows_like(where, np.minimum(taken, weights.rows - 1), weights)


def of_choices() -> Named:
    """Scales or zeros of a run that other digits of the place of a row choose."""
    for wide in (1, 2, 3):
        for to in range(BLOCK_BITS - wide + 1):
            for by in range(BLOCK_BITS - wide + 1):
                for what in BELONGING if by != to else ():
                    for where in PLACED[what]:
                        right, wrong, runs = 1 << to, 1 << by, 1 << wide
                        said = f"In each {right * runs} rows, which of {runs} runs of {right} belongs to row i follows"
                        cause = f"{said} from i / {wrong} where i / {right} is right: the {what.replace('-', ' ')}."
                        yield f"stored-{what}-of-another-run", cause, partial(chosen, where, to, by, wide)


# **Sums of parts in a narrow type.**


def narrow_parts(kind: Any, total: bool, length: Length, x: Any, weights: Stored, result: Any = "float32") -> Array:
    """The product whose sums of parts are rounded to a narrow type, and their `total` after each as well."""
    numbers, values, size = numbers_of(x), weights.values, length(weights)
    found = np.zeros((len(numbers), weights.columns), np.float32)
    with np.errstate(all="ignore"):
        for begin in range(0, weights.rows, size):
            rows = slice(begin, begin + size)
            part = (numbers[:, rows] @ values[rows]).astype(np.float32).astype(kind).astype(np.float32)
            found = found + part
            found = found.astype(kind).astype(np.float32) if total else found
    return like(x, found.astype(np.float64))


NARROW = tuple(np.dtype(FLOATS[name].dtype) for name in ("float16", "bfloat16"))


def of_narrow_parts() -> Iterator[tuple[str, str, Callable[..., Array]]]:
    """Sums of parts of K that are rounded before they are added."""
    runs: tuple[tuple[str, Length], ...] = (
        ("each group or block", run_of),
        *((f"each {size} rows", partial(fixed, size)) for size in SIZES),
        *((f"each part, {said}", length) for said, length in lengths()),
    )
    for kind in NARROW:
        for said, length in runs:
            for total in (False, True):
                end = ", and so is their total" if total else ""
                cause = f"The sum of {said}, is rounded to {kind.name} before it is added{end}."
                yield f"sums-of-parts-in-{kind.name}", cause, partial(narrow_parts, kind, total, length)
