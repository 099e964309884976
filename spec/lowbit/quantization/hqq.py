r"""HQQ matrices: a real zero for each group, groups along either axis, scales and zeros in 8 bits.

The quantiser of MoE offloading writes a weight as :math:`s\,(q - z)` with a zero that is a *real* number, found by
`hqq_solver`. It differs from `affine` in two more ways: its groups may run along either axis of the matrix, and at 2
bits the groups are so short that scales and zeros would outweigh the codes, so they are quantised themselves.

**Blocks.** HQQ sees the matrix as files store it, N × K, the transpose of :math:`W`. Laid out flat, weight
:math:`(n, k)` is number :math:`f = nK + k`, and there are :math:`G = NK/g` groups of g:

- *axis 1*: number f is in group :math:`\lfloor f / g \rfloor`, neighbours along K. With g a divisor of K these are the
  groups of `affine`, down the columns of :math:`W`.
- *axis 0*: number f is in group :math:`f \bmod G`, each G apart. With g a divisor of N that is every (N/g)-th output
  of one input.

Either way a matrix becomes blocks g × G whose columns are groups, and the rest is the same for both.

**Quantise.** The scale is :math:`(\max - \min)/(2^b - 1)` of the group, the first zero :math:`-\min/s`, rounded to an
integer at 4 bits and only there; then the solver moves the zeros. A group without a range, or with so small a one that
its zero is more than the stored dtype can hold, has scale 1 (errata Q10). As in `affine`, the stored values decide:
scales are rounded to their stored type before the solver runs, zeros after it, and the codes come last. The authors'
own code differs in four places; the option ``recipe`` follows it, and `hqq_published` says where they differ.

**Scales and zeros in 8 bits** are themselves stored as :math:`s'\,(q' - z')`, without a solver: the scales in groups of
their own, strided as along axis 0, and all zeros of a tensor in one. For 2 bits and groups of 16 and 128 that makes
3.016 bits per weight, not the 2.6 of the paper (errata M6; see `hqq_table1`).

A code that equals its zero stands for +0, and so does a code of 0 whose zero is −0, since :math:`0 - (-0)` is +0 and
scales are above 0.

**Why a type of its own.** `affine.QuantizedMatrix` knows a real *minimum* and an integer *zero-point*. A real zero
along axis 1 is a minimum, :math:`m = -s z`, so `as_minimum` makes an ordinary matrix of it and every kernel for
equation 2 runs it. That product is rounded once to float32, which moves a result by at most
:math:`u \sum_g s_g |z_g|\, |\sum_k x_k|` (`minimum_error`). So there is no third convention, and nothing about linear
layers changes. Along axis 0 the scale differs from input to input of one output and cannot be taken out of the sum as
equation 2 does: `qgemv` here is an operation of its own. (Where g divides N there is another way out: the scale
belongs to input k and to n mod N/g, so it can be folded into the activation, N/g times over.)

Source: HQQ (Badri and Shaji, 2023), as used by MoE offloading §3.3 and §4.2; errata H, M6.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np

from lowbit.arrays import F32, F64, Array
from lowbit.contract.checks import check_array, check_choice, check_finite, check_integer
from lowbit.contract.operation import BOUNDED, EXACT, Parameters, operation
from lowbit.contract.rounding import (
    HALF_LEAST_SUBNORMAL,
    LARGEST_GAMMA,
    UNIT_ROUNDOFF,
    Arithmetic,
    Bound,
    direct_bound,
    gamma,
)
from lowbit.contract.signature import FINITE, In, Shape, checked
from lowbit.errors import ArgumentError
from lowbit.quantization.affine import QuantizedMatrix, ScaleDtype
from lowbit.quantization.hqq_numbers import EightBit, Numbers, above_zero, check_plain, decode, encode, range_grid
from lowbit.quantization.hqq_published import Recipe, quantize_blocks
from lowbit.quantization.hqq_solver import Solver, codes, solve
from lowbit.quantization.packing import BITS, WORD_BITS, Bits, Codes, Words, check_rows, pack, unpack

Axis = Literal[0, 1]
AXES: tuple[Axis, ...] = (0, 1)


# **The value.**


@dataclass(frozen=True, eq=False)
class HqqMatrix:
    """A matrix of K × N weights as codes with real zeros, in G = K·N / group_size groups along either axis.

    Attributes:
        words: uint32, ``K * bits // 32`` × N, the codes as `packing` lays them, for either axis.
        scales: G numbers above 0, in the order of the groups.
        zeros: G numbers.
        bits: 2, 3, 4 or 8.
        rows: K, a multiple of the codes in a unit.
        group_size: g; divides K along axis 1 and K·N along axis 0.
        axis: 0 or 1.

    Raises:
        ArgumentError: any of these does not hold.
    """

    words: Words
    scales: Numbers
    zeros: Numbers
    bits: int
    rows: int
    group_size: int
    axis: Axis

    def __post_init__(self) -> None:
        check_choice("bits", self.bits, BITS)
        check_integer("rows", self.rows, least=1)
        check_rows("rows", self.rows, self.bits)
        check_array("words", self.words, np.uint32, (self.rows * self.bits // WORD_BITS, None))
        check_blocks(self.rows, self.columns, self.group_size, self.axis)
        for name, numbers in (("scales", self.scales), ("zeros", self.zeros)):
            if not isinstance(numbers, EightBit):
                check_plain(name, numbers)
            decoded = decode(numbers)
            check_array(f"{name}, decoded,", decoded, np.float32, (self.groups,))
            check_finite(f"{name}, decoded,", decoded)
        if not (decode(self.scales) > 0).all():
            raise ArgumentError("scales, decoded,", f"as low as {decode(self.scales).min()}", "above 0")

    @property
    def columns(self) -> int:
        """N."""
        return int(self.words.shape[1])

    @property
    def groups(self) -> int:
        """G, of the whole matrix."""
        return self.rows * self.columns // self.group_size

    @property
    def nbytes(self) -> int:
        """Bytes of words, scales and zeros."""
        return int(self.words.nbytes + self.scales.nbytes + self.zeros.nbytes)

    @property
    def parameters(self) -> Parameters:
        """Its choices, by the names under which a backend declares what it handles."""
        stored = ["eight-bit" if isinstance(part, EightBit) else str(part.dtype) for part in (self.scales, self.zeros)]
        own = {"bits": self.bits, "group_size": self.group_size, "axis": self.axis}
        return {**own, "scales": stored[0], "zeros": stored[1]}


def check_blocks(rows: int, columns: int, group_size: int, axis: Axis) -> None:
    """Refuse groups that do not fill the matrix."""
    check_choice("axis", axis, AXES)
    whole = rows if axis == 1 else rows * columns
    check_integer("group_size", group_size, 1, whole)
    if whole % group_size != 0:
        raise ArgumentError("group_size", group_size, f"a divisor of {whole} along axis {axis}")


def to_blocks(matrix: Array, group_size: int, axis: Axis) -> Array:
    """K × N to g × G: flat in the order of N × K, then cut along the axis.

    >>> to_blocks(np.array([[0, 2], [1, 3]]), 2, axis=0)
    array([[0, 1],
           [2, 3]])
    >>> to_blocks(np.array([[0, 2], [1, 3]]), 2, axis=1)
    array([[0, 2],
           [1, 3]])
    """
    flat = np.ascontiguousarray(matrix.T).reshape(-1)
    return flat.reshape(group_size, -1) if axis == 0 else np.ascontiguousarray(flat.reshape(-1, group_size).T)


def from_blocks(blocks: Array, rows: int, axis: Axis) -> Array:
    """g × G back to K × N."""
    flat = np.ascontiguousarray(blocks if axis == 0 else blocks.T).reshape(-1)
    return np.ascontiguousarray(flat.reshape(-1, rows).T)


# **Quantise and dequantise.**


def _check_quantize(
    weights: F32, bits: int, group_size: int, axis: Axis, scale_dtype: ScaleDtype, meta_group: int | None, *rest: object
) -> None:
    check_rows("rows of weights", len(weights), bits)
    check_blocks(weights.shape[0], weights.shape[1], group_size, axis)
    groups = weights.size // group_size
    if meta_group is not None and groups % meta_group != 0:
        raise ArgumentError("meta_group", meta_group, f"a divisor of the number of groups, {groups}")


@checked(also=_check_quantize)
def quantize(
    weights: Annotated[F32, Shape("K", "N"), FINITE],
    *,
    bits: Bits,
    group_size: Annotated[int, In(1)],
    axis: Axis = 1,
    scale_dtype: ScaleDtype = "float32",
    meta_group: Annotated[int, In(1)] | None = None,
    solver: Solver | None = None,
    recipe: Recipe = "ruled",
) -> HqqMatrix:
    """Quantise with the zeros that the solver finds.

    For weights with a few outliers, the mean error from the range alone and with the solver:

    >>> weights = (np.arange(-32, 32, dtype=np.float32) / 32).reshape(64, 1) ** 3
    >>> results = [quantize(weights, bits=2, group_size=64, solver=Solver(steps=steps)) for steps in (0, 20)]
    >>> [round(float(np.abs(weights - dequantize(result)).mean()), 3) for result in results]
    [0.198, 0.109]

    Args:
        weights: float32, K × N, finite.
        bits: 2, 3, 4 or 8.
        group_size: g; divides K along axis 1 and K·N along axis 0.
        axis: 0 or 1.
        scale_dtype: of scales and zeros stored as floats, ``float32`` or ``float16``.
        meta_group: if given, scales and zeros are stored in 8 bits, the scales in groups of this many (a divisor of G),
            the zeros in one group; the floats are then the scales and zeros of these 8-bit numbers.
        solver: the numbers of the method; ``Solver(steps=0)`` keeps the zeros that the ranges give.
        recipe: ``ruled``, or ``hqq-0.1.1`` or ``hqq-0.2.8`` to reproduce these versions of the authors' package on a
            CPU (`hqq_published`).

    Raises:
        ArgumentError: wrong argument; a range, or by the authors' recipes a zero, that the stored dtype cannot hold.

    Source: errata H.
    """
    dtype = np.dtype(scale_dtype)
    blocks = to_blocks(weights, group_size, axis)
    if recipe == "ruled":
        stored, scales, zeros = ruled(blocks, bits, dtype, meta_group, solver)
    else:
        stored, scales, zeros = quantize_blocks(blocks, bits, dtype, meta_group, solver or Solver(), recipe)
    words = pack(from_blocks(stored, weights.shape[0], axis), bits)
    return HqqMatrix(words, scales, zeros, bits, weights.shape[0], group_size, axis)


def ruled(
    blocks: F32, bits: int, dtype: np.dtype[np.floating], meta_group: int | None = None, solver: Solver | None = None
) -> tuple[Codes, Numbers, Numbers]:
    """Codes, scales and zeros of blocks by the ruling; groups may come in any order.

    Args:
        blocks: float32, g × G, finite: each column a group.
        bits, meta_group, solver: as `quantize`.
        dtype: of scales and zeros, as ``scale_dtype`` of `quantize`.

    Raises:
        ArgumentError: a range that the dtype cannot hold.
    """
    scales: Numbers = range_grid(blocks, bits, dtype if meta_group is None else np.dtype(np.float32))[0]
    if meta_group is not None:
        scales = above_zero(encode(decode(scales), meta_group, dtype))
    wide = decode(scales)
    with np.errstate(over="ignore"):
        start: F32 = -blocks.min(axis=0) / wide
    start = np.rint(start) if bits == 4 else start
    found = solve(blocks, wide, start, bits, solver).zeros
    zeros: Numbers = found.astype(dtype) if meta_group is None else encode(found, len(found), dtype)
    return codes(blocks, wide, decode(zeros), bits), scales, zeros


@checked
def dequantize(matrix: HqqMatrix) -> F32:
    """``scale * (q - zero)``, float32, two roundings.

    Args:
        matrix: K × N.

    Returns:
        float32, K × N.

    Raises:
        ArgumentError: not an `HqqMatrix`.

    Source: errata H.
    """
    blocks = to_blocks(unpack(matrix.words, matrix.bits), matrix.group_size, matrix.axis).astype(np.float32)
    return from_blocks(decode(matrix.scales) * (blocks - decode(matrix.zeros)), matrix.rows, matrix.axis)


# **Along axis 1 it is equation 2.**


@checked
def as_minimum(matrix: HqqMatrix) -> QuantizedMatrix:
    """The same weights under the convention ``minimum``, for axis 1: ``min = -(scale * zero)``, rounded to float32.

    >>> matrix = quantize(np.eye(16, dtype=np.float32), bits=2, group_size=8)
    >>> as_minimum(matrix).convention, as_minimum(matrix).groups
    ('minimum', 2)

    Args:
        matrix: K × N, axis 1.

    Raises:
        ArgumentError: not an `HqqMatrix`; axis 0, whose scales cannot be factored out of the sums of equation 2; a
            product that overflows.

    Source: QIGen equation 2; errata H.
    """
    if matrix.axis != 1:
        raise ArgumentError("axis", matrix.axis, "1 (axis 0 does not factor through equation 2; see `hqq.qgemv`)")
    scales, zeros = decode(matrix.scales), decode(matrix.zeros)
    with np.errstate(over="ignore"):  # an infinite minimum is refused by the matrix
        minima = -(scales * zeros)
    scales, minima = (np.ascontiguousarray(part.reshape(matrix.columns, -1).T) for part in (scales, minima))
    return QuantizedMatrix(matrix.words, scales, minima, matrix.bits, matrix.rows, matrix.group_size, "minimum")


def minimum_error(x: F32, matrix: HqqMatrix) -> F64:
    r"""How far `as_minimum` may move ``x W``: :math:`u \sum_g s_g |z_g| |\sum_{k \in g} x_k|`, and underflow;
    float64, N, for axis 1.
    """
    products = (decode(matrix.scales).astype(np.float64) * np.abs(decode(matrix.zeros))).reshape(matrix.columns, -1)
    sums = np.abs(np.add.reduce(x.astype(np.float64).reshape(-1, matrix.group_size), axis=1))
    moved: F64 = np.add.reduce((UNIT_ROUNDOFF["float32"] * products + HALF_LEAST_SUBNORMAL) * sums, axis=1)
    return moved


# **The product**, along either axis: each weight with its own group's scale and zero, summed over the rows in float64.


@checked
def qgemv(x: Annotated[F32, Shape("matrix.rows")], matrix: HqqMatrix) -> F64:
    """``y = x W`` for one activation vector.

    Args:
        x: float32, K.
        matrix: K × N, along either axis.

    Returns:
        float64, N.

    Raises:
        ArgumentError: `x` is not K contiguous float32 numbers; not an `HqqMatrix`.

    Source: errata H.
    """
    y = np.zeros(matrix.columns)
    with np.errstate(invalid="ignore", over="ignore"):  # a non-finite x gives a non-finite y, without a warning
        for x_k, (_, _, row) in zip(x.astype(np.float64), _rows(matrix), strict=True):
            y += x_k * row
    return y


def _rows(matrix: HqqMatrix) -> Iterator[tuple[F64, F64, F64]]:
    """For each row of W: ``s * q``, ``s * |z|`` and ``s * (q - z)``, float64, N each."""
    q = to_blocks(unpack(matrix.words, matrix.bits), matrix.group_size, matrix.axis).astype(np.float64)
    s, z = decode(matrix.scales).astype(np.float64), decode(matrix.zeros).astype(np.float64)
    parts = (s * q, s * np.abs(z) * np.ones_like(q), s * (q - z))
    yield from zip(*(from_blocks(part, matrix.rows, matrix.axis) for part in parts), strict=True)


def qgemv_bound(x: F32, matrix: HqqMatrix, arithmetic: Arithmetic, exact: F64) -> Bound:
    r"""The bound of `hqq.qgemv/C2`; its gauge is :math:`\sum |x| s (q + |z|)`, or :math:`\sum |x||w|` if dequantised.

    Args:
        x: float32, K, finite.
        matrix: K × N.
        arithmetic: what the backend declares. Dequantised weights have two roundings each, besides the declared ones.
        exact: float64, N: `qgemv`.
    """
    sizes = np.abs(x.astype(np.float64))
    terms, weights = np.zeros(matrix.columns), np.zeros(matrix.columns)
    for x_k, (codes_part, zero_part, row) in zip(sizes, _rows(matrix), strict=True):
        terms += x_k * (codes_part + zero_part)
        weights += x_k * np.abs(row)
    underflows = 4 * matrix.rows + float(np.sum(sizes))
    if arithmetic.form != "dequantised":
        return direct_bound(terms, matrix.rows, arithmetic, exact, underflows)
    bound = direct_bound(weights, matrix.rows, arithmetic, exact, underflows)
    limit = bound.limit + (1 + LARGEST_GAMMA) * gamma(2, UNIT_ROUNDOFF["float32"]) * weights
    return Bound(limit, weights, bound.derivation + " + rounding of the weights")


# **What a backend promises**, besides `hqq.codes` and `hqq.step` of the solver.

operation(
    "hqq.dequantize",
    "Codes with real zeros to weights",
    dequantize,
    promise=EXACT,
    source="errata H",
    clauses={
        "C1": "The weight is scale·(q − zero), two float32 roundings; float16 scales and zeros are widened first.",
        "C2": "Number f of N × K, laid out flat, is in group ⌊f/g⌋ along axis 1 and f mod G along axis 0.",
        "C3": "Scales and zeros in 8 bits are scale'·(code − zero'), two float32 roundings, with those of group f mod "
        "M.",
    },
)

operation(
    "hqq.qgemv",
    "Vector times matrix with real zeros",
    qgemv,
    promise=BOUNDED,
    source="errata H",
    clauses={
        "C1": "Where every partial sum is exactly representable in the declared accumulator, y equals x W exactly.",
        "C2": "For finite x without overflow, each element of y differs from x W by at most the bound derived from "
        "the declared arithmetic; scales and zeros count as the float32 numbers that they decode to.",
        "C3": "A NaN or an infinity in x makes every element of y NaN or infinite.",
    },
)
