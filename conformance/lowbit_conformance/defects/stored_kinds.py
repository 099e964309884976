"""Families of mistakes in stored matrices: kinds that follow from a table, with a place or a width in them.

The bank has the mistakes that every format can have. Here are those that depend on how codes lie in their integers, on
the lengths of runs, or on stored activations. `diagnosis` looks here where no defect of the bank explains the results;
nothing here is a backend of the kill matrix.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit.arrays import F64, Array
from lowbit.linear.elementary import product
from lowbit.numbers.floats import FLOATS
from lowbit.tensor_formats.stored import Stored
from lowbit.tensor_formats.table import Field, Terms
from lowbit_conformance.defects.defect import Defect, arithmetical
from lowbit_conformance.defects.stored import axis_of_groups, dequantized, first, multiplied
from lowbit_conformance.defects.stored_codes import (
    Codes,
    codes_of,
    joined,
    like,
    numbers_of,
    reread,
    run_of,
    split,
    width,
)
from lowbit_conformance.defects.stored_products import ORDERS, Sum, of_sums

Numbers = Callable[[Stored], Terms]
Rows = npt.NDArray[np.int64]
Named = Iterator[tuple[str, str, Numbers]]
RUNS = (16, 32, 64, 128, 256)


# **Other rows**: the scale or the zero of other runs.


def other_rows(kind: str, run: int, weights: Stored) -> Rows:
    """For each row the row from which it takes what belongs to a run."""
    rows = np.arange(weights.rows)
    whole = weights.table.block or weights.rows
    group = run_of(weights)
    found: Rows = {
        "before": (rows - run) % weights.rows,
        "after": (rows + run) % weights.rows,
        "before-in-block": rows // whole * whole + (rows - run) % whole,
        "after-in-block": rows // whole * whole + (rows + run) % whole,
        "late": np.maximum(rows - 1, 0),
        "early": np.minimum(rows + 1, weights.rows - 1),
        "first": rows // whole * whole,
        "interleaved": rows % -(-weights.rows // group) * group,
    }[kind]
    return np.minimum(found, weights.rows - 1)


def from_rows(kind: str, run: int, scale: bool, zero: bool, weights: Stored) -> Terms:
    view, rows = integers(weights), other_rows(kind, run, weights)
    return view.at(rows if scale else None, rows if zero else None)


def integers(weights: Stored) -> Codes:
    """The view of `stored_codes`.

    Raises:
        ValueError: there is none, so this mistake is not possible.
    """
    view = codes_of(weights)
    if view is None:
        raise ValueError("the codes are no integers")
    return view


def of_runs() -> Named:
    parts = {"scale": (True, False), "zero": (False, True), "scale-and-zero": (True, True)}
    for what, (scale, zero) in parts.items():
        words = what.replace("-", " ")
        for side, place in (("neighbour", "before"), ("next", "after")):
            for run in (16, 32):
                for within in ("", "-in-block"):
                    change = partial(from_rows, place + within, run, scale, zero)
                    yield f"stored-{what}-of-the-{side}", f"Each run takes the {words} of the one {place}.", change
        change = partial(from_rows, "first", 0, scale, zero)
        yield f"stored-{what}-of-the-first", f"All runs of a block have the {words} of its first.", change
        change = partial(from_rows, "interleaved", 0, scale, zero)
        name = "stored-groups-interleaved" if scale and zero else f"stored-{what}-interleaved"
        yield name, f"Row k takes the {words} of group k mod G.", change
    for kind in ("late", "early"):
        change = partial(from_rows, kind, 0, True, True)
        yield f"stored-groups-one-row-{kind}", f"Groups begin one row {kind}.", change


# **Codes read as other numbers**, and zeros of another size.


def base_moved(by: float, weights: Stored) -> Terms:
    view = integers(weights)
    return Terms(view.codes * view.step, view.base + by * view.step)


def half_subtracted(weights: Stored) -> Terms:
    view = integers(weights)
    return Terms(view.codes * view.step, view.base - 2.0 ** (view.bits - 1) * view.step)


def other_sign(weights: Stored) -> Terms:
    """Two's complement for unsigned integers, and vice versa."""
    view = integers(weights)
    if view.codes.min() < 0:
        return Terms(view.codes % 2.0**view.bits * view.step, view.base)
    high = view.codes >= 2 ** (view.bits - 1)
    return Terms((view.codes - 2.0**view.bits * high) * view.step, view.base)


def high_bit_lost(weights: Stored) -> Terms:
    view = integers(weights)
    return Terms(view.codes % 2.0 ** (view.bits - 1) * view.step, view.base)


def zero_wrapped(weights: Stored) -> Terms:
    view = integers(weights)
    return Terms(view.codes * view.step, -view.step * (np.round(view.zero) % 2.0**view.bits))


def zero_not_scaled(weights: Stored) -> Terms:
    view = integers(weights)
    return Terms(view.codes * view.step, -view.zero)


def half_of_the_offsets(run: int, half: int, weights: Stored) -> Terms:
    kept = (np.arange(weights.rows) % run // (run // 2) == half)[:, np.newaxis]
    return Terms(weights.terms.products, np.where(kept, weights.terms.offsets, 0.0))


def times(factor: float, weights: Stored) -> Terms:
    return Terms(weights.terms.values * factor)


def unsigned(weights: Stored) -> Terms:
    """Codes without their sign.

    Raises:
        ValueError: the codes have no sign.
    """
    view = codes_of(weights)
    if view is None:
        return Terms(np.abs(weights.terms.products), weights.terms.offsets)
    if view.codes.min() >= 0:
        raise ValueError("the codes have no sign")
    return Terms(np.abs(view.codes) * view.step, view.base)


def of_numbers() -> Named:
    yield "stored-zero-one-too-high", "The zero is one code too high.", partial(base_moved, -1)
    yield "stored-zero-one-too-low", "The zero is one code too low.", partial(base_moved, 1)
    for by, words in ((-0.5, "high"), (0.5, "low")):
        yield f"stored-zero-half-a-code-too-{words}", f"The zero is half a code too {words}.", partial(base_moved, by)
    yield "stored-half-of-the-range-subtracted", "Half of the range is subtracted from each code.", half_subtracted
    yield "stored-sign-of-codes-mistaken", "Codes are read as signed where they are not, or as unsigned.", other_sign
    yield "stored-high-bit-of-codes-lost", "The highest bit of each code is lost.", high_bit_lost
    yield "stored-zero-wrapped", "A zero of 2^b is read as 0.", zero_wrapped
    yield "stored-zero-not-scaled", "The zero is not multiplied by the scale.", zero_not_scaled
    yield "stored-sign-of-codes-lost", "Negative codes are read as positive.", unsigned
    yield "stored-numbers-doubled", "All numbers are twice as large: a bias is off by one.", partial(times, 2.0)
    yield "stored-numbers-halved", "All numbers are half as large: a bias is off by one.", partial(times, 0.5)
    for power in (2, -2, 3, -3, 4, -4):
        cause = f"All numbers are those that are right times {2.0**power:g}: biases are off."
        yield "stored-numbers-times-a-power", cause, partial(times, 2.0**power)
    for run in (32, 64):
        for half in (0, 1):
            change = partial(half_of_the_offsets, run, half)
            which = ("first", "second")[half]
            cause = f"The zero or minimum counts for the {which} half of each {run} rows only; half a sum is missing."
            yield "stored-half-of-a-sum-missing", cause, change


# **Fields**: codes elsewhere in their integers, integers elsewhere in their array, scales used differently.

FieldChange = Callable[[Field, Array, Stored], Array]


def with_fields(change: FieldChange, roles: tuple[str, ...], weights: Stored) -> Terms:
    """The numbers with all fields of some roles changed."""
    fields = weights.table.fields_of(weights.by_name)
    rows = [row for row in weights.table.fields if row.role in roles]
    return reread(weights, {row.name: change(row, np.ascontiguousarray(fields[row.name]), weights) for row in rows})


def bits_of(weights: Stored) -> int:
    return int(dict(weights.options).get("bits", 0)) or width(weights)


def reordered(order: tuple[int, ...] | None, row: Field, array: Array, weights: Stored) -> Array:
    """The codes of each integer in another order, by default in reverse."""
    codes = split(array, bits_of(weights))
    return joined(codes[..., ::-1] if order is None else codes[..., list(order)], array, bits_of(weights))


def planes(along: int, inverse: bool, row: Field, array: Array, weights: Stored) -> Array:
    """What is in integer w at place i is read with the place as the outer index: at i * integers + w.

    Or vice versa, if the format has such planes, the first in the highest bits.
    """
    bits = bits_of(weights)
    axis = along if array.ndim > 1 else 0
    codes = np.moveaxis(split(array, bits), axis, -2)
    # The code at place p of the changed order is the one that the kernel uses for place p of the right one.
    if inverse:
        pairs = codes[..., ::-1].reshape(*codes.shape[:-2], codes.shape[-1], codes.shape[-2])
        found = np.swapaxes(pairs, -1, -2)[..., ::-1]
    else:
        found = np.swapaxes(codes, -1, -2).reshape(codes.shape)
    return joined(np.moveaxis(found, -2, axis), array, bits)


def nibbles(inward: bool, run: int, high_first: bool, row: Field, array: Array, weights: Stored) -> Array:
    """Bytes of two codes each: planes of a run read as if a byte held neighbours, or vice versa.

    A run of 0 is the whole array. The first plane is in the low halves, or in the high ones if `high_first`.

    Raises:
        ValueError: there are no bytes.
    """
    if array.dtype != np.uint8:
        raise ValueError("there are no bytes")
    run = run or array.size
    octets = array.reshape(-1, run)
    low, high = octets & 15, octets >> 4
    if inward:  # stored in planes, read as neighbours
        read = np.stack([low, high], axis=-1).reshape(len(octets), 2 * run)
        one, two = read[:, :run], read[:, run:]
        planar: Array = (two | one << 4 if high_first else one | two << 4).reshape(array.shape)
        return planar
    read = np.concatenate([high, low] if high_first else [low, high], axis=-1)
    paired: Array = (read[:, 0::2] | read[:, 1::2] << 4).reshape(array.shape)
    return paired


def one_nibble(high: bool, row: Field, array: Array, weights: Stored) -> Array:
    octets = array.view(np.uint8)
    twice = octets >> 4 | octets & 240 if high else octets & 15 | octets << 4
    return twice.view(array.dtype)


def turned(row: Field, array: Array, weights: Stored) -> Array:
    """Read as if the array were its transpose."""
    if array.ndim != 2:
        raise ValueError("no matrix")
    return np.ascontiguousarray(array.reshape(array.shape[::-1]).T)


def inverse(row: Field, array: Array, weights: Stored) -> Array:
    """The inverse of each number in float64, because a kernel that divides rounds no inverse."""
    with np.errstate(all="ignore"):
        return np.asarray(1 / array.astype(np.float64))


def ones(row: Field, array: Array, weights: Stored) -> Array:
    return np.ones_like(array)


def following(row: Field, array: Array, weights: Stored) -> Array:
    return np.roll(array, -1, axis=axis_of_groups(row, array))


def subnormal_lost(row: Field, array: Array, weights: Stored) -> Array:
    kind = FLOATS[row.dtype]
    normal = kind.least_subnormal * 2.0**kind.mantissa
    return np.where(np.abs(array.astype(np.float64)) < normal, np.zeros((), array.dtype), array)


HIGH_BITS = {
    0: "bytes 0 to 3, which belong to the last four scales",
    4: "bytes 4 to 7, which belong to the last four minima",
    8: "bytes 8 to 11, which belong to minima",
}


def high_bits(source: int | None, target: int, row: Field, array: Array, weights: Stored) -> Array:
    """The two highest bits of four packed bytes are lost, or taken from four others."""
    if array.shape[-1:] != (12,) or array.dtype != np.uint8:
        return array
    found = array.copy()
    four = found[..., target : target + 4]
    four &= 63
    if source is not None:
        four |= array[..., source : source + 4] & 192
    return found


def exchanged(row: Field, array: Array, weights: Stored) -> Array:
    """Scales and minima of 6 bits in 12 bytes are exchanged."""
    if array.shape[-1:] != (12,) or array.dtype != np.uint8:
        return array
    late = array[..., 8:]
    return np.concatenate([array[..., 4:8], array[..., :4], late >> 4 | late << 4], axis=-1)


def of_fields() -> Named:
    both = {"codes": ("codes",), "zeros": ("zero",), "codes-and-zeros": ("codes", "zero")}
    for what, roles in both.items():
        said = what.replace("-", " ")
        change = partial(with_fields, partial(reordered, None), roles)
        yield f"stored-{what}-in-reverse", f"The {said} of each integer are read in reverse.", change
        for order in ORDERS:
            change = partial(with_fields, partial(reordered, order), roles)
            yield f"stored-{what}-in-another-order", f"The {said} of each word are read in another order.", change
        for along in (0, 1):
            change = partial(with_fields, partial(planes, along, False), roles)
            yield f"stored-{what}-in-planes", f"The {said} are read by their place in a word first.", change
            change = partial(with_fields, partial(planes, along, True), roles)
            yield f"stored-{what}-not-in-planes", f"The {said} of an integer are taken for neighbours.", change
        change = partial(with_fields, turned, roles)
        yield f"stored-{what}-transposed", f"The array of {said} is read as its transpose.", change
    for run, high_first in ((8, False), (16, False), (32, False), (64, False), (0, False), (0, True)):
        change = partial(with_fields, partial(nibbles, True, run, high_first), ("codes",))
        yield "stored-nibbles-interleaved", "The two codes of a byte are taken for neighbours.", change
        change = partial(with_fields, partial(nibbles, False, run, high_first), ("codes",))
        yield "stored-nibbles-in-planes", "The two codes of a byte are taken for codes of two halves of a run.", change
    for high in (False, True):
        change = partial(with_fields, partial(one_nibble, high), ("codes",))
        yield "stored-one-nibble-twice", "One of the two codes of a byte is used for both.", change
    for name, cause, scaled in (
        ("divided-by-the-scale", "Numbers are divided by the scale.", inverse),
        ("scale-forgotten", "The scale is not applied.", ones),
        ("scale-of-the-next", "Each group or block has the scale of the one after.", following),
        ("scales-transposed", "The array of scales is read as its transpose.", turned),
        ("scales-and-minima-exchanged", "Scales and minima are exchanged.", exchanged),
    ):
        yield f"stored-{name}", cause, partial(with_fields, scaled, ("scale",))
    for name, cause, moved in (
        ("zero-of-the-next", "Each group has the zero of the one after.", following),
        ("zero-of-the-first", "All groups have the zero of the first.", first),
    ):
        yield f"stored-{name}", cause, partial(with_fields, moved, ("zero",))
    yield "stored-subnormal-codes-lost", "Subnormal codes are 0.", partial(with_fields, subnormal_lost, ("codes",))
    for target in (0, 4, 8):
        for source in (None, *({0, 4, 8} - {target})):
            change = partial(with_fields, partial(high_bits, source, target), ("scale",))
            end = "are lost" if source is None else f"are those of {HIGH_BITS[source]}"
            yield (
                "stored-high-bits-of-scales",
                f"Of packed scales and minima, the high bits of {HIGH_BITS[target]} {end}.",
                change,
            )
    for first_one in (0, 1):
        for exchange in (False, True):
            change = partial(fields_exchanged, first_one, exchange)
            name = "scales-and-minima-exchanged" if exchange else "one-scale-for-both"
            used, lost = ("minima", "scales")[first_one], ("scales", "minima")[first_one]
            cause = f"The scale of {used} is used for {lost}, too."
            yield (
                f"stored-{name}",
                "The scale of scales and that of minima are exchanged." if exchange else cause,
                change,
            )


def fields_exchanged(taken: int, exchange: bool, weights: Stored) -> Terms:
    """Two similar fields of scales: one replaces the other, or both are exchanged."""
    fields = weights.table.fields_of(weights.by_name)
    scales = [row for row in weights.table.fields if row.role == "scale"]
    pair = [row.name for row in scales if (row.dtype, row.shape) == (scales[0].dtype, scales[0].shape)]
    one, other = pair[taken], pair[1 - taken]
    return reread(weights, {one: fields[other], other: fields[one] if exchange else fields[other]})


# **Stored activations.**


def of_activations() -> Named:
    """Mistakes in x; their names begin with ``x-``."""
    kinds = [*of_numbers(), *of_runs()]
    kinds += [each for each in of_fields() if "zeros" not in each[0]]
    kinds += [
        (
            "stored-scale-of-the-first",
            "All blocks, or all vectors where each has one scale, have that of the first.",
            partial(with_fields, first, ("scale",)),
        ),
        (
            "stored-scale-of-the-neighbour",
            "Each block has the scale of the one before.",
            partial(with_fields, lambda row, array, w: np.roll(array, 1, axis=axis_of_groups(row, array)), ("scale",)),
        ),
    ]
    yield from ((f"x-{name.removeprefix('stored-')}", f"Of x: {cause}", change) for name, cause, change in kinds)


def with_activations(sums: bool, change: Numbers, x: Stored, weights: Stored, result: Any = "float32") -> F64:
    """The product with other activations; with stored `sums`, these are multiplied by the offsets of weights
    unchanged."""
    other = change(x).values.T
    if not sums:
        return product(other, weights.values)
    offsets = np.broadcast_to(weights.terms.offsets, (weights.rows, weights.columns))
    return product(other, weights.terms.products) + product(x.values.T, offsets)


def wrapped(run: int, x: Stored, weights: Stored, result: Any = "float32") -> F64:
    """Integer sums of a run of codes that wrap at 16 bits."""
    ours, theirs = integers(weights), integers(x)
    half, most = 2.0**15, 2.0**16
    total = product(x.values.T, np.broadcast_to(ours.base, ours.codes.shape))
    for begin in range(0, weights.rows, run):
        rows = slice(begin, begin + run)
        sums = (product(theirs.codes[rows].T, ours.codes[rows]) + half) % most - half
        total += sums * ours.step[begin] * theirs.step[begin][:, np.newaxis]
    return total


def summed(sum_of: Sum, x: Any, weights: Stored, result: Any = "float32") -> Array:
    numbers = numbers_of(x)
    return like(x, sum_of(np.where(np.isfinite(numbers), numbers, 0.0), weights))


@cache
def of_stored(operation: str) -> tuple[Defect, ...]:
    """All members for one operation; members of one name are ways to make the same mistake."""
    found = []
    if operation == "formats.dequantize" or operation.startswith("linear.gem"):
        function = dequantized if operation == "formats.dequantize" else multiplied
        for name, cause, change in (*of_numbers(), *of_runs(), *of_fields()):
            found.append(arithmetical(name, cause, "", {operation: partial(function, change)}))
    if operation.startswith("linear.gem"):
        for name, cause, sum_of in of_sums():
            found.append(arithmetical(name, cause, "", {operation: partial(summed, sum_of)}))
    if operation == "linear.gemm_cast":
        for name, cause, change in of_activations():
            for sums in (False, True):
                found.append(arithmetical(name, cause, "", {operation: partial(with_activations, sums, change)}))
        for run in RUNS:
            cause = f"Integer sums of {run} products wrap at 16 bits."
            found.append(arithmetical("stored-integer-sums-wrap", cause, "", {operation: partial(wrapped, run)}))
    return tuple(found)
