r"""Bounds of routing: how far a correct gate, weight, expert or layer may lie from the exact one.

The gate is a product and, where probabilities are asked for, a softmax. An expert is two products, a silu, and a third
product. The steps are those of `lowbit.linear.propagation`; here they are composed.

**Between the steps** of a gate a kernel of 16 bits may round the logits to the type of its inputs before their softmax.

**The layer** sums :math:`k` experts, each within its own bound and weighted by a number that is given.

Source: N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., §3.1, Lemma 3.1.
"""

import numpy as np

from lowbit.arrays import F32, F64, Activations
from lowbit.contract.rounding import HALF_LEAST_SUBNORMAL, Arithmetic, Bound, direct_bound, gamma, returned
from lowbit.linear.elementary import product, silu
from lowbit.linear.propagation import (
    QUOTIENT,
    REFERENCE,
    Steps,
    declared,
    product_error,
    silu_error,
    softmax_error,
)
from lowbit.moe.routing import Ids, Scores, Softmax, expert


def expert_error(steps: Steps, x: F32, gate: F32, up: F32, down: F32) -> tuple[F64, F64]:
    """The error of one expert and the gauge of its last sum, both T × hidden."""
    exactly, wide = np.zeros(x.shape), x.astype(np.float64)
    a, b = product(x, gate), product(x, up)
    a_error, b_error = product_error(steps, wide, exactly, gate), product_error(steps, wide, exactly, up)
    s, s_error = np.abs(silu(a)), silu_error(steps, a, a_error)
    largest = (s + s_error) * (np.abs(b) + b_error)
    inner, inner_error = silu(a) * b, largest * (1 + steps.unit) - s * np.abs(b) + HALF_LEAST_SUBNORMAL
    gauge = np.abs(inner) @ np.abs(down.astype(np.float64))
    return product_error(steps, inner, inner_error, down), gauge


# **The bounds** of the operations.


def _described(arithmetic: Arithmetic, length: int) -> str:
    depth = arithmetic.roundings(length, length)
    return f"γ_{depth}({arithmetic.accumulator}) for a sum of {length}"


def gate_bound(x: Activations, router: Activations, scores: Scores, arithmetic: Arithmetic, exact: F64) -> Bound:
    """The bound of `routing.gate`.

    Args:
        x: float32, T × hidden, finite.
        router: float32, hidden × E.
        scores: ``logits`` or ``probabilities``.
        arithmetic: what the backend declares.
        exact: float64, T × E: ``routing.gate(x, router, scores)``.

    Raises:
        ArgumentError: the declared arithmetic would allow more than a tenth of the gauge.
    """
    gauge = np.abs(x.astype(np.float64)) @ np.abs(router.astype(np.float64))
    inputs = x.dtype.name
    if scores == "logits":
        bound = direct_bound(gauge, len(router), arithmetic, exact, underflows=len(router))
        return returned(bound, exact, inputs)
    wide, exactly, logits = x.astype(np.float64), np.zeros(x.shape), product(x, router.astype(np.float64))
    limit = sum(
        softmax_error(steps, logits, steps.passed(logits, product_error(steps, wide, exactly, router)))
        for steps in (declared(arithmetic, inputs), REFERENCE)
    )
    how = (
        f"logits by {_described(arithmetic, len(router))}, then {_described(arithmetic, router.shape[1])} exponentials"
    )
    return returned(Bound(np.asarray(limit), gauge, how), exact, inputs)


def weights_bound(scores: Activations, chosen: Ids, softmax: Softmax, arithmetic: Arithmetic, exact: F64) -> Bound:
    """The bound of `routing.weights`.

    Args:
        scores: float32, T × E.
        chosen: int64, T × k.
        softmax: ``after`` or ``before``.
        arithmetic: what the backend declares.
        exact: float64, T × k: ``routing.weights(scores, chosen, softmax)``.

    Raises:
        ArgumentError: the declared arithmetic would allow more than a tenth of the weights.
    """
    own, k = np.take_along_axis(scores, chosen, axis=1).astype(np.float64), chosen.shape[1]
    limit = np.zeros(own.shape)
    for steps in (declared(arithmetic), REFERENCE):
        if softmax == "after":
            limit += softmax_error(steps, own, np.zeros(own.shape))
        else:
            sums = 2 * steps.sum_gamma(k)
            limit += ((1 + gamma(QUOTIENT, steps.unit)) * (1 + sums) - 1) * exact + HALF_LEAST_SUBNORMAL
    what = "exponentials" if softmax == "after" else "probabilities"
    how = f"{_described(arithmetic, k)} {what} and a quotient"
    return returned(Bound(limit, exact, how), exact, scores.dtype.name)


def expert_bound(x: F32, gate: F32, up: F32, down: F32, arithmetic: Arithmetic) -> Bound:
    """The bound of `routing.expert`; arguments as there, and what the backend declares.

    Raises:
        ArgumentError: the declared arithmetic would allow more than a tenth of a gauge.
    """
    (own, gauge), (reference, _) = (
        expert_error(steps, x, gate, up, down) for steps in (declared(arithmetic), REFERENCE)
    )
    how = f"{_described(arithmetic, len(gate))} and {_described(arithmetic, len(down))}, with silu between"
    return Bound(own + reference, gauge, how)


def sparse_bound(
    x: F32,
    gate: F32,
    up: F32,
    down: F32,
    chosen: Ids,
    weights: F32,
    arithmetic: Arithmetic,
    exact: F64,
) -> Bound:
    """The bound of `routing.sparse`; arguments as there, what the backend declares, and the reference's result.

    Raises:
        ArgumentError: the declared arithmetic would allow more than a tenth of a gauge.
    """
    tokens, k = chosen.shape
    limit, gauge = np.zeros(x.shape), np.zeros(x.shape)
    for t in range(tokens):
        row = x[t : t + 1]
        answers = [expert(row, gate[e], up[e], down[e])[0] for e in chosen[t]]
        factors = np.abs(weights[t].astype(np.float64))
        gauge[t] = sum(factor * np.abs(answer) for factor, answer in zip(factors, answers, strict=True))
        for steps in (declared(arithmetic), REFERENCE):
            errors = [expert_error(steps, row, gate[e], up[e], down[e])[0][0] for e in chosen[t]]
            carried = sum(factor * error for factor, error in zip(factors, errors, strict=True))
            error = steps.sum_gamma(k) * (gauge[t] + carried) + carried + HALF_LEAST_SUBNORMAL * (k + 1)
            limit[t] += steps.stored(exact[t], error)
    return Bound(limit, gauge, f"the experts' own bounds, weighted, and {_described(arithmetic, k)}")
