r"""Values: how the arguments and results of operations are written down.

A kernel need not be written in Python to be held to this specification. Test vectors lie in files, a program may
answer on its standard output, and the code under test runs in a process of its own. All of them need one answer to the
question what an argument *is* once Python's objects are taken away. This chapter gives it: a *tree* of what JSON can
say, in which only the bytes of arrays are left to the carrier.

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

DTYPE is numpy's short name with the byte order in front, ``<f4`` for a little-endian float32. The carrier of JSON
files adds ``"data"``, the elements in C order as base64.

>>> import numpy as np
>>> from lowbit.bfp import Format
>>> as_json(np.array([[1, 2]], np.uint8))
{'array': '|u1', 'shape': [1, 2], 'data': 'AQI='}
>>> as_json(Format(32, 4))
{'type': 'bfp.Format', 'fields': {'block': 32, 'mantissa': 4, 'exponent': 8}}
>>> from_json(as_json((1, float("inf"), np.float32(0.5))))
(1, inf, np.float32(0.5))

Reading trusts nobody: a tree can make nothing but these values, and a dataclass only through its own checks.

Source: lowbit's own.
"""

import base64
import binascii
import dataclasses
import math
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit.errors import ArgumentError

Tree = Any
"""What JSON can say: None, bool, int, float, str, a list of trees, or a dictionary from strings to trees."""
Array = npt.NDArray[Any]
Put = Callable[[Array], dict[str, Tree]]
"""Hands an array's bytes to the carrier, and answers with what the tree must say to find them again."""
Get = Callable[[np.dtype[Any], tuple[int, ...], dict[str, Tree]], Array]
"""The array of this dtype and shape that a carrier holds, given all that the tree says of it."""

NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def encode(value: object, put: Put) -> Tree:
    """The tree of a value, whose arrays go to `put`.

    Raises:
        ArgumentError: the value, or a part of it, is of a kind that no operation takes or gives.
    """
    match value:
        case None | bool() | str():
            return value
        case np.generic():
            return {"scalar": _dtype_name(value.dtype), "value": encode(value.item(), put)}
        case int():
            return int(value)
        case float():
            return float(value) if math.isfinite(value) else {"float": repr(float(value))}
        case list() | tuple():
            return [encode(part, put) for part in value]
        case np.ndarray():
            return {"array": _dtype_name(value.dtype), "shape": list(value.shape)} | put(value)
    own: Any = type(value)
    if name := _type_name(own):
        fields = _field_names(_type(name))
        return {"type": name, "fields": {field: encode(getattr(value, field), put) for field in fields}}
    raise ArgumentError("value", f"a {type(value).__name__}", "numbers, text, arrays, sequences, dataclasses of lowbit")


def decode(tree: Tree, get: Get) -> Any:
    """The value of a tree, whose arrays come from `get`.

    Raises:
        ArgumentError: the tree is malformed, or a dataclass refuses its fields.
    """
    match tree:
        case None | bool() | int() | float() | str():
            return tree
        case list():
            return tuple(decode(part, get) for part in tree)
        case {"float": str(name)} if name in NOT_FINITE:
            return NOT_FINITE[name]
        case {"scalar": str(name), "value": value}:
            return _scalar(_dtype(name), decode(value, get))
        case {"array": str(name), "shape": list(shape)}:
            return get(_dtype(name), _shape(shape), tree)
        case {"type": str(name), "fields": dict(fields)}:
            return _build(_type(name), {str(field): decode(part, get) for field, part in fields.items()})
    raise ArgumentError("tree", repr(tree)[:60], "one of the forms of the chapter `values`")


def _build(kind: type, fields: dict[str, Any]) -> Any:
    known = _field_names(kind)
    if fields.keys() != set(known):
        raise ArgumentError(f"fields of {kind.__name__}", sorted(fields), f"{sorted(known)}")
    try:
        return kind(**fields)
    except (TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError(f"fields of {kind.__name__}", f"refused with {error}", "what its page says") from error


def _dtype_name(dtype: np.dtype[Any]) -> str:
    if dtype.kind not in "biufc":
        raise ArgumentError("dtype", dtype, "booleans, integers, floats or complex numbers")
    return dtype.str


def _dtype(name: str) -> np.dtype[Any]:
    try:
        dtype = np.dtype(name)
    except TypeError:
        dtype = np.dtype(object)
    if dtype.kind not in "biufc" or dtype.str != name:
        raise ArgumentError("dtype", repr(name[:20]), "a short name of numpy such as '<f4'")
    return dtype


def _shape(shape: list[Tree]) -> tuple[int, ...]:
    if len(shape) > 8 or not all(type(size) is int and 0 <= size < 2**40 for size in shape):
        raise ArgumentError("shape", shape, "at most 8 integers from 0")
    return tuple(shape)


def _scalar(dtype: np.dtype[Any], value: object) -> Any:
    try:
        return dtype.type(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ArgumentError("scalar", repr(value)[:40], f"a number that fits {dtype}") from error


# **Dataclasses** are named by their module inside lowbit; a subclass elsewhere counts as what it derives from.


@cache
def _type_name(kind: Any) -> str:
    bases: tuple[type, ...] = kind.__mro__
    for base in bases:
        if base.__module__.startswith("lowbit.") and dataclasses.is_dataclass(base):
            return f"{base.__module__.removeprefix('lowbit.')}.{base.__qualname__}"
    return ""


@cache
def _field_names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind) if field.init)


@cache
def _type(name: str) -> type:
    module, _, attribute = name.rpartition(".")
    kind = getattr(sys.modules.get(f"lowbit.{module}"), attribute, None)
    if not (isinstance(kind, type) and _type_name(kind) == name):
        raise ArgumentError("type", repr(name[:60]), "a dataclass of a chapter, such as affine.QuantizedMatrix")
    return kind


# **The carrier of JSON files.**


def as_json(value: object) -> Tree:
    """The tree of a value with its arrays inside, as base64 of their elements in C order.

    Raises:
        ArgumentError: see `encode`.
    """
    return encode(value, lambda array: {"data": base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()})


def from_json(tree: Tree) -> Any:
    """The value of such a tree; its arrays are new and may be written to.

    Raises:
        ArgumentError: see `decode`; or the bytes of an array are not as many as its shape says.
    """
    return decode(tree, _from_base64)


def _from_base64(dtype: np.dtype[Any], shape: tuple[int, ...], tree: dict[str, Tree]) -> Array:
    wanted = math.prod(shape) * dtype.itemsize
    try:
        data = base64.b64decode(tree.get("data", ""), validate=True)
    except (binascii.Error, TypeError, ValueError):
        data = b"\0" * (wanted + 1)
    if len(data) != wanted:
        raise ArgumentError("data", "not base64, or of another length", f"{wanted} bytes for {dtype} {shape}")
    return np.frombuffer(bytearray(data), dtype).reshape(shape)
