r"""Blocking: how much of a product fits in the first cache and in the registers.

A GEMV reads each weight once, but its vectors many times: x once for every column, y once for every row. If the matrix
is taken in blocks small enough that the block's part of x and of y stays in the first cache, only weights come from
memory. And if a smaller tile's part stays in registers, only weights come from the cache. Two inequalities determine
the sizes of both. This chapter states them, solves them exactly, and says what they leave out.

**The cache.** A block of :math:`m_b` codes by :math:`t_b` columns of :math:`b`-bit codes, with float32 vectors, must
fit in :math:`\gamma` bits (errata Q6: the block is :math:`b m_b/32 \times t_b` words):

.. math:: 32\,m_b + b\,m_b t_b + 32\,t_b \;\le\; \gamma . \tag{3}

**The registers.** A tile of :math:`m_u` codes by :math:`t_u` registers of columns must fit in :math:`\eta` registers:

.. math:: m_u + m_u t_u + t_u \;\le\; \eta . \tag{4}

The left side is :math:`(m_u + 1)(t_u + 1) - 1`, so the solutions are all pairs with :math:`(m_u+1)(t_u+1) \le \eta +
1`.

**Both.** Among the blocks that are whole tiles, the one that fills the cache best:

.. math:: \max\; 32\,m_b + b\,m_b t_b + 32\,t_b \;\le\; \gamma, \qquad
   t_b \bmod t_u = 0, \quad m_b \bmod m_u = 0 . \tag{5}

**What is left out** (errata Q8). Scales and zeros are read with the weights and take cache too; a group that ends
inside a block needs different code from one that ends outside; a register has L columns; codes come in whole words; and
a kernel also needs registers for its mask. The *extended* model counts all of these:

.. math:: 32\,m_b + b\,m_b t_b + 32\,t_b + 64\,t_b \lceil m_b / g \rceil \;\le\; \gamma,

with :math:`m_b \bmod g = 0` or :math:`g \bmod m_b = 0`, with :math:`t_b` whole tiles of :math:`t_u L` columns, with
:math:`m_b` and :math:`g` whole iterations of the loop of Algorithm 3; and it counts the registers of the actual
program. Both models are here, by name.

.. plot:: figures/cache_model.py

**What the objective ignores.** Equation 5 measures how full the cache is, not what fills it. With :math:`\gamma` = 32
KiB and 4 bits, the blocks of 2 × 6552 and of 312 × 197 both fill it to the last bit, but the first passes x through the
cache 33 times less often and y 156 times more often. Among blocks that fill it equally well, the chapter takes the one
with the most weights, hence with the least of x and y; and of two such blocks the taller, because an element of x is
only read but one of y is also written back.

Source: QIGen §3, equations 3 to 5; algorithm 4; errata Q6, Q7, Q8.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from lowbit.contract.checks import check_choice, check_integer
from lowbit.errors import ArgumentError
from lowbit.kernels.microkernel import algorithm_3, check_sizes, codes_per_iteration
from lowbit.kernels.program import live_registers
from lowbit.quantization.packing import BITS

FLOAT_BITS = 32


def equation_3(bits: int, m_b: int, t_b: int) -> int:
    """The bits of cache that a block takes, as printed: its part of x, its codes, its part of y.

    >>> equation_3(4, m_b=312, t_b=197)
    262144

    Args:
        bits: b, the width of a code.
        m_b: codes down the block.
        t_b: columns of the block.

    Source: QIGen §3, equation 3.
    """
    return FLOAT_BITS * m_b + bits * m_b * t_b + FLOAT_BITS * t_b


def equation_3_extended(bits: int, m_b: int, t_b: int, group_size: int) -> int:
    """The same with the scales and zeros of each group of g rows that the block overlaps, 32 bits each.

    >>> equation_3_extended(4, m_b=192, t_b=312, group_size=16)
    495360

    Source: QIGen §3, equation 3; errata Q8.
    """
    return equation_3(bits, m_b, t_b) + 2 * FLOAT_BITS * t_b * -(-m_b // group_size)


def equation_4(m_u: int, t_u: int) -> int:
    """The number of registers that a tile takes, as printed: for x, W and y.

    >>> equation_4(m_u=3, t_u=3)
    15

    Args:
        m_u: codes of the tile.
        t_u: registers of columns.

    Source: QIGen §3, equation 4; figure 2; errata Q7.
    """
    return m_u + m_u * t_u + t_u


def equation_4_extended(bits: int, m_u: int, t_u: int) -> int:
    """The number of registers that the program of Algorithm 3 takes: one more for the mask, and one for codes that
    straddle words.

    >>> equation_4_extended(4, m_u=3, t_u=3), equation_4_extended(3, m_u=10, t_u=1)
    (16, 23)

    Source: QIGen §3, equation 4; errata Q8.
    """
    return live_registers(algorithm_3(bits, m_u, t_u, lanes=1, stride=t_u))


# **The search space of the tile.** The fastest :math:`m_u` and :math:`t_u` are found by trial (the paper calls it
# empirical search). There are few candidates: every pair that fits.


def tiles(registers: int) -> list[tuple[int, int]]:
    """Every :math:`(m_u, t_u)` that equation 4 allows, as printed.

    >>> tiles(5)
    [(1, 1), (1, 2), (2, 1)]
    >>> len(tiles(16)), len(tiles(32))
    (19, 58)

    Args:
        registers: η, the number of registers.

    Raises:
        ArgumentError: fewer than the 3 registers of the smallest tile.

    Source: QIGen §3, equation 4.
    """
    check_integer("registers", registers, 3)
    pairs = ((m_u, t_u) for m_u in range(1, registers) for t_u in range(1, registers))
    return [pair for pair in pairs if equation_4(*pair) <= registers]


def tiles_extended(bits: int, registers: int) -> list[tuple[int, int]]:
    """Every :math:`(m_u, t_u)` whose program fits, by its own count.

    With 16 registers these are all the tiles of equation 4: 17 is prime, so no tile takes exactly 16 registers, and one
    is left for the mask. With 32 registers there are fewer:

    >>> sorted(set(tiles(32)) - set(tiles_extended(4, 32)))
    [(2, 10), (10, 2)]

    Raises:
        ArgumentError: wrong bits, or too few registers.

    Source: QIGen §3, equation 4; errata Q8.
    """
    check_choice("bits", bits, BITS)
    return [tile for tile in tiles(registers) if equation_4_extended(bits, *tile) <= registers]


# **Solving equation 5.** The numbers are small integers, and for a fixed :math:`m_b` the left side grows with
# :math:`t_b`. So for each :math:`m_b` the best :math:`t_b` is the largest that fits, which one division finds. There
# are at most :math:`\gamma/32` heights to try, 8192 for a cache of 32 KiB. So the search proves the optimum within
# milliseconds. An integer programming solver would find the same: the product :math:`m_b t_b` makes the problem
# quadratic, and the solver would have to branch over the same heights.


@dataclass(frozen=True)
class CacheBlock:
    """A block of a Mini-GEMV that fits the first-level cache.

    Attributes:
        m_b: rows of codes.
        t_b: columns.
        used: bits of cache that it takes, by the model used to choose it.
    """

    m_b: int
    t_b: int
    used: int


def solve(
    bits: int, cache_bits: int, m_u: int, t_u: int, *, rows: int | None = None, columns: int | None = None
) -> CacheBlock:
    r"""The block of equation 5, as printed.

    >>> solve(4, 32 * 1024 * 8, m_u=1, t_u=1)
    CacheBlock(m_b=312, t_b=197, used=262144)

    Args:
        bits: b, the width of a code.
        cache_bits: γ, the size of the first data cache in bits.
        m_u: :math:`m_b` is a multiple of it.
        t_u: :math:`t_b` is a multiple of it.
        rows: K, the largest height of a block; ``None`` for no limit.
        columns: N, the largest width of a block; ``None`` for no limit.

    Raises:
        ArgumentError: wrong bits, a size below 1, or no block fits.

    Source: QIGen §3, equation 5; algorithm 4, line 3.
    """
    check_sizes(bits, cache_bits=cache_bits, m_u=m_u, t_u=t_u, rows=rows, columns=columns)
    return _best(_heights(m_u, rows, cache_bits), t_u, cache_bits, columns, partial(equation_3, bits))


def solve_extended(
    bits: int, cache_bits: int, group_size: int, m_u: int, t_u: int, *, lanes: int, rows: int, columns: int
) -> CacheBlock:
    """The block of the extended model.

    >>> solve_extended(4, 32 * 1024 * 8, 128, m_u=8, t_u=4, lanes=8, rows=4096, columns=11008)
    CacheBlock(m_b=16, t_b=1632, used=261632)

    Args:
        bits: b, the width of a code.
        cache_bits: γ, bits of cache.
        group_size: g; K for one group.
        m_u: codes of a micro-step.
        t_u: registers of columns of a tile.
        lanes: L, columns of a register.
        rows: K, rows of codes.
        columns: N, columns.

    Raises:
        ArgumentError: wrong bits, a size below 1, groups that are not whole iterations of the loop, or no block fits.

    Source: QIGen §3, equation 5; errata Q7, Q8.
    """
    sizes = {"cache_bits": cache_bits, "group_size": group_size, "m_u": m_u, "t_u": t_u, "lanes": lanes}
    check_sizes(bits, **sizes, rows=rows, columns=columns)
    step = codes_per_iteration(bits, m_u)
    if group_size % step:
        raise ArgumentError("group_size", group_size, f"a multiple of {step}, the codes in one iteration of the loop")
    heights = [m_b for m_b in _heights(step, rows, cache_bits) if m_b % group_size == 0 or group_size % m_b == 0]
    model = partial(equation_3_extended, bits, group_size=group_size)
    return _best(heights, t_u * lanes, cache_bits, columns, model)


Model = Callable[[int, int], int]
"""The bits that a block of :math:`m_b` by :math:`t_b` takes; each further column adds the same number of bits."""


def _heights(step: int, rows: int | None, cache_bits: int) -> range:
    """Every height that is a multiple of `step`, at most that of the matrix, and whose part of x alone fits."""
    if rows is not None and rows < step:
        raise ArgumentError("rows", rows, f"at least {step}, the codes of one tile")
    most = cache_bits // FLOAT_BITS
    return range(step, min(most, most if rows is None else rows) + 1, step)


def _best(heights: Sequence[int], width: int, cache_bits: int, columns: int | None, model: Model) -> CacheBlock:
    """The block that fills most of the cache; among equals the one with the most weights, and among these the
    tallest."""
    blocks = list(_widest(heights, width, cache_bits, columns, model))
    if not blocks:
        raise ArgumentError("cache_bits", cache_bits, "enough for the x, the codes and the y of one tile")
    return max(blocks, key=lambda block: (block.used, block.m_b * block.t_b, block.m_b))


def _widest(
    heights: Sequence[int], width: int, cache_bits: int, columns: int | None, model: Model
) -> Iterator[CacheBlock]:
    """The widest block that fits for each height, if there is one."""
    for m_b in heights:
        fixed, column = model(m_b, 0), model(m_b, 1) - model(m_b, 0)
        t_b = (cache_bits - fixed) // column // width * width
        if columns is not None:
            t_b = min(t_b, -(-columns // width) * width)
        if t_b > 0:
            yield CacheBlock(m_b, t_b, model(m_b, t_b))
