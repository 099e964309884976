"""The memory read limit, and whether the cores are free: what a kernel's time is compared with, in the same run."""

import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from lowbit_cppyy.compiler import runtime

ROTATION = 2**30  # bytes read before any is read again; the caches of these machines hold 32 MiB
TRIAL = 2**26  # bytes of one reading by which the fastest reader is found
READERS = ("plain loop", "256-bit registers", "256-bit registers, prefetched")


class MemoryReader:
    """Plain readers over a gigabyte of memory, in rotation, by a number of threads."""

    def __init__(self, threads: int) -> None:
        runtime()
        import cppyy

        if not hasattr(cppyy.gbl.lowbit, "bench"):
            cppyy.include(str(Path(__file__).with_name("readers.h")))
        self._bench: Any = cppyy.gbl.lowbit.bench
        self._bench.read.__release_gil__ = True
        self._pool = cppyy.gbl.lowbit.Pool(threads)
        self._alone = cppyy.gbl.lowbit.Pool(1)
        self.threads = threads
        self._memory = np.ones(ROTATION // 8, np.uint64)
        self._position = 0
        self.fastest = min(range(len(READERS)), key=self._trial)

    def seconds(self, nbytes: int) -> float:
        """Read the next `nbytes` of the rotation by the fastest reader."""
        return self._timed(nbytes, self.fastest)

    def freedom(self) -> float:
        """How much faster the threads spin than one of them alone: close to `threads` where each has a core."""
        steps = 4_000_000
        ratios = []
        for _ in range(5):
            start = time.perf_counter()
            self._bench.spin(self._alone, steps)
            middle = time.perf_counter()
            self._bench.spin(self._pool, steps)
            ratios.append((middle - start) / (time.perf_counter() - middle))
        return median(ratios)

    def _trial(self, which: int) -> float:
        return min(self._timed(TRIAL, which) for _ in range(16))

    def _timed(self, nbytes: int, which: int) -> float:
        words = min(nbytes // 8, len(self._memory))
        if self._position + words > len(self._memory):
            self._position = 0
        piece = self._memory[self._position : self._position + words]
        self._position += words
        start = time.perf_counter()
        total = self._bench.read(self._pool, piece, words, which)
        seconds = time.perf_counter() - start
        if total != words:
            raise RuntimeError(f"the reader summed {total} ones out of {words}")
        return seconds
