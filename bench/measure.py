"""The measurement: contestants and the plain reader in turns, round after round, all in one process.

A round gives every contestant one turn. In a turn the reader first reads as many bytes as the contestant is about to
move, then the contestant runs, so that every time has a reading of its own beside it, a millisecond earlier on the same
machine. Before either, threads that some library keeps watching for work are waited for; and a contestant whose call is
short runs once untimed, on other weights, since in a model its threads would be awake from the layer before. The order
changes from round to round, so that nobody always follows the same neighbour.

A turn in which a core was taken by something else does not count: once the cores are free, it is made again. For that
the turns of a problem have a minute in all, unless told otherwise. When it is over, such turns count, and their rounds
are marked as busy. Rounds go on until enough are free, or four times as many have been made.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from limits import MemoryReader
from peers.base import Contestant
from quiet import Watch, settle

MOST = 4  # times as many rounds as are wanted free
PATIENCE = 60.0  # seconds for waiting and for turns made again, of all rounds of a problem; the default
WARM = 0.02  # seconds; waking threads takes some 50 µs, so a longer call needs no warming


class Clock(Protocol):
    """What tells the time, so that a test can."""

    def __call__(self) -> float: ...


@dataclass
class Times:
    """What was measured of one contestant, a value a round, in seconds: its runs, and the readings beside them.

    Attributes:
        warm: whether each run follows an untimed one.
    """

    warm: bool = False
    runs: list[float] = field(default_factory=list)
    reads: list[float] = field(default_factory=list)

    def drop_last(self) -> None:
        """Forget the last turn."""
        del self.runs[-1], self.reads[-1]


@dataclass
class Rounds:
    """All rounds of a problem.

    Attributes:
        times: of each contestant, in the order given.
        free: for each round, whether the cores were free all through it.
        restless: turns around which threads of some library did not go to sleep.
        again: turns that were made again because a core was not free.
    """

    times: list[Times]
    free: list[bool] = field(default_factory=list)
    restless: int = 0
    again: int = 0

    def kept(self, pairs: int) -> list[int]:
        """The rounds that count: the free ones if there are enough, or else all."""
        free = [n for n, was in enumerate(self.free) if was]
        return free if len(free) >= pairs else list(range(len(self.free)))


def measure(
    contestants: Sequence[Contestant],
    reader: MemoryReader,
    watch: Watch,
    pairs: int,
    report: Callable[[int, int], None],
    clock: Clock = time.perf_counter,
    patience: float = PATIENCE,
) -> Rounds:
    """Measure contestants that are prepared.

    Args:
        contestants: in the order of the result.
        reader: the read limit.
        watch: says whether the cores are free.
        pairs: rounds that are wanted free.
        report: called after each round with the free rounds and those wanted.
        clock: seconds.
        patience: seconds for waiting and for turns made again, together.
    """
    rounds = Rounds([Times(timed(each, clock) < WARM) for each in contestants])
    patience -= watch.wait(patience)
    watch.alone()
    for number in range(MOST * pairs):
        free = True
        for place in range(len(contestants)):
            index = (place + number) % len(contestants)
            one, times = contestants[index], rounds.times[index]
            settled = turn(one, times, reader, clock)
            while not (fast := watch.fast()) and settled and patience > 0:
                started = clock()
                watch.wait(patience)
                times.drop_last()
                settled = turn(one, times, reader, clock)
                rounds.again += 1
                patience -= clock() - started
            rounds.restless += not settled
            free &= fast
        rounds.free.append(watch.alone() and free)
        report(sum(rounds.free), pairs)
        if sum(rounds.free) >= pairs:
            break
    return rounds


def turn(contestant: Contestant, times: Times, reader: MemoryReader, clock: Clock) -> bool:
    """One reading and one run, both kept; False if some thread did not go to sleep before or after them."""
    before = settle()
    times.reads.append(reader.seconds(contestant.nbytes * contestant.products))
    if times.warm:
        contestant.run()
    times.runs.append(timed(contestant, clock))
    contestant.rest()
    return settle() and before


def timed(contestant: Contestant, clock: Clock) -> float:
    """Seconds of one run."""
    start = clock()
    contestant.run()
    return clock() - start
