"""What a right answer is: the result itself for an exact operation; for a bounded one the exact result and how far an
answer may lie from it, for one stated arithmetic.

A reader of vectors need not know how bounds are derived, so the files state them for the weakest usual arithmetic:
dequantised weights where there are weights, float32 sums, in any order; for integer products float32 sums of segments.
The suite itself judges a backend that declares a finer arithmetic more strictly.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from lowbit.arrays import F64
from lowbit.attention.bounds import attend_bound, softmax_bound
from lowbit.attention.rope import rotate_bound
from lowbit.attention.stored import attend_stored_bound
from lowbit.backend.reference import STORED_PRODUCTS, in_type
from lowbit.backend.wire import as_json
from lowbit.contract.operation import OPERATIONS, Promise
from lowbit.contract.rounding import Arithmetic, Bound, any_order
from lowbit.linear.bounds import linear_bound
from lowbit.linear.integer_bounds import integer_bound, integer_loop
from lowbit.linear.stored_bounds import of_sums, stored_bound
from lowbit.model.bounds import rms_norm_bound, swiglu_bound
from lowbit.moe.bounds import expert_bound, gate_bound, sparse_bound, weights_bound
from lowbit.operations import OPERATIONS as _ALL
from lowbit.quantization.gptq_bounds import hessian_bound, targets_bound
from lowbit.quantization.hqq import qgemv_bound
from lowbit.quantization.hqq_solver import step_bound
from lowbit.tensor_formats.stored import Result, Stored

DIRECT = Arithmetic("direct", "float32", any_order)
DEQUANTISED = Arithmetic("dequantised", "float32", any_order)
MATRICES = ("linear.qgemv", "linear.qgemm", "hqq.qgemv", *STORED_PRODUCTS)

INTEGER = Arithmetic("integer", "float32", integer_loop(1))

STATED: Mapping[str, Arithmetic] = {
    name: DEQUANTISED if name in MATRICES else INTEGER if name == "linear.qgemm_bfp" else DIRECT
    for name, operation in _ALL.items()
    if operation.promise is Promise.BOUNDED
}
"""The arithmetic for which the files state bounds, by operation."""


def _qgemm_bound(x: Any, matrix: Any, arithmetic: Arithmetic, exact: F64) -> Bound:
    rows = [linear_bound(row, matrix, arithmetic, result) for row, result in zip(x, exact, strict=True)]
    return Bound(np.stack([row.limit for row in rows]), np.stack([row.gauge for row in rows]), rows[0].derivation)


def _norm_bound(x: Any, gain: Any, epsilon: float, arithmetic: Arithmetic, exact: F64) -> Bound:
    """That of `blocks.rms_norm`; a row whose squares overflow has none, as its clause C7 leaves a choice."""
    bound = rms_norm_bound(x, gain, epsilon, arithmetic, exact)
    overflows = np.square(x.astype(np.float64)).sum(axis=1, keepdims=True) > np.finfo(np.float32).max
    return Bound(np.where(overflows, np.inf, bound.limit), bound.gauge, bound.derivation)


def _stored_bound(x: Any, weights: Stored, result: Result, arithmetic: Arithmetic, exact: F64) -> Bound:
    """That of a product with a stored matrix, whose weights are turned into the type of the activations."""
    cast = isinstance(x, Stored)
    numbers = x.values.T if cast else np.atleast_2d(x).astype(np.float64)
    own = replace(arithmetic, weights="float32" if cast else x.dtype.name)
    rows = np.atleast_2d(exact)
    bound = stored_bound(numbers, weights, result, own, rows, of_sums(x, weights) if cast else 0.0)
    return Bound(bound.limit.reshape(exact.shape), bound.gauge.reshape(exact.shape), bound.derivation)


BOUNDS: Mapping[str, Callable[..., Bound]] = {
    "attention.attend": lambda a, e, queries, keys, values, window: attend_bound(queries, keys, values, a, e, window),
    "attention.attend_stored": lambda a, e, queries, keys, values, window: attend_stored_bound(
        queries, keys, values, replace(a, weights=queries.dtype.name), e, window
    ),
    "attention.softmax": lambda a, e, scores: softmax_bound(scores, a, e),
    "blocks.rms_norm": lambda a, e, x, gain, epsilon: _norm_bound(x, gain, epsilon, a, e),
    "blocks.swiglu": lambda a, e, gate, up: swiglu_bound(gate, up, a, e),
    "gptq.hessian": lambda a, e, x: hessian_bound(x, a, e),
    "gptq.targets": lambda a, e, weights, factor, values: targets_bound(weights, factor, values, a, e),
    "hqq.qgemv": lambda a, e, x, matrix: qgemv_bound(x, matrix, a, e),
    "hqq.step": lambda a, e, **arguments: step_bound(**arguments, arithmetic=a, exact=e),
    "linear.gemm": lambda a, e, x, weights, result: _stored_bound(x, weights, result, a, e),
    "linear.gemm_cast": lambda a, e, x, weights, result: _stored_bound(x, weights, result, a, e),
    "linear.gemv": lambda a, e, x, weights, result: _stored_bound(x, weights, result, a, e),
    "linear.qgemm": lambda a, e, x, matrix: _qgemm_bound(x, matrix, a, e),
    "linear.qgemm_bfp": lambda a, e, x, matrix: integer_bound(x, matrix, a, e),
    "linear.qgemv": lambda a, e, x, matrix: linear_bound(x, matrix, a, e),
    "rope.rotate": lambda a, e, x, turn: rotate_bound(x, turn, a, e),
    "routing.expert": lambda a, e, **arguments: expert_bound(**arguments, arithmetic=a, exact=e),
    "routing.gate": lambda a, e, x, router, scores: gate_bound(x, router, scores, a, e),
    "routing.sparse": lambda a, e, **arguments: sparse_bound(**arguments, arithmetic=a, exact=e),
    "routing.weights": lambda a, e, scores, chosen, softmax: weights_bound(scores, chosen, softmax, a, e),
}
"""``bound(arithmetic, exact, **arguments)``. `gptq.factor` has none: its bound is one on the product of the answer with
its transpose, and follows from the answer itself."""


def right_answer(operation: str, arguments: Mapping[str, Any], exact: Any) -> dict[str, Any]:
    """What a vector says of the result, its flags, and whether its type holds the exact result.

    Args:
        operation: its id.
        arguments: by name, complete.
        exact: the reference's answer.
    """
    if OPERATIONS[operation].promise is not Promise.BOUNDED:
        return {"result": as_json(exact), "flags": set()}
    with np.errstate(all="ignore"):
        kept = in_type(exact, OPERATIONS[operation].result_type(**arguments))
        representable = np.array_equal(kept.astype(np.float64), exact)
    answer: dict[str, Any] = {"exact": as_json(exact), "flags": set(), "representable": bool(representable)}
    if operation not in BOUNDS:
        answer["flags"].add("residual")
    elif (limit := _limit(operation, arguments, exact)) is None:
        answer["flags"].add("not-finite")
    else:
        answer["bound"] = as_json(limit)
    return answer


def _limit(operation: str, arguments: Mapping[str, Any], exact: F64) -> F64 | None:
    """The bound of each element; none where there is no derivation, as for numbers that are not finite."""
    if not np.isfinite(exact).all():
        return None
    with np.errstate(all="ignore"):
        limit = np.asarray(BOUNDS[operation](STATED[operation], exact, **arguments).limit, np.float64)
    return np.broadcast_to(limit, exact.shape) if np.isfinite(limit).all() else None
