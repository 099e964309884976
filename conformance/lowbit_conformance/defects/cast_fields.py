"""Mistakes in the fields that a cast writes, and casts whose scale comes from another number of levels.

A right cast, by any of the choices that the owner of the format leaves, is written with one field changed: its bits in
another order, as another type, from elsewhere. These are the changes that `stored_fields` makes where such a matrix is
read. Casts to FP8 and to KIVI's groups are computed anew, with other levels.
"""

from collections import deque
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import numpy as np

from lowbit.arrays import F32, Array
from lowbit.numbers.floats import FLOATS, Name, rounded
from lowbit.tensor_formats.bits import join
from lowbit.tensor_formats.casts import in_groups, stepped
from lowbit.tensor_formats.stored import FORMATS, Stored, quantized
from lowbit.tensor_formats.table import Field
from lowbit_conformance.defects.casts import Options, stored_as
from lowbit_conformance.defects.defect import Defect, arithmetical
from lowbit_conformance.defects.places import Order
from lowbit_conformance.defects.stored_codes import joined, split
from lowbit_conformance.defects.stored_fields import of_field
from lowbit_conformance.defects.stored_kinds import bits_of
from lowbit_conformance.defects.stored_parts import INSIDE, NIBBLES

OPERATION = "formats.quantize"
REMEMBERED = 256
MOST_CHOICES = 12
Written = Callable[[Field, Array, Stored], Array]
Named = Iterator[tuple[str, str, Callable[..., Stored]]]

_casts: deque[tuple[Array, str, str, Options, Stored]] = deque(maxlen=REMEMBERED)


def right_cast(x: F32, format: str, options: Options, choice: str) -> Stored:
    """A right cast, cached because hundreds of changes are tried on it."""
    for own, name, chosen, sizes, found in _casts:
        if own is x and (name, chosen, sizes) == (format, choice, options):
            return found
    found = quantized(x, format, options, choice)
    _casts.append((x, format, choice, options, found))
    return found


def written(choice: str, name: str, change: Written, x: F32, format: str, options: Options = ()) -> Stored:
    """A cast with one field written differently."""
    right = right_cast(x, format, options, choice)
    fields = dict(right.table.fields_of(right.by_name))
    row = next(each for each in right.table.fields if each.name == name)
    own = np.ascontiguousarray(fields[name])
    with np.errstate(all="ignore"):
        fields[name] = np.ascontiguousarray(change(row, own, right).astype(own.dtype))
    return stored_as(right, fields)


def negated(choice: str, x: F32, format: str, options: Options = ()) -> Stored:
    """A scale with the opposite sign, and matching codes and sums."""
    right = right_cast(x, format, options, choice)
    fields = dict(right.table.fields_of(right.by_name))
    for row in right.table.fields:
        if row.role in ("scale", "codes", "sum"):
            fields[row.name] = np.negative(fields[row.name]) + np.zeros((), fields[row.name].dtype)  # no -0
    return stored_as(right, fields)


def inside(order: Order, row: Field, array: Array, weights: Stored) -> Array:
    """The codes of each integer in another order."""
    bits = bits_of(weights)
    codes = split(array, bits)
    count = codes.shape[-1]
    return joined(codes[..., order(np.arange(count), count) % count], array, bits)


def of_field_of_codes(row: Field) -> Iterator[tuple[str, str, Written]]:
    """Other orders of the codes in an integer."""
    if row.role not in ("codes", "zero") or row.dtype in FLOATS or row.numpy_dtype.kind not in "iu":
        return
    for name, words, order in (*INSIDE, *NIBBLES):
        yield f"{name}-in-integers", f"with the codes of each integer {words}", partial(inside, order)


def of_fields(format: str) -> Named:
    table = FORMATS[format]
    choices = tuple(table.encode)[:MOST_CHOICES]
    for choice in choices:
        cause = "The scale and the codes have the opposite sign."
        yield "cast-scale-and-codes-negated", cause, partial(negated, choice)
    for row in table.fields:
        for name, words, change in (*of_field_of_codes(row), *of_field(row, table.block is not None)):
            for choice in choices:
                wrong = partial(written, choice, row.name, change)
                yield f"cast-{row.role}-{name}", f"The field {row.name} is written {words}.", wrong


# **Other levels.**

FP8_LEVELS = (240, 224, 256, 127, 255, 480, 57344)
QUOTIENTS: tuple[Callable[[F32, F32, F32, np.float32], Array], ...] = (
    lambda x, m, d, levels: np.asarray(x / d),
    lambda x, m, d, levels: np.asarray(x * (np.float32(1) / d)),
    lambda x, m, d, levels: np.asarray(x * (levels / m)),
)
FP8_AXES = {"fp8-channel": 1, "fp8-tensor": None}


def in_fp8(levels: int, quotient: Callable[..., Array], x: F32, format: str, options: Options = ()) -> Stored:
    """A cast to FP8 with a scale that is the largest magnitude over another number.

    Raises:
        ValueError: the format has other scales.
    """
    if format not in FP8_AXES:
        raise ValueError("scales belong to blocks")
    right, wide, top = quantized(x, format, options), x.astype(np.float32), np.float32(levels)
    m = np.abs(wide).max(axis=FP8_AXES[format], keepdims=True)
    d = m / top
    with np.errstate(all="ignore"):
        numbers = np.where(d == 0, np.float32(0), quotient(wide, m, d, top))
    elements = rounded(np.nan_to_num(numbers).astype(np.float64), "float8_e4m3fn", "saturate")
    return stored_as(right, {"weight": elements, "weight_scale": d.reshape(right.by_name["weight_scale"].shape)})


KIVI = ("kivi-keys", "kivi-values", "kivi-keys-bf16", "kivi-values-bf16")
KIVI_LEVELS: tuple[tuple[str, Callable[[int], int]], ...] = (
    ("2^b", lambda bits: 2**bits),
    ("2^b - 2", lambda bits: 2**bits - 2),
    ("2^(b-1)", lambda bits: 2 ** (bits - 1)),
    ("2^b - 1", lambda bits: 2**bits - 1),
)
INTEGERS: tuple[tuple[str, str, Callable[[Array], Array]], ...] = (
    ("", "", np.rint),
    ("cast-truncates", "Codes are rounded towards zero.", np.trunc),
    ("cast-rounds-up", "Codes are rounded up.", np.ceil),
)


def in_kivi(
    levels: Callable[[int], int],
    integer: Callable[[Array], Array],
    in_float32: bool,
    x: F32,
    format: str,
    options: Options = (),
) -> Stored:
    """A cast to KIVI's groups with another number of levels or another rounding of codes.

    Raises:
        ValueError: the format has no such groups.
    """
    if format not in KIVI:
        raise ValueError("no format of KIVI")
    right, chosen = quantized(x, format, options), dict(options)
    own: Name = "bfloat16" if format.endswith("bf16") else "float16"
    step = partial(stepped, "float32" if in_float32 else own)
    keys, bits = "keys" in format, chosen["bits"]
    lines = step((x.T if keys else x).astype(np.float32))
    groups = in_groups(lines, chosen["tokens" if keys else "group_size"])
    least = groups.min(axis=-1, keepdims=True)
    scale = step(step(groups.max(axis=-1, keepdims=True) - least) / np.float32(levels(bits)))
    with np.errstate(all="ignore"):
        real = np.where(scale == 0, np.float32(0), step(step(groups - least) / scale))
    codes = integer(np.nan_to_num(real)).clip(0, 2**bits - 1).astype(np.uint32)
    codes = codes.reshape(len(lines), -1)[:, : lines.shape[1]]
    filled = np.pad(codes, ((0, 0), (0, -codes.shape[1] % (32 // bits))))
    kept = {
        name: each[..., 0].astype(right.by_name[name].dtype)
        for name, each in {"scale": scale, "minimum": least}.items()
    }
    return stored_as(right, {"codes": join(filled, bits, np.int32), **kept})


def of_levels() -> Named:
    for levels in FP8_LEVELS:
        cause = f"The scale is the largest magnitude over {levels}, not 448."
        for quotient in QUOTIENTS:
            yield f"cast-fp8-by-{levels}", cause, partial(in_fp8, levels, quotient)
    for in_float32 in (True, False):
        for words, count in KIVI_LEVELS[:-1]:
            cause = f"The range of a group is divided by {words}, not 2^b - 1."
            yield "cast-range-over-other-levels", cause, partial(in_kivi, count, np.rint, in_float32)
        for name, cause, integer in INTEGERS[1:]:
            yield name, cause, partial(in_kivi, KIVI_LEVELS[-1][1], integer, in_float32)


@cache
def members(format: str) -> tuple[Defect, ...]:
    """All members for casts to one format."""
    found = (*of_levels(), *of_fields(format))
    return tuple(arithmetical(name, cause, "", {OPERATION: wrong}) for name, cause, wrong in found)


def of_casts_to_formats(failures: list[Any], operation: str) -> tuple[Defect, ...]:
    """The members for the format of failures, if it is one."""
    if operation != OPERATION:
        return ()
    formats = {each.right.format for each in failures}
    return members(formats.pop()) if len(formats) == 1 else ()
