r"""Bounds of routing: how far a correct gate, weight, expert or layer may lie from the exact one.

The gate is a product and, where probabilities are asked for, a softmax. An expert is two products, a silu, and a third
product. The steps are those of `lowbit.linear.propagation`; here they are composed.

**Between the steps** a kernel of 16 bits may round to the type of its inputs, if it declares so: the logits of a gate
before their softmax; in an expert both products of :math:`x`, silu and what is multiplied by :math:`W_{down}`; in the
layer each expert's answer, its product with the weight, and the running sum. Where one of these passes the largest
number of the type, a right kernel may overflow, and its row is not judged.

**The layer** sums :math:`k` experts, each within its own bound and weighted by a number that is given.

Source: N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., §3.1, Lemma 3.1.
"""

import numpy as np

from lowbit.arrays import F64, Activations
from lowbit.contract.rounding import (
    HALF_LEAST_SUBNORMAL,
    UNIT_ROUNDOFF,
    Arithmetic,
    Bound,
    direct_bound,
    gamma,
    returned,
)
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


def expert_error(
    steps: Steps, x: Activations, gate: Activations, up: Activations, down: Activations
) -> tuple[F64, F64]:
    """The error of one expert and the gauge of its last sum, both T × hidden; infinite in rows that may overflow."""
    exactly, wide = np.zeros(x.shape), x.astype(np.float64)
    a, b = (product(wide, matrix.astype(np.float64)) for matrix in (gate, up))
    a_error = steps.passed(a, product_error(steps, wide, exactly, gate))
    b_error = steps.passed(b, product_error(steps, wide, exactly, up))
    s, s_error = silu(a), steps.passed(silu(a), silu_error(steps, a, a_error))
    inner, largest = s * b, (np.abs(s) + s_error) * (np.abs(b) + b_error)
    inner_error = steps.passed(inner, largest * (1 + steps.unit) - np.abs(inner) + HALF_LEAST_SUBNORMAL)
    gauge = np.abs(inner) @ np.abs(down.astype(np.float64))
    error = product_error(steps, inner, inner_error, down)
    for value, off in ((a, a_error), (b, b_error), (inner, inner_error)):
        error[steps.overflows(value, off).any(axis=1)] = np.inf
    return error, gauge


# **The bounds.** Each takes the arguments of its operation, what the backend declares, and the reference's result.


def _described(arithmetic: Arithmetic, length: int) -> str:
    depth = arithmetic.roundings(length, length)
    return f"γ_{depth}({arithmetic.accumulator}) for a sum of {length}"


def gate_bound(x: Activations, router: Activations, scores: Scores, arithmetic: Arithmetic, exact: F64) -> Bound:
    """The bound of `routing.gate`.

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


def expert_bound(
    x: Activations, gate: Activations, up: Activations, down: Activations, arithmetic: Arithmetic, exact: F64
) -> Bound:
    """The bound of `routing.expert`.

    Raises:
        ArgumentError: the declared arithmetic would allow more than a tenth of a gauge.
    """
    inputs = x.dtype.name
    (own, gauge), (reference, _) = (
        expert_error(steps, x, gate, up, down) for steps in (declared(arithmetic, inputs), REFERENCE)
    )
    how = f"{_described(arithmetic, len(gate))} and {_described(arithmetic, len(down))}, with silu between"
    return returned(Bound(own + reference, gauge, how), exact, inputs)


def sparse_bound(
    x: Activations,
    gate: Activations,
    up: Activations,
    down: Activations,
    chosen: Ids,
    weights: Activations,
    arithmetic: Arithmetic,
    exact: F64,
) -> Bound:
    """The bound of `routing.sparse`.

    Raises:
        ArgumentError: the declared arithmetic would allow more than a tenth of a gauge.
    """
    tokens, k = chosen.shape
    inputs = x.dtype.name
    limit, gauge = np.zeros(x.shape), np.zeros(x.shape)
    for t in range(tokens):
        row = x[t : t + 1]
        answers = np.array([expert(row, gate[e], up[e], down[e])[0] for e in chosen[t]])
        factors = np.abs(weights[t].astype(np.float64))[:, np.newaxis]
        gauge[t] = (factors * np.abs(answers)).sum(axis=0)
        for steps in (declared(arithmetic, inputs), REFERENCE):
            errors = np.array([expert_error(steps, row, gate[e], up[e], down[e])[0][0] for e in chosen[t]])
            limit[t] += steps.stored(exact[t], _weighted_error(steps, factors, answers, errors))
    how = f"the experts' own bounds, weighted, and {_described(arithmetic, k)}"
    return returned(Bound(limit, gauge, how), exact, inputs)


def _weighted_error(steps: Steps, factors: F64, answers: F64, errors: F64) -> F64:
    """The error of a sum of k expert outputs times their factors, k × hidden and k × 1; infinite where one may
    overflow."""
    k = len(answers)
    errors = steps.passed(answers, errors)
    with np.errstate(invalid="ignore"):  # a factor of 0 times an output that overflows
        carried = steps.passed(factors * answers, factors * errors).sum(axis=0)
    sizes = (factors * np.abs(answers)).sum(axis=0)
    running = gamma(k, UNIT_ROUNDOFF[steps.handed]) if steps.handed else 0.0
    relative = (1 + steps.sum_gamma(k)) * (1 + running) - 1
    error = relative * (sizes + carried) + carried + HALF_LEAST_SUBNORMAL * (k + 1)
    unsure = np.isnan(error) | steps.overflows(sizes, error) | steps.overflows(answers, errors).any(axis=0)
    return np.where(unsure, np.inf, error)
