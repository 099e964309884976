r"""Values: how the arguments and results of operations are written outside Python.

A kernel need not be written in Python to be tested against this specification. Test vectors are files, a program may
answer on its standard output, and the code under test runs in a process of its own. All of these need one form for
arguments that does not depend on Python's objects. This chapter defines it: a *tree* of what JSON can express, in which
only the bytes of arrays are left to the carrier.

====================  ================================================================================
value                 tree
====================  ================================================================================
None, bool, int, str  itself
float                 itself; ``{"float": "nan"}``, ``"inf"`` or ``"-inf"`` where JSON has no number
list or tuple         an array of trees; it comes back as a tuple
numpy scalar          ``{"scalar": DTYPE, "value": tree}``
numpy array           ``{"array": DTYPE, "shape": [...], ...}`` and what the carrier adds
dataclass of lowbit   ``{"type": "affine.QuantizedMatrix", "fields": {NAME: tree, ...}}``
====================  ================================================================================

DTYPE is numpy's short name with the byte order in front, ``<f4`` for a little-endian float32; a float of the chapter
`floats` that numpy lacks has its own name, ``bfloat16``, and its elements are bit patterns, little-endian (those of
``>bfloat16`` are big-endian). The carrier of JSON files adds ``"data"``, the elements in C order as base64.

>>> import numpy as np
>>> from lowbit.quantization.bfp import Format
>>> as_json(np.array([[1, 2]], np.uint8))
{'array': '|u1', 'shape': [1, 2], 'data': 'AQI='}
>>> as_json(Format(32, 4))
{'type': 'bfp.Format', 'fields': {'block': 32, 'mantissa': 4, 'exponent': 8}}
>>> from_json(as_json((1, float("inf"), np.float32(0.5))))
(1, inf, np.float32(0.5))

Trees are not trusted. A tree can only make these values, and of the dataclasses only those that operations take or
return (`KINDS`), each through its own checks. Every size is compared with a limit, and with the bytes that are present,
before memory is allocated. An error names the place in the tree:

>>> from_json({"type": "bfp.Format", "fields": {"block": 32, "mantissa": 10**30, "exponent": 8}})
Traceback (most recent call last):
lowbit.errors.ArgumentError: value.mantissa is an integer of 100 bits; allowed: one of at most 64 bits
>>> from_json([{"array": "<f4", "shape": [2**30], "data": ""}])
Traceback (most recent call last):
lowbit.errors.ArgumentError: data of value[0] is 0 characters; allowed: 5726623064, for float32 (1073741824,)
"""

import base64
import binascii
import dataclasses
import importlib
import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from types import MappingProxyType
from typing import Any

import numpy as np

from lowbit.arrays import Array
from lowbit.errors import ArgumentError
from lowbit.numbers.floats import FLOATS
from lowbit.text import kind_of, quoted

Tree = Any
"""What JSON can say: None, bool, int, float, str, a list of trees, or a dictionary from strings to trees."""

Put = Callable[[Array], dict[str, Tree]]
"""Passes an array's bytes to the carrier and returns the entry of the tree that locates them."""
Get = Callable[[np.dtype[Any], tuple[int, ...], dict[str, Tree]], Array]
"""Returns the carrier's array of this dtype and shape, given its entry in the tree."""

NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

KINDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "affine.QuantizedMatrix": ("lowbit.quantization.affine", "QuantizedMatrix"),
        "bfp.Blocks": ("lowbit.quantization.bfp", "Blocks"),
        "bfp.Format": ("lowbit.quantization.bfp", "Format"),
        "bfp_dot.BlockSums": ("lowbit.quantization.bfp_dot", "BlockSums"),
        "bfp_storage.StoredBlocks": ("lowbit.quantization.bfp_storage", "StoredBlocks"),
        "hqq.HqqMatrix": ("lowbit.quantization.hqq", "HqqMatrix"),
        "hqq_numbers.EightBit": ("lowbit.quantization.hqq_numbers", "EightBit"),
        "layouts.ColumnPanels": ("lowbit.kernels.layouts", "ColumnPanels"),
        "layouts.NestedPanels": ("lowbit.kernels.layouts", "NestedPanels"),
        "layouts.ZCurve": ("lowbit.kernels.layouts", "ZCurve"),
        "offload.Arrangement": ("lowbit.moe.offload", "Arrangement"),
        "offload.Event": ("lowbit.moe.offload", "Event"),
        "offload.Request": ("lowbit.moe.offload", "Request"),
        "formats.Stored": ("lowbit.tensor_formats.stored", "Stored"),
        "rope.Layout": ("lowbit.attention.rope", "Layout"),
        "rope.Rotation": ("lowbit.attention.rope", "Rotation"),
    }
)
"""The dataclasses that have a tree: the name on the wire, which never changes, to the module and the class."""
MOST_DEPTH = 16
"""The deepest nesting of lists and objects; a result of the specification has five levels."""
MOST_DIMENSIONS = 8
MOST_ELEMENTS = 2**32
"""The most elements of an array, a size of 0 counted as 1."""
DTYPE = re.compile(r"[|<>][biufc]\d{1,2}")
OWN_DTYPES: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {name: kind.dtype for name, kind in FLOATS.items() if not kind.native}
)
"""The dtypes that are not numpy's own, by their names on the wire."""


def encode(value: object, put: Put) -> Tree:
    """The tree of a value, whose arrays go to `put`.

    Raises:
        ArgumentError: the value, or a part of it, is of a kind that no operation takes or returns.
    """
    match value:
        case None | bool() | str():
            return value
        case np.generic() if not isinstance(value.item(), np.generic):  # a long double stays as it is
            return {"scalar": dtype_name(value.dtype), "value": encode(value.item(), put)}
        case int():
            return int(value)
        case float():
            return float(value) if math.isfinite(value) else {"float": repr(float(value))}
        case list() | tuple():
            return [encode(part, put) for part in value]
        case np.ndarray():
            return {"array": dtype_name(value.dtype), "shape": list(value.shape)} | put(value)
    own: Any = type(value)
    if name := _type_name(own):
        fields = _field_names(_known(name))
        return {"type": name, "fields": {field: encode(getattr(value, field), put) for field in fields}}
    raise ArgumentError("value", kind_of(value), "numbers, text, arrays, sequences, dataclasses of lowbit")


def decode(tree: Tree, get: Get, name: str = "value") -> Any:
    """The value of a tree, whose arrays come from `get`.

    Args:
        tree: a tree from `encode`, which need not be trusted.
        get: the carrier; it raises an `ArgumentError` if it has no such array.
        name: what the tree is, for messages.

    Raises:
        ArgumentError: the tree is malformed or larger than the limits of this chapter, or a dataclass refuses its
            fields. The message names the place.
    """
    return _decode(tree, get, name, MOST_DEPTH)


def _decode(tree: Tree, get: Get, name: str, depth: int) -> Any:
    match tree:
        case None | bool() | str():
            return tree
        case int():
            if not -(2**63) <= tree < 2**64:
                raise ArgumentError(name, f"an integer of {tree.bit_length()} bits", "one of at most 64 bits")
            return tree
        case float():
            if not math.isfinite(tree):  # 1e999, which JSON readers turn into infinity
                raise ArgumentError(name, tree, "a finite number, or an object that says which it is")
            return tree
    if depth == 0:
        raise ArgumentError(name, "nested more deeply", f"at most {MOST_DEPTH} lists and objects inside one another")
    match tree:
        case list():
            return tuple(_decode(part, get, f"{name}[{index}]", depth - 1) for index, part in enumerate(tree))
        case {"float": str(number), **more} if number in NOT_FINITE and not more:
            return NOT_FINITE[number]
        case {"scalar": str(dtype), "value": value, **more} if not more:
            return _scalar(name, _dtype(name, dtype), _decode(value, get, name, depth - 1))
        case {"array": str(dtype), "shape": list(shape)}:
            kind, sizes = _dtype(name, dtype), _shape(name, shape)
            try:
                return get(kind, sizes, tree)
            except ArgumentError as error:
                raise ArgumentError(f"{error.argument} of {name}", error.given, error.allowed) from None
        case {"type": str(kind), "fields": dict(fields), **more} if not more:
            return _build(name, kind, fields, get, depth)
    raise ArgumentError(name, _shown(tree), "one of the forms of the chapter `wire`")


def _build(name: str, kind: str, fields: dict[str, Tree], get: Get, depth: int) -> Any:
    """A dataclass, through its own checks."""
    if kind not in KINDS:
        allowed = "a dataclass of a chapter, such as affine.QuantizedMatrix"
        raise ArgumentError(f"type of {name}", quoted(kind), allowed)
    own = _known(kind)
    known = _field_names(own)
    if fields.keys() != set(known):
        raise ArgumentError(f"fields of {name}", _shown(sorted(fields)), f"{sorted(known)}")
    values = {field: _decode(part, get, f"{name}.{field}", depth - 1) for field, part in fields.items()}
    try:
        return own(**values)
    except ArgumentError as error:
        raise ArgumentError(f"{name}: {error.argument}", error.given, error.allowed) from None


def _shown(tree: Tree) -> str:
    """A malformed tree in a few characters, without its inner parts, since there may be very many."""
    match tree:
        case dict():
            return f"an object with {quoted(', '.join(list(tree)[:8]))}"
        case list():
            return f"a list of {quoted(', '.join(str(part)[:40] for part in tree[:8]))}"
    return kind_of(tree)


def dtype_name(dtype: np.dtype[Any]) -> str:
    """The name of a dtype on the wire.

    Raises:
        ArgumentError: a dtype of something other than numbers.
    """
    if dtype.name in OWN_DTYPES:
        return dtype.name if dtype == OWN_DTYPES[dtype.name] else f">{dtype.name}"
    if dtype.kind not in "biufc":
        raise ArgumentError("dtype", dtype, "booleans, integers, floats or complex numbers")
    return dtype.str


def _dtype(name: str, given: str) -> np.dtype[Any]:
    if given.removeprefix(">") in OWN_DTYPES:
        own = OWN_DTYPES[given.removeprefix(">")]
        return own.newbyteorder(">") if given.startswith(">") else own
    try:
        dtype = np.dtype(given) if DTYPE.fullmatch(given) else None
    except TypeError:
        dtype = None
    if dtype is None or dtype.str != given:
        raise ArgumentError(f"dtype of {name}", quoted(given), "a short name of numpy such as '<f4'")
    return dtype


def _shape(name: str, shape: list[Tree]) -> tuple[int, ...]:
    sizes = len(shape) <= MOST_DIMENSIONS and all(type(size) is int and 0 <= size <= MOST_ELEMENTS for size in shape)
    if not sizes or math.prod(max(size, 1) for size in shape) > MOST_ELEMENTS:
        allowed = f"at most {MOST_DIMENSIONS} integers from 0, for at most {MOST_ELEMENTS} elements"
        raise ArgumentError(f"shape of {name}", _shown(shape), allowed)
    return tuple(shape)


def _scalar(name: str, dtype: np.dtype[Any], value: object) -> Any:
    """The scalar of this dtype that equals this number."""
    kinds: dict[str, tuple[type, ...]] = {"b": (bool,), "i": (int,), "u": (int,), "f": (float, int)}
    number = None
    if type(value) in kinds.get(dtype.kind, ()):
        with suppress(OverflowError), np.errstate(over="ignore"):
            number = dtype.type(value)
    if number is None or (number.item() != value and not (number != number and value != value)):
        shown = str(value) if type(value) in (bool, int, float) else kind_of(value)
        raise ArgumentError(name, shown, f"a number that fits {dtype}")
    return number


# **Dataclasses** have the names in `KINDS`, independent of their modules; a subclass counts as the class it derives
# from.


@cache
def _type_name(kind: type) -> str:
    places = {(base.__module__, base.__qualname__) for base in kind.__mro__}
    return next((name for name, place in KINDS.items() if place in places), "")


@cache
def _field_names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind) if field.init)


@cache
def _known(name: str) -> type:
    module, attribute = KINDS[name]
    kind: type = getattr(importlib.import_module(module), attribute)
    return kind


# **The carrier of JSON files.**


def as_json(value: object) -> Tree:
    """The tree of a value with its arrays inside, as base64 of their elements in C order.

    Raises:
        ArgumentError: see `encode`.
    """
    return encode(value, lambda array: {"data": base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()})


def from_json(tree: Tree, name: str = "value") -> Any:
    """The value of such a tree; its arrays are new and may be written to.

    Args:
        tree: from `as_json`.
        name: what it is, for messages.

    Raises:
        ArgumentError: see `decode`; or the bytes of an array do not match its shape.
    """
    return decode(tree, _from_base64, name)


def _from_base64(dtype: np.dtype[Any], shape: tuple[int, ...], tree: dict[str, Tree]) -> Array:
    """The array; the length of its text must match its shape before it is decoded."""
    wanted = math.prod(shape) * dtype.itemsize
    length, data = 4 * -(-wanted // 3), tree.get("data")
    if not isinstance(data, str) or len(data) != length:
        given = f"{len(data)} characters" if isinstance(data, str) else kind_of(data)
        raise ArgumentError("data", given, f"{length}, for {dtype} {shape}")
    try:
        content = bytearray(base64.b64decode(data, validate=True))
    except (binascii.Error, ValueError):
        content = bytearray()
    if len(content) != wanted:
        raise ArgumentError("data", "not base64, or of another length", f"{wanted} bytes for {dtype} {shape}")
    return np.frombuffer(content, dtype).reshape(shape)
