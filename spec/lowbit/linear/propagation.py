r"""Propagation: how an error of the input changes the result of a product, a silu, a softmax and a soft cap.

Layers chain these functions: the error of one step enters the next, which may enlarge it and adds its own. `rounding`
bounds a single sum. Here each step takes exact values with a bound on the error of each, and returns a bound on the
error of its result. The bound of an operation composes these steps: once for the arithmetic that a backend declares,
and once, far smaller, for the reference's own float64.

**A product of inexact values.** If :math:`|\hat x - x| \le \epsilon`, then

.. math:: |\widehat{xW} - xW| \;\le\; \gamma_D\,(|x| + \epsilon)\,|W| \;+\; \epsilon\,|W| \;+\; \text{underflow}.

**One number at a time.** Outside its sums a backend computes with single numbers in float32 or better. A library's
exponential is charged :math:`c = 8` roundings, which are 4 units in the last place, and a quotient 4; an exponential
may vanish where its value lies below the least normal number.

**silu.** Its slope is at most 1.1 everywhere, so it enlarges an error by no more than that. It adds an exponential, a
sum and a quotient: :math:`\gamma_{13}\,|\mathrm{silu}(a)|`. Where :math:`e^{-a}` overflows, the quotient is 0 instead
of :math:`a e^{a}`, at most :math:`2^{-121}` away, because :math:`e^{-a}` overflows float32 only below :math:`a =
-88.7`.

**Softmax** of logits whose errors are at most :math:`\epsilon_i`. Numerator and denominator change by factors of at
most :math:`e^{\epsilon_i}` and :math:`e^{\max \epsilon}`; subtracting the greatest logit :math:`m` first adds
:math:`u\,|l_i - m|` to :math:`\epsilon_i`. The exponentials, their sum with :math:`D` roundings and the quotient are
one relative error

.. math:: r = (1 + \gamma_{3c + 4})\,(1 + 2\gamma_D) - 1, \qquad
   |\hat p_i - p_i| \;\le\; p_i\,\bigl(e^{\epsilon_i + \max \epsilon}\,(1 + r) - 1\bigr) + \text{vanished},

where a denominator is charged twice: :math:`1/(1 - \gamma) \le 1 + 2\gamma` while :math:`\gamma` is at most a half.

**A soft cap**, :math:`C(a) = c\tanh(a/c)`, rises everywhere, so an error :math:`\epsilon` of a number moves it by at
most

.. math:: \mu = \max\bigl(C(a + \epsilon) - C(a),\; C(a) - C(a - \epsilon)\bigr).

Its own roundings are relative. tanh is concave above 0 and 0 there, so a relative error of its argument causes a
relative error of its value that is no larger: the rounded cap and the quotient are :math:`1 + 4`. A tanh is charged
:math:`c + 1 + 4 + 1 = 14`, whether it comes from a library or is :math:`1 - 2/(e^{2z} + 1)`; that form is as exact only
where tanh exceeds a half, because it cancels below, and a kernel that uses it alone loses the small numbers. Where
:math:`e^{2z}` or :math:`a/c` overflows, its value is 1, and the exact one lies within :math:`2^{-126}` of that. The
product with the rounded cap is 2 more:

.. math:: |\hat C - C(a)| \;\le\; \mu + \gamma_{21}\,(|C(a)| + \mu) + 2\,(1 + c)\,\eta .

A 16-bit kernel that rounds between its steps also rounds the quotient and the tanh, each with :math:`u_T` and
:math:`\eta_T`.

Source: N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., §3.1, Lemma 3.1.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lowbit.arrays import F64, Activations
from lowbit.contract.rounding import (
    ETA,
    HALF_LEAST_SUBNORMAL,
    LARGEST,
    UNIT_ROUNDOFF,
    Arithmetic,
    checked_gamma,
    gamma,
    one_loop,
)
from lowbit.linear.elementary import product, silu, soft_cap

EXPONENTIAL = 8
QUOTIENT = 4
TANH = EXPONENTIAL + 1 + QUOTIENT + 1
SOFT_CAP = 1 + QUOTIENT + TANH + 2
SILU_SLOPE = 1.1
SILU_VANISHED = 2.0**-121
LEAST_NORMAL = 2.0**-126


@dataclass(frozen=True)
class Steps:
    """An arithmetic, step by step.

    Attributes:
        arithmetic: its accumulator and the roundings of its sums.
        unit: unit roundoff of everything between the sums.
        handed: the type to which values passed from one step to the next are rounded, or None if the roundings between
            the sums include it.
    """

    arithmetic: Arithmetic
    unit: float
    handed: str | None = None

    def sum_gamma(self, length: int) -> float:
        """γ_D of a sum of `length` terms.

        Raises:
            ArgumentError: γ_D is above a tenth.
        """
        return checked_gamma(self.arithmetic, length, length)

    def stored(self, value: F64, error: F64) -> F64:
        """The error of a sum after conversion from its accumulator, which may be more precise than the next step."""
        if UNIT_ROUNDOFF[self.arithmetic.accumulator] < self.unit:
            return error + self.unit * (np.abs(value) + error)
        return error

    def passed(self, value: F64, error: F64) -> F64:
        """The error of a value after it has been passed to the next step."""
        if self.handed is None:
            return error
        return error + UNIT_ROUNDOFF[self.handed] * (np.abs(value) + error) + ETA[self.handed]

    def overflows(self, value: F64, error: F64) -> npt.NDArray[np.bool_]:
        """Where a value may exceed the largest number of the type in which it is passed on."""
        return np.abs(value) + error > (np.inf if self.handed is None else LARGEST[self.handed])


def declared(arithmetic: Arithmetic, inputs: str = "float32") -> Steps:
    """The steps that a backend declares: its sums as declared, and float32 or the type of the inputs for the values
    between them."""
    handed = inputs if arithmetic.intermediate == "inputs" and inputs != "float32" else None
    return Steps(arithmetic, UNIT_ROUNDOFF["float32"], handed)


REFERENCE = Steps(Arithmetic("direct", "float64", one_loop), UNIT_ROUNDOFF["float64"])
"""The steps of the reference: plain loops in float64."""


def product_error(steps: Steps, x: F64, error: F64, matrix: Activations) -> F64:
    """The error of ``x W``, where that of x is at most `error`: float64, T × N."""
    relative, magnitudes = steps.sum_gamma(matrix.shape[0]), np.abs(matrix.astype(np.float64))
    summed = relative * ((np.abs(x) + error) @ magnitudes) + error @ magnitudes
    underflow = HALF_LEAST_SUBNORMAL * (1 + relative) * (matrix.shape[0] + 1)
    return steps.stored(product(x, matrix.astype(np.float64)), summed + underflow)


def silu_error(steps: Steps, a: F64, error: F64) -> F64:
    """The error of ``silu(a)``, where that of a is at most `error`."""
    moved = SILU_SLOPE * error
    return moved + gamma(EXPONENTIAL + 1 + QUOTIENT, steps.unit) * (np.abs(silu(a)) + moved) + SILU_VANISHED


def softmax_error(steps: Steps, logits: F64, error: F64) -> F64:
    """The error of the softmax along the last axis, where that of the logits is at most `error`."""
    below = logits - logits.max(axis=-1, keepdims=True)
    shift = error + steps.unit * (np.abs(below) + 2 * error.max(axis=-1, keepdims=True))
    shift = shift + shift.max(axis=-1, keepdims=True)
    sums = 2 * steps.sum_gamma(logits.shape[-1])
    relative = (1 + gamma(3 * EXPONENTIAL + QUOTIENT, steps.unit)) * (1 + sums) - 1
    log_p = below - np.log(np.exp(below).sum(axis=-1, keepdims=True))
    greatest: F64 = np.minimum(np.exp(np.minimum(log_p + shift, 0)), 1) * (1 + relative)  # no probability exceeds 1
    limit: F64 = greatest - np.exp(log_p) + logits.shape[-1] * LEAST_NORMAL
    return limit


def soft_cap_error(steps: Steps, a: F64, error: F64, cap: float) -> F64:
    """The error of ``soft_cap(a, cap)``, where that of a is at most `error`."""
    capped = soft_cap(a, cap)
    moved = np.maximum(soft_cap(a + error, cap) - capped, capped - soft_cap(a - error, cap))
    relative, lost = gamma(SOFT_CAP, steps.unit), HALF_LEAST_SUBNORMAL
    if steps.handed is not None:
        relative, lost = (1 + relative) * (1 + UNIT_ROUNDOFF[steps.handed]) ** 2 - 1, ETA[steps.handed]
    limit: F64 = moved + relative * (np.abs(capped) + moved) + 2 * (1 + cap) * lost
    return limit
