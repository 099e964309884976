"""Defects of casts to formats: wrong rounding, wrong scales, and fields in the wrong place.

Casts to signed codes of 8 bits are computed anew with the mistake. What casts of all formats share, the order of
nibbles and the scale of a block, is changed in a right result.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from lowbit.arrays import F32, F64, Array
from lowbit.numbers.floats import rounded
from lowbit.tensor_formats.casts import inverse
from lowbit.tensor_formats.gguf_encode import extreme, packed, rounded_down
from lowbit.tensor_formats.int8 import runs
from lowbit.tensor_formats.stored import Stored, quantized
from lowbit_conformance.defects.defect import Defect, of_operation, unchecked
from lowbit_conformance.defects.stored import Change, first, neighbour, nibbles

DEFECTS: list[Defect] = []
of_cast = of_operation(DEFECTS, "formats.quantize")

Options = tuple[tuple[str, int], ...]


def stored_as(right: Stored, fields: dict[str, Array]) -> Stored:
    """A matrix of the same kind with other fields, constructed without checks."""
    tensors = right.table.tensors_of(fields, right.sizes)
    return unchecked(
        Stored, format=right.format, rows=right.rows, columns=right.columns, tensors=tensors, options=right.options
    )


def with_fields(change: Change, role: str, x: F32, format: str, options: Options = ()) -> Stored:
    """Fields of one role are changed after a right cast."""
    right = quantized(x, format, options)
    fields = right.table.fields_of(right.by_name)
    for row in right.table.fields:
        if row.role == role:
            fields[row.name] = change(row, np.ascontiguousarray(fields[row.name]), right.sizes)
    return stored_as(right, fields)


# **Casts to 8 bits**: the scale, its inverse and the rounding are parameters.


def largest(x: F32) -> F32:
    found: F32 = np.abs(x).max(axis=-1, keepdims=True)
    return found


def of_row(x: F32) -> F32:
    """One scale for all blocks of a row."""
    largest: F32 = np.abs(x).max(axis=(1, 2), keepdims=True)
    return np.broadcast_to(largest, (*x.shape[:2], 1))


def not_absolute(x: F32) -> F32:
    """The largest number, ignoring the magnitude of negative ones."""
    found: F32 = np.maximum(x.max(axis=-1, keepdims=True), np.float32(1e-9))
    return found


def in_float32(d: F32) -> F32:
    return d


def in_float16(d: F32) -> F32:
    with np.errstate(over="ignore"):
        return d.astype(np.float16).astype(np.float32)


def divided_by(seen: Callable[[F32], F32], numbers: F32, d: F32) -> Array:
    """The numbers divided by a scale."""
    return np.asarray(numbers / seen(d))


def times_the_inverse(seen: Callable[[F32], F32], numbers: F32, d: F32) -> Array:
    """The numbers times the inverse of a scale, all in float32."""
    return np.asarray(numbers.astype(np.float32) * (np.float32(1) / seen(d)))


def half_down(numbers: Array) -> Array:
    """Round ties towards minus infinity."""
    return np.ceil(numbers - 0.5)


def in_eight(
    absmax: Callable[[F32], F32],
    levels: int,
    quotient: Callable[[F32, F32], Array],
    integer: Callable[[Array], Array],
    x: F32,
    format: str,
    options: Options = (),
) -> Stored:
    """A cast to signed codes of 8 bits; casts to other formats are right."""
    right = quantized(x, format, options)
    table, at = right.table, right.sizes
    rows = {row.role: row for row in table.fields}
    if rows["codes"].dtype != "int8" or rows["scale"].dtype == "float8_e8m0fnu":
        return right
    fields = table.fields_of(right.by_name)
    scale, name = rows["scale"].name, rows["codes"].name
    numbers = runs(np.asarray(x.T, np.float64), at, table.block or dict(options).get("group_size", at.K))
    d = absmax(numbers) / np.float32(levels)
    with np.errstate(all="ignore"):
        codes = (
            integer(np.nan_to_num(quotient(numbers, d), posinf=levels, neginf=-levels)).clip(-128, 127).astype(np.int8)
        )
        scales = d[..., 0].astype(fields[scale].dtype)
    if right.format == "q8_k":  # the reference gives code -127 to the number of largest magnitude
        sign = np.sign(fields["d"])
        codes, scales = (codes * sign[..., None]).astype(np.int8), scales * sign
    if table.block is None:
        codes = np.ascontiguousarray(codes.reshape(at.N, -1)[:, : at.K])
    changed = {**fields, scale: scales.astype(fields[scale].dtype), name: codes}
    if "s" in changed:
        changed["s"] = in_float16(d[..., 0] * codes.sum(axis=-1, dtype=np.int64).astype(np.float32)).astype(np.float16)
    elif table.complete is not None:
        changed = table.complete(changed, at)
    return stored_as(right, changed)


def eight(
    absmax: Callable[[F32], F32] = largest,
    levels: int = 127,
    seen: Callable[[F32], F32] = in_float32,
    integer: Callable[[Array], Array] = np.rint,
) -> Callable[..., Stored]:
    return partial(in_eight, absmax, levels, partial(divided_by, seen), integer)


def sum_of_codes(x: F32, format: str, options: Options = ()) -> Stored:
    """The sum of a block is that of its codes, without the scale."""
    right = quantized(x, format, options)
    fields = right.table.fields_of(right.by_name)
    if "s" in fields:
        fields["s"] = fields["qs"].sum(axis=-1, dtype=np.int64).astype(np.float16)
    return stored_as(right, fields)


def plus_one(row: Any, array: Array, at: Any) -> Array:
    """Every code one higher."""
    return array + np.ones((), array.dtype)


def in_four(signed: bool, added: float, x: F32, format: str, options: Options = ()) -> Stored:
    """A cast to Q4_0 or Q5_0 whose scale has no sign, or whose codes are rounded by a number other than 1/2."""
    right = quantized(x, format, options)
    if format not in ("q4_0", "q5_0"):
        return right
    bits = int(format[1])
    center, numbers = 2 ** (bits - 1), x.reshape(len(x), -1, 32)
    d = (extreme(numbers) / np.float32(-center)) if signed else largest(numbers) / np.float32(center)
    codes = rounded_down(numbers, inverse(d), center + added, 2**bits - 1, fused=False)
    return stored_as(right, {"d": d[..., 0].astype(np.float16), **packed(codes, bits)})


def of_all_rows(x: F32, format: str, options: Options = ()) -> Stored:
    """The scale of a block is from the largest numbers at its place in any row."""
    others = quantized(np.copysign(np.abs(x).max(axis=0), x), format, options)
    mine = quantized(x, format, options)
    fields = mine.table.fields_of(mine.by_name)
    theirs = others.table.fields_of(others.by_name)
    scales = {row.name: theirs[row.name] for row in mine.table.fields if row.role == "scale"}
    return stored_as(mine, {**fields, **scales})


# **Casts to small floats**: the shared scale.


def of_powers(scaling: Callable[[F64, float], Array], x: F32, format: str, options: Options = ()) -> Stored:
    """A cast to a format of OCP MX with another rule for the power of two; casts to other formats are right."""
    right = quantized(x, format, options)
    if "standard" not in right.table.encode:
        return right
    encode: Any = right.table.encode["standard"]
    return stored_as(right, encode.func(scaling, np.asarray(x.T, np.float64), right.sizes))


def one_higher(blocks: F64, largest: float) -> Array:
    """The exponent of the scale is one higher than the standard's, even for a power of two."""
    exponents = np.frexp(np.abs(blocks).max(axis=-1))[1]
    return np.asarray((exponents - np.frexp(largest)[1] + 128).clip(0, 254), np.uint8)


def of_mantissa(blocks: F64, largest: float) -> Array:
    """The exponent of the largest element is not subtracted from that of the scale."""
    return np.asarray((np.frexp(np.abs(blocks).max(axis=-1))[1] + 126).clip(0, 254), np.uint8)


def in_e4m3(factor: float, shared: bool, x: F32, format: str, options: Options = ()) -> Stored:
    """A cast to FP8 whose scale is larger by a factor or the largest of all tokens; other casts are right."""
    right = quantized(x, format, options)
    weight = right.by_name.get("weight")
    if "weight_scale" not in right.by_name or weight is None or weight.dtype.name != "float8_e4m3fn":
        return right
    scales = right.by_name["weight_scale"] * np.float32(factor)
    scales = np.full_like(scales, scales.max()) if shared else scales
    elements = rounded((x / np.where(scales == 0, np.float32(1), scales)).astype(np.float64), "float8_e4m3fn")
    return stored_as(right, {"weight": elements, "weight_scale": scales})


of_cast.add("cast-truncates", "Codes are rounded towards zero.", "C1", eight(integer=np.trunc))
of_cast.add("cast-rounds-down", "Codes are rounded down.", "C1", eight(integer=np.floor))
of_cast.add("cast-ties-down", "Ties are rounded down.", "C1", eight(integer=half_down))
of_cast.add("cast-inverse-of-rounded-scale", "Codes are divided by the float16 scale.", "C1", eight(seen=in_float16))
of_cast.add("cast-maximum-of-signed", "The scale comes from the largest number.", "C1", eight(absmax=not_absolute))
of_cast.add("cast-scale-of-row", "All blocks of a row have one scale.", "C1", eight(absmax=of_row))
of_cast.add("cast-128-levels", "The scale is the largest magnitude over 128.", "C1", eight(levels=128))
of_cast.add(
    "cast-nibbles-swapped", "The two codes of a byte are swapped.", "C1", partial(with_fields, nibbles, "codes")
)
of_cast.add("cast-codes-one-higher", "Every code is one higher.", "C1", partial(with_fields, plus_one, "codes"))
of_cast.add(
    "cast-scale-of-neighbour",
    "A block has the scale of the one before.",
    "C1",
    partial(with_fields, neighbour, "scale"),
)
of_cast.add(
    "cast-scale-of-first", "All blocks have the scale of the first.", "C1", partial(with_fields, first, "scale")
)
of_cast.add("cast-sum-without-scale", "The stored sum of a block is that of its codes, not scaled.", "C1", sum_of_codes)
of_cast.add(
    "cast-scale-of-all-rows", "The scale of a block is computed over the same block of all rows.", "C1 C2", of_all_rows
)
of_cast.add(
    "cast-extreme-without-sign", "The scale of Q4_0 and Q5_0 is never negative.", "C1", partial(in_four, False, 0.5)
)
of_cast.add(
    "cast-minimum-of-neighbour",
    "A group has the minimum of the one before.",
    "C1",
    partial(with_fields, neighbour, "zero"),
)
of_cast.add(
    "cast-exponent-rounded-up",
    "The exponent of an MX scale is rounded up, even for a power of two.",
    "C1",
    partial(of_powers, one_higher),
)
of_cast.add(
    "cast-exponent-of-element-forgotten",
    "An MX scale has the exponent of the largest number itself.",
    "C1",
    partial(of_powers, of_mantissa),
)
of_cast.add(
    "cast-fp8-by-240", "The scale is the largest magnitude over 240, not 448.", "C1", partial(in_e4m3, 448 / 240, False)
)
of_cast.add("cast-fp8-one-scale", "All tokens have the largest scale.", "C1 C2", partial(in_e4m3, 1.0, True))
of_cast.add("cast-half-not-added", "Codes of Q4_0 and Q5_0 are not rounded.", "C1", partial(in_four, True, 0.0))
