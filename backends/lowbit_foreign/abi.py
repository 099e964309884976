"""The structures and numbers of ``include/lowbit.h``, as ctypes sees them; the header says what they mean."""

import ctypes
from ctypes import POINTER, c_char_p, c_double, c_int32, c_int64, c_size_t, c_uint32, c_void_p
from enum import IntEnum

import numpy as np

from lowbit.backend.wire import OWN_DTYPES, dtype_name

ABI = 1
MESSAGE_BYTES = 1024


class Status(IntEnum):
    """The status that the functions of a library return."""

    OK = 0
    NOT_DECLARED = 1
    BAD_ARGUMENT = 2
    FAILED = 3


class Kind(IntEnum):
    """The kind of a value."""

    NONE = 0
    BOOL = 1
    INTEGER = 2
    REAL = 3
    TEXT = 4
    ARRAY = 5
    LIST = 6
    RECORD = 7


NO_DTYPE = 0
NAMES = ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", *OWN_DTYPES)
"""In the order of the header, which appends those of `lowbit.numbers.floats` that numpy lacks."""
DTYPES: dict[int, np.dtype[np.generic]] = {
    number: OWN_DTYPES[name] if name in OWN_DTYPES else np.dtype(name) for number, name in enumerate(NAMES, 1)
}
DTYPE_NUMBERS = {dtype_name(dtype): number for number, dtype in DTYPES.items()}


class Value(ctypes.Structure):
    """``lowbit_value``."""

    _fields_ = (
        ("size", c_uint32),
        ("kind", c_int32),
        ("path", c_char_p),
        ("dtype", c_int32),
        ("ndim", c_int32),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("data", c_void_p),
        ("integer", c_int64),
        ("real", c_double),
        ("text", c_char_p),
    )


ResultFunction = ctypes.CFUNCTYPE(c_void_p, c_void_p, c_char_p, c_int32, c_int32, c_int32, POINTER(c_int64))
"""``lowbit_result_function``."""


class Call(ctypes.Structure):
    """``lowbit_call``."""

    _fields_ = (
        ("size", c_uint32),
        ("abi", c_uint32),
        ("operation", c_char_p),
        ("handle", c_void_p),
        ("count", c_int64),
        ("arguments", POINTER(Value)),
        ("result", ResultFunction),
        ("owner", c_void_p),
        ("message", c_void_p),
        ("message_size", c_size_t),
    )
