r"""Affine quantisation: real weights to small codes and back.

A code alone is a number from 0 to :math:`2^b - 1`. Its *meaning* is given by two numbers, a *scale* and a *zero*, which
a group of weights shares: equally spaced points on a line, hence *affine*. Smaller groups cost more bytes and lose less
accuracy; the *group size* sets that trade-off.

**The paper.** With :math:`b` bits, a vector :math:`x` and :math:`z = \min(x)`,

.. math:: Q(x, b) = \mathrm{rnd}\!\left(\frac{x - \min(x)}{\max(x) - \min(x)}\,(2^b - 1)\right)

maps :math:`x` to codes :math:`x_q`, and :math:`D(x_q)` maps them back. As printed, *s* multiplies in one and divides in
the other, and *z* is sometimes a real number and sometimes a code (errata Q1, Q2). Here the scale always multiplies
codes, and there are two *conventions*, each one expression:

.. list-table::
   :header-rows: 1

   * - convention
     - scale :math:`s` and zero
     - code
     - value
   * - ``minimum``
     - :math:`s = (\max - \min)/(2^b - 1)`; :math:`\min` as it is
     - :math:`q = \mathrm{rint}((x - \min)/s)`
     - :math:`s q + \min`
   * - ``zero_point``
     - range extended to contain 0, same :math:`s`; :math:`z = \mathrm{rint}(-\min/s)`
     - :math:`q = \mathrm{rint}(x/s) + z`
     - :math:`s (q - z)`

All codes and zero-points are clamped to :math:`0 \dots 2^b - 1`; ``rint`` rounds half to even. A zero-point is itself a
code of *b* bits: this is the paper's remark that *z* can be quantised too. Everything is float32 arithmetic in the
order written, with one rounding per operation, so the result has the same bits on every machine. Scale and minimum are
rounded to the dtype in which they are stored *before* the codes are computed, so that the codes fit the scale that will
be used.

**Zero weights** keep no sign. A difference of equal numbers is +0, and so is :math:`+0 + -0`: a code that stands for 0
comes back as +0 under both conventions, a minimum of −0 included, and −0 comes only from a negative weight that
underflows. The minimum of a group that holds zeros of both signs and nothing below may be either zero: the expression
leaves it open, and no weight depends on it.

**Groups** run down each column of :math:`W` (:math:`K \times N`): rows :math:`0 \dots g-1` of a column are its first
group, and so on; the last may be short. ``group_size = K`` is the paper's column-wise quantisation.

Source: QIGen §2 (Quantization), §3 (Data format); errata Q1, Q2, Q9, Q10.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from lowbit.arrays import F32, Array
from lowbit.contract.checks import check_array, check_choice, check_finite, check_integer
from lowbit.contract.operation import EXACT, Parameters, operation
from lowbit.contract.signature import CHOICE, FINITE, In, Shape, checked
from lowbit.errors import ArgumentError
from lowbit.quantization.packing import BITS, WORD_BITS, Bits, Codes, Words, check_codes, check_rows, pack, unpack

Convention = Literal["minimum", "zero_point"]
ScaleDtype = Literal["float32", "float16"]
CONVENTIONS: tuple[Convention, ...] = get_args(Convention)
SCALE_DTYPES: tuple[ScaleDtype, ...] = get_args(ScaleDtype)
Scales = npt.NDArray[np.floating[Any]]


# **The central value**: a quantised matrix, checked once when it is made.


@dataclass(frozen=True, eq=False)
class QuantizedMatrix:
    """A matrix of K × N weights as codes, scales and zeros, with G = ⌈K / group_size⌉ groups down each column.

    Attributes:
        words: uint32, ``K * bits // 32`` × N, the codes as `packing` lays them.
        scales: float32 or float16, G × N, finite and above 0.
        zeros: under ``minimum`` the least value of each group, dtype of `scales`, G × N, finite;
            under ``zero_point`` a code, uint8, G × N, below ``2**bits``.
        bits: 2, 3, 4 or 8.
        rows: K, a multiple of the codes in a unit.
        group_size: 1 to K.
        convention: ``minimum`` or ``zero_point``.

    Raises:
        ArgumentError: any of these does not hold.
    """

    words: Words
    scales: Scales
    zeros: Array
    bits: int
    rows: int
    group_size: int
    convention: Convention

    def __post_init__(self) -> None:
        check_choice("bits", self.bits, BITS)
        check_integer("rows", self.rows, least=1)
        check_rows("rows", self.rows, self.bits)
        check_integer("group_size", self.group_size, 1, self.rows)
        check_choice("convention", self.convention, CONVENTIONS)
        check_array("words", self.words, np.uint32, (self.rows * self.bits // WORD_BITS, None))
        check_choice("dtype of scales", str(getattr(self.scales, "dtype", None)), SCALE_DTYPES)
        check_array("scales", self.scales, self.scales.dtype, (self.groups, self.columns))
        check_finite("scales", self.scales)
        if not (self.scales > 0).all():
            raise ArgumentError("scales", f"as low as {self.scales.min()}", "above 0")
        if self.convention == "minimum":
            check_array("zeros", self.zeros, self.scales.dtype, self.scales.shape)
            check_finite("zeros", self.zeros)
        else:
            check_array("zeros", self.zeros, np.uint8, self.scales.shape)
            check_codes("zeros", self.zeros, self.bits)
        self._check_largest()

    def _check_largest(self) -> None:
        """Refuse a matrix in which scale times the largest code, or the largest weight, overflows float32."""
        reach = self.scales.astype(np.float64) * (2**self.bits - 1)
        offset = self.zeros.astype(np.float64) if self.convention == "minimum" else np.zeros(1)
        if max(reach.max(), np.abs(reach + offset).max()) > np.finfo(np.float32).max:
            raise ArgumentError("scales", f"as high as {self.scales.max()}", "such that no weight overflows float32")

    @property
    def columns(self) -> int:
        """N."""
        return int(self.words.shape[1])

    @property
    def groups(self) -> int:
        """G, the groups down one column, the short last one included."""
        return -(-self.rows // self.group_size)

    @property
    def nbytes(self) -> int:
        """Bytes of words, scales and zeros; a zero-point counts its `bits`, as it would be stored."""
        zero_bits = self.bits if self.convention == "zero_point" else 8 * self.zeros.itemsize
        return self.words.nbytes + self.scales.nbytes + -(-self.zeros.size * zero_bits // 8)

    @property
    def parameters(self) -> Parameters:
        """Its choices, by the names under which a backend declares what it handles."""
        return {
            "bits": self.bits,
            "group_size": self.group_size,
            "convention": self.convention,
            "scale_dtype": str(self.scales.dtype),
        }

    def group_rows(self, group: int) -> slice:
        """The rows of one group, as a slice of 0 … K."""
        return slice(group * self.group_size, min((group + 1) * self.group_size, self.rows))


# **Quantise.** Group by group; inside a group, every column has a scale and a zero of its own.


def _check_units(weights: F32, bits: int, *others: object) -> None:
    check_rows("rows of weights", len(weights), bits)


@checked(also=_check_units)
def quantize(
    weights: Annotated[F32, Shape("K", "N"), FINITE],
    *,
    bits: Bits,
    group_size: Annotated[int, In(1, "K"), CHOICE],
    convention: Convention = "minimum",
    scale_dtype: ScaleDtype = "float32",
) -> QuantizedMatrix:
    """Round each weight to the nearest of the ``2**bits`` values that its group can represent.

    >>> weights = np.linspace(-1, 2, 8, dtype=np.float32).reshape(8, 1)
    >>> coarse = quantize(weights, bits=4, group_size=8, convention="zero_point")
    >>> print(coarse.scales[0, 0], coarse.zeros[0, 0])
    0.2 5
    >>> unpack(coarse.words, bits=4)[:, 0]
    array([ 0,  2,  4,  6,  9, 11, 13, 15], dtype=uint8)

    Args:
        weights: float32, K × N, finite.
        bits: 2, 3, 4 or 8.
        group_size: 1 to K; K is one group a column.
        convention: ``minimum`` or ``zero_point``.
        scale_dtype: dtype of the stored scales and minima, ``float32`` or ``float16``.

    Raises:
        ArgumentError: wrong argument; a weight that is not finite; a group whose range or minimum overflows the
            dtype of its scale.

    Source: QIGen §2; errata Q1, Q9, Q10.
    """
    rows, columns = weights.shape
    codes = np.empty((rows, columns), np.uint8)
    scales, zeros = [], []
    for start in range(0, rows, group_size):
        group = weights[start : start + group_size]
        scale, zero = group_scale_and_zero(group, bits, convention, np.dtype(scale_dtype))
        codes[start : start + group_size] = group_codes(group, scale, zero, bits, convention)
        scales.append(scale)
        zeros.append(zero)
    return QuantizedMatrix(pack(codes, bits), np.stack(scales), np.stack(zeros), bits, rows, group_size, convention)


def group_scale_and_zero(group: F32, bits: int, convention: Convention, dtype: np.dtype[Any]) -> tuple[Scales, Array]:
    """Scale and zero of one group, for each of its N columns, in the dtypes in which they are stored."""
    low, high = group.min(axis=0), group.max(axis=0)
    if convention == "zero_point":  # the range must hold 0, so that a zero weight stays exactly zero
        low, high = np.minimum(low, np.float32(0)), np.maximum(high, np.float32(0))
    levels = np.float32(2**bits - 1)
    with np.errstate(over="ignore", under="ignore"):  # overflow is refused below, with a message
        scale = ((high - low) / levels).astype(dtype)
        minimum = low.astype(dtype)
    stored = {"range": scale, "minimum": minimum} if convention == "minimum" else {"range": scale}
    for name, numbers in stored.items():
        if not np.isfinite(numbers).all():
            given = f"{low.min()} to {high.max()}"
            raise ArgumentError(f"{name} of a group of weights", given, f"what {dtype} can hold")
    # No range: every weight of the group is the same number. A scale of 1 represents it exactly (errata Q10). A range
    # so small that the stored scale is 0 is treated alike: the rounding error is then the range itself.
    scale = np.where(scale > 0, scale, dtype.type(1))
    if convention == "minimum":
        return scale, minimum
    zero = np.clip(np.rint(-low / scale.astype(np.float32)), 0, levels)
    return scale, zero.astype(np.uint8)


def group_codes(group: F32, scale: Scales, zero: Array, bits: int, convention: Convention) -> Codes:
    """The codes of one group, from the stored scale and zero, in float32 and in the order of the table above."""
    scale, offset = scale.astype(np.float32), zero.astype(np.float32)
    if convention == "minimum":
        real = np.rint((group - offset) / scale)
    else:
        real = np.rint(group / scale) + offset
    return np.clip(real, 0, 2**bits - 1).astype(np.uint8)


# **Dequantise.** The inverse is one expression, in float32 and in the order written.


@checked
def dequantize(matrix: QuantizedMatrix) -> F32:
    """The float32 weights that a quantised matrix represents.

    >>> weights = np.array([[3.5]] * 8, np.float32)  # a constant group is represented exactly
    >>> dequantize(quantize(weights, bits=4, group_size=8))[0, 0]
    np.float32(3.5)

    Args:
        matrix: K × N.

    Returns:
        float32, K × N: ``scale * q + min`` (two roundings) or ``scale * (q - zero)`` (one).

    Raises:
        ArgumentError: not a `QuantizedMatrix`.

    Source: QIGen §2, D; errata Q1.
    """
    codes = unpack(matrix.words, matrix.bits)
    weights = np.empty(codes.shape, np.float32)
    for group in range(matrix.groups):
        rows = matrix.group_rows(group)
        weights[rows] = group_values(codes[rows], matrix.scales[group], matrix.zeros[group], matrix.convention)
    return weights


def group_values(codes: Codes, scale: Scales, zero: Array, convention: Convention) -> F32:
    """The values of the codes of one group; scale and zero are widened to float32 first."""
    q, scale, zero = codes.astype(np.float32), scale.astype(np.float32), zero.astype(np.float32)
    values: F32 = scale * q + zero if convention == "minimum" else scale * (q - zero)
    return values


# **What a backend promises.**

operation(
    "affine.quantize",
    "Weights to codes, scales and zeros",
    quantize,
    promise=EXACT,
    source="QIGen §2; errata Q1, Q2, Q9, Q10",
    clauses={
        "C1": "Scales and zeros equal the table's expressions evaluated in float32 in the order written, then rounded "
        "to the stored dtype.",
        "C2": "Codes are computed with the scale and zero as stored, rounded half to even and clamped.",
        "C3": "A group without a range, or one so small that the stored scale vanishes, has scale 1: under minimum a "
        "constant comes back exactly, under zero_point an all-zero group does.",
        "C4": "Rows start·g to (start + 1)·g − 1 of a column share a group; the last group may be short.",
    },
)

operation(
    "affine.dequantize",
    "Codes, scales and zeros to weights",
    dequantize,
    promise=EXACT,
    source="QIGen §2; errata Q1, Q2",
    clauses={
        "C1": "Under minimum the weight is scale·q + min, two float32 roundings in this order.",
        "C2": "Under zero_point the weight is scale·(q − zero), one float32 rounding.",
        "C3": "float16 scales and minima are widened to float32 first, which is exact.",
    },
)
