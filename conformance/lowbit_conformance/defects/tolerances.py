"""How far results may lie from exact ones: what float32 in any order may add, by the bounds of the specification."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lowbit.arrays import Array
from lowbit.attention.residual import attend_residual_bound
from lowbit.attention.stored import attend_stored_bound
from lowbit.contract.checks import check_choice
from lowbit.contract.operation import Promise
from lowbit.contract.rounding import Arithmetic, Weights, any_order, gamma
from lowbit.linear.integer_bounds import integer_loop
from lowbit.linear.stored_bounds import of_sums, stored_bound
from lowbit.operations import OPERATIONS
from lowbit.tensor_formats.stored import RESULTS, Stored
from lowbit_conformance import packing
from lowbit_conformance.bounds import bound_of
from lowbit_conformance.defects import steps

DECLARED = Arithmetic("direct", "float32", any_order)
INTEGER = Arithmetic("integer", "float32", integer_loop(1))
UNIT = 2.0**-24
UNDERFLOW = 2.0**-140

Limit = Callable[..., Array]


def _linear(x: Array, matrix: Any, right: Array) -> Array:
    codes, group = packing.unpack(matrix.words, matrix.bits).astype(np.float64), steps.groups(matrix)
    scale, zero = steps.scales(matrix).astype(np.float64)[group], steps.zeros(matrix).astype(np.float64)[group]
    offsets = zero if matrix.convention == "minimum" else scale * zero
    terms: Array = np.abs(np.atleast_2d(x).astype(np.float64)) @ (scale * codes + np.abs(offsets))
    return (gamma(matrix.rows + 8, UNIT) * terms).reshape(right.shape)


def _stored(x: Any, weights: Stored, *rest: Any) -> Array:
    """A kernel may round weights to the type of its activations without declaring it."""
    result, right = check_choice("result", rest[0] if len(rest) > 1 else "float32", RESULTS), rest[-1]
    wide = x.values.T if isinstance(x, Stored) else np.atleast_2d(x).astype(np.float64)
    shortest: Weights = "float32" if isinstance(x, Stored) else check_choice("activations", x.dtype.name, RESULTS)
    declared = Arithmetic("factored", "float32", any_order, shortest)
    sums = of_sums(x, weights) if isinstance(x, Stored) else 0.0
    limit: Array = stored_bound(wide, weights, result, declared, np.atleast_2d(right), sums).limit
    return limit.reshape(right.shape)


def _factor(hessian: Array, right: Array) -> Array:
    return np.full(right.shape, 1e-4 * np.abs(right).max())


LIMITS: Mapping[str, Limit] = {
    "linear.qgemv": _linear,
    "linear.qgemm": _linear,
    "linear.qgemm_bfp": lambda x, matrix, right: bound_of("linear.qgemm_bfp", (x, matrix), INTEGER, right).limit,
    "linear.gemv": _stored,
    "linear.gemm": _stored,
    "linear.gemm_cast": _stored,
    "gptq.factor": _factor,
    "attention.attend_stored": lambda q, k, v, *rest: (
        attend_stored_bound(q, k, v, replace(DECLARED, weights="exact"), rest[-1], *rest[:-1]).limit
    ),
    "attention.attend_residual": lambda q, k, v, new_k, new_v, right: (
        attend_residual_bound(q, k, v, new_k, new_v, replace(DECLARED, weights="exact"), right).limit
    ),
}
"""Limits for unusual arithmetic, or where `lowbit_conformance.bounds` has no bound."""


def _limit(operation: str, arguments: Sequence[Any], right: Array) -> Array:
    if operation in LIMITS:
        return LIMITS[operation](*arguments, right)
    return bound_of(operation, arguments, DECLARED, right).limit


def limits_of(operation: str, arguments: tuple[Any, ...], choices: Mapping[str, Any], right: Any) -> Array | None:
    """How far a right result may differ from the exact one; None if results are exact."""
    if OPERATIONS[operation].promise is not Promise.BOUNDED:
        return None
    with np.errstate(all="ignore"):
        try:
            limit = _limit(operation, (*arguments, *choices.values()), right)
        except Exception:  # inputs without a bound, such as NaN: only NaN and infinity are compared
            return np.where(np.isfinite(right), UNIT * np.abs(right), 0.0)
    return np.nan_to_num(limit, nan=0.0, posinf=0.0) + UNDERFLOW
