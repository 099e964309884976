"""Quiet: no thread of one contestant is running while another is measured, and both cores are free."""

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from limits import MemoryReader

TASKS, STAT = Path("/proc/self/task"), Path("/proc/stat")
STEP, PATIENCE = 0.0005, 0.12  # seconds; ggml's and OpenBLAS's threads watch for work for up to a tenth of a second
FREE = 0.85
"""Of the speed that a spin had at its best: below this a round is busy."""
SLACK = 0.02  # seconds: two ticks of the machine's clock
OTHERS = 0.05
"""Of the machine's time: more of it in other hands, and a round is busy."""
STEPS = 50_000  # of a spin, some 100 µs


def others_running(processes: Sequence[int] = ()) -> bool:
    """Whether any thread of this process but the caller's, or of other processes, is running or wants to."""
    own = str(threading.get_native_id())
    tasks = [TASKS / task for task in os.listdir(TASKS) if task != own]
    tasks += [task for process in processes for task in Path(f"/proc/{process}/task").glob("*")]
    return any(_state(task) == "R" for task in tasks)


def _state(task: Path) -> str:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""  # it has ended


def settle(processes: Sequence[int] = ()) -> bool:
    """Wait until the threads that other libraries keep watching for work have gone to sleep, in this process and in
    others; False if they do not."""
    if not TASKS.is_dir():
        time.sleep(PATIENCE)
        return True
    start = time.perf_counter()
    while others_running(processes):
        if time.perf_counter() - start > PATIENCE:
            return False
        time.sleep(STEP)
    return True


@dataclass(frozen=True)
class Moment:
    """What the clocks of the machine and of this process show."""

    wall: float
    machine: float  # seconds of all processors together, those among them that another machine was given
    process: float


def moment() -> Moment:
    """Now."""
    return Moment(time.perf_counter(), busy_seconds(STAT.read_text()), time.process_time())


def busy_seconds(stat: str) -> float:
    """Seconds that the processors were busy or taken away, from the first line of /proc/stat.

    >>> busy_seconds("cpu  100 20 30 9999 9999 1 2 7 0 0") * os.sysconf("SC_CLK_TCK")
    160.0
    """
    user, nice, system, _, _, irq, soft, stolen = map(int, stat.split()[1:9])
    return (user + nice + system + irq + soft + stolen) / os.sysconf("SC_CLK_TCK")


def others_share(before: Moment, after: Moment, processors: int) -> float:
    """The share of the machine's time that went to others than this process, less what the clocks' ticks may feign.

    >>> round(others_share(Moment(0, 0, 0), Moment(1, 1.52, 1), 2), 3)
    0.25
    """
    taken = (after.machine - before.machine) - (after.process - before.process)
    return max(taken - SLACK, 0.0) / (processors * (after.wall - before.wall))


class Watch:
    """Says of each round whether the cores were free.

    They were not where other processes, or other machines on the same processor, had more than a twentieth of the time
    since the last question, or where a spin takes longer now than it did at its best, as it does beside a busy
    neighbour with which a core shares its parts.
    """

    def __init__(self, reader: MemoryReader) -> None:
        self._reader = reader
        self._best = min(reader.spin(STEPS) for _ in range(10))
        self._before = moment() if STAT.is_file() else None

    def free(self) -> bool:
        """Whether the cores have been free since the last question."""
        settle()
        times = [self._reader.spin(STEPS) for _ in range(5)]
        self._best = min(self._best, *times)
        return self._alone() and self._best / median(times) >= FREE

    def _alone(self) -> bool:
        if self._before is None:
            return True
        before, self._before = self._before, moment()
        return others_share(before, self._before, os.cpu_count() or 1) <= OTHERS
