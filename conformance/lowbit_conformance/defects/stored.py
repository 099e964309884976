"""Defects of stored matrices: each follows from what the table of a format says of its fields.

A mistake is a change of the fields before they are decoded, or of the two parts of the decoded numbers. So every format
has its defects as soon as it has a table.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from lowbit.arrays import Array
from lowbit.linear.elementary import product
from lowbit.numbers.floats import FLOATS, rounded
from lowbit.tensor_formats.stored import Stored
from lowbit.tensor_formats.table import Field, Sizes, Terms
from lowbit_conformance.defects.defect import Function, arithmetical
from lowbit_conformance.defects.stored_codes import codes_of, like, numbers_of, reread
from lowbit_conformance.defects.stored_lines import short_groups_uncounted, without_padding

Change = Callable[[Field, Array, Sizes], Array]


# **Changes of a field**; each returns an array of the same shape.


def nibbles(row: Field, array: Array, at: Sizes) -> Array:
    """Swap the two halves of every byte of codes."""
    octets = array.view(np.uint8)
    return (octets >> 4 | octets << 4).view(array.dtype)


def backwards(row: Field, array: Array, at: Sizes) -> Array:
    """Reverse the bytes of each integer of codes."""
    return array.byteswap()


def axis_of_groups(row: Field, array: Array) -> int:
    """The axis of groups or blocks in a field: the one whose size follows from K."""
    sizes = [str(size) for size in row.shape]
    if array.ndim > 1 and not any(re.search("[NKG]", size) for size in sizes):
        return 1  # of a block format, whose arrays are N x blocks
    return next((axis for axis, size in enumerate(sizes) if re.search("[KG]", size)), 0)


def neighbour(row: Field, array: Array, at: Sizes) -> Array:
    """Each group or block has the number of the previous one."""
    axis = axis_of_groups(row, array)
    return np.roll(array, 1, axis=axis)


def first(row: Field, array: Array, at: object) -> Array:
    """All groups or blocks of a column have the number of the first."""
    axis = axis_of_groups(row, array)
    return np.broadcast_to(np.take(array, [0], axis=axis), array.shape).copy()


def in_order(row: Field, array: Array, at: Sizes) -> Array:
    """The group of row k is k divided by the group size."""
    return at.group_of_row().astype(array.dtype)


def rolled_bytes(row: Field, array: Array, at: Sizes) -> Array:
    """The bits of codes come from the byte before."""
    octets = array.view(np.uint8) if array.dtype.itemsize > 1 else array
    return np.roll(octets.view(np.uint8), 1, axis=-1 if octets.shape[-1] > 1 else 0).view(array.dtype)


def negative(row: Field, array: Array, at: Sizes) -> Array:
    """The sign bit of a float is lost.

    Raises:
        ValueError: floats of this type have no sign bit.
    """
    if row.dtype in FLOATS and not FLOATS[row.dtype].signed:
        raise ValueError("there is no sign bit")
    kind = f"u{array.dtype.itemsize}"
    cleared: Array = (array.view(kind) & np.asarray(2 ** (8 * array.dtype.itemsize - 1) - 1, kind)).view(array.dtype)
    return cleared


def with_fields(change: Change, role: str, weights: Stored) -> Terms:
    """The terms of a matrix whose fields of one role are changed."""
    fields = weights.table.fields_of(weights.by_name)
    rows = [row for row in weights.table.fields if row.role == role]
    return reread(
        weights, {row.name: change(row, np.ascontiguousarray(fields[row.name]), weights.sizes) for row in rows}
    )


# **Changes of the two parts.**


def offset_added(weights: Stored) -> Terms:
    return Terms(weights.terms.products, -np.asarray(weights.terms.offsets))


def offset_dropped(weights: Stored) -> Terms:
    return Terms(weights.terms.products, 0.0)


def zero_off_by_one(change: int, weights: Stored) -> Terms:
    """The offset is that of a zero one code higher or lower."""
    terms, view = weights.terms, codes_of(weights)
    step = 0.0 if view is None else change * view.step
    return Terms(terms.products, np.asarray(terms.offsets) + step)


def transposed(weights: Stored) -> Terms:
    return Terms(weights.values.T.reshape(weights.values.shape))


DECODES: dict[str, tuple[str, Callable[[Stored], Terms]]] = {
    "stored-nibbles-swapped": ("The two codes of a byte are swapped.", partial(with_fields, nibbles, "codes")),
    "stored-bytes-of-words-swapped": (
        "Integers of codes are read big-endian.",
        partial(with_fields, backwards, "codes"),
    ),
    "stored-codes-from-the-byte-before": (
        "The bits of codes come from the neighbouring byte.",
        partial(with_fields, rolled_bytes, "codes"),
    ),
    "stored-scale-of-the-neighbour": (
        "Each group or block has the scale of the previous one.",
        partial(with_fields, neighbour, "scale"),
    ),
    "stored-scale-of-the-first": (
        "All groups, or all columns if each has one scale, use the scale of the first.",
        partial(with_fields, first, "scale"),
    ),
    "stored-sign-of-a-scale-lost": (
        "A negative scale or minimum is read as positive.",
        partial(with_fields, negative, "scale"),
    ),
    "stored-zero-of-the-neighbour": (
        "Each group has the zero of the previous one.",
        partial(with_fields, neighbour, "zero"),
    ),
    "stored-zero-nibbles-swapped": ("The two zeros of a byte are swapped.", partial(with_fields, nibbles, "zero")),
    "stored-group-index-ignored": (
        "The group of row k is k divided by the group size, whatever g_idx says.",
        partial(with_fields, in_order, "index"),
    ),
    "stored-offset-subtracted": ("The offset of a zero or minimum has the wrong sign.", offset_added),
    "stored-offset-forgotten": ("The zero or minimum is not applied.", offset_dropped),
    "stored-zero-one-too-high": ("The zero is one code too high.", partial(zero_off_by_one, -1)),
    "stored-zero-one-too-low": ("The zero is one code too low.", partial(zero_off_by_one, 1)),
    "stored-matrix-transposed": ("The matrix is read with K and N exchanged.", transposed),
}


def dequantized(terms_of: Callable[[Stored], Terms], weights: Stored, result: Any = "float32") -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        return rounded(np.ascontiguousarray(terms_of(weights).values), result)


def multiplied(terms_of: Callable[[Stored], Terms], x: Any, weights: Stored, result: Any = "float32") -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        return like(x, rounded(product(numbers_of(x), terms_of(weights).values), result))


PRODUCTS = ("linear.gemv", "linear.gemm", "linear.gemm_cast")
PLAIN = PRODUCTS[:2]
"""Products with plain x."""


def of_products(numbers: str, *operations: str) -> str:
    return " ".join(f"{name}/{number}" for name in operations or PRODUCTS for number in numbers.split())


def reading(terms_of: Callable[[Stored], Terms], products: tuple[str, ...] = PLAIN) -> dict[str, Function]:
    """The operations on a matrix that is read wrongly."""
    wrong = partial(multiplied, terms_of)
    return {"formats.dequantize": partial(dequantized, terms_of), **dict.fromkeys(products, wrong)}


# **Mistakes that do not depend on the format.**


def right_terms(weights: Stored) -> Terms:
    return weights.terms


def hidden(x: Any, weights: Stored, result: Any = "float32") -> Array:
    """NaN and infinity in x count as 0."""
    return multiplied(right_terms, np.where(np.isfinite(x), x, np.zeros((), x.dtype)), weights, result)


def of_two_blocks(row: Field, array: Array, at: Sizes) -> Array:
    """If blocks of columns share a scale, every block from the third on has that of the first or second.

    Raises:
        ValueError: no columns share a scale.
    """
    axis = next((axis for axis, size in enumerate(row.shape) if re.fullmatch(r"N//?\d+", str(size))), None)
    if axis is None:
        raise ValueError("no columns share a scale")
    blocks = np.arange(array.shape[axis])
    return np.take(array, blocks % 2, axis=axis)


def within_float16(row: Field, array: Array, at: Sizes) -> Array:
    """Scales that are powers of two, limited to those of float16."""
    return np.clip(powers_of_two(row, array), 127 - 24, 127 + 15).view(array.dtype)


def zero_as_one(row: Field, array: Array, at: Sizes) -> Array:
    """A scale of 0 is treated as missing.

    Raises:
        ValueError: the scales are no floats with a zero.
    """
    if row.dtype not in FLOATS or not FLOATS[row.dtype].signed:
        raise ValueError("there is no scale of 0")
    return np.where(array == 0, np.ones((), array.dtype), array)


def not_above_codes(row: Field, array: Array, at: Sizes) -> Array:
    """A float zero is limited to the range of 4-bit codes.

    Raises:
        ValueError: zeros are integers.
    """
    if row.dtype not in FLOATS:
        raise ValueError("zeros are packed")
    found: Array = np.minimum(array, np.asarray(15, array.dtype))
    return found


def of_whole_groups(row: Field, array: Array, at: Sizes) -> Array:
    """A short last group has the scale of the previous group.

    Raises:
        ValueError: all groups are whole, or there is only one.
    """
    size, axis = at.options.get("group_size", at.K), axis_of_groups(row, array)
    if at.K % size == 0 or size > at.K or array.shape[axis] != at.G:
        raise ValueError("no group but the last is whole")
    places = np.minimum(np.arange(at.G), at.K // size - 1)
    return np.take(array, places, axis=axis)


def ends_of_float16(row: Field, array: Array, at: Sizes) -> Array:
    """Scales of wider floats are limited to the range of float16: to 65504, and to 0 below its least number.

    Raises:
        ValueError: the type of the scales is not wider than float16, or has no zero.
    """
    if row.dtype not in ("float32", "bfloat16"):
        raise ValueError("the scales are no wider than float16")
    most, least = FLOATS["float16"].largest, FLOATS["float16"].least_subnormal
    numbers = array.astype(np.float64).clip(-most, most)
    return np.where(np.abs(numbers) < least, 0.0, numbers).astype(array.dtype)


def of_activations(change: Change, x: Any, weights: Stored, result: Any = "float32") -> Array:
    """A product whose stored activations have changed scales."""
    found = possible(partial(with_fields, change, "scale"), x).values
    with np.errstate(over="ignore", invalid="ignore"):
        return rounded(product(found.T, weights.values), result)


def without_byte_0(row: Field, array: Array, at: Sizes) -> Array:
    """The least power of two is read as the next one."""
    return np.maximum(powers_of_two(row, array), 1).view(array.dtype)


def powers_of_two(row: Field, array: Array) -> Array:
    """The bytes of powers of two.

    Raises:
        ValueError: scales are of another type.
    """
    if row.dtype not in FLOATS or FLOATS[row.dtype].signed:
        raise ValueError("the type of the scales does not hold powers of two only")
    return array.view(np.uint8)


def least_power_as_zero(weights: Stored) -> Terms:
    """Numbers with a scale byte of 0 become 0."""
    changed = with_fields(without_byte_0, "scale", weights).values != weights.values
    return Terms(np.where(changed, 0.0, weights.values))


def possible(terms_of: Callable[[Stored], Terms], weights: Stored) -> Terms:
    """The terms with the mistake, or the right ones if the mistake does not apply to the format."""
    try:
        return terms_of(weights)
    except ValueError:
        return weights.terms


def with_possible(change: Change, role: str) -> Callable[[Stored], Terms]:
    return partial(possible, partial(with_fields, change, role))


OTHERS = (
    arithmetical(
        "stored-non-finite-hidden",
        "NaN and infinity in x count as 0.",
        of_products("C4", *PLAIN),
        dict.fromkeys(PLAIN, hidden),
    ),
    arithmetical(
        "stored-scales-end-with-float16",
        "Scales of bfloat16 and float32 beyond float16 become its largest number, or 0.",
        "formats.dequantize/C1 " + of_products("C2"),
        reading(with_possible(ends_of_float16, "scale"), PRODUCTS),
    ),
    arithmetical(
        "stored-scales-of-activations-end-with-float16",
        "Scales of activations beyond float16 become its largest number, or 0.",
        "linear.gemm_cast/C2",
        {"linear.gemm_cast": partial(of_activations, ends_of_float16)},
    ),
    *(
        arithmetical(name, cause, f"formats.dequantize/C1 {of_products('C2', *PLAIN)}", reading(terms_of))
        for name, cause, terms_of in (
            ("stored-scale-of-0-as-1", "A scale of 0 counts as 1.", with_possible(zero_as_one, "scale")),
            (
                "stored-real-zero-within-codes",
                "A float zero is limited to 15.",
                with_possible(not_above_codes, "zero"),
            ),
            (
                "stored-short-group-unseen",
                "A short last group has the scale of the previous group.",
                with_possible(of_whole_groups, "scale"),
            ),
            (
                "stored-zeros-not-padded",
                "The zeros of a row follow the ones before, in one byte.",
                with_possible(without_padding, "zero"),
            ),
            (
                "stored-short-group-uncounted",
                "The number of groups is rounded down, so that lines of scales and minima begin too early.",
                partial(possible, short_groups_uncounted),
            ),
        )
    ),
    *(
        arithmetical(
            name,
            cause,
            of_products("C2", *PLAIN),
            dict.fromkeys(PLAIN, partial(multiplied, partial(possible, terms_of))),
        )
        for name, cause, terms_of in (
            (
                "stored-blocks-of-columns-modulo-2",
                "From the third block of columns on, scales are those of the first two blocks.",
                partial(with_fields, of_two_blocks, "scale"),
            ),
            (
                "stored-powers-of-two-in-float16",
                "Scales that are powers of two are converted to float16, and saturate there.",
                partial(with_fields, within_float16, "scale"),
            ),
            (
                "stored-least-power-of-two-as-zero",
                "The scale byte 0, which is 2^-127, is shifted into an exponent and gives 0.",
                least_power_as_zero,
            ),
        )
    ),
)
DEFECTS = (
    *(
        arithmetical(name, cause, f"formats.dequantize/C1 {of_products('C1 C2')}", reading(terms_of, PRODUCTS))
        for name, (cause, terms_of) in DECODES.items()
    ),
    *OTHERS,
)
