"""Habits of memory: reading and writing where no array is, changing what was given, leaving out what was asked for."""

import ctypes
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from kills.habits import PRODUCTS, Call, Weigh, habits, preparations
from lowbit.arrays import F32, Array
from lowbit.quantization.affine import QuantizedMatrix
from lowbit_conformance.defects.defect import Defect

REGISTER = 32  # bytes of a vector register
OVER = "UNDECLARED_OVERREAD OOB_READ"

DEFECTS: list[Defect] = []
habit, prepared = habits(DEFECTS), preparations(DEFECTS)


def arrays(value: Any) -> Iterator[Array]:
    """The arrays of an argument, those of its fields and parts among them."""
    if isinstance(value, np.ndarray):
        yield value
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from arrays(getattr(value, field.name))
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from arrays(part)


def first(call: Call) -> Array:
    """The first array that was given."""
    return next(array for argument in call.arguments for array in arrays(argument) if array.size)


def address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


def end(array: Array) -> int:
    return address(array) + array.nbytes


# **Reading.**


@habit(
    "H1",
    OVER,
    (*PRODUCTS, "packing.unpack", "attention.attend", "routing.gate"),
    "https://github.com/flame/blis/issues/635",
)
def reads_one_register_past(call: Call) -> Any:
    """The last load is a whole register, past the end of the array."""
    array = first(call)
    if array.nbytes % REGISTER:
        ctypes.string_at(end(array), REGISTER - array.nbytes % REGISTER)
    return call.right()


@habit("H1", "OOB_READ", ("packing.pack", "bfp.cast", "rope.rotate", "gptq.targets"))
def reads_a_row_too_many(call: Call) -> Any:
    """A loop runs one row past the end of its array."""
    array = first(call)
    ctypes.string_at(end(array) + array.shape[-1] * array.itemsize + 64, 4)
    return call.right()


@habit("H1", "OOB_READ", ("linear.qgemv", "affine.dequantize", "bfp.dot", "blocking.apply"))
def reads_before_the_start(call: Call) -> Any:
    """A load begins before its array."""
    ctypes.string_at(address(first(call)) - 4, 4)
    return call.right()


@habit("H1", "OOB_READ NONDETERMINISTIC WRONG", ("linear.qgemv",), "https://github.com/google/XNNPACK/pull/8257")
def padding_is_used(call: Call) -> Any:
    """What lies behind x is added to the result."""
    result, x = call.right(), call.arguments[0]
    if end(x) % 4096 and isinstance(x, np.ndarray):
        beyond = ctypes.c_float.from_address(end(x)).value
        if beyond != 0 and call.out is not None:
            call.out[...] += np.float32(beyond)
    return result


# **Writing.**


@habit("H2", "OOB_WRITE", seen="https://github.com/ooples/AiDotNet.Tensors/pull/993")
def writes_past_the_tail(call: Call) -> Any:
    """Whole registers of 8 columns are stored, past the last of them."""
    result = call.right()
    if call.out is not None and call.out.size % 8:
        ctypes.memset(end(call.out), 0, 4 * (8 - call.out.size % 8))
    return result


@habit("H2", "OOB_WRITE")
def writes_before_the_start(call: Call) -> Any:
    """A store begins before the output."""
    result = call.right()
    if call.out is not None:
        ctypes.memset(address(call.out) - 4, 0, 4)
    return result


@habit(
    "H2",
    "INPUT_MUTATED",
    (*PRODUCTS, "packing.unpack", "attention.softmax", "hqq.codes", "ksort.permutation", "pooling.pool"),
)
def input_changed(call: Call) -> Any:
    """An argument is written to."""
    # Through its address, as C can although numpy says read-only.
    result, array = call.right(), first(call)
    byte = ctypes.c_ubyte.from_address(address(array))
    byte.value ^= 1
    return result


@habit("H2", "INPUT_MUTATED", ("linear.qgemv", "routing.expert"))
def input_changed_and_put_back(call: Call) -> Any:
    """x is scaled in place and scaled back."""
    x = first(call)
    held = ctypes.string_at(address(x), x.itemsize)
    ctypes.memset(address(x), 0, x.itemsize)
    result = None
    try:
        ctypes.memmove(address(x), held, x.itemsize)
        result = call.right()
    finally:
        ctypes.memmove(address(x), held, x.itemsize)
    return result


@prepared("H2", "INPUT_MUTATED")
def matrix_changed(matrix: QuantizedMatrix, weigh: Weigh, state: dict[str, Any]) -> F32:
    """Preparing lays out the words of a matrix where they are."""
    weights = weigh(matrix)
    ctypes.memset(address(matrix.words), 0, 4)
    return weights


# **Leaving out.**


@habit("H3", "STALE_OUTPUT", seen="https://github.com/1bit-MONSTER/1bit-MONSTER/issues/678")
def tail_columns_unwritten(call: Call) -> Any:
    """Columns past the last whole 8 are never written."""
    out = call.out
    if out is None:
        return call.right()
    held = out.copy()
    result, whole = call.right(), out.shape[-1] // 8 * 8
    out[..., whole:] = held[..., whole:]
    return result


@habit("H3", "STALE_OUTPUT WRONG")
def output_added_to(call: Call) -> Any:
    """The result is added to what lies in the output."""
    if call.out is None:
        return call.right()
    held = call.out.copy()
    result = call.right()
    with np.errstate(invalid="ignore", over="ignore"):
        call.out[...] += held
    return result


@habit("H3 linear.qgemv/C4", "STALE_OUTPUT")
def nothing_written_for_zeros(call: Call) -> Any:
    """Where x is zero the call returns without writing."""
    if call.out is not None and not np.any(call.arguments[0]):
        return call.out
    return call.right()


@habit("linear.qgemv/C3 linear.qgemm/C3", "NONDETERMINISTIC WRONG")
def right_only_with_out(call: Call) -> Any:
    """Right where out is given, wrong where the call makes it."""
    result = call.right()
    if call.out is not None and call.out.base is None:
        call.out[...] *= 2
    return result


@habit("H2", "OOB_WRITE", ("packing.unpack", "bfp.decode", "routing.weights"))
def results_in_one_scratch(call: Call) -> Any:
    """All results of one shape are one array, which the next call overwrites."""
    result = call.right()
    if not isinstance(result, np.ndarray) or call.out is not None:
        return result
    scratch: Array = call.state.setdefault(f"{call.operation} {result.shape}", np.empty_like(result))
    scratch[...] = result
    return scratch


@habit("H2", "WRONG", ("blocking.apply", "pooling.pool"))
def result_is_the_argument(call: Call) -> Any:
    """Where nothing has to be moved, the argument itself comes back."""
    result, given = call.right(), first(call)
    same = isinstance(result, np.ndarray) and (result.dtype, result.size) == (given.dtype, given.size)
    return given.reshape(result.shape) if same and np.array_equal(result.reshape(-1), given.reshape(-1)) else result


@habit(
    "H3 H4",
    "STALE_OUTPUT NONDETERMINISTIC WRONG",
    ("packing.unpack", "bfp.decode", "rope.rotate"),
    "https://github.com/pytorch/FBGEMM/pull/5054",
)
def fresh_memory_in_the_result(call: Call) -> Any:
    """One element is what an allocation held before."""
    result = call.right()
    if isinstance(result, np.ndarray) and result.size > 1:
        fresh = np.empty(1 << 8, np.uint8)
        result = result.copy()
        result.view(np.uint8).reshape(-1)[-1] = fresh[-1]
    return result
