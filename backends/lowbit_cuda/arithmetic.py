r"""What the kernels' arithmetic is declared to be: the most roundings that a term meets, counted in the kernels.

Every sum is split among threads in a way that depends on its length only, so the roundings can be counted, line by line
in the sources. A sum of n terms meets at most n in any order, its own product included, and that is the count where it
is the smaller one. A backend that puts numpy in the place of kernels sums in float64 and rounds once, which is within
all of these.

**Products with quantised matrices** (``linear.cuh``, the factored form). A column is cut into segments, which go to 32
threads in turn. In a segment a product is one of a chain of fused multiply-adds, as many as its group has rows there;
an activation, on its way to the zero's term, one of a tree of at most 7 additions. Where a group or a segment ends, two
fused operations bring the sum to the column's; each end after it in the same thread adds at most two. Sums of 4 threads
meet in 2 additions, and of 8 warps in 7.

**Dense products and norms** (``dense.cuh``, ``between.cuh``). A thread's chain, 5 additions in a warp, 7 between warps.

**Attention** (``attention.cuh``) takes tokens in chunks of 256. In a chunk a share is one of a tree of 5 and 8
additions, and a value is one of a chain in which a warp takes every eighth token. What earlier chunks gave is then
multiplied by an exponential, which counts 4: the product and its own error (``numbers.cuh``: 2.2 units of
:math:`2^{-24}`). The rounding of the exponents' arguments needs no more than the bound has for one: scores approach the
greatest from below, so that their distances add up.

Source: the kernels; the chapters `lowbit.contract.rounding`, `lowbit.model.bounds` and `lowbit.attention.bounds` for
what is made of the counts.
"""

from lowbit.contract.rounding import Arithmetic
from lowbit_cuda.kernels.products import SEGMENT, SLICES, segments

TREE, SLICE_STEPS, LANE_STEPS, WARP_STEPS = 7, 2, 5, 7
CHUNK, LOWERED = 256, 4


def product_roundings(rows: int, group_size: int) -> int:
    """Of a product with a quantised matrix, of whichever bits need most.

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
    """Of a product with a dense matrix: a thread takes four rows in every 1024."""
    return min(length + 1, 4 * -(-length // 1024) + LANE_STEPS + WARP_STEPS)


def norm_roundings(length: int, group_size: int) -> int:
    """Of a sum of squares: a thread takes one number in every 256."""
    return min(length + 1, -(-length // 256) + LANE_STEPS + WARP_STEPS)


def attention_roundings(length: int, group_size: int) -> int:
    """Of a score, whose sum is shorter than this, and of sums over tokens."""
    chunks = -(-length // CHUNK)
    steps = -(-length // 8) + LANE_STEPS + WARP_STEPS + 8 * chunks + LOWERED * (chunks - 1)
    return min(length + 1, steps) if chunks == 1 else steps


PRODUCTS = Arithmetic("factored", "float32", product_roundings)
DENSE = Arithmetic("direct", "float32", dense_roundings)
NORMS = Arithmetic("direct", "float32", norm_roundings)
ATTENTION = Arithmetic("direct", "float32", attention_roundings)
ELEMENTS = Arithmetic("direct", "float32", lambda length, group_size: 1)
ROTATIONS = Arithmetic("direct", "float32", lambda length, group_size: 3)
