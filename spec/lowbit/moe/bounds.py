r"""Bounds of routing: how far a correct gate, weight, expert or layer may lie from the exact one.

The products are sums like any other, and `rounding` says how far those may lie. What is new is that they are chained:
the error of one step enters the next, which may enlarge it and adds its own. Each step below takes an error and
returns one, and the bound of an operation is their composition, once for the arithmetic that a backend declares and
once, far smaller, for the reference's own float64.

**A product of a value that is off already.** If :math:`|\hat x - x| \le \epsilon`, then

.. math:: |\widehat{xW} - xW| \;\le\; \gamma_D\,(|x| + \epsilon)\,|W| \;+\; \epsilon\,|W| \;+\; \text{underflow}.

**One number at a time.** Between sums a backend works on single numbers in float32, or better. An exponential of a
library is charged :math:`c = 8` roundings, which are 4 units in the last place, and a quotient 4; an exponential may
vanish where its value lies below the least normal number.

**silu.** Its slope is at most 1.1 anywhere, so it enlarges an error by no more than that. Of its own it adds an
exponential, a sum and a quotient: :math:`\gamma_{13}\,|\mathrm{silu}(a)|`. Where :math:`e^{-a}` overflows, the
quotient is 0 instead of :math:`a e^{a}`, at most :math:`2^{-121}` away, because :math:`e^{-a}` overflows float32 only
below :math:`a = -88.7`.

**Softmax** of logits that are off by :math:`\epsilon_i`. Numerator and denominator move by factors of at most
:math:`e^{\epsilon_i}` and :math:`e^{\max \epsilon}`; subtracting the greatest logit :math:`m` first adds
:math:`u\,|l_i - m|` to :math:`\epsilon_i`. The exponentials, their sum with :math:`D` roundings and the quotient are
one relative error

.. math:: r = (1 + \gamma_{3c + 4})\,(1 + 2\gamma_D) - 1, \qquad
   |\hat p_i - p_i| \;\le\; p_i\,\bigl(e^{\epsilon_i + \max \epsilon}\,(1 + r) - 1\bigr) + \text{vanished},

where a denominator is charged twice: :math:`1/(1 - \gamma) \le 1 + 2\gamma` while :math:`\gamma` is at most a half.

**The layer** sums :math:`k` experts, each off by its own bound and weighted by a number that is given.

Source: N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., §3.1, Lemma 3.1.
"""

from dataclasses import dataclass

import numpy as np

from lowbit.arrays import F32, F64
from lowbit.contract.rounding import (
    HALF_LEAST_SUBNORMAL,
    UNIT_ROUNDOFF,
    Arithmetic,
    Bound,
    checked_gamma,
    direct_bound,
    gamma,
    one_loop,
)
from lowbit.moe.routing import Ids, Scores, Softmax, expert, product, silu

EXPONENTIAL = 8
QUOTIENT = 4
SILU_SLOPE = 1.1
SILU_VANISHED = 2.0**-121
LEAST_NORMAL = 2.0**-126


@dataclass(frozen=True)
class Steps:
    """An arithmetic, step by step.

    Attributes:
        arithmetic: its accumulator and the roundings of its sums.
        unit: unit roundoff of everything between the sums.
    """

    arithmetic: Arithmetic
    unit: float

    def sum_gamma(self, length: int) -> float:
        """γ_D of a sum of `length` terms.

        Raises:
            ArgumentError: it is above a tenth.
        """
        return checked_gamma(self.arithmetic, length, length)

    def stored(self, value: F64, error: F64) -> F64:
        """The error of a sum after it has left its accumulator, which may be finer than what follows."""
        if UNIT_ROUNDOFF[self.arithmetic.accumulator] < self.unit:
            return error + self.unit * (np.abs(value) + error)
        return error


def declared(arithmetic: Arithmetic) -> Steps:
    """What a backend declares: its sums as declared, float32 between them."""
    return Steps(arithmetic, UNIT_ROUNDOFF["float32"])


REFERENCE = Steps(Arithmetic("direct", "float64", one_loop), UNIT_ROUNDOFF["float64"])


# **The steps.** Each takes exact values with an error for each, and returns the error of its result.


def product_error(steps: Steps, x: F64, error: F64, matrix: F32) -> F64:
    """Of ``x W``, where x is off by `error`: float64, T × N."""
    relative, magnitudes = steps.sum_gamma(matrix.shape[0]), np.abs(matrix.astype(np.float64))
    summed = relative * ((np.abs(x) + error) @ magnitudes) + error @ magnitudes
    underflow = HALF_LEAST_SUBNORMAL * (1 + relative) * (matrix.shape[0] + 1)
    return steps.stored(product(x, matrix), summed + underflow)


def silu_error(steps: Steps, a: F64, error: F64) -> F64:
    """Of ``silu(a)``, where a is off by `error`."""
    moved = SILU_SLOPE * error
    return moved + gamma(EXPONENTIAL + 1 + QUOTIENT, steps.unit) * (np.abs(silu(a)) + moved) + SILU_VANISHED


def softmax_error(steps: Steps, logits: F64, error: F64) -> F64:
    """Of the softmax along the last axis, where the logits are off by `error`."""
    below = logits - logits.max(axis=-1, keepdims=True)
    shift = error + steps.unit * (np.abs(below) + 2 * error.max(axis=-1, keepdims=True))
    shift = shift + shift.max(axis=-1, keepdims=True)
    sums = 2 * steps.sum_gamma(logits.shape[-1])
    relative = (1 + gamma(3 * EXPONENTIAL + QUOTIENT, steps.unit)) * (1 + sums) - 1
    log_p = below - np.log(np.exp(below).sum(axis=-1, keepdims=True))
    greatest: F64 = np.minimum(np.exp(np.minimum(log_p + shift, 0)), 1) * (1 + relative)  # no probability exceeds 1
    limit: F64 = greatest - np.exp(log_p) + logits.shape[-1] * LEAST_NORMAL
    return limit


def expert_error(steps: Steps, x: F32, gate: F32, up: F32, down: F32) -> tuple[F64, F64]:
    """Of one expert: its error and the gauge of its last sum, both T × hidden."""
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


def gate_bound(x: F32, router: F32, scores: Scores, arithmetic: Arithmetic, exact: F64) -> Bound:
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
    if scores == "logits":
        return direct_bound(gauge, len(router), arithmetic, exact, underflows=len(router))
    wide, exactly, logits = x.astype(np.float64), np.zeros(x.shape), product(x, router)
    limit = sum(
        softmax_error(steps, logits, product_error(steps, wide, exactly, router))
        for steps in (declared(arithmetic), REFERENCE)
    )
    how = (
        f"logits by {_described(arithmetic, len(router))}, then {_described(arithmetic, router.shape[1])} exponentials"
    )
    return Bound(np.asarray(limit), gauge, how)


def weights_bound(scores: F32, chosen: Ids, softmax: Softmax, arithmetic: Arithmetic, exact: F64) -> Bound:
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
    return Bound(limit, exact, f"{_described(arithmetic, k)} {what} and a quotient")


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
        shares = np.abs(weights[t].astype(np.float64))
        gauge[t] = sum(share * np.abs(answer) for share, answer in zip(shares, answers, strict=True))
        for steps in (declared(arithmetic), REFERENCE):
            errors = [expert_error(steps, row, gate[e], up[e], down[e])[0][0] for e in chosen[t]]
            carried = sum(share * error for share, error in zip(shares, errors, strict=True))
            error = steps.sum_gamma(k) * (gauge[t] + carried) + carried + HALF_LEAST_SUBNORMAL * (k + 1)
            limit[t] += steps.stored(exact[t], error)
    return Bound(limit, gauge, f"the experts' own bounds, weighted, and {_described(arithmetic, k)}")
