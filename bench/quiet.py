"""Quiet: no thread of one contestant is running while another is measured, and both cores are free."""

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from limits import MemoryReader

from lowbit_bench.rounds import BUSY, moment, others_share

TASKS = Path("/proc/self/task")
STEP, PATIENCE = 0.0005, 0.12  # seconds; ggml's and OpenBLAS's threads watch for work for up to a tenth of a second
FREE = 0.85
"""Of the speed that a spin had at its best: below this a round is busy."""
PAUSE = 0.02  # seconds between spins that wait for free cores
RECOVERY = 0.001
"""Seconds after which a slow spin is repeated: a core that ran AVX-512 has a slower clock for some 0.6 ms afterwards
(0.77 of the usual speed; *measured*, Ice Lake)."""
STEPS = 30_000  # of a spin, some 120 µs
FIRST = 100  # pauses before the first round, with five spins after each: neighbours rest at times in these two seconds


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


class Watch:
    """Says whether the cores are free.

    They are not where other processes, or other machines on the same processor, had more than a twentieth of the time
    since the last question (`alone`), or where a spin takes longer than it did at its best (`fast`), as it does beside
    a busy neighbour: two threads share the slots in which a core begins instructions, and a virtual machine may have
    one of the two. A product slows down with it; a plain reading does not. Of the moments in which a kernel of AVX2
    took 1.18 times its best time or more, the spin sees 64 to 79 in a hundred (*measured*, Ice Lake, six times 8
    seconds); chains of arithmetic without the instructions that fill all slots saw 5 to 20. A neighbour that has not
    rested since the watch began is not seen, as the best is no better then; so one watch serves all problems of a
    process.
    """

    def __init__(self, reader: MemoryReader) -> None:
        self._reader = reader
        self._best = float("inf")
        for _ in range(FIRST):
            time.sleep(PAUSE)
            self._spin()
        self._spins = list[float]()
        self._began = self._fast = moment()  # of what `alone` is asked about; of the last fast spin

    def arithmetic(self) -> float:
        """The median speed of spins since the last question, as a fraction of the best."""
        spins, self._spins = self._spins, []
        return self._best / median(spins) if spins else 1.0

    def fast(self) -> bool:
        """Whether a spin is as fast now, or a millisecond later, as where no neighbour runs."""
        spin = self._spin()
        if self._best / spin < FREE:
            time.sleep(RECOVERY)
            spin = self._spin()
        self._spins.append(spin)
        fast = self._best / spin >= FREE
        if fast:
            self._fast = moment()
        return fast

    def alone(self) -> bool:
        """Whether others had little of the machine since the last question.

        What passed from a fast spin to the end of a `wait` is left out: it is not part of a round.
        """
        began, self._began = self._began, moment()
        return others_share(began, self._began, os.cpu_count() or 1) <= BUSY

    def wait(self, patience: float) -> float:
        """Wait until a spin is as fast as on a core without a neighbour, for at most `patience` seconds.

        Returns:
            The seconds that passed.
        """
        started = time.perf_counter()
        while (passed := time.perf_counter() - started) < patience:
            spin = self._spin()
            if self._best / spin >= FREE:
                break
            time.sleep(PAUSE)
        now = moment()
        if self._began and self._fast and now:
            self._began = self._began.later(self._fast, now)
        self._fast = now
        return passed

    def _spin(self) -> float:
        """The seconds of a spin, the median of five."""
        times = [self._reader.spin(STEPS) for _ in range(5)]
        self._best = min(self._best, *times)
        return median(times)
