r"""Attention heads: the scores of many tokens against one query, and the weighted sum of their values.

Both read rows of :math:`d_h` channels, one for each token, but they sum along different axes. A *mix*
:math:`\sum_u p_u v_u` sums down the rows: each lane is a channel. A *score* :math:`\sum_c q_c k_c` sums along a row:
the lanes hold parts of one sum and are added at the end.

**Scores.** Each token has sixteen running sums, with channel c in sum c mod 16, in one register of sixteen lanes or two
of eight. The kernel takes as many tokens at once as a register has lanes, and `add_neighbours`
(`lowbit.kernels.vector_elementwise`) combines their registers into one with a score in each lane.

**Mixes.** Each channel has two sums, one of the even tokens and one of the odd, so that an addition need not wait for
the one before it. The two are added after the last token.

A program is made for one :math:`d_h`, by which its pointers move, and processes sixteen channels at a time. Beyond the
last channel of a row it reads the beginning of the next row, which is multiplied by zeros of the query, or added to
channels that are not used. ``cpp/decode.h`` copies the last rows, so that it never reads beyond the end of memory.
"""

from collections.abc import Iterator

from lowbit.kernels.program import Advance, Instruction, Loop, Program, Step
from lowbit_cppyy.codegen.elementwise import ProgramKernel, load, scalar, store
from lowbit_cppyy.codegen.exponential import constant
from lowbit_cppyy.codegen.isa import InstructionSet

CHANNELS = 16
"""The number of running sums of a score."""

UNROLLED = 16
"""The loop over groups of 16 channels is unrolled up to this many groups."""

TILE_REGISTERS = 4
"""The largest number of registers of channels that are mixed at once."""


def sixteens(head_dim: int) -> int:
    """The number of groups of 16 channels of a head; the last may be short."""
    return -(-head_dim // CHANNELS)


def tile_channels(head_dim: int, lanes: int) -> int:
    """The number of channels mixed at once: the largest that divides the number of all channels."""
    most = TILE_REGISTERS * lanes // CHANNELS
    return CHANNELS * next(n for n in range(most, 0, -1) if sixteens(head_dim) % n == 0)


def scores(head_dim: int, table: InstructionSet) -> ProgramKernel:
    """Scores of ``groups`` times L tokens; the common factor of the scores follows the query.

    Args:
        head_dim: d_h.
        table: the instruction set.
    """
    lanes, halves = table.lanes, range(CHANNELS // table.lanes)
    steps: list[Step] = []
    waiting: list[tuple[int, int]] = []  # runs of tokens whose sums share a register: the first token, their number
    for token in range(lanes):
        steps += _products(head_dim, lanes, [f"t{token}_{half}" for half in halves])
        count = 1
        while waiting and waiting[-1][1] == count:
            first, _ = waiting.pop()
            for half in halves:
                pair = (f"t{first}_{half}", f"t{token}_{half}")
                steps.append(Instruction("add_neighbours", pair[0], pair))
            token, count = first, 2 * count
        waiting.append((token, count))
    if len(halves) == 2:
        steps.append(Instruction("add", "t0_0", ("t0_0", "t0_1")))
    steps += [Instruction("multiply", "t0_0", ("t0_0", "scale")), store(0, "t0_0"), Advance("y", lanes)]
    body = (scalar("scale", sixteens(head_dim) * CHANNELS), Loop("i", "groups", tuple(steps)))
    summary = f"scores of tokens at w, rows of {head_dim}, for the query at x"
    return ProgramKernel(f"scores_d{head_dim}", summary, Program(lanes, body), table)


def _products(head_dim: int, lanes: int, sums: list[str]) -> Iterator[Step]:
    """The running sums of one token, in one register or two; then w moves to the next token."""
    starts = {acc: half * lanes for half, acc in enumerate(sums)}
    for acc, start in starts.items():
        yield from _product(acc, start, first=True)
    rest = sixteens(head_dim) - 1
    if rest < UNROLLED:
        for number in range(1, rest + 1):
            for acc, start in starts.items():
                yield from _product(acc, CHANNELS * number + start)
        yield Advance("w", head_dim)
        return
    more = [step for acc, start in starts.items() for step in _product(acc, CHANNELS + start)]
    yield Loop("c", rest, (*more, Advance("w", CHANNELS), Advance("x", CHANNELS)))
    yield Advance("w", head_dim - CHANNELS * rest)
    yield Advance("x", -CHANNELS * rest)


def _product(acc: str, start: int, *, first: bool = False) -> Iterator[Step]:
    yield load("k", "w", start)
    yield load("q", "x", start)
    yield Instruction("multiply", acc, ("q", "k")) if first else Instruction("fmadd", acc, ("q", "k", acc))


def mixed(head_dim: int, table: InstructionSet) -> ProgramKernel:
    """A tile of channels of ``groups`` times two tokens: each is multiplied by its probability at x and added to y.

    Args:
        head_dim: d_h.
        table: the instruction set.
    """
    return weighted(head_dim, tile_channels(head_dim, table.lanes), table)


def weighted(stride: int, columns: int, table: InstructionSet) -> ProgramKernel:
    """``y += x W`` for some columns of W, whose rows begin `stride` elements apart."""
    starts = range(0, columns, table.lanes)
    sums = {start: (f"even_{start // table.lanes}", f"odd_{start // table.lanes}") for start in starts}
    both: list[Step] = [scalar("p0", 0), scalar("p1", 1)]
    for token in (0, 1):
        for start in starts:
            both.append(load("v", "w", token * stride + start))
            both.append(Instruction("fmadd", sums[start][token], ("v", f"p{token}", sums[start][token])))
    body: tuple[Step, ...] = (
        *(load(sums[start][0], "y", start) for start in starts),
        *(constant(sums[start][1], 0.0) for start in starts),
        Loop("i", "groups", (*both, Advance("w", 2 * stride), Advance("x", 2))),
        *(Instruction("add", even, (even, odd)) for even, odd in sums.values()),
        *(store(start, sums[start][0]) for start in starts),
    )
    title = f"weighted_d{stride}c{columns}"
    summary = f"y += x W for {columns} columns of rows of {stride} at w, two rows an iteration"
    return ProgramKernel(title, summary, Program(table.lanes, body), table)
