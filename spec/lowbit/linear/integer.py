r"""Integer products: activations in Block Floating Point.

A kernel that multiplies float32 activations by codes converts every code to a float first. On a processor, this is most
of the work: the bytes of a 4-bit matrix arrive faster than its codes can be converted. Integer instructions multiply
codes directly, four or eight times as many at once, if the activations are small integers too. The chapter `bfp` makes
such integers: a block of activations shares an exponent, and each element is a mantissa of 8 bits.

**The cast is never silent.** It loses accuracy, and how much it loses depends on the activations, not on the kernel
(see below). So it is an operation of its own: a caller casts and passes blocks, or calls `qgemm_cast` by name. No
backend may compute `linear.qgemv` this way: the bound of that operation assumes float32 arithmetic, most results with a
cast lie several times as far away, and the suite detects this.

**Segments.** Activations come in blocks of :math:`B` rows, scales in groups of :math:`g` rows; both are counted from
row 0, and the last of either may be short. The intersection of one block and one group is a *segment*. With :math:`B =
32` and :math:`g = 128` a segment is a block; with :math:`B = 32` and :math:`g = 24` the segments have 24, 8, 16, 16, …
rows. Row :math:`k` of activation vector :math:`t` is :math:`2^{e} M_{tk}`, with the exponent of its block. Within a
segment everything is an integer,

.. math:: D_{t\sigma n} = \sum_{k \in \sigma} M_{tk}\, q_{kn}, \qquad S_{t\sigma} = \sum_{k \in \sigma} M_{tk},
   \tag{1}

and nothing is rounded: with 8-bit mantissas, blocks of 32 and 8-bit codes :math:`|D| \le 32 \cdot 127 \cdot 255`, which
is below :math:`2^{20}`. What remains is the factored dot product of the chapter `linear`, equation 2, with segments
instead of rows:

.. math:: y_{tn} = \sum_{i=1}^{P} \Bigl[\, s_{in} \sum_{\sigma \in i} 2^{e_{t\sigma}} D_{t\sigma n}
   \;+\; o_{in} \sum_{\sigma \in i} 2^{e_{t\sigma}} S_{t\sigma} \Bigr], \tag{2}

where :math:`o = -s z` is the group's offset, `linear.group_offsets`.

**In a kernel** the group's accumulator takes ``acc += 2^e · float(D)``, one rounding per segment, because :math:`D` is
exact in float32 while :math:`|D| \le 2^{24}` and a power of two rounds nothing; then ``y += s · acc`` and ``y += o ·
X̂``. The sums of mantissas :math:`S` are the same for every column and are computed once per call. `integer_bounds`
derives the resulting error.

**Which instruction.** The usual one (``maddubs``) multiplies unsigned by signed bytes and adds neighbouring products
into 16 bits, *with saturation*. Codes of at most 4 bits are safe: two products are at most :math:`2 \cdot 15 \cdot 128
= 3840`, so that even eight such results, :math:`8 \cdot 3840 = 30720 < 32767`, can be added up in 16 bits before
anything is widened. Codes of 8 bits are not: :math:`2 \cdot 255 \cdot 127 = 64770 > 32767` saturates in the first
instruction, but only where two large codes are adjacent, so ordinary tests miss it. These codes take another route:
products of 16-bit numbers, or instructions that add into 32 bits (``vpdpbusd``), which have room for 65 000 products.

**What the cast costs.** A step of a block is :math:`2^e`, and its largest mantissa lies between 64 and 128; an element
is off by at most half a step, or a whole step at the very top. For independent normal activations this is an error of
0.8 % of their root mean square, which a layer does not amplify: its results are off by 0.8 % of *their* root mean
square. For comparison, normal weights of 4 bits in groups of 128 are off by 10 %, of 8 bits by 0.6 %. Outliers make it
worse, because their neighbours share their steps; so larger blocks are worse, and shorter mantissas much worse:

>>> from lowbit.quantization.bfp import bfp12, bfp16, cast, decode
>>> def relative_error(x, format):
...     return float(np.linalg.norm(decode(cast(x, format)) - x) / np.linalg.norm(x))
>>> x = np.random.default_rng(1).standard_normal((1, 2**16)).astype(np.float32)
>>> [round(relative_error(x, format), 4) for format in (bfp16(16), bfp16(32), bfp16(128), bfp12(32))]
[0.0073, 0.0083, 0.0091, 0.1324]

The default, `ACTIVATIONS`, is BFP16 in blocks of 32: mantissas that fit the instructions, with an error an order of
magnitude below that of the weights. Callers choose it because the speed is then again limited only by the bytes.

Source: K-sort §II.B (the format); QIGen §2, equation 2; errata Q3, B2, B8.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lowbit.arrays import F64, I64
from lowbit.contract.checks import check_instance
from lowbit.contract.operation import BOUNDED, operation
from lowbit.contract.signature import checked
from lowbit.errors import ArgumentError
from lowbit.linear.linear import group_offsets
from lowbit.quantization.affine import QuantizedMatrix
from lowbit.quantization.bfp import Blocks, bfp16
from lowbit.quantization.bfp_dot import LARGEST_SUM
from lowbit.quantization.packing import Codes, unpack

ACTIVATIONS = bfp16(32)
"""The default format of activations: 8-bit mantissas, blocks of 32."""

LARGEST_CODE = 255
"""Of any width. Whether blocks are too long does not depend on the matrix that they meet."""


# **Segments** end where a block or a group ends.


@dataclass(frozen=True)
class Segment:
    """A run of rows that share a block and a group.

    Attributes:
        rows: which rows.
        block: number of the block of activations.
        group: number of the group of weights.
    """

    rows: slice
    block: int
    group: int


def segments(rows: int, block: int, group_size: int) -> Iterator[Segment]:
    """The segments of K rows, in order.

    >>> [(s.rows.start, s.rows.stop, s.block, s.group) for s in segments(40, block=32, group_size=24)]
    [(0, 24, 0, 0), (24, 32, 0, 1), (32, 40, 1, 1)]

    Args:
        rows: K.
        block: elements of a block of activations.
        group_size: rows of a group of weights.
    """
    start = 0
    while start < rows:
        stop = min(rows, (start // block + 1) * block, (start // group_size + 1) * group_size)
        yield Segment(slice(start, stop), start // block, start // group_size)
        start = stop


# **The integers**, equation 1. A kernel must compute them to the last bit, whatever it does afterwards.


@dataclass(frozen=True, eq=False)
class CodeSums:
    """The integer sums of T vectors of activations times a matrix, for each of P segments, before any rounding.

    Attributes:
        products: int64, T × P × N, of magnitude below 2^53: :math:`D`, the sums of mantissa times code.
        mantissas: int64, T × P: :math:`S`, the sums of mantissas.
        exponents: int64, T × P: a segment stands for its integers times ``2**exponents``.
        groups: int64, P: the group of weights to which each segment belongs, ascending.
    """

    products: I64
    mantissas: I64
    exponents: I64
    groups: I64


def check_activations(x: Blocks, rows: int) -> None:
    """Refuse blocks that cannot be multiplied by a matrix with this number of rows.

    Raises:
        ArgumentError: not `Blocks`, rows of another length, or blocks whose sums could reach 2^53.
    """
    check_instance("x", x, Blocks)
    if x.columns != rows:
        raise ArgumentError("elements of a row of x", x.columns, f"{rows}, the rows of the matrix")
    longest = min(x.format.block, rows)
    if longest * x.format.top * LARGEST_CODE >= LARGEST_SUM:
        given = f"{longest} products of {x.format.mantissa}-bit mantissas and codes"
        raise ArgumentError("a block of x", given, "sums below 2^53")


def _check_product(x: Blocks, matrix: QuantizedMatrix) -> None:
    check_activations(x, matrix.rows)


@checked(also=_check_product)
def code_sums(x: Blocks, matrix: QuantizedMatrix) -> CodeSums:
    """The exact integers of every segment.

    >>> from lowbit.quantization.affine import quantize
    >>> from lowbit.quantization.bfp import cast
    >>> matrix = quantize(np.arange(16, dtype=np.float32).reshape(8, 2), bits=4, group_size=8)
    >>> sums = code_sums(cast(np.ones((1, 8), np.float32), bfp16(4)), matrix)
    >>> print(sums.products.tolist(), sums.mantissas.tolist(), sums.exponents.tolist(), sums.groups.tolist())
    [[[768, 768], [3072, 3072]]] [[256, 256]] [[-6, -6]] [0, 0]

    Args:
        x: T rows of K elements.
        matrix: K × N.

    Returns:
        Integers of T × P × N and T × P, with exponents and groups.

    Raises:
        ArgumentError: not `Blocks`, rows of another length, or blocks whose sums could reach 2^53.

    Source: equation 1 of this chapter.
    """
    return sums_of_codes(x, unpack(matrix.words, matrix.bits), matrix.group_size)


def sums_of_codes(x: Blocks, codes: Codes, group_size: int) -> CodeSums:
    """The same for unpacked codes, uint8, K × N."""
    mantissas = x.mantissas.astype(np.int64)
    runs = list(segments(len(codes), x.format.block, group_size))
    return CodeSums(
        products=np.stack([mantissas[:, run.rows] @ codes[run.rows].astype(np.int64) for run in runs], axis=1),
        mantissas=np.stack([mantissas[:, run.rows].sum(axis=1) for run in runs], axis=1),
        exponents=x.exponents[:, [run.block for run in runs]].astype(np.int64),
        groups=np.array([run.group for run in runs]),
    )


# **The product**, equation 2: the integers are scaled and added in float64, group by group and segment by segment,
# without a library sum, so that the result has the same bits on every machine.


@checked(also=_check_product)
def qgemm_bfp(x: Blocks, matrix: QuantizedMatrix) -> F64:
    """``Y = X W`` for activations in Block Floating Point; T = 1 is the product with a single vector.

    >>> from lowbit.quantization.affine import quantize
    >>> from lowbit.quantization.bfp import cast
    >>> weights = np.eye(8, dtype=np.float32) * 15
    >>> x = np.arange(8, dtype=np.float32)[None]
    >>> qgemm_bfp(cast(x, ACTIVATIONS), quantize(weights, bits=4, group_size=8))
    array([[  0.,  15.,  30.,  45.,  60.,  75.,  90., 105.]])

    Args:
        x: T rows of K elements.
        matrix: K × N.

    Returns:
        float64, T × N: the value that a backend's float32 result is measured against.

    Raises:
        ArgumentError: not `Blocks`, rows of another length, or blocks whose sums could reach 2^53.

    Source: QIGen §2, equation 2; equation 2 of this chapter; errata Q3.
    """
    codes = unpack(matrix.words, matrix.bits)
    return scaled(sums_of_codes(x, codes, matrix.group_size), matrix)


def scaled(sums: CodeSums, matrix: QuantizedMatrix) -> F64:
    """The rest of `qgemm_bfp`, from the integers: float64, T × N."""
    y = np.zeros((len(sums.products), matrix.columns))
    offsets = group_offsets(matrix)
    for group in range(matrix.groups):
        accumulator, x_sum = np.zeros(y.shape), np.zeros((len(y), 1))
        for run in np.flatnonzero(sums.groups == group):
            e = sums.exponents[:, run, None]
            accumulator += np.ldexp(sums.products[:, run].astype(np.float64), e)  # exact but for this addition
            x_sum += np.ldexp(sums.mantissas[:, run, None].astype(np.float64), e)
        y += matrix.scales[group] * accumulator + offsets[group] * x_sum
    return y


# **What a backend promises.**

operation(
    "linear.qgemm_bfp",
    "Blocks of integers times quantised matrix",
    qgemm_bfp,
    promise=BOUNDED,
    source="K-sort §II.B equation 1; QIGen §2 equation 2; errata Q3",
    clauses={
        "C1": "The integers of a segment are exact: where every partial sum of their scaled values is exactly "
        "representable in the declared accumulator, Y equals X W exactly.",
        "C2": "Without overflow, each element of Y differs from X W by at most the bound derived from the integers "
        "and the declared arithmetic.",
        "C3": "The result is float32, T × N; row t depends on nothing but row t of X and the matrix; the same call "
        "gives the same bits.",
        "C4": "A row of X of zeros gives zeros, whatever its exponents; a row with a single mantissa M gives 2^e·M "
        "times a row of weights, within the bound.",
    },
)
