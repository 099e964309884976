"""Matrices of quantised checkpoints: from the few tensors of each to the stored matrix of its format.

`lowbit.formats.checkpoint.prequantized` finds the tensors of a matrix and its format. Here they are compared with the
sizes that the configuration asks for, before any weight is read, and then read. Their bytes stay as they are: the
result is a `lowbit.tensor_formats.stored.Stored`, which backends multiply by, and no code becomes a float.

**Types of scales.** Some tools store scales in the type of the model, and a chapter has one type. A scale is converted
if that is exact, as bfloat16 to float32 always is; otherwise it is refused.

**What tensors do not say.** bitsandbytes keeps the mean of its scales in a tensor of JSON. GPTQ checkpoints without
``g_idx`` have their groups one after another.

**Several matrices in one tensor**, as Phi-3 has them, lie side by side along N. They are cut where the format's fields
can be cut: a word holds several columns, and one scale may be for a block of them.

**Floats of 16 bits** are stored matrices, too.

Source: the chapters of `lowbit.tensor_formats` name the owners.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import numpy as np

from lowbit.arrays import F32, Array
from lowbit.errors import ArgumentError, FormatError
from lowbit.formats.checkpoint.prequantized import STATE, Packed
from lowbit.formats.checkpoint.tensors import Place, Table, read_coded
from lowbit.system.json_files import Fields, parsed
from lowbit.tensor_formats.bitsandbytes import FP4_TABLE, NESTED, NF4_TABLE, nested
from lowbit.tensor_formats.stored import FORMATS, Stored
from lowbit.tensor_formats.table import OPERATORS, Field, Sizes
from lowbit.text import quoted

ALIASES: Mapping[str, tuple[str, ...]] = {
    "elements": ("weight_packed", "blocks"),
    "scale": ("weight_scale", "scales"),
    "weight_scale": ("weight_scale_inv",),
}
"""Other names of fields in checkpoints; any name may also follow ``weight.``."""
BESIDE = (
    *("input_scale", "activation_scale", "input_global_scale", "weight_shape", "weight.quant_map"),
    *("k_scale", "v_scale", "q_scale"),
    *("nbits", "group_size", "axis", "shape", "packing", "view_as_float", "unpack_view_dtype", "compute_dtype"),
    *("quant_zero", "quant_scale", "channel_wise", "optimize", "round_zero", "offload_meta", "encoded_state_dict"),
    "stores_quant_config",
)
"""What tools store besides the fields of a matrix: scales of activations, and copies of the configuration."""
MOST_STATE_BYTES = 2**16
OF_16_BITS: Mapping[str, str] = {"F16": "float16", "BF16": "bfloat16"}
"""The types of floats that stay as stored, and their formats."""


def floats_of_16_bits(place: Place, name: str, numbers: Array) -> Stored:
    """N × K floats of a tensor, as the matrix of their format.

    Raises:
        FormatError: one of them is not finite.
    """
    try:
        return Stored(OF_16_BITS[place.type], numbers.shape[1], numbers.shape[0], (numbers,))
    except ArgumentError as error:
        file = place.shard.path.name
        raise FormatError(file, f"a number in tensor {quoted(name)}", error.given, "finite numbers") from error


def field_part(matrix: Packed, field: Field) -> str | None:
    """The end of the name of a field's tensor; None if the matrix has no such tensor."""
    names = (field.name, f"weight.{field.name}", *ALIASES.get(field.name, ()))
    return next((name for name in names if name in matrix.tensors), None)


def check(table: Table, matrix: Packed, rows: int, columns: int) -> None:
    """Refuse a matrix that is not K × N, or has missing tensors, extra tensors, or wrong shapes.

    Raises:
        FormatError: names the file and the tensor.
    """
    file = _file(table, matrix)
    sizes = _sizes(file, matrix, rows, columns)
    unknown = {part for part in matrix.tensors if part not in BESIDE and not part.startswith(STATE)}
    for field in FORMATS[matrix.format].tensors:
        part = field_part(matrix, field)
        if part is None:
            if not _is_derived(matrix, field):
                allowed = f"there, as the format {matrix.format} asks for"
                raise FormatError(file, f"tensor {quoted(f'{matrix.module}.{field.name}')}", "missing", allowed)
            continue
        unknown.discard(part)
        name = matrix.tensors[part]
        with _in_words(file, matrix):
            wanted = field.sizes(sizes)
        if _without_ones(table[name].shape) != _without_ones(wanted):
            allowed = " x ".join(map(str, wanted))
            raise FormatError(
                table[name].shard.path.name, f"shape of tensor {quoted(name)}", table[name].shape, allowed
            )
    if unknown:
        name = matrix.tensors[min(unknown)]
        allowed = f"those of a matrix in the format {matrix.format}"
        raise FormatError(table[name].shard.path.name, "tensor", quoted(name), allowed)


def _file(table: Table, matrix: Packed) -> str:
    """The file of its first tensor, for messages."""
    return table[next(iter(matrix.tensors.values()))].shard.path.name


@contextmanager
def _in_words(file: str, matrix: Packed) -> Iterator[None]:
    """Add the file and the matrix to an error of its format."""
    try:
        yield
    except ArgumentError as error:
        field = f"{error.argument} of matrix {quoted(matrix.module)}"
        raise FormatError(file, field, error.given, error.allowed) from error


def _sizes(file: str, matrix: Packed, rows: int, columns: int) -> Sizes:
    found = matrix.layout.sizes
    if found is not None and found != (rows, columns):
        given = " x ".join(map(str, found))
        raise FormatError(file, f"shape of matrix {quoted(matrix.module)}", given, f"{rows} x {columns}")
    with _in_words(file, matrix):
        return FORMATS[matrix.format].sizes(rows, columns, matrix.layout.options)


def _is_derived(matrix: Packed, field: Field) -> bool:
    """Whether a field without its own tensor is known: the order of groups, or a field of the JSON."""
    return field.name == "g_idx" or (field.name == "nested_offset" and any(map(_is_state, matrix.tensors)))


def _is_state(part: str) -> bool:
    return part.startswith(STATE)


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Sizes other than 1; tools differ in whether a single number has a dimension."""
    return tuple(size for size in shape if size != 1)


# **Reading.**


def read(table: Table, matrix: Packed, rows: int, columns: int) -> Stored:
    """A matrix that `check` accepted, K × N.

    Raises:
        FormatError: a file has changed since it was opened; a number that the format does not allow.
    """
    file, options = _file(table, matrix), tuple(matrix.layout.options.items())
    sizes = _sizes(file, matrix, rows, columns)
    state = _state(table, matrix, sizes)
    arrays = []
    for field in FORMATS[matrix.format].tensors:
        part = field_part(matrix, field)
        if part is None:
            arrays.append(_derived(field, sizes, state))
            continue
        name = matrix.tensors[part]
        arrays.append(_as(field, read_coded(table, name), name, table[name]).reshape(field.sizes(sizes)))
    with _in_words(file, matrix):
        return Stored(matrix.format, rows, columns, tuple(arrays), options)


def _as(field: Field, array: Array, name: str, place: Place) -> Array:
    """The numbers of a tensor in the type of its field."""
    wanted = field.numpy_dtype
    if array.dtype == wanted:
        return array
    if array.dtype == np.uint8 and place.type == "U8" and wanted.itemsize == 1:  # patterns of a float of 8 bits
        return array.view(wanted)
    if field.role in ("scale", "zero") and array.dtype.kind not in "iu":
        with np.errstate(over="ignore", invalid="ignore"):
            found = array.astype(wanted)
        if np.array_equal(found.astype(np.float64), array.astype(np.float64), equal_nan=True):
            return found
    allowed = f"{wanted.name}, or numbers that it holds exactly"
    raise FormatError(place.shard.path.name, f"type of tensor {quoted(name)}", place.type, allowed)


def _derived(field: Field, sizes: Sizes, state: Fields | None) -> Array:
    if state is None:
        return (np.arange(sizes.K) // sizes["group_size"]).astype(field.numpy_dtype)
    return np.array([state.value("nested_offset", float)], np.float32)


def _state(table: Table, matrix: Packed, sizes: Sizes) -> Fields | None:
    """The JSON that bitsandbytes stores with a matrix, checked against its tensors; None for other methods."""
    part = next(filter(_is_state, matrix.tensors), None)
    if part is None:
        return None
    name = matrix.tensors[part]
    file = table[name].shard.path.name
    if table[name].nbytes > MOST_STATE_BYTES:
        raise FormatError(file, f"size of tensor {quoted(name)}", table[name].nbytes, f"at most {MOST_STATE_BYTES}")
    state = parsed(file, read_coded(table, name).tobytes())
    expected = {"quant_type": part.removeprefix(STATE), "blocksize": sizes["blocksize"], "shape": [sizes.N, sizes.K]}
    if matrix.format.endswith("-double"):
        expected["nested_blocksize"] = NESTED
    for key, allowed in expected.items():
        if (given := state.values.get(key)) != allowed:
            raise FormatError(file, f"{key} in tensor {quoted(name)}", given, repr(allowed))
    if (numbers := matrix.tensors.get("weight.quant_map")) is not None:
        wanted: F32 = FP4_TABLE if expected["quant_type"] == "fp4" else NF4_TABLE
        if not np.array_equal(read_coded(table, numbers), wanted):
            raise FormatError(file, f"tensor {quoted(numbers)}", "another table", f"that of {expected['quant_type']}")
    return state


# **Several matrices in one tensor.**


def cut(matrix: Stored, ends: list[int], packed: Packed, table: Table) -> Iterator[Stored]:
    """The matrices of consecutive columns, cut before each of these ends.

    Args:
        matrix: from `read`.
        ends: of the matrices, ascending; the last is N.
        packed: its tensors, for messages.
        table: of the checkpoint.

    Raises:
        FormatError: a format whose bytes belong to columns on both sides of an end.
    """
    matrix, file = _with_plain_scales(matrix), _file(table, packed)
    for begin, end in pairwise((0, *ends)):
        yield _columns(matrix, begin, end, packed.module, file)


def _with_plain_scales(matrix: Stored) -> Stored:
    """The same matrix without double quantisation, whose blocks of scales span rows; the numbers are exactly the
    same."""
    if not matrix.format.endswith("-double"):
        return matrix
    tensors = matrix.by_name
    plain = (tensors["weight"], np.asarray(nested(tensors), np.float32))
    return Stored(matrix.format.removesuffix("-double"), matrix.rows, matrix.columns, plain, matrix.options)


def _columns(matrix: Stored, begin: int, end: int, module: str, file: str) -> Stored:
    parts = []
    for field, array in zip(matrix.table.tensors, matrix.tensors, strict=True):
        index = tuple(_slice(size, matrix, begin, end) for size in field.shape)
        if matrix.format.startswith("hqq") or None in index:
            allowed = "a format whose bytes can be cut where the matrices that a tensor holds meet"
            raise FormatError(file, f"format of matrix {quoted(module)}", matrix.format, allowed)
        parts.append(np.ascontiguousarray(array[index]))
    return Stored(matrix.format, matrix.rows, end - begin, tuple(parts), matrix.options)


def _slice(size: str | int, matrix: Stored, begin: int, end: int) -> slice | None:
    """The part of some columns along an axis of a field; None if they share a number with others at an end."""
    first, *steps = OPERATORS.split(str(size))
    if "N" not in (first, *steps[1::2]):
        return slice(None)

    def place(columns: int) -> Fraction:
        at = replace(matrix.sizes, N=columns)
        found = Fraction(at.size(first, "size"))
        for operator, name in zip(steps[::2], steps[1::2], strict=True):
            by = at.size(name, "size")
            found = found * by if operator == "*" else found / by
        return found

    first_place, last_place = place(begin), place(end)
    if first_place.denominator > 1 or (last_place.denominator > 1 and end < matrix.columns):
        return None
    return slice(int(first_place), math.ceil(last_place))
