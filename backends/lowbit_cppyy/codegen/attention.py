r"""Attention heads: the scores of many tokens against one query, and the weighted sum of their values.

Both read rows of :math:`d_h` channels, one for each token, but they sum along different axes. A *mix*
:math:`\sum_u p_u v_u` sums down the rows: each lane is a channel. A *score* :math:`\sum_c q_c k_c` sums along a row:
the lanes hold parts of one sum and are added at the end.

**Scores.** Each token has sixteen running sums, with channel c in sum c mod 16, in one register of sixteen lanes or two
of eight. The kernel takes as many tokens at once as a register has lanes, and `add_neighbours`
(`lowbit.kernels.vector_elementwise`) combines their registers into one with a score in each lane.

**Mixes.** Each channel has two sums, one of the even tokens and one of the odd, so that an addition need not wait for
the one before it. The two are added after the last token.

**Queries together.** The query heads of a key-value head read the same rows. One after the other, the first would wait
for memory and the others would leave it idle. So where there are 32 registers, `TOGETHER` queries share each row that
is loaded: *measured* on a Zen 4, tokens of SmolLM2 after 128, 512 and 1,900 others are 1.08, 1.09 and 1.17 times as
fast on one thread, and 1.04, 1.39 and 1.19 times on two. The sums of a query are the same in the same order.

A program is made for one :math:`d_h`, by which its pointers move, and processes sixteen channels at a time. Beyond the
last channel of a row it reads the beginning of the next row, which is multiplied by zeros of the query, or added to
channels that are not used. ``cpp/decode.h`` copies the last rows, so that it never reads beyond the end of memory.
"""

from collections.abc import Iterable, Iterator

from lowbit.kernels.program import Address, Advance, Instruction, Loop, Program, Step
from lowbit_cppyy.codegen.elementwise import CHUNK, ProgramKernel, load, scalar, store
from lowbit_cppyy.codegen.exponential import constant
from lowbit_cppyy.codegen.isa import InstructionSet

CHANNELS = 16
"""The number of running sums of a score."""

UNROLLED = 16
"""The loop over groups of 16 channels is unrolled up to this many groups."""

TOGETHER = 3
"""The number of queries of one kernel where there are 32 registers: 24 hold the sums of three mixes."""

TILE_REGISTERS = 4
"""The largest number of registers of channels that are mixed at once."""


def sixteens(head_dim: int) -> int:
    """The number of groups of 16 channels of a head; the last may be short."""
    return -(-head_dim // CHANNELS)


def tile_channels(head_dim: int, lanes: int) -> int:
    """The number of channels mixed at once: the largest that divides the number of all channels."""
    most = TILE_REGISTERS * lanes // CHANNELS
    return CHANNELS * next(n for n in range(most, 0, -1) if sixteens(head_dim) % n == 0)


def query_counts(table: InstructionSet) -> tuple[int, ...]:
    """The numbers of queries that kernels have: one, and `TOGETHER` if there are enough registers."""
    return (1, TOGETHER) if table.registers == 32 else (1,)


def scores(head_dim: int, table: InstructionSet, queries: int = 1, ahead: int = 0) -> ProgramKernel:
    """Scores of ``groups`` times L tokens; the common factor of the scores follows the query.

    Args:
        head_dim: d_h.
        table: the instruction set.
        queries: the number of queries, each with its factor in a row of x; y has rows of `CHUNK`.
        ahead: the prefetch distance in elements; 0 for no prefetch.
    """
    lanes, halves, row = table.lanes, range(CHANNELS // table.lanes), sixteens(head_dim) * CHANNELS + CHANNELS
    steps: list[Step] = []
    waiting: list[tuple[int, int]] = []  # runs of tokens whose sums share a register: the first token, their number
    for token in range(lanes):
        sums = {(q, half): f"t{token}_{half}_{q}" for half in halves for q in range(queries)}
        steps += fetched(_products(head_dim, lanes, row, sums), ahead)
        count = 1
        while waiting and waiting[-1][1] == count:
            first, _ = waiting.pop()
            for q, half in sums:
                pair = (f"t{first}_{half}_{q}", f"t{token}_{half}_{q}")
                steps.append(Instruction("add_neighbours", pair[0], pair))
            token, count = first, 2 * count
        waiting.append((token, count))
    for q in range(queries):
        if len(halves) == 2:
            steps.append(Instruction("add", f"t0_0_{q}", (f"t0_0_{q}", f"t0_1_{q}")))
        steps += [Instruction("multiply", f"t0_0_{q}", (f"t0_0_{q}", f"scale_{q}")), store(q * CHUNK, f"t0_0_{q}")]
    steps.append(Advance("y", lanes))
    scales = [scalar(f"scale_{q}", q * row + row - CHANNELS) for q in range(queries)]
    body: tuple[Step, ...] = (*scales, Loop("i", "groups", tuple(steps)))
    title = f"scores_d{head_dim}" + (f"q{queries}" if queries > 1 else "") + (f"a{ahead}" if ahead else "")
    summary = f"scores of tokens at w, rows of {head_dim}, for {queries} query(s) at x"
    return ProgramKernel(title, summary, Program(lanes, body), table)


def _products(head_dim: int, lanes: int, row: int, sums: dict[tuple[int, int], str]) -> Iterator[Step]:
    """The running sums of one token, by query and half of the channels; then w moves to the next token."""
    starts = {half * lanes: [(q * row, acc) for (q, part), acc in sums.items() if part == half] for _, half in sums}
    for start, own in starts.items():
        yield from _product(own, start, first=True)
    rest = sixteens(head_dim) - 1
    if rest < UNROLLED:
        for number in range(1, rest + 1):
            for start, own in starts.items():
                yield from _product(own, CHANNELS * number + start)
        yield Advance("w", head_dim)
        return
    more = [step for start, own in starts.items() for step in _product(own, CHANNELS + start)]
    yield Loop("c", rest, (*more, Advance("w", CHANNELS), Advance("x", CHANNELS)))
    yield Advance("w", head_dim - CHANNELS * rest)
    yield Advance("x", -CHANNELS * rest)


def _product(sums: list[tuple[int, str]], start: int, *, first: bool = False) -> Iterator[Step]:
    yield load("k", "w", start)
    for row, acc in sums:
        yield load("q", "x", row + start)
        yield Instruction("multiply", acc, ("q", "k")) if first else Instruction("fmadd", acc, ("q", "k", acc))


def fetched(steps: Iterable[Step], ahead: int) -> Iterator[Step]:
    """Steps with a prefetch before the first load from each line of w, `ahead` elements further on; 0 for none."""
    for step in steps:
        if isinstance(step, Loop):
            yield Loop(step.index, step.count, tuple(fetched(step.body, ahead)))
            continue
        place = (
            next((a for a in step.arguments if isinstance(a, Address)), None) if isinstance(step, Instruction) else None
        )
        if ahead and place is not None and place.pointer == "w" and place.offset % CHANNELS == 0:
            yield Instruction("prefetch_once", "", (Address("w", place.offset + ahead),))
        yield step


def mixed(head_dim: int, table: InstructionSet, queries: int = 1, ahead: int = 0) -> ProgramKernel:
    """A tile of channels of ``groups`` times two tokens: each is multiplied by its probability at x and added to y.

    Args:
        head_dim: d_h.
        table: the instruction set.
        queries: the number of queries, with probabilities in rows of `CHUNK`.
        ahead: as for `scores`.
    """
    row = sixteens(head_dim) * CHANNELS
    return weighted(head_dim, tile_channels(head_dim, table.lanes), table, queries, row, ahead)


def weighted(
    stride: int, columns: int, table: InstructionSet, rows: int = 1, row: int = 0, ahead: int = 0
) -> ProgramKernel:
    """``y += x W`` for some columns of W, whose rows begin `stride` elements apart.

    Args:
        stride: of W.
        columns: of W and y.
        table: the instruction set.
        rows: of x, `CHUNK` elements apart, and of y.
        row: the number of elements between rows of y.
        ahead: as for `scores`.
    """
    starts = range(0, columns, table.lanes)
    sums = {
        (r, start): (f"even_{start // table.lanes}_{r}", f"odd_{start // table.lanes}_{r}")
        for r in range(rows)
        for start in starts
    }
    both: list[Step] = []
    for token in (0, 1):
        both += [scalar(f"p{token}_{r}", r * CHUNK + token) for r in range(rows)]
        for start in starts:
            both.append(load("v", "w", token * stride + start))
            for r in range(rows):
                acc = sums[r, start][token]
                both.append(Instruction("fmadd", acc, ("v", f"p{token}_{r}", acc)))
    body: tuple[Step, ...] = (
        *(load(even, "y", r * row + start) for (r, start), (even, _) in sums.items()),
        *(constant(odd, 0.0) for _, odd in sums.values()),
        Loop("i", "groups", (*fetched(both, ahead), Advance("w", 2 * stride), Advance("x", 2))),
        *(Instruction("add", even, (even, odd)) for even, odd in sums.values()),
        *(store(r * row + start, even) for (r, start), (even, _) in sums.items()),
    )
    title = f"weighted_d{stride}c{columns}" + (f"r{rows}" if rows > 1 else "") + (f"a{ahead}" if ahead else "")
    summary = f"y += x W for {columns} columns of rows of {stride} at w, two rows an iteration"
    return ProgramKernel(title, summary, Program(table.lanes, body), table)
