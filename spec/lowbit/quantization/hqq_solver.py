r"""The solver of HQQ: which zero serves a group best, found without any data.

With a grid that spans a group from its least to its largest weight, two outliers decide how all the others are rounded.
HQQ (half-quadratic quantisation) keeps the step of the grid, its scale, and moves its zero until the weights lie closer
to it, counted in a norm with :math:`p < 1`, which gives many small errors more weight than a few large ones. It needs
no calibration inputs, only the weights.

**The problem.** For each group, with fixed scale s,

.. math:: \min_{z}\; \sum_k \varphi\bigl(w_k - s\,(q_k - z)\bigr), \qquad \varphi(d) = |d|^p,

where the codes :math:`q` depend on the zero :math:`z`, a real number here. Splitting off the error into a variable of
its own, :math:`w_e`, tied to it by a quadratic penalty :math:`\beta`, gives two halves that are each solved in closed
form and alternate:

.. math::

    q &= \mathrm{clamp}(\mathrm{rint}(w / s + z)), \qquad d = w - s\,(q - z), \\
    w_e &= \mathrm{sign}(d)\,\max\bigl(0,\; |d| - |d|^{p-1} / \beta\bigr), \\
    z &\leftarrow \mathrm{mean}_k\bigl(q_k - (w_k - w_{e,k}) / s\bigr), \qquad \beta \leftarrow \kappa \beta,

with :math:`p = 0.7`, :math:`\beta = 10`, :math:`\kappa = 1.01` and 20 steps. The mean of :math:`|d|` over the whole
tensor is monitored, including that of the last step's zeros: when it no longer falls, the solver stops, and the zeros
with the least mean are kept.

**What the shrinking does.** It removes any error up to :math:`\beta^{-1/(2-p)}`, which is 0.17 for the numbers above.
The weights of language models are a tenth of that and less, and then :math:`w_e = 0` throughout: the step is :math:`z
\leftarrow \mathrm{mean}(q - w/s)`, the zero of least *squares* for the codes at hand, and *p* never matters. The norm
matters only where errors exceed the threshold; so the result depends on the unit in which weights are measured. The
figure shows both: the same weights at two sizes.

A smaller error of the weights need not be a smaller error of the layer. On SmolLM2-135M (stored in 4 bits and quantised
again along axis 1, groups of 64) the layers' squared error on 2048 tokens, against rounding to the nearest, was smaller
in 9, 19 and 20 of 21 matrices at 2, 3 and 4 bits (`bench/experiments/gptq.py` measures single layers). At 4 bits the
perplexity of 2048 tokens of another text was 47.9, where rounding to the nearest gave 56.0 (``lowbit perplexity --bits
4 --method hqq``).

.. plot:: figures/hqq_convergence.py

Here the weights come as *blocks*, g × G: each column is a group, whatever its axis (see `hqq`).

Source: HQQ (Badri and Shaji, 2023), as used by MoE offloading §3.3; errata H.
"""

from dataclasses import dataclass
from fractions import Fraction
from math import frexp
from typing import Annotated

import numpy as np

from lowbit.arrays import F32, F64
from lowbit.contract.checks import check_finite, check_integer
from lowbit.contract.operation import BOUNDED, EXACT, operation
from lowbit.contract.rounding import UNIT_ROUNDOFF, Arithmetic, Bound, direct_bound, gamma
from lowbit.contract.signature import FINITE, POSITIVE, Shape, checked
from lowbit.errors import ArgumentError
from lowbit.quantization.packing import Bits, Codes
from lowbit.text import kind_of

WEIGHTS_AT_A_TIME = 2**17
"""Few enough that the intermediate arrays, 5 MB, stay in a cache; with fewer, threads wait for the interpreter."""

CLEARLY = 1 - 1e-6
"""An error below this fraction of the threshold shrinks to 0, however the threshold is rounded."""

LEAST_EXPONENT = -1074
"""The exponent of the least float64 above 0, a power of two."""

POWER_ROUNDINGS = 10
"""The error bound of a float32 power, in unit roundoffs: 4 units in the last place, and the rounding of its
exponent."""


def check_norm(p: float, beta: float) -> None:
    """Refuse a norm or a penalty for which the two half-steps of the chapter do not hold."""
    for name, number in (("p", p), ("beta", beta)):
        if not isinstance(number, int | float | np.floating):
            raise ArgumentError(name, kind_of(number), "a number")
    if not 0 < p <= 1:
        raise ArgumentError("p", p, "above 0 and at most 1")
    if not (np.isfinite(beta) and beta > 0):
        raise ArgumentError("beta", beta, "a finite number above 0")


@dataclass(frozen=True)
class Solver:
    """The numbers of the method.

    Attributes:
        p: of the norm, above 0 and at most 1.
        beta: initial weight of the penalty, above 0.
        kappa: its growth from step to step, above 0.
        steps: the most steps; with 0 the zero remains that of the group's range.

    Raises:
        ArgumentError: a number outside these.
    """

    p: float = 0.7
    beta: float = 10.0
    kappa: float = 1.01
    steps: int = 20

    def __post_init__(self) -> None:
        check_norm(self.p, self.beta)
        if not (np.isfinite(self.kappa) and self.kappa > 0):
            raise ArgumentError("kappa", self.kappa, "a finite number above 0")
        check_integer("steps", self.steps, least=0)

    @property
    def threshold(self) -> float:
        """The largest error that the first step shrinks to 0.

        >>> round(Solver().threshold, 3)
        0.17
        """
        return float(vanishing(self.p, self.beta))


def vanishing(p: float, beta: float) -> np.float64:
    """The largest error that a step shrinks to 0."""
    with np.errstate(over="ignore"):
        return np.float64(beta) ** (-1 / (2 - p))


# **The two halves.** The first is exact: one division, one addition, one rounding to an integer.


GroupWeights = Annotated[F32, Shape("g", "G"), FINITE]
GroupScales = Annotated[F32, Shape("G"), POSITIVE]
GroupZeros = Annotated[F32, Shape("G"), FINITE]


@checked
def codes(weights: GroupWeights, scales: GroupScales, zeros: GroupZeros, bits: Bits) -> Codes:
    """``clamp(rint(W / scale + zero))``, in float32 and in this order; ties to even.

    >>> codes(np.array([[0.3], [-0.4]], np.float32), np.float32([0.5]), np.float32([1.25]), bits=2)
    array([[2],
           [0]], dtype=uint8)

    Args:
        weights: float32, g × G, finite: each column a group.
        scales: float32, G, finite and above 0.
        zeros: float32, G, finite.
        bits: 2, 3, 4 or 8.

    Returns:
        uint8, g × G.

    Raises:
        ArgumentError: wrong argument.

    Source: errata H.
    """
    with np.errstate(over="ignore"):  # a weight beyond all codes gets the last one
        real = weights / scales
        real += zeros
    np.clip(np.rint(real, out=real), 0, 2**bits - 1, out=real)
    return real.astype(np.uint8)


def shrink(d: F64, p: float, beta: float) -> F64:
    r""":math:`\mathrm{sign}(d) \max(0, |d| - |d|^{p-1}/\beta)`: errors up to the threshold become 0, others shrink.

    >>> shrink(np.array([0.0, 0.1, -1.0]), p=0.7, beta=10.0)
    array([ 0. ,  0. , -0.9])
    """
    result = np.zeros_like(d)
    left = ~(np.abs(d) <= CLEARLY * vanishing(p, beta))  # a power is slow, and most errors shrink to 0 anyway
    if left.any():
        size = np.abs(d[left])
        result[left] = np.sign(d[left]) * np.maximum(0.0, size - size ** (p - 1) / beta)
    return result


def _check_step(weights: F32, codes: Codes, scales: F32, zeros: F32, p: float, beta: float) -> None:
    check_norm(p, beta)


@checked(also=_check_step)
def step(
    weights: GroupWeights,
    codes: Annotated[Codes, Shape("g", "G")],
    scales: GroupScales,
    zeros: GroupZeros,
    p: float | np.floating,
    beta: float | np.floating,
) -> F64:
    """The next zeros, given the codes: the mean over each group of ``q - (W - W_e) / scale``.

    Args:
        weights, scales: as `codes`.
        codes: uint8, g × G.
        zeros: float32, G, finite: those with which the codes were found.
        p: of the norm, above 0 and at most 1.
        beta: weight of the penalty, above 0.

    Returns:
        float64, G.

    Raises:
        ArgumentError: wrong argument.

    Source: errata H.
    """
    left = shrink(residual(weights, codes, scales, zeros), float(p), float(beta))
    terms = codes - (weights - left) / scales
    result: F64 = np.add.reduce(terms, axis=0) / len(terms)
    return result


def residual(weights: F32, codes: Codes, scales: F32, zeros: F32) -> F64:
    """``d = W - scale * (q - zero)``, float64, g × G."""
    result: F64 = weights.astype(np.float64) - scales.astype(np.float64) * (codes - zeros.astype(np.float64))
    return result


# **The solver** alternates between the two halves. Zeros are rounded to float32 after each step,
# because `codes` takes float32.


@dataclass(frozen=True, eq=False)
class Solution:
    """What the solver found.

    Attributes:
        zeros: float32, G: those of the least error.
        errors: the mean magnitude of the errors, before the first step and after each step made.
    """

    zeros: F32
    errors: tuple[float, ...]


@checked
def solve(
    weights: GroupWeights, scales: GroupScales, zeros: GroupZeros, bits: Bits, solver: Solver | None = None
) -> Solution:
    """Move the zeros of a tensor's groups until the mean error no longer falls.

    A group whose outlier makes the grid too coarse for its other weights:

    >>> weights = np.array([[0.0], [0.4], [0.4], [0.4], [0.4], [3.0]], np.float32)
    >>> found = solve(weights, np.float32([1.0]), np.float32([0.0]), bits=2)
    >>> found.zeros.round(3), [round(error, 3) for error in found.errors[::5]]
    (array([-0.343], dtype=float32), [0.267, 0.166, 0.155, 0.154, 0.152])

    Args:
        weights, scales, bits: as `codes`.
        zeros: float32, G, finite: where to begin.
        solver: the numbers of the method; `Solver` by default.

    Raises:
        ArgumentError: wrong argument.

    Source: errata H.
    """
    chosen = solver or Solver()
    path, sums = _walked(weights, scales, zeros, bits, chosen)
    best, errors = 0, list[float]()
    for number in range(chosen.steps + 1):
        check_finite("zeros", path[number])
        errors.append(exact_sum(sums[number]) / weights.size)
        if number > 0 and not errors[-1] < min(errors[:-1]):
            break
        best = number
    return Solution(path[best].copy(), tuple(errors))


def exact_sum(numbers: F64) -> float:
    """The sum of finite numbers of at least 0, rounded once: that of `math.fsum`, in a seventh of the time.

    Sufficiently small multiples of one unit sum without rounding, in any order; the remainder of each number is summed
    in smaller units.

    >>> exact_sum(np.array([1.0, 1e-30, 1e16, 1.0]))
    1.0000000000000002e+16
    """
    total, left, bits = Fraction(0), numbers, 53 - len(numbers).bit_length()
    while (largest := float(left.max(initial=0.0))) > 0:
        unit = 2.0 ** max(frexp(largest)[1] - bits, LEAST_EXPONENT)
        multiples = np.trunc(left / unit)
        total += Fraction(unit) * int(multiples.sum())
        left = left - multiples * unit
    return float(total)


def _walked(weights: F32, scales: F32, zeros: F32, bits: int, solver: Solver) -> tuple[F32, F64]:
    """All steps, as if the mean error always fell: the zeros before each, and the sum of the errors of each group.

    Groups are independent, so a few of them make all steps before the next few do: their weights stay in the cache.
    It never takes a single group, because numpy sums a single column in another order.
    """
    count = weights.shape[1]
    path, sums = np.empty((solver.steps + 1, count), np.float32), np.empty((solver.steps + 1, count))
    parts = max(1, min(count // 2, weights.size // WEIGHTS_AT_A_TIME))
    edges = [count * part // parts for part in range(parts + 1)]
    for some in map(slice, edges, edges[1:]):
        _walk(weights[:, some], scales[some], zeros[some], bits, solver, path[:, some], sums[:, some])
    return path, sums


def _walk(weights: F32, scales: F32, zeros: F32, bits: int, solver: Solver, path: F32, sums: F64) -> None:
    """All steps of a few groups into `path` and `sums`, with the numbers of `codes`, `residual` and `step`.

    The quotients, which are slow, are the same in all steps.
    """
    wide, wide_scales, beta = weights.astype(np.float64), scales.astype(np.float64), solver.beta
    real, q, d = np.empty_like(wide, np.float32), np.empty_like(wide), np.empty_like(wide)
    with np.errstate(all="ignore"):  # after the step at which `solve` ends, any value may occur
        quotients, wide_quotients = weights / scales, wide / wide_scales
        for number in range(solver.steps + 1):
            path[number] = zeros
            np.rint(np.add(quotients, zeros, out=real), out=real)
            np.clip(real, np.float32(0), np.float32(2**bits - 1), out=real)
            q[...] = real
            np.subtract(q, zeros.astype(np.float64), out=d)
            np.subtract(wide, np.multiply(d, wide_scales, out=d), out=d)
            largest = max(d.max(), -d.min())
            if largest <= CLEARLY * vanishing(solver.p, beta):
                q -= wide_quotients
            else:
                q -= (wide - shrink(d, solver.p, beta)) / wide_scales
            sums[number] = np.add.reduce(np.abs(d, out=d), axis=0)
            zeros = (np.add.reduce(q, axis=0) / len(q)).astype(np.float32)
            beta *= solver.kappa


# **The bound of a step.** An error :math:`\hat d - d` of at most :math:`\gamma_3 (|w| + s(q + |z|))` goes through the
# shrinking, whose slope is at most :math:`2 - p` (at the threshold), and the shrinking itself adds the roundings of the
# power, a quotient and a difference, of two numbers no larger than :math:`|d|` where anything is left. What follows is
# a sum in one form, of :math:`q` and :math:`(w - w_e)/s`.


def step_bound(
    weights: F32,
    codes: Codes,
    scales: F32,
    zeros: F32,
    p: float,
    beta: float,
    arithmetic: Arithmetic,
    exact: F64,
) -> Bound:
    """The bound of `hqq.step/C2`.

    Args:
        weights, codes, scales, zeros, p, beta: as `step`.
        arithmetic: what the backend declares; its roundings are taken at g, and each intermediate is at least as
            precise as its accumulator.
        exact: float64, G.
    """
    u, size = UNIT_ROUNDOFF[arithmetic.accumulator], len(weights)
    w, s, z = np.abs(weights.astype(np.float64)), scales.astype(np.float64), np.abs(zeros.astype(np.float64))
    d = residual(weights, codes, scales, zeros)
    of_d = gamma(3, u) * (w + s * (codes + z))
    of_shrinking = (2 - p) * of_d + gamma(POWER_ROUNDINGS + 3, u) * 2 * (np.abs(d) + of_d)
    kept = np.abs(shrink(d, p, beta))
    terms = np.add.reduce(codes + (w + kept) / s, axis=0) / size
    underflows = 3 + 4 / s
    bound = direct_bound(terms, size, arithmetic, exact, underflows)
    relative = gamma(arithmetic.roundings(size, size), u)
    limit = bound.limit + (1 + relative) * np.add.reduce(of_shrinking / s, axis=0) / size
    return Bound(limit, terms, bound.derivation + " + rounding of the errors and of their shrinking")


# **What a backend promises.** Codes are discontinuous, and so is the decision to stop; so the solver is not an
# operation, but its two halves are. A power is not a basic floating-point operation, so a step is bounded and not
# exact.

operation(
    "hqq.codes",
    "Weights to codes with a real zero",
    codes,
    promise=EXACT,
    source="errata H",
    clauses={
        "C1": "The code is W / scale + zero, two float32 roundings, rounded half to even and clamped to 0 … 2^b − 1.",
        "C2": "A column of weights uses its own scale and zero; a quotient that overflows has the first or last code.",
    },
)

operation(
    "hqq.step",
    "Next zeros of the solver, given the codes",
    step,
    promise=BOUNDED,
    source="errata H",
    clauses={
        "C1": "Where every error is 0 or well below the threshold, and quotients and sums are exact, the zero is the "
        "mean of q − W / scale exactly.",
        "C2": "Without overflow, each zero differs from the mean of q − (W − W_e) / scale by at most the bound derived "
        "from the declared arithmetic.",
    },
)
