"""The measurement: contestants in turns, round after round, each beside a reading of as many bytes.

In a turn the reader reads as many bytes as the contestant is about to move, then the contestant runs on a copy of its
matrix that no cache holds. So every time has a reading beside it, a moment earlier on the same machine. A contestant
whose call is short runs once untimed before, on another copy: in a model its threads would be awake from the layer
before. The order changes from round to round. A round is *busy* if other processes used more than a twentieth of the
machine's time, as far as the system reports it. Rounds continue until enough were free, or until twice as many were
made; then all count.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lowbit_bench.reading import Reader
from lowbit_conformance.isolation.descendants import below

STAT = Path("/proc/stat")
BUSY = 0.05
"""The fraction of the machine's time, used by other processes, above which a round is busy."""
WARM = 0.02
"""Seconds: waking threads takes less than a millisecond, so a longer call is not repeated."""
SLACK = 0.02
"""Seconds: two ticks of the machine's clock."""


@dataclass
class Contestant:
    """One backend at one problem.

    Attributes:
        name: its name in tables.
        calls: the product on each copy of the matrix.
        nbytes: bytes of the matrix that a call reads.
        runs, reads: seconds of each round.
    """

    name: str
    calls: Sequence[Callable[[], object]]
    nbytes: int
    runs: list[float] = field(default_factory=list)
    reads: list[float] = field(default_factory=list)
    _made: int = 0

    def next(self) -> Callable[[], object]:
        """The product on the next copy, in rotation."""
        self._made += 1
        return self.calls[(self._made - 1) % len(self.calls)]


@dataclass(frozen=True)
class Moment:
    """Seconds on the clocks of the machine, and of this process with the programs that it started."""

    wall: float
    machine: float
    process: float

    def later(self, start: "Moment", end: "Moment") -> "Moment":
        """This moment moved on by what passed between two others.

        >>> Moment(1, 2, 3).later(Moment(0, 0, 0), Moment(10, 20, 30))
        Moment(wall=11, machine=22, process=33)
        """
        return Moment(
            self.wall + end.wall - start.wall,
            self.machine + end.machine - start.machine,
            self.process + end.process - start.process,
        )


@dataclass
class CallError(Exception):
    """A contestant raised an error in a round.

    Attributes:
        name: of the contestant.
        error: what it raised.
    """

    name: str
    error: BaseException


def moment() -> Moment | None:
    """The present moment; None if the system has no such clock."""
    try:
        fields = list(map(int, STAT.read_text().split()[1:9]))
    except (OSError, ValueError):
        return None
    user, nice, system, _, _, irq, soft, stolen = fields
    busy = (user + nice + system + irq + soft + stolen) / os.sysconf("SC_CLK_TCK")
    return Moment(time.perf_counter(), busy, time.process_time() + sum(map(processor_seconds, below(os.getpid()))))


def processor_seconds(process: int) -> float:
    """The processor time of a process and its ended children; 0 if the process has gone."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def others_share(before: Moment | None, after: Moment | None, processors: int) -> float:
    """The fraction of the machine's time that other processes used; 0 where the system does not report it.

    >>> round(others_share(Moment(0, 0, 0), Moment(1, 1.52, 1), 2), 3)
    0.25
    """
    if before is None or after is None:
        return 0.0
    taken = (after.machine - before.machine) - (after.process - before.process)
    return max(taken - SLACK, 0.0) / (processors * (after.wall - before.wall))


def measure(
    contestants: Sequence[Contestant],
    reader: Reader,
    rounds: int,
    entering: Callable[[str], None],
    progress: Callable[[int, int], None],
) -> list[bool]:
    """Fill in the times of all contestants; returns for each round whether it was free.

    Args:
        contestants: the backends.
        reader: the speed of memory.
        rounds: the number of free rounds wanted.
        entering: called with the name of the backend that runs next, which may end the process.
        progress: called with the numbers of free rounds so far and wanted.

    Raises:
        CallError: a contestant failed.
    """
    free, order = list[bool](), np.random.default_rng(rounds)
    processors = os.cpu_count() or 1
    while sum(free) < rounds and len(free) < 2 * rounds:
        before = moment()
        for each in order.permutation(len(contestants)):
            one = contestants[each]
            entering(one.name)
            one.reads.append(reader.seconds(one.nbytes))
            if not one.runs or one.runs[-1] < WARM:
                seconds_of(one.name, one.next())
            one.runs.append(seconds_of(one.name, one.next()))
        free.append(others_share(before, moment(), processors) <= BUSY)
        progress(sum(free), rounds)
    return free


def seconds_of(name: str, call: Callable[[], object]) -> float:
    """The time of one call.

    Raises:
        CallError: it failed.
    """
    started = time.perf_counter()
    try:
        call()
    except (Exception, SystemExit) as error:  # third-party code may raise anything
        raise CallError(name, error) from error
    return time.perf_counter() - started


def kept(free: Sequence[bool], rounds: int) -> list[int]:
    """The rounds that count: the free ones if there are enough, else all.

    >>> kept([True, False, True], 2), kept([True, False, False], 2)
    ([0, 2], [0, 1, 2])
    """
    found = [number for number, was in enumerate(free) if was]
    return found if len(found) >= rounds else list(range(len(free)))
