"""The speed of memory: numpy reads more bytes than caches hold, on every thread, a new part each time.

A product with one vector of activations reads each byte of its matrix once, so no kernel can be faster than this
reading, except for what caches keep. numpy finds the largest of integers by vector instructions, which is the fastest
of its readings. It needs no compiler on the user's machine; a reader that prefetches can be some percent faster, and
``bench/`` has such readers.
"""

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from lowbit.arrays import Array

ROTATION = 2**29
"""Bytes that are read before any is read again."""
LEAST = 2**26
"""Bytes of the shortest reading: passing a part to a thread takes up to 100 µs, and these bytes some milliseconds."""


class Reader:
    """Reads memory by a number of threads.

    If the process may use as many processors as there are threads, and no more, each thread keeps to one of them.
    Some systems wake two threads on one processor while another is idle.

    Args:
        threads: how many.
        nbytes: the memory in rotation, at least that of one reading.
    """

    def __init__(self, threads: int, nbytes: int = ROTATION) -> None:
        self.threads, self._place = threads, 0
        self._memory = np.ones(nbytes // 8, np.int64)
        self._pool = ThreadPoolExecutor(threads, initializer=keep_to_next, initargs=(one_each(threads),))

    def seconds(self, nbytes: int) -> float:
        """Seconds to read this many bytes, at the speed of a reading of at least `LEAST`."""
        each = min(-(-max(nbytes, LEAST) // 8 // self.threads), len(self._memory) // self.threads)
        if self._place + each * self.threads > len(self._memory):
            self._place = 0
        parts = [self._memory[self._place + n * each : self._place + (n + 1) * each] for n in range(self.threads)]
        self._place += each * self.threads
        started = time.perf_counter()
        found = list(self._pool.map(largest, parts)) if self.threads > 1 else [largest(parts[0])]
        taken = time.perf_counter() - started
        assert set(found) == {1}, "all of it was read"
        return taken * nbytes / (8 * each * self.threads)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


def largest(part: Array) -> int:
    """The largest element; numpy reads the others too."""
    return int(np.max(part))


def one_each(threads: int) -> Iterator[int]:
    """A processor for each thread; none if their numbers differ, or the system does not say."""
    processors = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()
    return iter(sorted(processors) if len(processors) == threads else ())


def keep_to_next(processors: Iterator[int]) -> None:
    """Keep the calling thread to the next of these processors, if there is one."""
    processor = next(processors, None)
    if processor is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {processor})
