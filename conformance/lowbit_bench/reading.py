"""The speed of memory: numpy reads more bytes than caches hold, on every thread, a new part each time.

A product with one vector of activations reads each byte of its matrix once, so no kernel can be faster than this
reading, except for what caches keep. numpy's sum of integers is a plain loop that compilers vectorise. It needs no
compiler on the user's machine; a reader that prefetches can be some percent faster, and ``bench/`` has such readers.
"""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

ROTATION = 2**29
"""Bytes that are read before any is read again."""
LEAST = 2**24
"""Bytes of the shortest reading."""


class Reader:
    """Reads memory by a number of threads.

    Args:
        threads: how many.
        nbytes: the memory in rotation, at least that of one reading.
    """

    def __init__(self, threads: int, nbytes: int = ROTATION) -> None:
        self.threads, self._place = threads, 0
        self._memory = np.ones(nbytes // 8, np.uint64)
        self._pool = ThreadPoolExecutor(threads)

    def seconds(self, nbytes: int) -> float:
        """Seconds to read this many bytes, at the speed of a reading of at least `LEAST`.

        Passing a part to a thread takes microseconds, too long for a short reading.
        """
        each = min(-(-max(nbytes, LEAST) // 8 // self.threads), len(self._memory) // self.threads)
        if self._place + each * self.threads > len(self._memory):
            self._place = 0
        parts = [self._memory[self._place + n * each : self._place + (n + 1) * each] for n in range(self.threads)]
        self._place += each * self.threads
        started = time.perf_counter()
        totals = list(self._pool.map(np.sum, parts)) if self.threads > 1 else [np.sum(parts[0])]
        taken = time.perf_counter() - started
        assert sum(totals) == each * self.threads, "all of it was read"
        return taken * nbytes / (8 * each * self.threads)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()
