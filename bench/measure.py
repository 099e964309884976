"""The measurement: contestants and the plain reader in turns, round after round, all in one process.

A round gives every contestant one turn. In a turn the reader first reads as many bytes as the contestant is about to
move, then the contestant runs, so that every time has a reading of its own beside it, a millisecond earlier on the same
machine. Before either, threads that some library keeps watching for work are waited for; and a contestant whose call is
short runs once untimed, on other weights, since in a model its threads would be awake from the layer before. The order
changes from round to round, so that nobody always follows the same neighbour.

Rounds in which a core was taken by something else are marked. After one, the next waits until the cores are free, up to
a minute in all unless told otherwise. Rounds go on until enough are free, or four times as many have been made.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from limits import MemoryReader
from peers.base import Contestant
from quiet import Watch, settle

MOST = 4  # times as many rounds as are wanted free
PATIENCE = 60.0  # seconds that the rounds of a problem wait for free cores, together; the default
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


@dataclass
class Rounds:
    """All rounds of a problem.

    Attributes:
        times: of each contestant, in the order given.
        free: for each round, whether the cores were free all through it.
        restless: turns before which threads of some library did not go to sleep.
    """

    times: list[Times]
    free: list[bool] = field(default_factory=list)
    restless: int = 0

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
        watch: says whether the cores were free since it was last asked.
        pairs: rounds that are wanted free.
        report: called after each round with the free rounds and those wanted.
        clock: seconds.
        patience: seconds that the rounds wait for free cores, together.
    """
    rounds = Rounds([Times(timed(each, clock) < WARM) for each in contestants])
    watch.free()
    for number in range(MOST * pairs):
        if rounds.free and not rounds.free[-1]:
            patience -= watch.wait(patience)
        for place in range(len(contestants)):
            index = (place + number) % len(contestants)
            rounds.restless += not turn(contestants[index], rounds.times[index], reader, clock)
        rounds.free.append(watch.free())
        report(sum(rounds.free), pairs)
        if sum(rounds.free) >= pairs:
            break
    return rounds


def turn(contestant: Contestant, times: Times, reader: MemoryReader, clock: Clock) -> bool:
    """One reading and one run, both kept; False if some thread did not go to sleep before them."""
    settled = settle()
    times.reads.append(reader.seconds(contestant.nbytes * contestant.products))
    if times.warm:
        contestant.run()
    times.runs.append(timed(contestant, clock))
    contestant.rest()
    return settled


def timed(contestant: Contestant, clock: Clock) -> float:
    """Seconds of one run."""
    start = clock()
    contestant.run()
    return clock() - start
