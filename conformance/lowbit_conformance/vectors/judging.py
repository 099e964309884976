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
from lowbit.attention.residual import attend_residual_bound
from lowbit.attention.stored import attend_stored_bound
from lowbit.backend.reference import STORED_PRODUCTS, in_type
from lowbit.backend.wire import as_json
from lowbit.contract.operation import Promise
from lowbit.contract.rounding import Arithmetic, Bound, Weights, any_order
from lowbit.linear.bounds import linear_bound
from lowbit.linear.integer_bounds import integer_loop
from lowbit.linear.stored_bounds import of_sums, stored_bound
from lowbit.model.bounds import rms_norm_bound
from lowbit.operations import OPERATIONS
from lowbit.tensor_formats.stored import Result, Stored
from lowbit_conformance import bounds
from lowbit_conformance.suite.exact_sums import exact_products

DIRECT = Arithmetic("direct", "float32", any_order)
DEQUANTISED = Arithmetic("dequantised", "float32", any_order)
MATRICES = ("linear.qgemv", "linear.qgemm", "hqq.qgemv", *STORED_PRODUCTS)

INTEGER = Arithmetic("integer", "float32", integer_loop(1))

STATED: Mapping[str, Arithmetic] = {
    name: DEQUANTISED if name in MATRICES else INTEGER if name == "linear.qgemm_bfp" else DIRECT
    for name, operation in OPERATIONS.items()
    if operation.promise is Promise.BOUNDED
}
"""The arithmetic for which the files state bounds, by operation."""


def _attend_stored_bound(
    queries: Any, keys: Stored, values: Stored, window: int | None, arithmetic: Arithmetic, exact: F64
) -> Bound:
    return attend_stored_bound(queries, keys, values, replace(arithmetic, weights=queries.dtype.name), exact, window)


def _attend_residual_bound(
    queries: Any,
    keys: Stored,
    values: Stored,
    newest_keys: Any,
    newest_values: Any,
    arithmetic: Arithmetic,
    exact: F64,
) -> Bound:
    own = replace(arithmetic, weights=queries.dtype.name)
    return attend_residual_bound(queries, keys, values, newest_keys, newest_values, own, exact)


def _qgemm_bound(x: Any, matrix: Any, arithmetic: Arithmetic, exact: F64) -> Bound:
    rows = [linear_bound(row, matrix, arithmetic, result) for row, result in zip(x, exact, strict=True)]
    return Bound(np.stack([row.limit for row in rows]), np.stack([row.gauge for row in rows]), rows[0].derivation)


def _norm_bound(x: Any, gain: Any, epsilon: float, arithmetic: Arithmetic, exact: F64) -> Bound:
    """The bound of `blocks.rms_norm`; a row whose squares overflow has none, because its clause C7 leaves a choice."""
    bound = rms_norm_bound(x, gain, epsilon, arithmetic, exact)
    overflows = np.square(x.astype(np.float64)).sum(axis=1, keepdims=True) > np.finfo(np.float32).max
    return Bound(np.where(overflows, np.inf, bound.limit), bound.gauge, bound.derivation)


def _stored_bound(x: Any, weights: Stored, result: Result, arithmetic: Arithmetic, exact: F64) -> Bound:
    """The bound of a product with a stored matrix, whose weights are converted to the type of the activations."""
    cast = isinstance(x, Stored)
    numbers = x.values.T if cast else np.atleast_2d(x).astype(np.float64)
    own = replace(arithmetic, weights="float32" if cast else x.dtype.name)
    rows = np.atleast_2d(exact)
    bound = stored_bound(numbers, weights, result, own, rows, of_sums(x, weights) if cast else 0.0)
    return Bound(bound.limit.reshape(exact.shape), bound.gauge.reshape(exact.shape), bound.derivation)


def _exact(x: Any, weights: Stored, result: Result) -> bool:
    """Whether a product with a stored matrix has one right answer in the stated arithmetic."""
    cast = isinstance(x, Stored)
    numbers = x.values.T if cast else np.atleast_2d(x).astype(np.float64)
    if not np.isfinite(numbers).all() or (cast and np.any(of_sums(x, weights))):
        return False
    kind: Weights = "float32" if cast else x.dtype.name
    return bool(exact_products(numbers, weights.terms, ("float32", result), kind).all())


BOUNDS: Mapping[str, Callable[..., Bound]] = {
    **bounds.BOUNDS,
    "attention.attend_residual": _attend_residual_bound,
    "attention.attend_stored": _attend_stored_bound,
    "blocks.rms_norm": _norm_bound,
    "linear.gemm": _stored_bound,
    "linear.gemm_cast": _stored_bound,
    "linear.gemv": _stored_bound,
    "linear.qgemm": _qgemm_bound,
    "linear.qgemv": linear_bound,
}
"""Each takes the arguments of its operation by name, the stated arithmetic, and the exact result. `gptq.factor` has
none: its bound applies to the product of the result with its transpose, and depends on the result."""


def right_answer(operation: str, arguments: Mapping[str, Any], exact: Any) -> dict[str, Any]:
    """The result as stated in a vector, its flags, and whether its type holds the exact result.

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
    if operation in BOUNDS and BOUNDS[operation] is _stored_bound:
        representable = representable and _exact(**arguments)
    answer: dict[str, Any] = {"exact": as_json(exact), "flags": set(), "representable": bool(representable)}
    if operation not in BOUNDS:
        answer["flags"].add("residual")
    elif (limit := _limit(operation, arguments, exact)) is None:
        answer["flags"].add("not-finite")
    else:
        answer["bound"] = as_json(limit)
    return answer


def _limit(operation: str, arguments: Mapping[str, Any], exact: F64) -> F64 | None:
    """The bound of each element; None without a derivation, as for non-finite numbers."""
    if not np.isfinite(exact).all():
        return None
    with np.errstate(all="ignore"):
        bound = BOUNDS[operation](**arguments, arithmetic=STATED[operation], exact=exact)
        limit = np.asarray(bound.limit, np.float64)
    return np.broadcast_to(limit, exact.shape) if np.isfinite(limit).all() else None
