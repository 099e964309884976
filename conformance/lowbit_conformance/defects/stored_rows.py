"""Mistakes in the rows of a stored matrix: which x they meet, and which of them are summed."""

from functools import partial

import numpy as np

from lowbit.arrays import Array
from lowbit.tensor_formats.stored import Stored
from lowbit.tensor_formats.table import Terms
from lowbit_conformance.defects.places import DROPPED, ORDERS, Kept, Order
from lowbit_conformance.defects.stored_codes import run_of
from lowbit_conformance.defects.stored_groups import SIZES, Rows, of_groups, of_rows_like
from lowbit_conformance.defects.stored_nested import of_nested
from lowbit_conformance.defects.stored_parts import (
    INSIDE,
    QUOTIENTS,
    WITHIN,
    Named,
    in_codes,
    parts_of,
)


def in_runs(order: Order, run: int, weights: Stored) -> Rows:
    """The rows, in another order within each run.

    Raises:
        ValueError: the last run is not whole.
    """
    if weights.rows % run:
        raise ValueError("the last run is not whole")
    rows = np.arange(weights.rows)
    return np.asarray(rows // run * run + (order(np.arange(run), run) % run)[rows % run])


# **x at another place**: the element of x for row k.


def met(rows: Rows, weights: Stored) -> Terms:
    """The matrix that gives the same sums as a product of row k and x at ``rows[k]``."""
    values = weights.values
    total = np.zeros_like(values)
    np.add.at(total, rows, values)
    return Terms(total)


def halves_gathered(order: Order, half: int, run: int, weights: Stored) -> Terms:
    """Within each run of rows, only those of one half use x at other places."""
    return gathered(lambda at, n: np.where(at // (n // 2) == half, order(at, n) % n, at), run, weights)


def codes_gathered(order: Order, run: int, weights: Stored) -> Terms:
    """Within each run of rows, codes are taken from other places."""
    return of_rows_like(in_codes, in_runs(order, run, weights), weights)


def codes_of_tiles(size: int, weights: Stored) -> Terms:
    """Each tile of rows, or each group if the size is 0, has the codes of the first."""
    return of_rows_like(in_codes, np.arange(weights.rows) % (size or run_of(weights)), weights)


def x_of_tiles(size: int, weights: Stored) -> Terms:
    """Each tile of rows, or each group if the size is 0, uses x of the first."""
    return met(np.arange(weights.rows) % (size or run_of(weights)), weights)


def half_gathered(order: Order, odd: bool, run: int, weights: Stored) -> Terms:
    """Within each run of rows, only the odd or only the even ones use x at other places."""
    return gathered(lambda at, n: np.where(at % 2 == odd, order(at, n) % n, at), run, weights)


HALF_GATHERS: tuple[tuple[str, str, Order], ...] = (
    ("half-the-run-further", "from place i / 2 + n / 2", lambda at, n: at // 2 + n // 2),
    ("half-of-its-place", "from place i / 2", lambda at, n: at // 2),
    ("one-before", "from the place before", lambda at, n: at - 1),
    ("one-after", "from the next place", lambda at, n: at + 1),
    ("half-a-run-away", "from half of the run further", lambda at, n: at + n // 2),
    ("reversed", "from the other end", lambda at, n: n - 1 - at),
)


PERMUTED: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("x is taken in the order of the groups, and the rows of the matrix are not", (1,)),
    ("x is taken in the inverse of the groups' order, and the rows of the matrix are not", (-1,)),
    ("Rows are taken in the order of the groups, and x in the inverse of it", (-1, -1)),
    ("Rows are taken in the inverse of the groups' order, and x in the order", (1, 1)),
)
"""The sentence, and the permutations by which row k finds its x: 1 for the order of the groups, -1 for its inverse."""


def by_groups(steps: tuple[int, ...], weights: Stored) -> Terms:
    """x in the order of the groups or the inverse order, or in one of these for rows in the other.

    Raises:
        ValueError: there is no index of groups.
    """
    if "g_idx" not in weights.by_name:
        raise ValueError("there is no g_idx")
    order = np.argsort(weights.by_name["g_idx"], kind="stable")
    taken = np.arange(len(order))
    for step in steps:
        taken = taken[order if step > 0 else np.argsort(order)]
    return met(taken, weights)


def gathered(order: Order, run: int, weights: Stored) -> Terms:
    """Within each run of rows, x is taken in another order."""
    return met(in_runs(order, run, weights), weights)


def halved(at: Array, count: int) -> Array:
    return np.asarray(at // 2 + at % 2)


GATHERS: tuple[tuple[str, str, Order], ...] = (
    *INSIDE,
    *QUOTIENTS,
    *(
        each
        for each in ORDERS
        if each[0].startswith(("modulo", "first-of", "next", "one-before", "exchanged", "first"))
    ),
    ("not-stepped-by-2", "from place i / 2, rounded up, for place i", halved),
    *(
        (f"taken-{by}-apart", f"from place {by} i for place i", lambda at, n, by=by: at * by)
        for by in (2, 4, 8, 16, 32)
    ),
)


def tells(name: str, run: int) -> bool:
    """Whether an order is distinct for a run of some places; for shorter runs it equals another order.

    >>> tells("quarters-apart", 8), tells("quarters-apart", 2), tells("divided-by-4", 2)
    (True, False, False)
    """
    return run >= (8 if "quarters" in name else 2 * int(name.removeprefix("divided-by-")) if "divided" in name else 0)


def of_x() -> Named:
    for said, permutations in PERMUTED:
        yield "stored-rows-permuted", f"{said}.", partial(by_groups, permutations)
    for run in (2, *WITHIN):
        gathers = [each for each in GATHERS if tells(each[0], run)]
        for name, words, order in gathers:
            yield f"x-{name}-in-runs", f"In each run of {run}, x is taken {words}.", partial(gathered, order, run)
        for name, words, order in HALF_GATHERS:
            for odd, said in ((True, "odd"), (False, "even")):
                cause = f"In each run of {run}, the {said} codes meet x {words}."
                yield f"x-{name}-for-{said}-codes", cause, partial(half_gathered, order, odd, run)
            for half, said in enumerate(("first", "second")):
                cause = f"In each run of {run}, codes of the {said} half meet x {words}."
                yield f"x-{name}-for-the-{said}-half", cause, partial(halves_gathered, order, half, run)
        for name, words, order in gathers:
            cause = f"In each run of {run}, codes are taken {words}."
            yield f"stored-codes-{name}-in-runs", cause, partial(codes_gathered, order, run)
    yield "stored-codes-of-the-first-group", "All groups have the codes of the first.", partial(codes_of_tiles, 0)
    yield "x-of-the-first-group", "All groups meet x of the first.", partial(x_of_tiles, 0)
    for size in SIZES:
        cause = f"Each tile of {size} rows has the codes of the first."
        yield "stored-codes-of-the-first-tile", cause, partial(codes_of_tiles, size)
        yield "x-of-the-first-tile", f"Each tile of {size} rows meets x of the first.", partial(x_of_tiles, size)


# **Rows of each run that are not summed.**


def past_first(count: int, at: Array, places: int) -> Array:
    return at >= count


FIRST: tuple[tuple[str, str, Kept], ...] = tuple(
    (f"first-{w}-dropped", f"without its first {w} places", partial(past_first, w)) for w in (2, 4, 8, 16)
)


def left_out(kept: Kept, run: int, which: str, weights: Stored) -> Terms:
    """Rows that are left out by their place in a run, in all terms or in one of the two."""
    run = run or run_of(weights)
    there = kept(np.arange(run), run)[np.arange(weights.rows) % run, np.newaxis]
    terms = weights.terms
    products = terms.products if which == "zeros" else terms.products * there
    return Terms(products, terms.offsets if which == "codes" else terms.offsets * there)


def of_rows_inside() -> Named:
    for which, said in (("all", "summed"), ("zeros", "summed for the zeros"), ("codes", "summed for the codes")):
        for run in (0, 8, 16, 32, 64, 128, 256):
            runs = "group" if run == 0 else f"run of {run} rows"
            for name, words, kept in (*DROPPED, *FIRST):
                cause = f"The rows of each {runs} are {said} {words}."
                yield f"stored-rows-of-runs-{name}", cause, partial(left_out, kept, run, which)


# **Codes of runs in another order**, and codes whose neighbours are not masked.


def runs_in_order(order: Order, outer: int, inner: int, weights: Stored) -> Terms:
    """In each run of `outer` rows, codes of its runs of `inner` rows in another order.

    Raises:
        ValueError: there is no whole run.
    """
    if weights.rows % outer:
        raise ValueError("there are no whole runs")
    rows, count = np.arange(weights.rows), outer // inner
    place = (order(np.arange(count), count) % count)[rows % outer // inner]
    taken = rows // outer * outer + place * inner + rows % inner
    return of_rows_like(in_codes, taken, weights)


PLANES: tuple[tuple[str, str, Order], ...] = (
    *INSIDE,
    *(each for each in (*ORDERS, *QUOTIENTS) if each[0].startswith(("modulo", "divided", "first", "exchanged"))),
    ("bytes-modulo", "from the bytes of run i mod n/2", lambda at, n: at % (n // 2) * 2 + at % 2),
    ("bytes-halved", "from the bytes of run i / 4", lambda at, n: at // 4 * 2 + at % 2),
    ("halves-first", "from the half i / (n/2) of the bytes of run i", lambda at, n: at % (n // 2) * 2 + at // (n // 2)),
)


def masked_beyond(along: int, width: int, zeros: bool, weights: Stored) -> Terms:
    """Codes or zeros with a mask that keeps only the bit above them, the lowest of the next code.

    Raises:
        ValueError: the codes are no integers.
    """
    parts = parts_of(weights)
    if not parts.bits:
        raise ValueError("the codes are no integers")
    array = np.broadcast_to(parts.zero, parts.units.shape) if zeros else parts.units
    codes = np.moveaxis(array, along, 0)
    last = np.arange(len(codes)) % width == width - 1
    above = np.where(last[:, np.newaxis], 0.0, np.roll(codes, -1, axis=0)) % 2 * 2.0**parts.bits
    found = np.moveaxis(above, 0, along)
    return (
        Terms(parts.units * parts.scale, -parts.scale * found) if zeros else Terms(found * parts.scale, parts.offsets)
    )


def unmasked(along: int, width: int, extra: int, signed: bool, weights: Stored) -> Terms:
    """Codes with some bits of the next code in their integer; after the last, zeros or its sign.

    Raises:
        ValueError: the codes are no integers.
    """
    parts = parts_of(weights)
    if not parts.bits:
        raise ValueError("the codes are no integers")
    codes = np.moveaxis(parts.units, along, 0)
    last = np.arange(len(codes)) % width == width - 1
    sign = np.where(codes >= 2.0 ** (parts.bits - 1), 2.0**extra - 1, 0.0) if signed else np.zeros_like(codes)
    following = np.where(last[:, np.newaxis], sign, np.roll(codes, -1, axis=0))
    total = codes + 2.0**parts.bits * (following % 2.0**extra)
    return Terms(np.moveaxis(total, 0, along) * parts.scale, parts.offsets)


def of_codes() -> Named:
    for outer in (64, 128, 256):
        for inner in (16, 32, 64):
            for name, words, order in PLANES if inner < outer else ():
                cause = f"In each {outer} rows, runs of {inner} codes are taken {words}."
                yield f"stored-runs-of-codes-{name}", cause, partial(runs_in_order, order, outer, inner)
    for along in (0, 1):
        for width in (2, 4, 8, 16, 32):
            for zeros in (False, True):
                cause = f"The mask of {'zeros' if zeros else 'codes'} is one too high: a power of two."
                yield "stored-mask-one-too-high", cause, partial(masked_beyond, along, width, zeros)
            for extra in (1, 2, 3, 4):
                cause = f"Codes keep {extra} bits too many: those of the next code in their integer."
                for signed in (False, True):
                    yield "stored-codes-not-masked", cause, partial(unmasked, along, width, extra, signed)


def of_rows() -> Named:
    """All kinds of this module, of groups, and of scales with second-level scales or blocks."""
    yield from of_nested()
    yield from of_groups()
    yield from of_x()
    yield from of_codes()
    yield from of_rows_inside()
