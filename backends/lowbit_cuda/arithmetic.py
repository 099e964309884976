r"""The declared arithmetic of the kernels: the largest number of roundings of a term, counted in the sources.

Every sum is divided among threads in a way that depends on its length only, so the roundings can be counted line by
line. A term of a sum of n terms is rounded at most n times in any order, including its own product, so n is used where
it is smaller. A backend that runs numpy in place of the kernels sums in float64 and rounds once, which is within all of
these counts.

**Products with quantised matrices** (``linear.cuh``, the factored form). A column is cut into segments, which are dealt
to 32 threads in rotation. Within a segment a product is part of a chain of fused multiply-adds, one for each row of its
group, and an activation, in the term of the zero, is part of a tree of at most 7 additions. Where a group or a segment
ends, two fused operations add the sum to the column's; each later end in the same thread adds at most two roundings.
The sums of 4 threads are combined by 2 additions, and those of 8 warps by 7.

**Dense products and norms** (``dense.cuh``, ``between.cuh``). A thread's chain, then 5 additions within a warp and 7
between warps.

**Attention** (``attention.cuh``) processes tokens in chunks of 256. Within a chunk a probability is part of a tree of 5
and 8 additions, and a value is part of a chain in which a warp takes every eighth token. Earlier chunks are then
multiplied by an exponential, which counts 4: the product and its own error (``numbers.cuh``: 2.2 units of
:math:`2^{-24}`). The rounding of the exponents' arguments needs no more than the bound allows for one: scores approach
the maximum from below, so their distances add up.

Source: the kernels; the chapters `lowbit.contract.rounding`, `lowbit.model.bounds` and `lowbit.attention.bounds` for
the use of the counts.
"""

from lowbit.contract.rounding import Arithmetic
from lowbit_cuda.kernels.products import SEGMENT, SLICES, segments

TREE, SLICE_STEPS, LANE_STEPS, WARP_STEPS = 7, 2, 5, 7
CHUNK, LOWERED = 256, 4


def product_roundings(rows: int, group_size: int) -> int:
    """Roundings of a product with a quantised matrix, for the number of bits with the most.

    >>> product_roundings(4096, 128), product_roundings(32, 32)
    (77, 45)
    """
    return max(_of_bits(bits, rows, group_size) for bits in SEGMENT)


def _of_bits(bits: int, rows: int, group_size: int) -> int:
    segment = SEGMENT[bits]
    chain = max(min(segment, group_size, rows), TREE)
    of_slice = -(-segments(bits, rows, group_size) // SLICES)
    ends = of_slice * -(-segment // group_size)
    return chain + 2 * ends + SLICE_STEPS + WARP_STEPS


def dense_roundings(length: int, group_size: int) -> int:
    """Roundings of a product with a dense matrix: a thread takes four rows of every 1024."""
    return min(length + 1, 4 * -(-length // 1024) + LANE_STEPS + WARP_STEPS)


def norm_roundings(length: int, group_size: int) -> int:
    """Roundings of a sum of squares: a thread takes one number of every 256."""
    return min(length + 1, -(-length // 256) + LANE_STEPS + WARP_STEPS)


def attention_roundings(length: int, group_size: int) -> int:
    """Roundings of a sum over tokens; a score needs fewer."""
    chunks = -(-length // CHUNK)
    steps = -(-length // 8) + LANE_STEPS + WARP_STEPS + 8 * chunks + LOWERED * (chunks - 1)
    return min(length + 1, steps) if chunks == 1 else steps


PRODUCTS = Arithmetic("factored", "float32", product_roundings)
DENSE = Arithmetic("direct", "float32", dense_roundings)
NORMS = Arithmetic("direct", "float32", norm_roundings)
ATTENTION = Arithmetic("direct", "float32", attention_roundings)
ELEMENTS = Arithmetic("direct", "float32", lambda length, group_size: 1)
ROTATIONS = Arithmetic("direct", "float32", lambda length, group_size: 3)
