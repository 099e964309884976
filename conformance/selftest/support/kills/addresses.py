"""Habits of addresses: right only where an array lies well, and what was remembered by where something lay."""

import ctypes
from typing import Any

import numpy as np

from kills.habits import PRODUCTS, Call, Weigh, habits, preparations
from kills.memory import REGISTER, address, arrays, first
from lowbit.arrays import F32
from lowbit.quantization.affine import QuantizedMatrix
from lowbit_conformance.defects.defect import Defect

POINTER_KEYED = "https://github.com/Avarok-Cybersecurity/atlas/pull/508"

DEFECTS: list[Defect] = []
habit, prepared = habits(DEFECTS), preparations(DEFECTS)


@habit("H4", "NONDETERMINISTIC WRONG")
def works_only_when_aligned(call: Call) -> Any:
    """Right only where x lies on a multiple of a register."""
    # It loads from the address rounded down to a register.
    x, out = call.arguments[0], call.out
    off = address(x) % REGISTER // 4
    result = call.right()
    if off and out is not None:
        out[...] = np.roll(out, off, axis=-1) + np.float32(off)
    return result


@habit(
    "H5",
    "CRASHED(SIGSEGV)",
    ("linear.qgemv", "routing.top_k", "packing.pack"),
    "https://github.com/PaddlePaddle/Paddle/pull/19487",
)
def aligned_loads_crash(call: Call) -> Any:
    """An aligned load of an address that is not."""
    if address(first(call)) % REGISTER:
        ctypes.string_at(0)
    return call.right()


@habit(
    "H4", "WRONG NONDETERMINISTIC", (*PRODUCTS, "affine.dequantize", "hqq.dequantize", "routing.top_k"), POINTER_KEYED
)
def results_by_address(call: Call) -> Any:
    """Results are remembered by the addresses of their arguments."""
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


@prepared("H4", "WRONG NONDETERMINISTIC", seen="https://github.com/local-inference-lab/vllm/pull/228")
def weights_by_address(matrix: QuantizedMatrix, weigh: Weigh, state: dict[str, Any]) -> F32:
    """Prepared weights are remembered by the address of their words."""
    kept = state.setdefault("weights", {})
    key = (address(matrix.words), matrix.words.shape, matrix.rows)
    if key not in kept:
        kept[key] = weigh(matrix)
    result: F32 = kept[key]
    return result


@prepared("H4 linear.qgemv/C3 linear.qgemm/C3", "NONDETERMINISTIC WRONG")
def one_buffer_for_all_matrices(matrix: QuantizedMatrix, weigh: Weigh, state: dict[str, Any]) -> F32:
    """Matrices of one shape share the weights that were prepared last."""
    weights = weigh(matrix)
    shared: F32 = state.setdefault("buffers", {}).setdefault(weights.shape, weights)
    shared[...] = weights
    return shared
