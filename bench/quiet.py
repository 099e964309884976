"""Quiet: no thread of one contestant is running while another is measured, and both cores are free."""

import os
import threading
import time
from pathlib import Path
from statistics import median

from limits import MemoryReader

TASKS = Path("/proc/self/task")
STEP, PATIENCE = 0.0005, 0.12  # seconds; ggml's and OpenBLAS's threads watch for work for up to a tenth of a second
FREE = 0.85
"""Of the speed-up that free cores give, and of the speed that a spin had at its best: below this a round is busy."""
STEPS = 50_000  # of a spin, some 100 µs


def others_running() -> bool:
    """Whether any thread of this process but the caller's is running or wants to."""
    own = str(threading.get_native_id())
    return any(task != own and _state(task) == "R" for task in os.listdir(TASKS))


def _state(task: str) -> str:
    try:
        return (TASKS / task / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""  # it has ended


def settle() -> bool:
    """Wait until the threads that other libraries keep watching for work have gone to sleep; False if they do not."""
    if not TASKS.is_dir():
        time.sleep(PATIENCE)
        return True
    start = time.perf_counter()
    while others_running():
        if time.perf_counter() - start > PATIENCE:
            return False
        time.sleep(STEP)
    return True


class Watch:
    """Says of each round whether the cores were free: by a short spin of all threads, against the best one seen."""

    def __init__(self, reader: MemoryReader) -> None:
        self._reader = reader
        self._best = min(reader.spin(STEPS) for _ in range(10))

    def free(self) -> bool:
        """Whether a spin on all threads at once took no longer than it must, three times out of five."""
        settle()
        times = [self._reader.spin(STEPS) for _ in range(5)]
        self._best = min(self._best, *times)
        return self._best / median(times) >= FREE
