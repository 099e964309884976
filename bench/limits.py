"""The memory read limit, the ceilings of arithmetic, and whether the cores are free: what a kernel is compared with."""

import mmap
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from lowbit_cppyy.runtime import processor
from lowbit_cppyy.runtime.compiler import runtime

ROTATION = 2**30  # bytes read before any is read again; the caches of these machines hold 32 MiB
TRIAL = 2**25  # bytes of one reading by which the fastest reader is found
TRIALS = 6  # of each reader when it is found, and of the best ones when they are tried again
CHUNK = 2**17  # bytes that a thread takes at a time where the reading is not split beforehand

AVX2 = (
    "256 bits",
    "256 bits, prefetched",
    "256 bits, 4 streams",
    "256 bits, 4 streams, prefetched",
    "256 bits, prefetched from eight pages",
)
AVX512 = (
    *(
        f"512 bits{streams}{ahead}"
        for streams in ("", ", 2 streams", ", 4 streams", ", 8 streams")
        for ahead in ("", ", prefetched")
    ),
    "512 bits, prefetched from eight pages",
)
CEILINGS = {
    "float32, AVX2": "avx2",
    "float32, AVX-512": "avx512f",
    "8 bits, AVX-512": "avx512_vnni",
}  # as in ceilings.h
READERS = ("plain loop", *AVX2, *AVX512)  # in the order of `readers` in readers.h


@dataclass(frozen=True)
class Way:
    """One way to read: a reader, and how the bytes are split among threads (chunk 0: a piece each)."""

    reader: int
    chunk: int

    @property
    def name(self) -> str:
        return READERS[self.reader] + (", in chunks" if self.chunk else "")


@cache
def instruments() -> Any:
    """The C++ of readers.h and ceilings.h, compiled once in a process."""
    runtime()  # imports cppyy without its side effects
    import cppyy

    cppyy.add_include_path(str(files("lowbit_cppyy") / "cpp"))
    cppyy.include(str(Path(__file__).with_name("ceilings.h")))
    bench = cppyy.gbl.lowbit.bench
    for call in (bench.read, bench.spin, bench.ceiling):
        call.__release_gil__ = True
    return bench


class MemoryReader:
    """Plain readers over a gigabyte of memory in huge pages, in rotation, by a number of threads."""

    def __init__(self, threads: int) -> None:
        self._bench = instruments()
        self._gang, self._alone = self._bench.Gang(threads), self._bench.Gang(1)
        self.threads = threads
        self._memory = self._ones()
        self._position = 0
        self.ways = self._ranked([Way(reader, chunk) for reader in self._usable() for chunk in self._chunks()])
        self.fastest = self.ways[0].name

    def seconds(self, nbytes: int) -> float:
        """Read the next `nbytes` of the rotation in the fastest way."""
        return self._timed(nbytes, self.ways[0])

    def try_again(self, nbytes: int, most: int = 6) -> None:
        """Find the fastest way anew among the best ones, reading so many bytes at a time."""
        self.ways[:most] = self._ranked(self.ways[:most], nbytes)
        self.fastest = self.ways[0].name

    def freedom(self, steps: int = 4_000_000, times: int = 5) -> float:
        """How much faster the threads spin than one of them alone: close to `threads` where each has a core."""
        ratios = []
        for _ in range(times):
            alone = float(self._bench.spin(self._alone, steps))
            ratios.append(self.threads * alone / self.spin(steps))
        return median(ratios)

    def spin(self, steps: int) -> float:
        """Seconds in which each thread makes so many steps of a chain of arithmetic."""
        return float(self._bench.spin(self._gang, steps))

    def ceilings(self) -> dict[str, float]:
        """Operations a second that all threads reach together on registers, by instruction set."""
        return {
            name: max(float(self._bench.ceiling(self._gang, 2_000_000, which)) for _ in range(5))
            for which, (name, feature) in enumerate(CEILINGS.items())
            if processor.has(feature)
        }

    def _ones(self) -> np.ndarray[Any, np.dtype[np.uint64]]:
        pages = mmap.mmap(-1, ROTATION, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory gets no huge pages
        if hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)
        memory = np.frombuffer(pages, np.uint64)
        memory[:] = 1
        return memory

    def _usable(self) -> list[int]:
        avx2, avx512 = processor.has("avx2"), processor.has("avx512f")
        return [n for n, name in enumerate(READERS) if (avx2 or name not in AVX2) and (avx512 or name not in AVX512)]

    def _chunks(self) -> tuple[int, ...]:
        return (0, CHUNK // 8) if self.threads > 1 else (0,)

    def _ranked(self, ways: list[Way], nbytes: int = TRIAL) -> list[Way]:
        """The fastest first, by the median of a few readings each, in turns."""
        times: dict[Way, list[float]] = {way: [] for way in ways}
        for _ in range(TRIALS):
            for way, taken in times.items():
                taken.append(self._timed(min(nbytes, TRIAL), way))
        return sorted(ways, key=lambda way: median(times[way]))

    def _timed(self, nbytes: int, way: Way) -> float:
        words = min(nbytes // 8, len(self._memory))
        if self._position + words > len(self._memory):
            self._position = 0
        piece = self._memory[self._position : self._position + words]
        self._position += words
        seconds = float(self._bench.read(self._gang, piece, words, way.reader, way.chunk))
        if seconds < 0:
            raise RuntimeError(f"the reader {way.name} did not read all of {words} words")
        return seconds
