r"""Bounds of norm and activation: how far a correct RMSNorm, gated unit or soft cap may lie from the exact one.

All end in operations on single numbers. Only the norm has a sum, and the root halves its error.

**RMSNorm**, :math:`y_c = g_c\,x_c / \sqrt v` with :math:`v = \frac1n \sum x_c^2 + \varepsilon`. All terms of :math:`v`
are positive, so their relative errors bound that of the whole. A square goes through the :math:`D` roundings that are
declared for the sum, and at most :math:`4` after it: the sum leaves its accumulator, :math:`1/n` is rounded, the sum is
multiplied by it, and :math:`\varepsilon`, which was rounded once, is added. So :math:`\hat v = v (1 + \theta)` with

.. math:: |\theta| \;\le\; e = (1 + \gamma_D)(1 + \gamma_4) - 1 + 3\eta / v,

where the last term covers the loss of squares below :math:`2^{-126}`; it is small because :math:`\varepsilon` is at
least that. A root halves a small relative error; the exact expression is as short as the half:

.. math:: \Bigl|\frac1{\sqrt{\hat v}} - \frac1{\sqrt v}\Bigr| \;\le\;
   \frac1{\sqrt v}\Bigl(\frac1{\sqrt{1 - e}} - 1\Bigr).

Root and reciprocal are one rounding each where they are those of IEEE 754; as for any quotient here, a library is
charged :math:`4` for the two. Two products follow:

.. math:: |\hat y_c - y_c| \;\le\; |y_c|\Bigl(\frac{1 + \gamma_6}{\sqrt{1 - e}} - 1\Bigr)
   + \eta\,(1 + |g_c| + 1/\sqrt v),

where :math:`\eta = 2^{-150}` is what a product may lose to underflow, whichever is the first: that of x and root is
multiplied by the gain afterwards, that of x and gain by the root.

Where integers make the sum exact, :math:`\gamma_D` is zero, and about :math:`8u` remains: too little to hide one
dropped square among thousands.

**A gated unit**, :math:`\mathrm{silu}(a)\,b`. As in `lowbit.linear.propagation`, silu is an exponential of a
library, a sum and a quotient, :math:`\gamma_{13}\,|\mathrm{silu}(a)|`, and a quotient whose denominator overflowed. A
backend may instead take :math:`e^{a}`, of negative a, and let it vanish below the least normal number :math:`2^{-126}`,
which it is from :math:`a = -87.3` on; that loses at most :math:`87.4 \cdot 2^{-126} < 2^{-119}`. One product is left:

.. math:: |\hat y - y| \;\le\; (1 + u)\bigl(|\mathrm{silu}(a)| + \epsilon\bigr)\,|b| - |y| + 2\eta, \qquad
   \epsilon = \gamma_{13}\,|\mathrm{silu}(a)| + 2^{-121} + 2^{-119}.

**With a GELU**, :math:`a\,\sigma(w)\,b` with the logistic function :math:`\sigma` and
:math:`w = 2\sqrt{2/\pi}\,(a + 0.044715\,a^3)`. Both terms of :math:`w` have one sign, so the :math:`8` roundings of
its powers, constants, products and sum are a relative error, :math:`\delta = \gamma_8 |w|`. As :math:`\sigma` rises
everywhere, it changes by at most :math:`\sigma(w + \delta) - \sigma(w - \delta)`. A kernel may compute :math:`\sigma`
as above, or as :math:`(1 + \tanh\frac w2)/2`, as most do. There the tanh of a library and the sum, both at most about
1, lose up to :math:`\gamma_{13}` of 1 and not of :math:`\sigma`: at negative :math:`a` the sum cancels. So both ways
are allowed

.. math:: \epsilon = |a|\,\bigl(\sigma(w + \delta) - \sigma(w - \delta) + \gamma_{13}\bigr)
   + 2^{-121} + 2^{-119}

in place of the :math:`\epsilon` of silu; what vanishes is less here, since :math:`|a| < 11` where :math:`w = -88.7`.

**The clamped unit**, :math:`a'\,\sigma(\alpha a')\,(b' + 1)`, has the rounded limit in :math:`a'` and :math:`b'`: a
relative error of :math:`u` in each. The logit :math:`w = \alpha a'` has that one, the rounded :math:`\alpha` and a
product, :math:`\delta = \gamma_3 |w|`. The logistic function moves as for the GELU. It is computed with a relative
error of :math:`\gamma_{13}`, as in silu, and multiplied by :math:`a'`, which has its own :math:`u`:

.. math:: \epsilon = |a'|\,\bigl(\sigma(w + \delta) - \sigma(w - \delta)\bigr)
   + \gamma_{15}\,|a'|\,\sigma(w + \delta) + 2^{-121} + 2^{-119}.

What vanishes is again less than for silu, since :math:`|a'| < 53` where :math:`w = -88.7`. The other factor is wrong by
at most :math:`\epsilon_b = r + u\,(|b' + 1| + r)`, where :math:`r` is :math:`u\,|b'|` if :math:`b` is at the limit or
beyond and else 0: near :math:`b' = -1` the sum cancels, but only what the limit had lost. The product is

.. math:: |\hat y - y| \;\le\; (1 + u)\,(|f| + \epsilon)\,(|b' + 1| + \epsilon_b) - |y| + 2\eta, \qquad
   f = a'\,\sigma(w).

**A soft cap** is that of `lowbit.linear.propagation`, of an exact number.

**Between the steps** a kernel of 16 bits may round the product of x and root, before the gain, and silu or gelu,
before its product, to the type of the inputs: :math:`u_T` of the value and :math:`\eta_T` times what it is multiplied
by. The same holds for both factors of the clamped unit.

Source: N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., §3.1, Lemma 3.1.
"""

from collections.abc import Callable

import numpy as np

from lowbit.arrays import F64, Activations
from lowbit.contract.rounding import HALF_LEAST_SUBNORMAL, Arithmetic, Bound, gamma, returned
from lowbit.linear.elementary import logistic, silu
from lowbit.linear.propagation import (
    EXPONENTIAL,
    QUOTIENT,
    REFERENCE,
    SILU_VANISHED,
    Steps,
    declared,
    silu_error,
    soft_cap_error,
)
from lowbit.model.layers import SLOPE, gelu, gelu_exponent

MEAN_ROUNDINGS = 4
PRODUCTS = 2
POLYNOMIAL = 8
LOGIT = 3
EXPONENTIAL_VANISHED = 2.0**-119


# **The bounds.** Each takes the arguments of its operation, what the backend declares, and the reference's result.


def rms_norm_bound(
    x: Activations,
    gain: Activations,
    epsilon: float,
    arithmetic: Arithmetic,
    exact: F64,
    *,
    summed_exactly: bool = False,
) -> Bound:
    """The bound of `blocks.rms_norm`; `summed_exactly` if the squares have an exact sum in any order, as those of small
    integers do.

    Raises:
        ArgumentError: the declared arithmetic would allow more than a tenth.
    """
    wide = x.astype(np.float64)
    under_root = np.mean(wide * wide, axis=1, keepdims=True) + epsilon
    limit, inputs, factor = np.zeros(exact.shape), x.dtype.name, np.abs(gain.astype(np.float64))
    normal = np.abs(wide) / np.sqrt(under_root)
    for steps in (declared(arithmetic, inputs), REFERENCE):
        sums = steps.sum_gamma(x.shape[1])
        relative = 1 / np.sqrt(1 - mean_error(steps, 0.0 if summed_exactly else sums, under_root))
        own = normal * (relative * (1 + gamma(QUOTIENT + PRODUCTS, steps.unit)) - 1)
        limit += factor * steps.passed(normal, own)
    lost = HALF_LEAST_SUBNORMAL * (1 + np.abs(gain.astype(np.float64)) + 1 / np.sqrt(under_root))
    depth = arithmetic.roundings(x.shape[1], x.shape[1])
    summed = "an exact sum" if summed_exactly else f"half of γ_{depth}({arithmetic.accumulator})"
    how = f"{summed}, and a mean, a root, a quotient and two products in float32"
    return returned(Bound(limit + lost, np.abs(exact), how), exact, inputs)


def mean_error(steps: Steps, sums: float, under_root: F64) -> F64:
    """The relative error of the mean square plus ε, float64: e at the top of this chapter."""
    return (1 + sums) * (1 + gamma(MEAN_ROUNDINGS, steps.unit)) - 1 + 3 * HALF_LEAST_SUBNORMAL / under_root


def swiglu_bound(gate: Activations, up: Activations, arithmetic: Arithmetic, exact: F64) -> Bound:
    """The bound of `blocks.swiglu`, which has no sum: the declared accumulator does not matter if it is float32 or
    better.
    """
    a = gate.astype(np.float64)
    how = "an exponential, a sum, a quotient and a product in float32"
    return _gated(a, up, arithmetic, exact, how, silu(a), lambda steps: silu_error(steps, a, np.zeros_like(a)))


def geglu_bound(gate: Activations, up: Activations, arithmetic: Arithmetic, exact: F64) -> Bound:
    """The bound of `blocks.geglu`."""
    a = gate.astype(np.float64)
    how = "a polynomial, an exponential or a tanh, a sum, a quotient and a product in float32"
    return _gated(a, up, arithmetic, exact, how, gelu(a), lambda steps: gelu_error(steps, a))


def gelu_error(steps: Steps, a: F64) -> F64:
    """The error of ``gelu(a)`` for an exact a, float64."""
    logit = gelu_exponent(a)
    shift = gamma(POLYNOMIAL, steps.unit) * np.abs(logit)
    lost = gamma(EXPONENTIAL + 1 + QUOTIENT, steps.unit)
    return np.abs(a) * (logistic(logit + shift) - logistic(logit - shift) + lost) + SILU_VANISHED


def _gated(
    a: F64,
    up: Activations,
    arithmetic: Arithmetic,
    exact: F64,
    how: str,
    activated: F64,
    error_of: Callable[[Steps], F64],
) -> Bound:
    """The bound of a gated unit, given its activation and the activation's error."""
    b, size, limit, inputs = np.abs(up.astype(np.float64)), np.abs(activated), np.zeros(exact.shape), up.dtype.name
    for steps in (declared(arithmetic, inputs), REFERENCE):
        error = steps.passed(size, error_of(steps) + EXPONENTIAL_VANISHED)
        limit += (size * steps.unit + error * (1 + steps.unit)) * b + 2 * HALF_LEAST_SUBNORMAL
    return returned(Bound(limit, np.abs(exact), how), exact, inputs)


def clamped_swiglu_bound(gate: Activations, up: Activations, limit: float, arithmetic: Arithmetic, exact: F64) -> Bound:
    """The bound of `blocks.clamped_swiglu`."""
    a, b = np.minimum(gate.astype(np.float64), limit), np.clip(up.astype(np.float64), -limit, limit)
    activated, factor = np.abs(a * logistic(SLOPE * a)), np.abs(b + 1)
    within, inputs = np.zeros(exact.shape), up.dtype.name
    for steps in (declared(arithmetic, inputs), REFERENCE):
        of_gate = steps.passed(activated, _clamped_error(steps, a))
        of_limit = steps.unit * np.where(np.abs(up.astype(np.float64)) < (1 - 2 * steps.unit) * limit, 0, np.abs(b))
        of_up = steps.passed(factor, of_limit + steps.unit * (factor + of_limit))
        product = (1 + steps.unit) * (activated + of_gate) * (factor + of_up)
        within += product - activated * factor + 2 * HALF_LEAST_SUBNORMAL
    how = "two clamps, an exponential, two sums, a quotient and products in float32"
    return returned(Bound(within, np.abs(exact), how), exact, inputs)


def _clamped_error(steps: Steps, a: F64) -> F64:
    """The error of ``a σ(α a)`` for a clamped a, float64: ε at the top of this chapter."""
    logit = SLOPE * a
    shift = gamma(LOGIT, steps.unit) * np.abs(logit)
    most = logistic(logit + shift)
    own = gamma(EXPONENTIAL + 1 + QUOTIENT + PRODUCTS, steps.unit) * most
    return np.abs(a) * (most - logistic(logit - shift) + own) + SILU_VANISHED + EXPONENTIAL_VANISHED


def soft_cap_bound(x: Activations, cap: float, arithmetic: Arithmetic, exact: F64) -> Bound:
    """The bound of `blocks.soft_cap`."""
    wide, within, inputs = x.astype(np.float64), np.zeros(exact.shape), x.dtype.name
    for steps in (declared(arithmetic, inputs), REFERENCE):
        within += soft_cap_error(steps, wide, np.zeros_like(wide), cap)
    how = "a quotient, a tanh and a product in float32"
    return returned(Bound(within, np.abs(exact), how), exact, inputs)
