r"""Bounds of products with stored matrices: from the declared types to the error of each element.

The chapter `rounding` bounds a sum by :math:`\gamma_D` times its gauge. A kernel in use rounds in more places, and each
adds its own term. With the unit roundoff :math:`u_T` and half the least subnormal number :math:`\eta_T` of a type T:

**Weights.** A kernel that converts weights to a type V before it multiplies (*weights* in its declaration) multiplies
by :math:`\hat w` with :math:`|\hat w - w| \le u_V\,|w| + \eta_V`, or twice that if it goes through float32 to 16 bits.
One that declares ``exact`` applies codes and scales without forming a weight. Forming a weight from code, scale and
zero may itself round: up to three times in V, charged to the magnitudes :math:`|product| + |offset|`:

.. math:: E_w = \sum_k |x_k|\,\bigl(\gamma_4(V)\,m_{kn} + 4\,\eta_V\bigr).

**The sum.** In the *dequantised* form its terms are :math:`x_k w_k`, in the *factored* form :math:`x_k` times the
product and times the offset, so that the gauge is :math:`\sum_k |x_k|\,m_{kn}` with magnitudes :math:`m`. Scaling after
the sum of a group adds roundings and not terms, and is part of the declared :math:`D`.

**Accumulators of 16 bits** stay accurate only for short sums, so kernels *promote*: after P products the float16 sum is
added to a float32 one. Then a term meets at most P + 1 roundings of float16 and D of float32:

.. math:: \gamma = (1 + \gamma_{P+1}(\text{float16}))\,(1 + \gamma_D(\text{float32})) - 1.

Without promotion all D are of float16, and a declaration whose :math:`\gamma` exceeds a tenth is refused, as always.

**Sums that activations carry** (Q8_1) may replace the sum of a block that meets the offset of its weights. Where a
stored sum differs from that of the numbers, a kernel is right with either, so the bound includes

.. math:: \sum_b |s_{tb} - \sum_{k \in b} x_{tk}|\; \max_{k \in b} |\mathit{offset}_{kn}|.

**The result** is rounded to its type R: :math:`u_R (|y| + \text{all of the above}) + \eta_R`, unless R is the type of
the accumulator. Where the exact sum or its bound passes the largest number of R, or the gauge passes the largest number
of the accumulator, the kernel may overflow, and the element is not judged (its bound is infinite).

Source: N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., §2.2, §3.1.
"""

import numpy as np

from lowbit.arrays import F64
from lowbit.contract.checks import check_choice
from lowbit.contract.rounding import ETA, UNIT_ROUNDOFF, Arithmetic, Bound, checked_gamma, gamma, one_loop
from lowbit.numbers.floats import FLOATS
from lowbit.tensor_formats.stored import Result, Stored
from lowbit.tensor_formats.table import Terms

FORMS = ("dequantised", "factored")
SCALED = 4
"""Roundings from code, scale and zero to a weight of a 16-bit type by way of float32."""


def run_length(weights: Stored) -> int:
    """The rows that share a scale: the group, the block, or all of them."""
    return int(dict(weights.options).get("group_size") or weights.table.block or weights.rows)


def of_sums(x: Stored, weights: Stored, terms: Terms | None = None) -> F64 | float:
    """How much the sums stored with activations may change a result: T × N, or 0 if none are stored; `terms` as for
    `stored_bound`."""
    if x.sums is None:
        return 0.0
    blocks = x.sums.shape[1]
    apart = np.abs(x.sums - x.values.T.reshape(x.columns, blocks, -1).sum(axis=-1))
    own = terms or weights.terms
    offsets = np.broadcast_to(np.abs(own.offsets), own.products.shape)
    changed: F64 = apart @ offsets.reshape(blocks, -1, offsets.shape[1]).max(axis=1)
    return changed


def stored_bound(
    x: F64,
    weights: Stored,
    result: Result,
    arithmetic: Arithmetic,
    exact: F64,
    sums: F64 | float = 0.0,
    terms: Terms | None = None,
) -> Bound:
    """The bound of `linear.gemm/C2`, for all rows of activations.

    Args:
        x: float64, T × K, finite: the activations.
        weights: K × N.
        result: the type of the backend's result.
        arithmetic: what the backend declares.
        exact: float64, T × N: the reference's result.
        sums: what `of_sums` gives for stored activations.
        terms: the terms of the columns of `exact`; by default those of all columns.

    Returns:
        limit and gauge, T × N; the limit is infinite where a kernel of this arithmetic may overflow.

    Raises:
        ArgumentError: another form than those of `FORMS`; a declaration that allows more than a tenth of the gauge.
    """
    check_choice("form of a product with a stored matrix", arithmetic.form, FORMS)
    terms, sizes = terms or weights.terms, np.abs(x)
    magnitudes = terms.magnitudes
    factored = sizes @ magnitudes
    gauge = sizes @ np.abs(terms.values) if arithmetic.form == "dequantised" else factored
    relative = summed_gamma(arithmetic, weights)
    limit = relative * gauge
    derivation = f"γ = {relative:.3g} ({arithmetic.accumulator}) times the {arithmetic.form} gauge"
    if arithmetic.weights != "exact":
        limit += (1 + relative) * (
            gamma(SCALED, UNIT_ROUNDOFF[arithmetic.weights]) * factored
            + SCALED * ETA[arithmetic.weights] * sizes.sum(axis=1, keepdims=True)
        )
        derivation += f" + weights in {arithmetic.weights}"
    # Products may underflow when they are formed, at most three per row, and are then multiplied by a code or a scale.
    largest = max(1.0, float(magnitudes.max()), float(sizes.max()))
    limit += ETA[arithmetic.accumulator] * (1 + relative) * 3 * (weights.rows + 1) * largest
    limit += sums
    if result != arithmetic.accumulator:
        limit += UNIT_ROUNDOFF[result] * (np.abs(exact) + limit) + ETA[result]
        derivation += f" + rounding to {result}"
    limit += gamma(one_loop(weights.rows, weights.rows), UNIT_ROUNDOFF["float64"]) * factored
    most = float(np.finfo(arithmetic.accumulator).max) / 2
    overflows = (np.abs(exact) + limit > FLOATS[result].largest) | (factored > most)
    return Bound(np.where(overflows, np.inf, limit), gauge, derivation)


def summed_gamma(arithmetic: Arithmetic, weights: Stored) -> float:
    """γ of the declared sum, promotion included.

    Raises:
        ArgumentError: γ is above a tenth.
    """
    run = run_length(weights)
    if arithmetic.accumulator != "float16" or not arithmetic.promotion:
        return checked_gamma(arithmetic, weights.rows, run)
    short = gamma(min(arithmetic.promotion, weights.rows) + 1, UNIT_ROUNDOFF["float16"])
    later = Arithmetic(arithmetic.form, "float32", arithmetic.roundings)
    return (1 + short) * (1 + checked_gamma(later, weights.rows, run)) - 1
