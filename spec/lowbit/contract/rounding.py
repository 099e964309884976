r"""Rounding: how much error floating-point arithmetic alone can cause.

A kernel adds thousands of float32 products in its own order, so its result legitimately differs from the reference's. A
tolerance chosen by experience either passes a wrong kernel or fails a right one. The remedy is to *derive* how much
error rounding alone can cause, from the inputs and from the arithmetic that the backend declares. Any larger error is a
mistake, not rounding.

**One operation.** In a format with unit roundoff :math:`u` (:math:`2^{-24}` for float32),

.. math:: \mathrm{fl}(a \circ b) = (a \circ b)(1 + \delta) + \eta, \qquad |\delta| \le u,

where :math:`\eta` is zero except in a product that underflows, and then at most half the least subnormal number
(:math:`2^{-150}`). A fused multiply-add rounds once where two operations round twice.

**A chain of operations.** If a term goes through at most :math:`D` roundings on its way into the result, it arrives
multiplied by :math:`1 + \theta` with

.. math:: |\theta| \le \gamma_D = \frac{D u}{1 - D u}.

This holds for *any* order of the sum; the order only decides :math:`D`. A loop over :math:`K` products has
:math:`D = K`; eight partial sums that are combined at the end have :math:`D = K/8 + 3`. A backend declares its
:math:`D` as a function of the shape, its `roundings`.

**The whole result.** If a kernel forms and sums the terms :math:`t_k`, then

.. math:: |\hat y - y| \;\le\; \gamma_D \sum_k |t_k| \;+\; \text{underflow}.

The sum :math:`\sum |t_k|` is the *gauge*. It depends on the *form* of the computation, because different forms sum
different terms; the chapter `lowbit.linear.bounds` derives it for each form of a product with quantised weights. An
accumulator that is finer than the float32 result adds the final rounding, :math:`u|y|`. The reference itself, which
sums in float64, adds its own :math:`\gamma`, about :math:`2^{-29}` of the whole.

**Types of 16 bits.** Norms, rotations, attention and gates take float16 and bfloat16 too, all arrays of a call in one
type T, and return that type, as the kernels of vLLM, PyTorch and llama.cpp do. They compute in float32 between the
ends, so the bound of float32, :math:`L`, grows by one rounding of the result:

.. math:: |\hat y - y| \;\le\; L + u_T\,(|y| + L) + \eta_T .

Some kernels also round the values between steps to T (`Arithmetic.intermediate`). Each bound says which values these
are, and charges each of them :math:`u_T` and :math:`\eta_T`. Where :math:`|y| + L` exceeds the largest number of T, a
right kernel may overflow, and the element is not judged.

**A bound must mean something.** A declaration with :math:`\gamma_D > 1/10` is refused, because almost any result lies
within a tenth of the gauge. A declaration of several times more roundings than a plain loop over the sum has is refused
too. Even an honest bound is about :math:`\sqrt{D}` times wider than the typical error, so one dropped product among
thousands can hide inside it. So every random case of the suite is paired with a *lattice* case, whose inputs make every
partial sum exact and allow no error at all.

Source: N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., §2.2, §3.1, Lemma 3.1.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from lowbit.arrays import F64
from lowbit.contract.checks import check_choice, check_integer
from lowbit.errors import ArgumentError

Form = Literal["dequantised", "factored", "offset", "direct", "integer"]
Accumulator = Literal["float16", "float32", "float64"]
Weights = Literal["exact", "float16", "bfloat16", "float32"]
Intermediate = Literal["float32", "inputs"]
FORMS: tuple[Form, ...] = get_args(Form)

UNIT_ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24, "float64": 2.0**-53}
HALF_LEAST_SUBNORMAL = 2.0**-150
ETA = {"bfloat16": 2.0**-134, "float16": 2.0**-25, "float32": HALF_LEAST_SUBNORMAL, "float64": 2.0**-1074}
"""Half the least subnormal number of each type; for float64 the whole, since half of it is not representable."""
LARGEST = {"bfloat16": 2.0**128 - 2.0**120, "float16": 65504.0}
"""The largest number of each 16-bit type."""
LARGEST_GAMMA = 0.1

Roundings = Callable[[int, int], int]
"""``roundings(rows, group_size)``: the largest number of roundings that any term undergoes on its way into the result.

For an operation without groups both are the length of its sum."""


def any_order(rows: int, group_size: int) -> int:
    """The roundings of a dot product summed in any order: one product and ``rows`` additions."""
    return rows + 1


def one_loop(rows: int, group_size: int) -> int:
    """The roundings of equation 2 as a plain loop.

    A product and at most ``group_size`` additions inside the group (the product of activation and code, or none if
    fused); the offset's own product; the scale's product; then two additions for each group.
    """
    groups = -(-rows // group_size)
    return min(rows, group_size) + 1 + 2 + 2 * groups


@dataclass(frozen=True)
class Arithmetic:
    """The arithmetic that a backend declares for a bounded operation.

    Attributes:
        form: which terms it sums: ``dequantised``, ``factored`` or ``offset`` for products with quantised weights,
            ``integer`` for those whose activations are blocks of integers, ``direct`` for an operation with only one
            form.
        accumulator: the type of its running sums, ``float32`` or ``float64``; ``float16`` for products with stored
            matrices only.
        roundings: the largest number of roundings that any term undergoes, as a function of (rows, group_size).
        weights: for products with stored matrices, the type to which weights are converted before they are multiplied;
            ``exact`` if codes and scales are applied without forming a weight.
        intermediate: the type of values passed from one step of an operation to the next, for example of a probability
            before it is multiplied: ``float32`` (or better), or ``inputs`` for the type of the arrays of the call.
        promotion: with a float16 accumulator, the number of products after which its sum is added to a float32 sum; 0
            for never.

    Raises:
        ArgumentError: a form or accumulator that is not in the lists above.
    """

    form: Form
    accumulator: Accumulator = "float32"
    roundings: Roundings = any_order
    weights: Weights = "float32"
    promotion: int = 0
    intermediate: Intermediate = "float32"

    def __post_init__(self) -> None:
        check_choice("form", self.form, FORMS)
        check_choice("accumulator", self.accumulator, get_args(Accumulator))
        check_choice("weights", self.weights, get_args(Weights))
        check_integer("promotion", self.promotion, 0)
        check_choice("intermediate", self.intermediate, get_args(Intermediate))


def gamma(roundings: int, unit_roundoff: float) -> float:
    r""":math:`\gamma_D = D u / (1 - D u)`, or infinity where :math:`D u \ge 1`.

    >>> gamma(1, 2.0**-24) > 2.0**-24
    True
    >>> gamma(2**24, 2.0**-24)
    inf

    Source: Higham, Lemma 3.1.
    """
    product = roundings * unit_roundoff
    return product / (1 - product) if product < 1 else float("inf")


@dataclass(frozen=True)
class Bound:
    """A bound with its derivation, so that a failing report can show where it comes from.

    Attributes:
        limit: float64, N: the largest allowed distance of each element from the exact value.
        gauge: float64, N: the gauge of the declared form.
        derivation: one line that a reader can check.
    """

    limit: F64
    gauge: F64
    derivation: str


def returned(bound: Bound, exact: F64, inputs: str) -> Bound:
    """The bound of a result in the type of its inputs, from the bound of the float32 result.

    >>> returned(Bound(np.zeros(1), np.ones(1), "exact"), np.ones(1), "bfloat16").limit
    array([0.00390625])
    """
    if inputs == "float32":
        return bound
    limit = bound.limit + UNIT_ROUNDOFF[inputs] * (np.abs(exact) + bound.limit) + ETA[inputs]
    limit = np.where(np.abs(exact) + bound.limit > LARGEST[inputs], np.inf, limit)
    return Bound(limit, bound.gauge, f"{bound.derivation} + rounding to {inputs}")


def direct_bound(terms: F64, length: int, arithmetic: Arithmetic, exact: F64, underflows: float | F64) -> Bound:
    """The bound of an operation with only one form: sums of at most `length` terms, each formed as written.

    Args:
        terms, arithmetic, exact, underflows: as `sum_bound`.
        length: the most terms of any sum; the declared roundings are taken at it.

    Raises:
        ArgumentError: the declared arithmetic would allow more than a tenth of the gauge.
    """
    reference = gamma(one_loop(length, length), UNIT_ROUNDOFF["float64"]) * terms
    return sum_bound(terms, (length, length), arithmetic, exact, underflows, reference, "the gauge")


def sum_bound(
    terms: F64,
    sizes: tuple[int, int],
    arithmetic: Arithmetic,
    exact: F64,
    underflows: float | F64,
    reference: F64,
    gauge: str,
    conversion: F64 | None = None,
) -> Bound:
    """The bound of float32 sums, as the chapter derives it.

    Args:
        terms: float64, the gauge, the sum of the magnitudes of the terms of each element.
        sizes: rows and group size, at which the declared roundings are taken.
        arithmetic: what the backend declares.
        exact: float64, the reference's result, of the shape of `terms`.
        underflows: how many half least subnormals the products and quotients of an element may lose in total.
        reference: float64, the error bound of the reference's own sum in float64.
        gauge: its name in the derivation.
        conversion: float64, what rounding the weights may add to each element; None where weights are not rounded.

    Raises:
        ArgumentError: the declared arithmetic would allow more than a tenth of the gauge.
    """
    relative = checked_gamma(arithmetic, *sizes)
    limit = relative * terms
    derivation = f"γ_{arithmetic.roundings(*sizes)}({arithmetic.accumulator}) = {relative:.3g} times {gauge}"
    if conversion is not None:
        limit = limit + (1 + relative) * conversion
        derivation += " + rounding of the weights"
    if UNIT_ROUNDOFF[arithmetic.accumulator] < UNIT_ROUNDOFF["float32"]:
        limit = limit + UNIT_ROUNDOFF["float32"] * (np.abs(exact) + limit)
        derivation += " + rounding of the result"
    limit = limit + HALF_LEAST_SUBNORMAL * (1 + relative) * (underflows + 1)
    return Bound(limit + reference, terms, derivation)


def checked_gamma(arithmetic: Arithmetic, rows: int, group_size: int) -> float:
    """The relative bound of a declaration; refuse one too wide to be useful.

    >>> checked_gamma(Arithmetic("factored", "float32", lambda rows, group_size: rows), 4_000_000, 128)
    Traceback (most recent call last):
    lowbit.errors.ArgumentError: declared roundings is 4000000 in float32 (γ = 0.313); allowed: γ of at most 0.1

    Raises:
        ArgumentError: fewer than one rounding, several times more than any sum of this length needs, or γ above a
            tenth.
    """
    depth = arithmetic.roundings(rows, group_size)
    most = 4 * (rows + 2 * -(-rows // group_size)) + 64
    if depth > most:
        raise ArgumentError(
            "declared roundings", depth, f"at most {most} for sums of {rows}, four times what one loop needs"
        )
    if depth < 1:
        raise ArgumentError("declared roundings", depth, "at least 1: a product or its rounding to float32")
    relative = gamma(depth, UNIT_ROUNDOFF[arithmetic.accumulator])
    if relative > LARGEST_GAMMA:
        given = f"{depth} in {arithmetic.accumulator} (γ = {relative:.3g})"
        raise ArgumentError("declared roundings", given, f"γ of at most {LARGEST_GAMMA}")
    return relative
