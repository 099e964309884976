"""Habits of memory: reading and writing where no array is, changing what was given, leaving out what was asked for."""

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from kills.habits import Act, Call, Habit
from lowbit.arrays import F32, Array
from lowbit.quantization.affine import QuantizedMatrix
from lowbit_conformance.defects.defect import COMMON

REGISTER = 32  # bytes of a vector register
PRODUCTS = ("linear.qgemv", "linear.qgemm")


def habit(
    name: str,
    cause: str,
    habits: str,
    verdicts: str,
    act: Act,
    operations: tuple[str, ...] = PRODUCTS,
    seen: str = COMMON,
    **rest: Any,
) -> Habit:
    """A habit of some operations; `habits` are numbers such as ``H1 H2``, or clauses in full."""
    clauses = [clause for clause in habits.split() if "/" in clause]
    clauses += [f"{operation}/{number}" for number in habits.split() if "/" not in number for operation in operations]
    return Habit(name, cause, tuple(clauses), seen, tuple(verdicts.split()), act=act, habitual=operations, **rest)


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


def read_past(call: Call) -> Any:
    """Loads whole registers, the last of them past the end."""
    array = first(call)
    if array.nbytes % REGISTER:
        ctypes.string_at(end(array), REGISTER - array.nbytes % REGISTER)
    return call.right()


def read_far_past(call: Call) -> Any:
    """A loop that takes a row too many."""
    array = first(call)
    ctypes.string_at(end(array) + array.shape[-1] * array.itemsize + 64, 4)
    return call.right()


def read_before(call: Call) -> Any:
    ctypes.string_at(address(first(call)) - 4, 4)
    return call.right()


def padding_added(call: Call) -> Any:
    """Adds what lies behind x, where the page has bytes left: a tail that is not masked."""
    result, x = call.right(), call.arguments[0]
    if end(x) % 4096 and isinstance(x, np.ndarray):
        beyond = ctypes.c_float.from_address(end(x)).value
        if beyond != 0 and call.out is not None:
            call.out[...] += np.float32(beyond)
    return result


# **Writing.**


def write_past(call: Call) -> Any:
    """Stores whole registers of 8 columns."""
    result = call.right()
    if call.out is not None and call.out.size % 8:
        ctypes.memset(end(call.out), 0, 4 * (8 - call.out.size % 8))
    return result


def write_before(call: Call) -> Any:
    result = call.right()
    if call.out is not None:
        ctypes.memset(address(call.out) - 4, 0, 4)
    return result


def write_input(call: Call) -> Any:
    """Adds 1 to the first number, through its address, as C can although numpy says read-only."""
    result, array = call.right(), first(call)
    byte = ctypes.c_ubyte.from_address(address(array))
    byte.value ^= 1
    return result


def write_and_put_back(call: Call) -> Any:
    """Scales x in place, and divides again at the end."""
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


Weigh = Callable[[QuantizedMatrix], F32]


def write_matrix(matrix: QuantizedMatrix, weigh: Weigh, state: dict[str, Any]) -> F32:
    """Lays out the words anew where they are."""
    weights = weigh(matrix)
    ctypes.memset(address(matrix.words), 0, 4)
    return weights


# **Leaving out.**


def tail_unwritten(call: Call) -> Any:
    """Columns past the last whole 8 are never written."""
    out = call.out
    if out is None:
        return call.right()
    held = out.copy()
    result, whole = call.right(), out.shape[-1] // 8 * 8
    out[..., whole:] = held[..., whole:]
    return result


def added_to_output(call: Call) -> Any:
    """Adds to what lies in the output, as if somebody had cleared it."""
    if call.out is None:
        return call.right()
    held = call.out.copy()
    result = call.right()
    with np.errstate(invalid="ignore", over="ignore"):
        call.out[...] += held
    return result


def nothing_written_for_zeros(call: Call) -> Any:
    """Returns at once where x is zero, and leaves the output as it is."""
    if call.out is not None and not np.any(call.arguments[0]):
        return call.out
    return call.right()


def another_array(call: Call) -> Any:
    """Right where an array is given out, wrong where it makes its own."""
    result = call.right()
    if call.out is not None and call.out.base is None:
        call.out[...] *= 2
    return result


def in_one_scratch(call: Call) -> Any:
    """All results of one shape are one array."""
    result = call.right()
    if not isinstance(result, np.ndarray) or call.out is not None:
        return result
    scratch: Array = call.state.setdefault(f"{call.operation} {result.shape}", np.empty_like(result))
    scratch[...] = result
    return scratch


def of_the_argument(call: Call) -> Any:
    """Where nothing has to be done, the argument itself is the result."""
    result, given = call.right(), first(call)
    same = isinstance(result, np.ndarray) and (result.dtype, result.size) == (given.dtype, given.size)
    return given.reshape(result.shape) if same and np.array_equal(result.reshape(-1), given.reshape(-1)) else result


def of_fresh_memory(call: Call) -> Any:
    """The last element comes from memory that nobody has written."""
    result = call.right()
    if isinstance(result, np.ndarray) and result.size > 1:
        fresh = np.empty(1 << 8, np.uint8)
        result = result.copy()
        result.view(np.uint8).reshape(-1)[-1] = fresh[-1]
    return result


def nothing(call: Call) -> Any:
    """A right call; the habit is in the preparation."""
    return call.right()


OVER = "UNDECLARED_OVERREAD OOB_READ"

DEFECTS: tuple[Habit, ...] = (
    habit(
        "reads-one-register-past",
        "The last load is a whole register, past the end of the array.",
        "H1",
        OVER,
        read_past,
        (*PRODUCTS, "packing.unpack", "attention.attend", "routing.gate"),
        "https://github.com/flame/blis/issues/635",
    ),
    habit(
        "reads-a-row-too-many",
        "A loop runs one row past the end of its array.",
        "H1",
        "OOB_READ",
        read_far_past,
        ("packing.pack", "bfp.cast", "rope.rotate", "gptq.targets"),
    ),
    habit(
        "reads-before-the-start",
        "A load begins before its array.",
        "H1",
        "OOB_READ",
        read_before,
        ("linear.qgemv", "affine.dequantize", "bfp.dot", "blocking.apply"),
    ),
    habit(
        "padding-is-used",
        "What lies behind x is added to the result.",
        "H1",
        "OOB_READ NONDETERMINISTIC WRONG",
        padding_added,
        ("linear.qgemv",),
        "https://github.com/google/XNNPACK/pull/8257",
    ),
    habit(
        "writes-past-the-tail",
        "Whole registers of 8 columns are stored, past the last of them.",
        "H2",
        "OOB_WRITE",
        write_past,
        seen="https://github.com/ooples/AiDotNet.Tensors/pull/993",
    ),
    habit("writes-before-the-start", "A store begins before the output.", "H2", "OOB_WRITE", write_before),
    habit(
        "input-changed",
        "An argument is written to.",
        "H2",
        "INPUT_MUTATED",
        write_input,
        (*PRODUCTS, "packing.unpack", "attention.softmax", "hqq.codes", "ksort.permutation", "pooling.pool"),
    ),
    habit(
        "input-changed-and-put-back",
        "x is scaled in place and scaled back.",
        "H2",
        "INPUT_MUTATED",
        write_and_put_back,
        ("linear.qgemv", "routing.expert"),
    ),
    habit(
        "matrix-changed",
        "Preparing lays out the words of a matrix where they are.",
        "H2",
        "INPUT_MUTATED",
        nothing,
        preparing=write_matrix,
    ),
    habit(
        "tail-columns-unwritten",
        "Columns past the last whole 8 are never written.",
        "H3",
        "STALE_OUTPUT",
        tail_unwritten,
        seen="https://github.com/1bit-MONSTER/1bit-MONSTER/issues/678",
    ),
    habit(
        "output-added-to",
        "The result is added to what lies in the output.",
        "H3",
        "STALE_OUTPUT WRONG",
        added_to_output,
    ),
    habit(
        "nothing-written-for-zeros",
        "Where x is zero the call returns without writing.",
        "H3 linear.qgemv/C4",
        "STALE_OUTPUT",
        nothing_written_for_zeros,
    ),
    habit(
        "right-only-with-out",
        "Right where out is given, wrong where the call makes it.",
        "linear.qgemv/C3 linear.qgemm/C3",
        "NONDETERMINISTIC WRONG",
        another_array,
    ),
    habit(
        "results-in-one-scratch",
        "All results of one shape are one array, which the next call overwrites.",
        "H2",
        "OOB_WRITE",
        in_one_scratch,
        ("packing.unpack", "bfp.decode", "routing.weights"),
    ),
    habit(
        "result-is-the-argument",
        "Where nothing has to be moved, the argument itself comes back.",
        "H2",
        "WRONG",
        of_the_argument,
        ("blocking.apply", "pooling.pool"),
    ),
    habit(
        "fresh-memory-in-the-result",
        "One element is what an allocation held before.",
        "H3 H4",
        "STALE_OUTPUT NONDETERMINISTIC WRONG",
        of_fresh_memory,
        ("packing.unpack", "bfp.decode", "rope.rotate"),
        "https://github.com/pytorch/FBGEMM/pull/5054",
    ),
)
