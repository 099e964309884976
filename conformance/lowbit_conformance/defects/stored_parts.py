"""Mistakes in the parts of a stored matrix: codes, scales and zeros that are taken from elsewhere or as other numbers.

A number of a stored matrix is ``unit * scale + offset``. What a unit and a scale are follows from the table, so these
kinds know no format. Each part is taken along the columns, the groups or the rows in another order, as another number,
or not at all; `places` has the orders and the numbers.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
import numpy.typing as npt

from lowbit.arrays import F64, Array
from lowbit.tensor_formats.stored import Stored
from lowbit.tensor_formats.table import Terms
from lowbit_conformance.defects.places import DROPPED, NUMBERS, ORDERS, Kept, Order
from lowbit_conformance.defects.stored_codes import codes_of, filled, run_of, zero_of

Numbers = Callable[[Stored], Terms]
Named = Iterator[tuple[str, str, Numbers]]
Rows = npt.NDArray[np.int64]
Change = Callable[[F64], F64]


def quotient(by: int, at: Array, count: int) -> Array:
    return at // by


ONES = 0x11
"""A byte of codes that are finite and nonzero in every format of 4 or 8 bits."""
RUNS = (0, 16, 32, 64, 128, 256, 512, 1024)
"""Rows with their own scale or sum; 0 for the format's group."""
FEW = tuple(each for each in ORDERS if not each[0].startswith(("turned", "even-first-in", "first-of")))
QUOTIENTS: tuple[tuple[str, str, Order], ...] = tuple(
    (f"divided-by-{by}", f"from place i / {by} for place i", partial(quotient, by)) for by in (2, 4, 8, 16, 32)
)
SIZES = (16, 32, 64, 128, 256)
SQUARE = 128
"""Rows and columns of a block with one scale, in formats with square blocks."""
WITHIN = (4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True, eq=False)
class Parts:
    """The view: ``units * scale + offsets``, each K × N.

    Attributes:
        units: the values of codes: integers, or floats of a table.
        scale: of each element.
        offsets: the part that does not depend on the code.
        bits: of a code; 0 if units are not integers.
        hidden: the zero, if a scale of 0 hides it.
    """

    units: F64
    scale: F64
    offsets: F64
    bits: int
    hidden: F64

    @property
    def zero(self) -> F64:
        """The offsets in codes: ``scale * (unit - zero)``."""
        return zero_of(self.offsets, self.scale, self.hidden)


@lru_cache(maxsize=64)
def parts_of(weights: Stored) -> Parts:
    """The view of a matrix.

    Raises:
        ValueError: its numbers are not products.
    """
    view = codes_of(weights)
    if view is not None:
        return Parts(view.codes, view.step, view.base, view.bits, view.hidden)
    plain = filled(weights, ONES, True)
    with np.errstate(all="ignore"):
        scale = filled(weights, ONES) / plain
    units, values = filled(weights, None, True, whole=False), weights.values
    if not np.allclose(units * scale, values, rtol=1e-9, atol=0.0):
        raise ValueError("the numbers are not products of a code and a scale")
    none = np.zeros(values.shape)
    return Parts(units, scale, none, 0, none)


# **What is changed.** A scale may also apply to the zero; a zero may be given in codes or as a minimum.


def in_codes(parts: Parts, change: Change) -> Terms:
    return Terms(change(parts.units) * parts.scale, parts.offsets)


def in_scale(parts: Parts, change: Change) -> Terms:
    scale = change(parts.scale)
    return Terms(parts.units * scale, -scale * parts.zero)


def in_scale_of_codes(parts: Parts, change: Change) -> Terms:
    return Terms(parts.units * change(parts.scale), parts.offsets)


def in_scale_of_zeros(parts: Parts, change: Change) -> Terms:
    return Terms(parts.units * parts.scale, -change(parts.scale) * parts.zero)


def in_zero(parts: Parts, change: Change) -> Terms:
    return Terms(parts.units * parts.scale, -parts.scale * change(parts.zero))


def in_offset(parts: Parts, change: Change) -> Terms:
    return Terms(parts.units * parts.scale, change(parts.offsets))


def in_both(parts: Parts, change: Change) -> Terms:
    return Terms(parts.units * change(parts.scale), change(parts.offsets))


def in_codes_and_zero(parts: Parts, change: Change) -> Terms:
    return Terms(change(parts.units) * parts.scale, -parts.scale * change(parts.zero))


Where = Callable[[Parts, Change], Terms]
PLACED: dict[str, tuple[Where, ...]] = {
    "zero": (in_zero, in_offset),
    "scale": (in_scale, in_scale_of_codes),
    "scale-of-zeros": (in_scale_of_zeros,),
    "scale-and-zero": (in_both,),
    "codes": (in_codes,),
    "codes-and-zero": (in_codes_and_zero,),
}


# **Another order.**


def across(order: Order, run: int, inside: bool, axis: int, array: F64, group: int) -> F64:
    """An array with its columns, runs of its rows, or the rows of each run in another order."""
    if axis == 1 and inside:
        columns = np.arange(array.shape[1])
        taken = columns // run * run + (order(np.arange(run), run) % run)[columns % run]
        return np.asarray(array[:, np.minimum(taken, array.shape[1] - 1)])
    if axis == 1:
        count = array.shape[1]
        return np.asarray(array[:, order(np.arange(count), count) % count])
    rows, run = np.arange(len(array)), run or group
    if inside:
        taken = rows // run * run + (order(np.arange(run), run) % run)[rows % run]
    else:
        count = -(-len(array) // run)
        taken = (order(np.arange(count), count) % count)[rows // run] * run + rows % run
    return np.asarray(array[np.minimum(taken, len(array) - 1)])


def moved(where: Where, order: Order, run: int, inside: bool, axis: int, weights: Stored) -> Terms:
    parts, group = parts_of(weights), run_of(weights)
    return where(
        parts, lambda array: across(order, run, inside, axis, np.broadcast_to(array, parts.units.shape), group)
    )


def of_columns(where: Where, size: int, weights: Stored) -> Terms:
    """Column n uses what belongs to block ``n // size`` of `SQUARE` columns; 0 is N over the number of blocks.

    Raises:
        ValueError: blocks are no squares.
    """
    if not any(f"N//{SQUARE}" in row.shape for row in weights.table.fields):
        raise ValueError("blocks have no such size")
    parts, columns = parts_of(weights), np.arange(weights.columns)
    size = size or -(-weights.columns // -(-weights.columns // SQUARE))
    taken = np.minimum(columns // size * SQUARE, (weights.columns - 1) // SQUARE * SQUARE)
    return where(parts, lambda array: np.asarray(np.broadcast_to(array, parts.units.shape)[:, taken]))


def of_columns_again(where: Where, size: int, weights: Stored) -> Terms:
    """Column n uses what belongs to block ``n // size`` of `SQUARE` columns, modulo the number of blocks.

    Raises:
        ValueError: blocks are no squares.
    """
    if not any(f"N//{SQUARE}" in row.shape for row in weights.table.fields):
        raise ValueError("blocks have no such size")
    parts, columns = parts_of(weights), np.arange(weights.columns)
    taken = columns // size % -(-weights.columns // SQUARE) * SQUARE
    return where(parts, lambda array: np.asarray(np.broadcast_to(array, parts.units.shape)[:, taken]))


def halves_interleaved(at: Array, count: int) -> Array:
    return np.asarray(at // 2 + at % 2 * (count // 2))


def quarters_interleaved(at: Array, count: int) -> Array:
    return np.asarray(at // 4 + at % 4 * (count // 4))


def quarters_apart(at: Array, count: int) -> Array:
    return np.asarray(at % max(1, count // 4) * 4 + at // max(1, count // 4))


def transposed(high: int, at: Array, count: int) -> Array:
    """A run viewed as a matrix of `high` rows and read column by column."""
    wide = max(1, count // high)
    return np.asarray(at % high * wide + at // high)


def interleaved(order: tuple[int, ...], at: Array, count: int) -> Array:
    return np.asarray(at // 8 * 8 + np.array(order)[at % 8])


NIBBLES: tuple[tuple[str, str, Order], ...] = tuple(
    ("in-the-order-of-nibbles", "in an order of the nibbles of a word", partial(interleaved, order))
    for order in ((0, 2, 4, 6, 1, 3, 5, 7), (0, 4, 1, 5, 2, 6, 3, 7))
)
INSIDE: tuple[tuple[str, str, Order], ...] = (
    ("reversed", "in reverse order", lambda at, n: n - 1 - at),
    (
        "even-ones-first",
        "with even places before odd ones",
        lambda at, n: np.where(at < n // 2, 2 * at, 2 * at - n + 1),
    ),
    ("halves-exchanged", "with its halves exchanged", lambda at, n: (at + n // 2) % n),
    ("halves-interleaved", "with its two halves interleaved", halves_interleaved),
    ("quarters-interleaved", "with its four quarters interleaved", quarters_interleaved),
    ("quarters-apart", "with every fourth place together", quarters_apart),
    ("one-later", "one place later, the last one first", lambda at, n: (at - 1) % n),
    ("one-earlier", "one place earlier, the first one last", lambda at, n: (at + 1) % n),
    *(
        (f"transposed-{high}", f"as the transpose of a matrix of {high} rows", partial(transposed, high))
        for high in (2, 4, 8, 16, 32, 64)
    ),
)


TILES: tuple[tuple[str, str, Order], ...] = (
    *((f"modulo-{w}", f"from place i mod {w} for place i", lambda at, n, w=w: at % w) for w in (64, 128, 256)),
    *(
        (f"first-of-{w}-for-all", f"from the first of each {w} for all of them", lambda at, n, w=w: at // w * w)
        for w in (64, 128, 256)
    ),
    *(
        (
            f"first-half-of-{w}-twice",
            f"from the first half of each {w} for the second half, too",
            lambda at, n, w=w: at // w * w + at % (w // 2),
        )
        for w in (16, 32, 64, 128, 256)
    ),
    *(
        (
            f"first-of-{count}-parts-for-all",
            f"from the first of {count} equal parts for all of them",
            lambda at, n, count=count: at % -(-n // count),
        )
        for count in (2, 3, 4, 8)
    ),
)
"""Orders of columns that a kernel processes at once."""


def of_squares() -> Named:
    """Blocks of columns of another size."""
    for what, ways in PLACED.items():
        for where in ways:
            for size in (0, *SIZES) if "codes" not in what else ():
                many = f"{size} columns" if size else "N columns over the number of blocks"
                cause = f"Blocks are taken to have {many}: the {what.replace('-', ' ')}."
                yield f"stored-{what}-of-{size or 'equal'}-columns", cause, partial(of_columns, where, size)
            for size in (1, *SIZES) if "codes" not in what else ():
                words = "n modulo the number of blocks" if size == 1 else f"n / {size} modulo the number of blocks"
                cause = f"Column n takes what belongs to block {words}: the {what.replace('-', ' ')}."
                yield f"stored-{what}-of-blocks-again", cause, partial(of_columns_again, where, size)


def of_orders() -> Named:
    for what, ways in PLACED.items():
        said = what.replace("-", " ").replace("codes and zero", "codes and zeros")
        for where in ways:
            for name, words, order in (*ORDERS, *QUOTIENTS):
                change = partial(moved, where, order, 1, False, 1)
                yield f"stored-{what}-{name}-along-columns", f"Taken {words}, along the columns: the {said}.", change
            for name, words, order in (*INSIDE, *NIBBLES):
                change = partial(moved, where, order, 8, True, 1)
                yield f"stored-{what}-{name}-in-words", f"Of each 8 columns, taken {words}: the {said}.", change
            for run in (*RUNS[:3], 128, 256) if "codes" not in what else (1,):
                axis = "groups" if run == 0 else "rows" if run == 1 else f"runs of {run} rows"
                for name, words, order in FEW if run != 1 else ORDERS:
                    change = partial(moved, where, order, run, False, 0)
                    slug = f"stored-{what}-{name}-along-{axis.split()[0]}"
                    yield slug, f"Taken {words}, along the {axis}: the {said}.", change
            for name, words, order in TILES:
                change = partial(moved, where, order, 1, False, 1)
                yield f"stored-{what}-{name}-along-columns", f"Taken {words}, along the columns: the {said}.", change
    yield from of_squares()
    for run in WITHIN:
        for name, words, order in INSIDE:
            change = partial(moved, in_codes, order, run, True, 0)
            yield f"stored-codes-{name}-in-runs", f"Each run of {run} codes of a column is taken {words}.", change


# **Another number.**


def changed(where: Where, change: Callable[[F64, Parts], F64], weights: Stored) -> Terms:
    parts = parts_of(weights)
    return where(parts, lambda array: change(np.asarray(array, np.float64), parts))


def plainly(number: Callable[[Array], Array], array: F64, parts: Parts) -> F64:
    """A change that depends only on this part."""
    return np.asarray(number(array), np.float64)


def in_integers(change: Callable[[F64, int], F64], array: F64, parts: Parts) -> F64:
    """A change of codes of some bits.

    Raises:
        ValueError: they are no integers.
    """
    if not parts.bits or np.abs(array - np.round(array)).max() > 1e-6:
        raise ValueError("these are no integers")
    return change(np.round(array), parts.bits)


def below(count: int, array: F64, bits: int) -> F64:
    """Only the `count` highest bits, or all but the highest -`count` if negative."""
    return (
        array % 2.0 ** (bits + count) if count < 0 else np.floor(array / 2.0 ** (bits - count)) * 2.0 ** (bits - count)
    )


def twos_complement(array: F64, bits: int) -> F64:
    return np.asarray((array + 2.0 ** (bits - 1)) % 2.0**bits - 2.0 ** (bits - 1))


def within(least: int, most: int, array: F64, bits: int) -> F64:
    return array.clip(least, most)


def sign_and_size(array: F64, bits: int) -> F64:
    half = 2.0 ** (bits - 1)
    return np.where(array % 2.0**bits >= half, -(array % half), array % half)


READ: tuple[tuple[str, str, Callable[[F64, int], F64]], ...] = (
    *(
        (f"without-{count}-high-bits", f"without their highest {count} bits", partial(below, -count))
        for count in (1, 2, 3)
    ),
    *(
        (f"with-{count}-high-bits-only", f"with their highest {count} bits only", partial(below, count))
        for count in (1, 2, 3, 5, 7)
    ),
    ("in-twos-complement", "as two's complement", twos_complement),
    ("as-sign-and-size", "as a sign bit and a size", sign_and_size),
    ("complemented", "with every bit inverted", lambda a, bits: 2.0**bits - 1 - a),
    ("half-the-range-too-low", "less half of the range", lambda a, bits: a - 2.0 ** (bits - 1)),
    ("half-the-range-too-high", "plus half of the range", lambda a, bits: a + 2.0 ** (bits - 1)),
    ("as-half-the-range", "as half of the range", lambda a, bits: 0 * a + 2.0 ** (bits - 1)),
    ("as-less-than-half-the-range", "as half of the range less one", lambda a, bits: 0 * a + 2.0 ** (bits - 1) - 1),
    ("as-the-middle-of-the-range", "as the middle of the range", lambda a, bits: 0 * a + (2.0**bits - 1) / 2),
    (
        "as-two-codes-fewer",
        "without the code that has no opposite",
        lambda a, bits: np.maximum(a, 1 - 2.0 ** (bits - 1)),
    ),
    (
        "with-the-least-negated",
        "with the code that has no opposite as positive",
        lambda a, bits: np.where(a == -(2.0 ** (bits - 1)), -a, a),
    ),
    *(
        (f"clipped-at-{most}", f"clipped to {least} … {most}", partial(within, least, most))
        for least, most in ((-127, 126), (-128, 126), (-126, 126), (-120, 120), (-64, 63), (-63, 63), (-8, 7), (-7, 7))
    ),
    ("clipped", "clipped to the range of codes", lambda a, bits: np.clip(a, 0, 2.0**bits - 1)),
    ("wrapped", "modulo the number of codes", lambda a, bits: a % 2.0**bits),
)


WRAPPED: tuple[tuple[str, str, Callable[[F64, int], F64]], ...] = (
    ("0-as-their-number", "as the number of codes where it is 0", lambda a, bits: np.where(a == 0, 2.0**bits, a)),
    ("one-too-low-and-wrapped", "one too low, modulo the number of codes", lambda a, bits: (a - 1) % 2.0**bits),
    ("one-too-high-and-wrapped", "one too high, modulo the number of codes", lambda a, bits: (a + 1) % 2.0**bits),
)
"""Kinds that are not tried in parts of a matrix."""


def dropped_offset(parts: Parts, change: Change) -> Terms:
    """Codes that need no offset with another reading."""
    return Terms(change(parts.units) * parts.scale, 0.0)


def in_difference(change: Callable[[F64], F64], weights: Stored) -> Terms:
    """Codes minus zeros, as computed by integer kernels, replaced by other numbers.

    Raises:
        ValueError: these are no integers.
    """
    parts = parts_of(weights)
    difference = parts.units - parts.zero
    if np.abs(difference - np.round(difference)).max() > 1e-6:
        raise ValueError("these are no integers")
    return Terms(parts.scale * change(np.round(difference)))


DIFFERENCES: tuple[tuple[str, str, Callable[[F64], F64]], ...] = (
    ("wraps-in-bytes", "wraps around in unsigned bytes", lambda a: a % 256),
    ("wraps-in-signed-bytes", "wraps around in signed bytes", lambda a: (a + 128) % 256 - 128),
    ("saturates-in-signed-bytes", "saturates in signed bytes", lambda a: np.clip(a, -128, 127)),
    ("wraps-in-4-bits", "wraps around in 4 bits", lambda a: a % 16),
    ("wraps-in-signed-4-bits", "wraps around in 4 signed bits", lambda a: (a + 8) % 16 - 8),
    ("is-never-negative", "is 0 where it is negative", lambda a: np.maximum(a, 0)),
    ("is-never-positive", "is 0 where it is positive", lambda a: np.minimum(a, 0)),
    ("loses-its-sign", "loses its sign", np.abs),
    ("has-the-other-sign", "has the other sign", np.negative),
    ("saturates-at-4-bits", "saturates at 4 signed bits", lambda a: np.clip(a, -8, 7)),
    ("is-halved", "is halved and rounded down", lambda a: np.floor(a / 2)),
)


def zero_by(way: str, weights: Stored) -> Terms:
    """A zero that is multiplied by the wrong factor."""
    parts = parts_of(weights)
    zero = parts.zero
    offsets = {
        "not scaled": -zero,
        "scaled twice": -zero * parts.scale * parts.scale,
        "divided by the scale": -np.where(parts.scale == 0, 0.0, zero / np.where(parts.scale == 0, 1.0, parts.scale)),
    }[way]
    return Terms(parts.units * parts.scale, offsets)


def of_numbers() -> Named:
    of_codes: dict[str, tuple[Where, ...]] = {
        "codes": (in_codes, dropped_offset),
        "zero": (in_zero,),
        "codes-and-zero": (in_codes_and_zero,),
    }
    for what, ways in of_codes.items():
        said = what.replace("-and-zero", " and zeros")
        for where in ways:
            end = ", and no offset is subtracted." if where is dropped_offset else "."
            for name, words, read in (*READ, *WRAPPED):
                change = partial(changed, where, partial(in_integers, read))
                yield f"stored-{what}-{name}", f"Taken {words}: the {said}{end}", change
    for what, ways in PLACED.items():
        for where in ways:
            for name, words, kinds, number in NUMBERS:
                if "f" in kinds:
                    change = partial(changed, where, partial(plainly, number))
                    yield f"stored-{what}-{name}", f"Taken {words}: the {what.replace('-', ' ')}.", change
    for name, words, number in DIFFERENCES:
        change = partial(in_difference, number)
        yield f"stored-code-less-zero-{name}", f"The difference of code and zero {words}.", change
    for way in ("not scaled", "scaled twice", "divided by the scale"):
        yield f"stored-zero-{way.replace(' ', '-')}", f"The zero is {way}.", partial(zero_by, way)


# **Rows that are not summed**, in all terms, or only in those of zeros or of codes.


def left_out(kept: Kept, run: int, which: str, weights: Stored) -> Terms:
    rows = np.arange(weights.rows)
    index = rows if run == 1 else rows // (run or run_of(weights))
    if run == 0 and "g_idx" in weights.by_name:
        index = weights.by_name["g_idx"].astype(np.int64)
    there = kept(index, int(index.max()) + 1)[:, np.newaxis]
    terms = weights.terms
    products = terms.products if which == "zeros" else terms.products * there
    return Terms(products, terms.offsets if which == "codes" else terms.offsets * there)


def of_rows() -> Named:
    for which, said in (("all", "summed"), ("zeros", "summed for the zeros"), ("codes", "summed for the codes")):
        for run in (1, *RUNS):
            axis = "groups" if run == 0 else "rows" if run == 1 else f"runs of {run} rows"
            for name, words, kept in DROPPED:
                slug = f"stored-{axis.split()[0]}-{name}" + ("" if which == "all" else f"-for-{which}")
                yield slug, f"The {axis} are {said} {words}.", partial(left_out, kept, run, which)


def of_parts() -> Named:
    """All kinds of this module."""
    yield from of_numbers()
    yield from of_rows()
    yield from of_orders()
