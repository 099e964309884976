r"""GPTQ: rounding one row of weights after another, where later rows compensate for the errors of earlier ones.

Rounding every weight to the nearest code is best for the *weights*. It is not best for the *layer*: the error of a
layer is a sum over its inputs, and where two inputs rise and fall together, an error in the weight of one can be
compensated by the weight of the other. GPTQ uses this. It uses inputs that the layer really sees, the *calibration
set*, and rounds the rows of :math:`W` one after another; before a row is rounded, it is corrected for the errors of the
rows before it.

**The error of the layer.** :math:`X` (T × K) are the calibration inputs, :math:`\hat W` the values of the codes and
:math:`\Delta = W - \hat W`. The squared error on the calibration set is

.. math:: E = \|X W - X \hat W\|^2 = \sum_n \Delta_n^T H\, \Delta_n, \qquad H = X^T X,

a sum over independent columns n. :math:`H` is half the matrix of second derivatives, hence *Hessian*; constant factors
change nothing below.

**Completing the square.** Write :math:`H = M M^T` with :math:`M` *upper* triangular and a positive diagonal:
Cholesky's factor, computed from the last row backwards. Then for each column, leaving out its index,

.. math:: E = \|M^T \Delta\|^2 = \sum_k M_{kk}^2 \Bigl(\Delta_k + \sum_{j<k} \frac{M_{jk}}{M_{kk}} \Delta_j\Bigr)^2 .

The k-th square contains :math:`\Delta_0 \dots \Delta_k` and no later one. So when rows 0 to k − 1 are rounded, the
k-th square is least if the value of row k is as near as can be to its *target*

.. math:: t_k = w_k + \sum_{j<k} \frac{M_{jk}}{M_{kk}}\,\Delta_j, \qquad \text{and then}\quad
   E = \sum_k M_{kk}^2\,(t_k - \hat w_k)^2 .

That is the whole algorithm: factor, then round each row to its target. It is the usual form in another notation. There
one inverts, takes the upper factor :math:`U` of :math:`H^{-1} = U^T U`, and after rounding row k subtracts
:math:`U_{kj}\,(t_k - \hat w_k)/U_{kk}` from each later row j; since :math:`U = M^{-1}`, the targets are the same, and
here nothing is inverted.

**Damping.** With too few calibration inputs :math:`H` has no such factor. A part :math:`\lambda` of the mean of its
diagonal is therefore added to the diagonal, which also keeps the quantiser from trusting the calibration set too much.

**Dead inputs.** An input that is always zero on the calibration set has a row and column of zeros in :math:`H`. Its
weights can be anything; if they were kept, a large one would widen the range of its group and cost the others
precision. So they are set to 0 and do not affect the range of their group.

**Blocks.** The authors' code handles rows in blocks of 128, and adds the errors of a block to the rows after it only
when the block is done, which is faster and changes no target. It changes ranges: a group that is shorter than the block
takes its range from rows that lack the errors of their own block. ``block_size=128`` does the same. By default a block
is a group, so the range of each group includes all errors before it; this is the algorithm of the paper. Six layers of
256 × 64 weights with correlated inputs were quantised by the authors' code and with ``block_size=128``, in groups of 32
and 128. 6 of the 98304 weights differed, since the code computes in float32; at groups of 32 the default differed in 46
to 48 % of the weights, and its error was lower by 1 to 8 %.

**Order of the rows.** Any order will do, since permuting rows permutes :math:`H`. With *act-order* the inputs of
largest :math:`H_{kk}`, whose errors cost most, come first, while all later rows can still compensate.

**Is it better than rounding to the nearest?** Not by a theorem. Each step is best given the ones before it, but the
greedy choice can be worse in the end. With two rows it never is, because the first row is rounded the same way and the
second is then best; with three there are counterexamples, and the tests find one. What is tested is that over a corpus
of layers with correlated inputs the error on the calibration set is never larger, and that where :math:`H` is a
multiple of the identity the result is `affine.quantize` to the bit. On a real model (SmolLM2-135M, stored in 4 bits and
quantised again, groups of 64, 2048 tokens of calibration) it was smaller for all 21 matrices of layers 0, 15 and 29 at
2, 3 and 4 bits, by 1.9 to 39 times.

**Only on the calibration set.** The same weights on other text, 4096 tokens at 3 bits: of the 7 matrices of layer 15
six were better than rounded to the nearest, by 1.1 to 2.4 times, but the one with the most inputs (1536) was worse by
half. After 16384 tokens of calibration it was worse by 3 %, the others better by 1.3 to 2.6 times. GPTQ relies too much
on a Hessian from few tokens. `bench/experiments/gptq.py` measures single layers again, and ``lowbit perplexity --bits 3
--method gptq`` measures what their errors do to the whole model.

.. plot:: figures/gptq_error.py

Source: QIGen §2 (LLM quantization) and §3 (Data format), which take their weights from GPTQ (arXiv 2210.17323, §3).
The papers leave damping, order and symmetry open; they are fixed here.
"""

from typing import Annotated

import numpy as np
import numpy.typing as npt

from lowbit.arrays import F32, F64
from lowbit.contract.operation import BOUNDED, operation
from lowbit.contract.signature import FINITE, In, Shape, checked, unchecked
from lowbit.errors import ArgumentError
from lowbit.quantization.act_order import ActOrderMatrix
from lowbit.quantization.affine import (
    Convention,
    QuantizedMatrix,
    ScaleDtype,
    group_codes,
    group_scale_and_zero,
    group_values,
)
from lowbit.quantization.packing import Bits, check_rows, pack

DAMPING = 0.01
"""The default fraction of the mean of the diagonal that is added to the diagonal; GPTQ's own."""

# **The Hessian** is summed input by input, as the model reads the calibration text. It adds one elementwise product at
# a time, in float64, so that it is the same on every machine.


@checked
def hessian(x: Annotated[F32, Shape("T", "K"), FINITE]) -> F64:
    """``H = X^T X``.

    >>> hessian(np.array([[1, 2], [3, 0]], np.float32))
    array([[10.,  2.],
           [ 2.,  4.]])

    Args:
        x: float32, T × K, finite: T inputs of the layer.

    Returns:
        float64, K × K, symmetric to the bit.

    Raises:
        ArgumentError: wrong dtype, shape or layout; not finite.

    Source: GPTQ §3, H without its factor 2.
    """
    total = np.zeros((x.shape[1], x.shape[1]))
    for row in x.astype(np.float64):
        total += np.outer(row, row)
    return total


def damped(hessian: F32 | F64, damping: float) -> F64:
    """The Hessian with `damping` times the mean of its diagonal added to its diagonal, in float64.

    Raises:
        ArgumentError: the sum is beyond float64.
    """
    wide: F64 = hessian.astype(np.float64)
    added = damping * float(np.mean(np.diagonal(wide)))
    if not np.isfinite(added + float(np.max(np.diagonal(wide)))):
        raise ArgumentError("damping", damping, "a number with which the damped Hessian is finite")
    return wide + added * np.eye(len(wide))


# **The factor.** The last column of :math:`M` is the last column of :math:`H` divided by the root of its last element;
# subtracting the column's contribution leaves a smaller problem of the same kind.


def _check_symmetric(hessian: F32 | F64) -> None:
    if not np.array_equal(hessian, hessian.T):
        raise ArgumentError("hessian", "not symmetric", "H equal to H.T")


@checked(also=_check_symmetric)
def factor(hessian: Annotated[F32 | F64, Shape("K", "K"), FINITE]) -> F64:
    """The upper triangular M with a positive diagonal and ``M M^T = H``.

    >>> factor(np.array([[10.0, 2.0], [2.0, 4.0]]))
    array([[3., 1.],
           [0., 2.]])

    Args:
        hessian: float32 or float64, K × K, symmetric and positive definite.

    Returns:
        float64, K × K.

    Raises:
        ArgumentError: wrong dtype, shape or layout; not finite, not symmetric, or not positive definite.

    Source: Cholesky's factorisation, backwards; GPTQ §3.3, where it is that of the inverse.
    """
    rest: F64 = hessian.astype(np.float64)
    result = np.zeros(rest.shape)
    for k in reversed(range(len(rest))):
        pivot = rest[k, k]
        if not pivot > 0:
            raise ArgumentError(f"hessian, without its rows from {k + 1},", f"{pivot:.3g} at its end", "above 0 (damp)")
        column = rest[: k + 1, k] / np.sqrt(pivot)
        result[: k + 1, k] = column
        rest = rest[:k, :k] - np.outer(column[:k], column[:k])
    return result


# **The targets.** An error goes into the targets of all later rows at once.


def spread(targets: F64, factor: F32 | F64, k: int, error: F64) -> None:
    r"""Add the correction for the error :math:`\Delta_k` of row k to the target of every later row, in place."""
    later = slice(k + 1, None)
    targets[later] += np.outer(factor[k, later] / factor.diagonal()[later], error)


def _check_triangular(weights: F32, factor: F32, values: F32) -> None:
    if np.tril(factor, -1).any() or not (np.diagonal(factor) > 0).all():
        raise ArgumentError("factor", "another matrix", "upper triangular with a positive diagonal")


@checked(also=_check_triangular)
def targets(
    weights: Annotated[F32, Shape("K", "N"), FINITE],
    factor: Annotated[F32, Shape("K", "K"), FINITE],
    values: Annotated[F32, Shape("K", "N"), FINITE],
) -> F64:
    """The target of every row, given the rounded values of the rows before it.

    The first row was rounded up by 0.5; the second now aims 0.25 lower, and its own value changes nothing:

    >>> factor = np.array([[3, 1], [0, 2]], np.float32)
    >>> targets(np.array([[1.5], [1]], np.float32), factor, np.array([[2], [7]], np.float32))
    array([[1.5 ],
           [0.75]])

    Args:
        weights: float32, K × N, finite.
        factor: float32, K × K, finite, upper triangular with a positive diagonal.
        values: float32, K × N, finite: the values of each row's codes; the last row is not read.

    Returns:
        float64, K × N.

    Raises:
        ArgumentError: wrong dtypes, shapes or layouts; not finite; no such factor.

    Source: GPTQ §3, the update of the remaining weights; here with the factor of H itself.
    """
    result: F64 = weights.astype(np.float64)
    wide = factor.astype(np.float64)
    for k, error in enumerate(weights.astype(np.float64) - values):
        spread(result, wide, k, error)
    return result


# **Quantise.** This is the loop of the module docstring, with the grid of `affine`. A group's scale and zero are
# computed before its first row is rounded, from the values that its rows would take if every row since the beginning of
# the block met its target exactly. A row is rounded from its target in float32, by the expressions of `affine`.


def unrounded(goals: F64, weights: F64, factor: F64, rows: slice) -> F32:
    """The float32 values of these rows without rounding, given the errors of the rows before them.

    In the usual form of GPTQ these are the updated remaining weights.
    """
    free, block = goals[rows].copy(), factor[rows, rows]
    for k, row in enumerate(weights[rows]):
        spread(free, block, k, row - free[k])
    return free.astype(np.float32)


def _check_quantize(
    weights: F32, hessian: F32 | F64, bits: int, group_size: int, convention: Convention, symmetric: bool, *rest: object
) -> None:
    check_rows("rows of weights", len(weights), bits)
    _check_symmetric(hessian)
    if symmetric and convention != "zero_point":
        raise ArgumentError("convention", repr(convention), "'zero_point' where symmetric")


@checked(also=_check_quantize)
def quantize(
    weights: Annotated[F32, Shape("K", "N"), FINITE],
    hessian: Annotated[F32 | F64, Shape("K", "K"), FINITE],
    *,
    bits: Bits,
    group_size: Annotated[int, In(1, "K")],
    convention: Convention = "zero_point",
    symmetric: bool = False,
    act_order: bool = False,
    damping: Annotated[float, In(0)] = DAMPING,
    scale_dtype: ScaleDtype = "float32",
    block_size: Annotated[int, In(1)] | None = None,
) -> ActOrderMatrix:
    """Round the rows of W one after another, each to its target.

    With two correlated inputs, the second row compensates the rounding error of the first.

    >>> weights = np.array([[0.6], [0.6], [15], [0], [0], [0], [0], [0]], np.float32)
    >>> inputs = np.eye(8, dtype=np.float32)
    >>> inputs[:2, :2] = [[3, 3], [3, 2]]
    >>> result = quantize(weights, hessian(inputs), bits=4, group_size=8).dequantize()
    >>> print(result[:3, 0], round(layer_error(weights, result, hessian(inputs)), 2))
    [ 1.  0. 15.] 0.36
    >>> print(round(layer_error(weights, np.rint(weights), hessian(inputs)), 2))  # each to the nearest: 1, 1, 15
    9.76

    Args:
        weights: float32, K × N, finite.
        hessian: float32 or float64, K × K, symmetric: of the layer's inputs.
        bits: 2, 3, 4 or 8.
        group_size: 1 to K; groups are runs of rows in the order of rounding.
        convention: ``zero_point`` or ``minimum``.
        symmetric: the range of a group is −m to m with m its largest magnitude, and the zero-point 2^(bits − 1).
        act_order: round rows by decreasing diagonal of H, ties in row order; otherwise in row order.
        damping: λ, at least 0.
        scale_dtype: ``float32`` or ``float16``.
        block_size: rows of a block. The range of a group ignores the errors of earlier rows of its block; 128 in the
            authors' code. None is `group_size`: every range takes all earlier errors into account.

    Raises:
        ArgumentError: wrong argument; `symmetric` with ``minimum``; a Hessian that, damped, is not positive definite
            or not finite.

    Source: QIGen §2; GPTQ §3; errata P1, P2.
    """
    order = np.argsort(-hessian.diagonal(), kind="stable") if act_order else np.arange(len(weights))
    triangle = unchecked(factor)(np.ascontiguousarray(damped(hessian, damping)[np.ix_(order, order)]))

    live = hessian.diagonal()[order] != 0
    rows: F64 = np.where(live[:, np.newaxis], weights[order], 0).astype(np.float64)
    goals, codes = rows.copy(), np.empty(rows.shape, np.uint8)
    scales, zeros, block = [], [], block_size or group_size
    for k, row in enumerate(rows):
        if k % block == 0:
            begin, at_begin = k, goals.copy()
        if k % group_size == 0:
            free = unrounded(at_begin, rows, triangle, slice(begin, k + group_size))[k - begin :]
            scale, zero = grid(of_live(free, live[k : k + group_size]), bits, convention, symmetric, scale_dtype)
            scales.append(scale)
            zeros.append(zero)
        codes[k] = group_codes(goals[k].astype(np.float32), scale, zero, bits, convention)
        spread(goals, triangle, k, row - group_values(codes[k], scale, zero, convention))
    matrix = QuantizedMatrix(
        pack(codes, bits), np.stack(scales), np.stack(zeros), bits, len(codes), group_size, convention
    )
    return ActOrderMatrix(matrix, order)


def of_live(group: F32, live: npt.NDArray[np.bool_]) -> F32:
    """The rows of a group whose inputs are not dead, or all rows if all are dead."""
    return group[live] if live.any() else group


def grid(
    group: F32, bits: int, convention: Convention, symmetric: bool, scale_dtype: ScaleDtype
) -> tuple[npt.NDArray[np.floating], npt.NDArray[np.generic]]:
    """Scale and zero of a group, by `affine`; of its mirrored range where the grid is symmetric."""
    dtype = np.dtype(scale_dtype)
    if not symmetric:
        return group_scale_and_zero(group, bits, convention, dtype)
    most = np.abs(group).max(axis=0)
    scale, zero = group_scale_and_zero(np.stack([-most, most]), bits, convention, dtype)
    return scale, np.full_like(zero, 2 ** (bits - 1))


def layer_error(weights: F32, values: F32, hessian: F32 | F64) -> float:
    r"""E, the sum over the columns of :math:`\Delta^T H \Delta`: a measurement in float64, summed in the fastest order.

    Args:
        weights: float32, K × N.
        values: float32, K × N: the dequantised weights, rows in the order of `weights`.
        hessian: K × K, as it was measured, without damping.
    """
    delta = weights.astype(np.float64) - values
    return float(np.sum(delta * (hessian.astype(np.float64) @ delta)))


# **What a backend promises.** A rounding is discontinuous: two correct quantisers whose targets differ in the last bit
# may choose different codes at a tie, and different targets from there on. So the whole quantiser is not an operation.
# Its continuous parts are operations: the Hessian, the factor, and the targets *given* the values of the earlier rows.
# Between them lies only the rounding of `affine`, which is exact. A quantiser made of these parts makes each decision
# correctly, given the earlier ones. The bounds are derived in `gptq_bounds`.

operation(
    "gptq.hessian",
    "Hessian of a layer from calibration inputs",
    hessian,
    promise=BOUNDED,
    source="GPTQ §3",
    clauses={
        "C1": "Where every partial sum is exactly representable in the declared accumulator, H equals X^T X exactly.",
        "C2": "Without overflow, each element differs from that of X^T X by at most the bound derived from the "
        "declared arithmetic.",
    },
)

operation(
    "gptq.factor",
    "Upper triangular factor of a Hessian",
    factor,
    promise=BOUNDED,
    source="GPTQ §3.3; Cholesky, backwards",
    parameters=lambda hessian: {"dtype": str(hessian.dtype)},
    clauses={
        "C1": "Where the factor, its squares and the partial sums are exactly representable, M is exact.",
        "C2": "Each element of M M^T differs from that of H by at most the bound derived from the declared "
        "arithmetic: what is bounded is the product, since how far M itself moves depends on the condition of H.",
        "C3": "M is float32, has a positive diagonal, and is exactly 0 below it.",
        "C4": "H that is not symmetric, or not positive definite, is refused with an ArgumentError.",
    },
)

operation(
    "gptq.targets",
    "What each row should be, given the values of the rows before it",
    targets,
    promise=BOUNDED,
    source="GPTQ §3",
    clauses={
        "C1": "Where every quotient, product and partial sum is exactly representable, the targets are exact.",
        "C2": "Without overflow, each element differs from its target by at most the bound derived from the declared "
        "arithmetic.",
        "C3": "The target of row k depends on no value of row k or of a later row, to the bit.",
    },
)
