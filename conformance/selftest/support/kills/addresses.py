"""Habits of addresses: right only where an array lies well, and what was remembered by where something lay."""

import ctypes
from typing import Any

import numpy as np

from kills.habits import Call, Habit
from kills.memory import PRODUCTS, REGISTER, Weigh, address, arrays, first, habit, nothing
from lowbit.arrays import F32
from lowbit.quantization.affine import QuantizedMatrix


def aligned_only(call: Call) -> Any:
    """Loads from the address rounded down to a register: right only where x lies on one."""
    x, out = call.arguments[0], call.out
    off = address(x) % REGISTER // 4
    result = call.right()
    if off and out is not None:
        out[...] = np.roll(out, off, axis=-1) + np.float32(off)
    return result


def aligned_or_crash(call: Call) -> Any:
    """What an aligned load does to an address that is not."""
    if address(first(call)) % REGISTER:
        ctypes.string_at(0)
    return call.right()


def by_address(call: Call) -> Any:
    """Remembers results by the addresses of their arguments."""
    given_arrays = [array for argument in call.arguments for array in arrays(argument)]
    shape = () if call.out is None else call.out.shape
    key = (call.operation, shape, *((address(array), array.shape) for array in given_arrays))
    results = call.state.setdefault("results", {})
    if key not in results:
        given = call.right()
        results[key] = given.copy() if isinstance(given, np.ndarray) else given
    if call.out is not None:
        call.out[...] = results[key]
        return call.out
    return results[key]


def weights_by_address(matrix: QuantizedMatrix, weigh: Weigh, state: dict[str, Any]) -> F32:
    """Keeps the weights of each address of words, and takes what lies there for what lay there."""
    kept = state.setdefault("weights", {})
    key = (address(matrix.words), matrix.words.shape, matrix.rows)
    if key not in kept:
        kept[key] = weigh(matrix)
    result: F32 = kept[key]
    return result


def one_buffer(matrix: QuantizedMatrix, weigh: Weigh, state: dict[str, Any]) -> F32:
    """All matrices of one shape share the weights that were prepared last."""
    weights = weigh(matrix)
    shared: F32 = state.setdefault("buffers", {}).setdefault(weights.shape, weights)
    shared[...] = weights
    return shared


POINTER_KEYED = "https://github.com/Avarok-Cybersecurity/atlas/pull/508"

DEFECTS: tuple[Habit, ...] = (
    habit(
        "works-only-when-aligned",
        "Right only where x lies on a multiple of a register.",
        "H4",
        "NONDETERMINISTIC WRONG",
        aligned_only,
    ),
    habit(
        "aligned-loads-crash",
        "An aligned load of an address that is not.",
        "H5",
        "CRASHED(SIGSEGV)",
        aligned_or_crash,
        ("linear.qgemv", "routing.top_k", "packing.pack"),
        "https://github.com/PaddlePaddle/Paddle/pull/19487",
    ),
    habit(
        "results-by-address",
        "Results are remembered by the addresses of their arguments.",
        "H4",
        "WRONG NONDETERMINISTIC",
        by_address,
        (*PRODUCTS, "affine.dequantize", "hqq.dequantize", "routing.top_k"),
        POINTER_KEYED,
    ),
    habit(
        "weights-by-address",
        "Prepared weights are remembered by the address of their words.",
        "H4",
        "WRONG NONDETERMINISTIC",
        nothing,
        seen="https://github.com/local-inference-lab/vllm/pull/228",
        preparing=weights_by_address,
    ),
    habit(
        "one-buffer-for-all-matrices",
        "Matrices of one shape share the weights that were prepared last.",
        "H4 linear.qgemv/C3 linear.qgemm/C3",
        "NONDETERMINISTIC WRONG",
        nothing,
        preparing=one_buffer,
    ),
)
