r"""The dot product of blocks: integers inside a block, one rounding between blocks.

Two vectors in Block Floating Point are multiplied block by block. Within a block the mantissas are integers and all
have the same scale, so the sum of their products is an integer too, and nothing is rounded:

.. math:: \sum_{i=1}^{n} \bigl(2^{e_a} M^a_i\bigr)\bigl(2^{e_b} M^b_i\bigr)
   \;=\; 2^{e_a + e_b} \sum_{i=1}^{n} M^a_i M^b_i .

The blocks of a vector keep their own exponents. Adding up the blocks is therefore an addition of floats, and costs one
rounding for each block: a head of 128 channels in blocks of 64 is rounded twice where a float32 loop rounds 128
times.

The two sides need not have the same precision. The paper multiplies queries in BFP16 by keys in BFP12; only the block
size is common.

**An operation ends at the integers.** `dot` returns the integer of each block and its exponent, and rounds nothing.
`total` adds the blocks of one dot product in float32, in order.

Source: K-sort §II.B, §III.
"""

from dataclasses import dataclass

import numpy as np

from lowbit.arrays import F32, F64, I32, I64
from lowbit.contract.checks import check_array
from lowbit.contract.operation import EXACT, Parameters, operation
from lowbit.contract.signature import checked
from lowbit.errors import ArgumentError
from lowbit.quantization.bfp import Blocks

LARGEST_SUM = 2**53
"""The integers of a block must stay below this, so that a float64 holds them; 8-bit mantissas reach it with blocks of
5e11 elements, 16-bit ones with 8e6."""


@dataclass(frozen=True, eq=False)
class BlockSums:
    """The dot products of R rows with S rows, one sum for each of their P blocks, before any rounding.

    Attributes:
        sums: int64, R × S × P, of magnitude below 2^53: the sum of the products of mantissas.
        exponents: int32, R × S × P: the block stands for ``sums * 2**exponents``.

    Raises:
        ArgumentError: arrays of other dtypes or shapes, or a sum that is too large.
    """

    sums: I64
    exponents: I32

    def __post_init__(self) -> None:
        check_array("sums", self.sums, np.int64, (None, None, None))
        check_array("exponents", self.exponents, np.int32, self.sums.shape)
        if (self.sums >= LARGEST_SUM).any() or (self.sums <= -LARGEST_SUM).any():
            raise ArgumentError("sums", "of 2^53 or more", "integers that a float64 holds exactly")


def _check_dot(a: Blocks, b: Blocks) -> None:
    if a.columns != b.columns:
        raise ArgumentError("elements of a row of b", b.columns, f"{a.columns}, as in a")
    if a.format.block != b.format.block:
        raise ArgumentError("block of b", b.format.block, f"{a.format.block}, as in a")
    longest = min(a.format.block, a.columns)
    if longest * a.format.top * b.format.top >= LARGEST_SUM:
        widths = f"{longest} products of {a.format.mantissa}-bit and {b.format.mantissa}-bit mantissas"
        raise ArgumentError("a block", widths, "sums below 2^53")


@checked(also=_check_dot)
def dot(a: Blocks, b: Blocks) -> BlockSums:
    """Every row of `a` times every row of `b`, block by block, in integers.

    >>> from lowbit.quantization.bfp import bfp12, bfp16, cast
    >>> a = cast(np.array([[1.0, 2.0, 3.0, 64.0]], np.float32), bfp16(2))
    >>> b = cast(np.array([[1.0, 1.0, 0.5, 0.25]], np.float32), bfp12(2))
    >>> result = dot(a, b)
    >>> print(result.sums.tolist(), result.exponents.tolist())
    [[[384, 140]]] [[[-7, -3]]]
    >>> 384 * 2.0**-7, 140 * 2.0**-3
    (3.0, 17.5)

    Args:
        a: R rows of n elements.
        b: S rows of n elements, of the same block size; its mantissas and exponents may have other widths.

    Returns:
        Sums and exponents, R × S × P.

    Raises:
        ArgumentError: rows of another length, other blocks, or mantissas so wide that a block's sum could reach 2^53.

    Source: K-sort §II.B.
    """
    shape = (a.rows, b.rows, a.format.blocks(a.columns))
    sums, exponents = np.empty(shape, np.int64), np.empty(shape, np.int32)
    for number, span in enumerate(a.format.spans(a.columns)):
        sums[:, :, number] = a.mantissas[:, span].astype(np.int64) @ b.mantissas[:, span].astype(np.int64).T
        exponents[:, :, number] = np.add.outer(a.exponents[:, number].astype(np.int32), b.exponents[:, number])
    return BlockSums(sums, exponents)


@checked
def total(blocks: BlockSums) -> F32:
    r"""Add the blocks of each dot product in float32: :math:`y \leftarrow \mathrm{fl}(y + 2^e S)`, first block first.

    Each step rounds once, as a fused multiply-add with exact factors does. A block sum of more than 24 bits is not
    rounded to float32 first.

    >>> sums = BlockSums(np.array([[[384, 140]]]), np.array([[[-7, -3]]], np.int32))
    >>> total(sums)
    array([[20.5]], dtype=float32)

    Args:
        blocks: R × S × P, from `dot`.

    Returns:
        float32, R × S; infinite where it overflows.

    Raises:
        ArgumentError: not `BlockSums`.

    Source: K-sort §II.B.
    """
    y = np.zeros(blocks.sums.shape[:2], np.float32)
    for number in range(blocks.sums.shape[2]):
        term = np.ldexp(blocks.sums[:, :, number].astype(np.float64), blocks.exponents[:, :, number])
        y = add_rounded_once(y, term)
    return y


# **One rounding, not two.** Adding in float64 and then converting would round twice, and the first rounding may create
# a tie that the exact sum is not. The remedy is to round the float64 sum *to odd*: if it is inexact, take the one of
# its two neighbours whose last bit is 1. Such a number is never a tie of float32 and lies on the same side of every tie
# as the exact sum, so the conversion rounds as it would round the exact sum.


def add_rounded_once(y: F32 | np.float32, term: F64) -> F32:
    """The exact sum of a float32 and a float64, rounded once to float32.

    A sum just above the tie between 1 and its successor rounds up; rounded to float64 first, it would become the tie
    and round down:

    >>> y, term = np.float32([1.0]), np.float64([2.0**-24 + 2.0**-60])
    >>> float(add_rounded_once(y, term)[0]) == 1 + 2.0**-23, float(np.float32(1.0 + term[0]))
    (True, 1.0)

    Args:
        y: float32, of the shape of `term`, or one number.
        term: float64.

    Returns:
        float32, of the shape of `term`.

    Source: Boldo and Melquiond, Emulation of FMA and correctly rounded sums (IEEE TC 57, 2008); Knuth's TwoSum.
    """
    wide = y.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        s = wide + term
        part = s - wide
        lost = (wide - (s - part)) + (term - part)  # what the rounding of s lost, exactly
        even = (s.view(np.int64) & 1) == 0
        neighbour = np.nextafter(s, np.where(lost > 0, np.inf, -np.inf))
        return np.where(np.isfinite(s) & (lost != 0) & even, neighbour, s).astype(np.float32)


def dot_parameters(a: Blocks, b: Blocks) -> Parameters:
    """The choices of both formats."""
    return {"block": a.format.block, "mantissa_a": a.format.mantissa, "mantissa_b": b.format.mantissa}


# **What a backend promises.**

operation(
    "bfp.dot",
    "Dot products of blocks, in integers",
    dot,
    promise=EXACT,
    source="K-sort §II.B",
    parameters=dot_parameters,
    clauses={
        "C1": "The sum of a block is the sum of the products of its mantissas, exactly.",
        "C2": "The exponent of a block is the sum of the two exponents.",
        "C3": "Element (r, s, j) is block j of row r of a with row s of b; the last block may be short.",
    },
)

operation(
    "bfp.total",
    "Sums of blocks, in float32",
    total,
    promise=EXACT,
    source="K-sort §II.B",
    clauses={
        "C1": "The blocks of a dot product are added to a float32 sum that begins at 0, first block first, each with "
        "one rounding to nearest, ties to even, of the exact sum.",
        "C2": "Overflow gives infinity, underflow a subnormal or a zero of its sign, as that one rounding makes them.",
    },
)
