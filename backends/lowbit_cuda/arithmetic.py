r"""What the kernels' arithmetic is declared to be: how many roundings a term meets, counted from the kernels.

Every sum here is split among threads in a way that depends on its length only. The counts below follow the sources line
by line, and are upper bounds where a source takes a shorter way at some lengths. The simulated backend with numpy in
place of kernels sums in float64 and rounds once, which is within all of them.

**Products with quantised matrices** (``linear.cuh``) sum the factored form. A column's rows are cut into segments of up
to 64 rows, dealt out to 32 threads in turn. In a segment a term is one of a chain of fused multiply-adds, as many as
the rows of its group there; or it is one of the sum of activations, which is a tree and shorter, and then the zero's
factor. When a group or a segment ends, its sum is scaled and added by at most two fused operations, and every end of
the same thread after it adds at most two more. At last 4 sums meet in 2 steps and 8 in at most 8.

**Plain sums** are dealt out to the threads of a warp (``dense.cuh``) or of a block, whose sums then meet in a tree. In
any order a term of a sum of n meets at most n roundings, its own product included, which is the other limit.

Source: the kernels' own sources; the chapter `lowbit.bounds` for what is done with the counts.
"""

from lowbit.bounds import Arithmetic

SEGMENT, SLICES = 64, 32
WARP_STEPS, BLOCK_STEPS = 5, 8
"""Additions in which 32 threads' sums meet, and in which those of 8 warps do."""


def product_roundings(rows: int, group_size: int) -> int:
    """Of a product with a quantised matrix.

    >>> product_roundings(4096, 128), product_roundings(32, 32)
    (80, 46)
    """
    chain = min(group_size, SEGMENT, rows)
    segments = -(-rows // SEGMENT) + (-(-rows // group_size) if group_size % SEGMENT else 0)
    ends_of_segment = -(-SEGMENT // group_size) if group_size < SEGMENT else 1
    ends = -(-segments // SLICES) * ends_of_segment
    return chain + 2 + 2 * ends + 2 + BLOCK_STEPS


def sum_roundings(length: int, group_size: int) -> int:
    """Of a plain sum in any order: a product, and an addition for every other term."""
    return length + 1


PRODUCTS = Arithmetic("factored", "float32", product_roundings)
SUMS = Arithmetic("direct", "float32", sum_roundings)
TURNS = Arithmetic("direct", "float32", lambda length, group_size: 3)
