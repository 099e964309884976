"""Registers: the types of the values in bodies, and values made of others.

A value of a vector type is an array with its lanes along the last axis, of numbers or of unknowns. One of a struct is
a mapping of its fields.
"""

import re
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from lowbit_prove.cplusplus import Declarations
from lowbit_prove.terms import UndecidedError


@dataclass(frozen=True)
class Vector:
    """A fixed number of elements of a dtype; also stands for a C++ array."""

    dtype: np.dtype[Any]
    lanes: int

    @property
    def size(self) -> int:
        """In bytes."""
        return self.lanes * self.dtype.itemsize


@dataclass(frozen=True)
class Struct:
    """Fields with their types, in order."""

    fields: tuple[tuple[str, "Type"], ...]

    @property
    def size(self) -> int:
        """In bytes."""
        return sum(kind.size for _, kind in self.fields)


Type: TypeAlias = Vector | Struct


def vector(name: str) -> Vector | None:
    """The registers of ARM and of x86 by their C++ names; those of x86 hold 32-bit numbers.

    >>> vector("int16x8_t"), vector("uint8x16x2_t").lanes, vector("__m256i").lanes
    (Vector(dtype=dtype('int16'), lanes=8), 32, 8)
    """
    if arm := re.fullmatch(r"(u?int|float)(\d+)x(\d+)(?:x(\d))?_t", name):
        return Vector(np.dtype(f"{arm[1]}{arm[2]}"), int(arm[3]) * int(arm[4] or 1))
    if x86 := re.fullmatch(r"__m(\d+)(i?)d?", name):
        return Vector(np.dtype(np.uint32 if x86[2] else np.float32), int(x86[1]) // 32)
    return None


def scalar(name: str) -> np.dtype[Any]:
    """The type of one number, by its name in C++.

    Raises:
        UndecidedError: it is not known.
    """
    plain = {"float": "float32", "int": "int32"}.get(name, re.sub(r"^std::|_t$", "", name))
    if not re.fullmatch(r"u?int\d+|float\d+", plain):
        raise UndecidedError(f"{name} is not a supported type")
    return np.dtype(plain)


def type_of(name: str, declared: Declarations, length: int | None = None) -> Type:
    """A type by its name; with a length, an array of that length.

    Raises:
        UndecidedError: it is not known.
    """
    if length is not None:
        return Vector(scalar(name), length)
    if name in declared.structs:
        return Struct(tuple((field, type_of(kind, declared)) for field, kind in declared.structs[name]))
    name, size = declared.others.get(name, (name, None))
    if (found := vector(name)) is not None:
        return found
    each = scalar(name)
    if size is None:
        raise UndecidedError(f"{name} is no type of vectors")
    return Vector(each, size // each.itemsize)


def made(kind: Type, given: Any) -> Any:
    """A value of this type: the value itself, or one built from a list in braces.

    Raises:
        UndecidedError: it is a value of another type.
    """
    if isinstance(kind, Struct):
        if isinstance(given, list) and len(given) == len(kind.fields):
            return {field: made(each, part) for (field, each), part in zip(kind.fields, given, strict=True)}
        if isinstance(given, dict) and [*given] == [field for field, _ in kind.fields]:
            return {field: made(each, given[field]) for field, each in kind.fields}
        raise UndecidedError("a value has other fields than its type")
    if isinstance(given, list):
        given = _joined(given)
    if given is None or isinstance(given, dict | int) or given.dtype != kind.dtype or given.shape[-1:] != (kind.lanes,):
        raise UndecidedError(f"a value is not {kind.dtype} of {kind.lanes} lanes")
    return given


def _joined(parts: list[Any]) -> Any:
    """Numbers as one vector, or concatenated vectors."""
    while len(parts) == 1 and isinstance(parts[0], list):
        (parts,) = parts
    if any(isinstance(each, list | dict | int) for each in parts):
        raise UndecidedError("a list in braces is not read")
    return np.stack(parts) if all(each.ndim == 0 for each in parts) else np.concatenate(parts, axis=-1)


def bytes_of(value: Any) -> Any:
    """The bytes of a value in memory."""
    if isinstance(value, dict):
        return np.concatenate([bytes_of(each) for each in value.values()], axis=-1)
    return value.view(np.uint8)


def from_bytes(kind: Type, given: Any) -> Any:
    """The value of a type that has these bytes in memory."""
    if isinstance(kind, Vector):
        return given.view(kind.dtype)
    found, place = {}, 0
    for field, each in kind.fields:
        found[field], place = from_bytes(each, given[..., place : place + each.size]), place + each.size
    return found
