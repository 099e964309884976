r"""Attention heads: scores of many tokens against one query, and the mix of their values.

Both read rows of :math:`d_h` channels, one for each token. They differ in what is summed. A *mix*
:math:`\sum_u p_u v_u` goes down the rows, so lanes are channels and stay apart. A *score* :math:`\sum_c q_c k_c` goes
along a row: lanes hold parts of one sum, and have to be added up in the end.

**Scores.** Sixteen running sums for each token, channel c in sum c mod 16, in one register of sixteen lanes or in two
of eight. As many tokens as a register has lanes are taken at once, and `add_neighbours`
(`lowbit.kernels.vector_elementwise`) makes of their registers a single one with a score in each lane.

**Mixes.** Two sums a channel, one of the even tokens and one of the odd, so that additions need not wait for each
other; they are added when the tokens of a turn are done.

The programs are made for one :math:`d_h`, by which their pointers move, and handle channels in sixteens. What they read
beyond the last channel of a row belongs to the next row; it is multiplied by zeros of the query, or falls into channels
that nobody looks at. ``cpp/decode.h`` gives them a copy of the last rows, behind which there is nothing.
"""

from collections.abc import Iterator

from lowbit.kernels.program import Advance, Instruction, Loop, Program, Step
from lowbit_cppyy.codegen.exponential import constant
from lowbit_cppyy.codegen.isa import InstructionSet
from lowbit_cppyy.codegen.pieces import Piece, load, scalar, store

CHANNELS = 16
"""Running sums of a score."""

UNROLLED = 16
"""Sixteens of channels up to which they are written one after another."""

TILE_REGISTERS = 4
"""Registers of channels that are mixed at once, at most."""


def sixteens(head_dim: int) -> int:
    """How many sixteens of channels a head has; the last may be short."""
    return -(-head_dim // CHANNELS)


def tile_channels(head_dim: int, lanes: int) -> int:
    """Channels that are mixed at once: the most that all of them are whole tiles of."""
    most = TILE_REGISTERS * lanes // CHANNELS
    return CHANNELS * next(n for n in range(most, 0, -1) if sixteens(head_dim) % n == 0)


def scores(head_dim: int, table: InstructionSet) -> Piece:
    """Scores of ``groups`` times L tokens; behind the query stands what each score is multiplied by.

    Args:
        head_dim: d_h.
        table: the instruction set.
    """
    lanes, halves = table.lanes, range(CHANNELS // table.lanes)
    steps: list[Step] = []
    waiting: list[tuple[int, int]] = []  # the first of so many tokens whose sums are in one register
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
    return Piece(f"scores_d{head_dim}", summary, Program(lanes, body), table)


def _products(head_dim: int, lanes: int, sums: list[str]) -> Iterator[Step]:
    """The running sums of one token, in one register or two; then w is at the next."""
    places = {acc: half * lanes for half, acc in enumerate(sums)}
    for acc, place in places.items():
        yield from _product(acc, place, first=True)
    rest = sixteens(head_dim) - 1
    if rest < UNROLLED:
        for number in range(1, rest + 1):
            for acc, place in places.items():
                yield from _product(acc, CHANNELS * number + place)
        yield Advance("w", head_dim)
        return
    more = [step for acc, place in places.items() for step in _product(acc, CHANNELS + place)]
    yield Loop("c", rest, (*more, Advance("w", CHANNELS), Advance("x", CHANNELS)))
    yield Advance("w", head_dim - CHANNELS * rest)
    yield Advance("x", -CHANNELS * rest)


def _product(acc: str, place: int, *, first: bool = False) -> Iterator[Step]:
    yield load("k", "w", place)
    yield load("q", "x", place)
    yield Instruction("multiply", acc, ("q", "k")) if first else Instruction("fmadd", acc, ("q", "k", acc))


def mixed(head_dim: int, table: InstructionSet) -> Piece:
    """Some channels of ``groups`` times two tokens, each times its share at x, added to those at y.

    Args:
        head_dim: d_h.
        table: the instruction set.
    """
    return weighted(head_dim, tile_channels(head_dim, table.lanes), table)


def weighted(stride: int, columns: int, table: InstructionSet) -> Piece:
    """The same for rows that begin `stride` elements apart, of which so many columns are taken."""
    places = range(0, columns, table.lanes)
    sums = {place: (f"even_{place // table.lanes}", f"odd_{place // table.lanes}") for place in places}
    turn: list[Step] = [scalar("p0", 0), scalar("p1", 1)]
    for token in (0, 1):
        for place in places:
            turn.append(load("v", "w", token * stride + place))
            turn.append(Instruction("fmadd", sums[place][token], ("v", f"p{token}", sums[place][token])))
    body: tuple[Step, ...] = (
        *(load(sums[place][0], "y", place) for place in places),
        *(constant(sums[place][1], 0.0) for place in places),
        Loop("i", "groups", (*turn, Advance("w", 2 * stride), Advance("x", 2))),
        *(Instruction("add", even, (even, odd)) for even, odd in sums.values()),
        *(store(place, sums[place][0]) for place in places),
    )
    title = f"weighted_d{stride}c{columns}"
    summary = f"y += x W for {columns} columns of rows of {stride} at w, two rows a turn"
    return Piece(title, summary, Program(table.lanes, body), table)
