"""Measuring a kernel: in the cache, without what every kernel has to do besides; and from memory, as a model runs it.

**In the cache.** A call lays the activations out and then multiplies; the first takes longer for some methods and does
not depend on the number of columns. So two matrices of the same rows are measured, a narrow and a wide one that both
stay in the second cache, by one thread. The difference in time by the difference in bytes is the kernel's time per
byte, and what is left of the narrow one's time belongs to the activations. Both are carried over to the whole matrix:
time per byte × bytes ÷ threads, and the rest by its rows.

**From memory.** Every call reads another copy of the whole matrix, and so many copies take turns that none is left in
the last cache when it is read again, whichever candidate read it before. All threads compute.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import cycle

import numpy as np

from lowbit.arrays import Array
from lowbit.quantization.affine import QuantizedMatrix
from lowbit.quantization.packing import CODES_PER_UNIT
from lowbit_cppyy.codegen.isa import InstructionSet
from lowbit_cppyy.codegen.kernels import Kernel
from lowbit_cppyy.layout.layout import PanelLayout, Words
from lowbit_cppyy.layout.memory import aligned
from lowbit_cppyy.layout.streams import Stream
from lowbit_cppyy.recipe.recipe import Purpose
from lowbit_cppyy.runtime.compiler import Linear, Pool, Route, raise_failure, runtime
from lowbit_cppyy.runtime.hardware import cache_of_level
from lowbit_cppyy.tuning.candidates import VECTORS, Candidate
from lowbit_cppyy.tuning.search import Place

ROWS_IN_CACHE = 2048
NARROW = 128
"""Columns of the narrow matrix: a panel, or two."""

SHARE_OF_CACHE = 0.5
"""How much of the second cache the wide matrix takes."""

TIMES_THE_CACHE = 4
"""All copies together, by the last cache."""

CALLS = 5
"""Calls of one sample in the cache, of which the shortest counts: it is the least disturbed."""


@dataclass(frozen=True)
class Problem:
    """What is measured.

    Attributes:
        layout: of the whole matrix, in column panels.
        table: the instruction set.
        purpose: what for.
        threads: that compute.
    """

    layout: PanelLayout
    table: InstructionSet
    purpose: Purpose
    threads: int

    @property
    def vectors(self) -> int:
        """Rows of x."""
        return VECTORS[self.purpose]


class Clock:
    """Times candidates of one problem on this machine.

    Args:
        problem: what to measure.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.compile_seconds: dict[str, float] = {}
        self._alone, self._all = Pool(1), Pool(problem.threads)
        self._calls: dict[tuple[Candidate, Place], Callable[[], float]] = {}
        self._linears: dict[tuple[PanelLayout, Place], list[Linear]] = {}
        self._turns: dict[PanelLayout, cycle[int]] = {}

    def close(self) -> None:
        """End the threads."""
        self._alone.stop()
        self._all.stop()

    def sample(self, candidate: Candidate, place: Place) -> float:
        """As `lowbit_cppyy.tuning.search.Stopwatch`."""
        key = candidate, place
        if key not in self._calls:
            self._calls[key] = self._in_cache(candidate) if place == "cache" else self._from_memory(candidate)
            self._calls[key]()
        return self._calls[key]()

    def _in_cache(self, candidate: Candidate) -> Callable[[], float]:
        whole = candidate.layout(self.problem.layout)
        wide = part_in_cache(whole)
        narrow = replace(wide, columns=NARROW)
        route = self._route(candidate, wide)
        calls = [self._call(self._linear(each, "cache")[0], route, each) for each in (narrow, wide)]
        more = wide.nbytes - narrow.nbytes

        def sample() -> float:
            short, long = (min(_timed(call) for _ in range(CALLS)) for call in calls)
            per_byte = max(long - short, 0.0) / more
            rest = max(short - per_byte * narrow.nbytes, 0.0)
            return rest * whole.rows / wide.rows + per_byte * whole.nbytes / self.problem.threads

        return sample

    def _from_memory(self, candidate: Candidate) -> Callable[[], float]:
        layout = candidate.layout(self.problem.layout)
        route = self._route(candidate, layout)
        calls = [self._call(linear, route, layout) for linear in self._linear(layout, "memory")]
        turns = self._turns.setdefault(
            layout, cycle(range(len(calls)))
        )  # shared, or each would warm the next one's copy
        return lambda: _timed(calls[next(turns)])

    def _route(self, candidate: Candidate, layout: PanelLayout) -> Route:
        kernel, start = Kernel(candidate.recipe, self.problem.table), time.perf_counter()
        route = Route(kernel, Stream(candidate.recipe, layout))
        self.compile_seconds.setdefault(kernel.name, time.perf_counter() - start)
        return route

    def _call(self, linear: Linear, route: Route, layout: PanelLayout) -> Callable[[], int]:
        rng, vectors = np.random.default_rng(1), self.problem.vectors
        x = rng.standard_normal((vectors, layout.rows)).astype(np.float32)
        out = np.empty((vectors, layout.columns), np.float32)
        integer = self.problem.purpose.startswith("integer")
        multiply = runtime().multiply_cast if integer else runtime().multiply
        return lambda: multiply(linear.handle, route.handle, x, out, vectors)

    def _linear(self, layout: PanelLayout, place: Place) -> list[Linear]:
        """The matrix: once, or as many times as no cache holds."""
        if (layout, place) not in self._linears:
            stream = layout.apply(some_matrix(layout))
            if place == "cache":
                self._linears[layout, place] = [Linear(layout, stream, self._alone)]
            else:
                copies = -(-TIMES_THE_CACHE * cache_of_level(3).bytes // stream.nbytes)
                streams = [stream, *(_copy(stream) for _ in range(max(2, copies) // 2 * 2))]  # an odd number in all
                self._linears[layout, place] = [Linear(layout, each, self._all) for each in streams]
        return self._linears[layout, place]


def part_in_cache(layout: PanelLayout) -> PanelLayout:
    """The upper left part of a matrix, whole groups high where they are small, that stays in the second cache."""
    group = layout.group_size
    rows = min(layout.rows, max(ROWS_IN_CACHE // group * group, ROWS_IN_CACHE if group > ROWS_IN_CACHE else group))
    rows -= rows % CODES_PER_UNIT[layout.bits]
    part = replace(layout, rows=rows, columns=layout.panel, group_size=min(group, rows))
    part = replace(part, block_groups=min(layout.block_groups, part.groups))
    panels = int(SHARE_OF_CACHE * cache_of_level(2).bytes) // part.nbytes
    return replace(part, columns=max(panels * layout.panel, 2 * NARROW))


def some_matrix(layout: PanelLayout) -> QuantizedMatrix:
    """A matrix of random codes and small scales; speed does not depend on their values."""
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**32, (layout.rows * layout.bits // 32, layout.columns), np.uint32)
    shape = layout.groups, layout.columns
    scales: Array = rng.uniform(0.001, 0.002, shape).astype(layout.scales)
    zeros: Array = -8 * scales
    if layout.convention == "zero_point":
        zeros = rng.integers(0, 2**layout.bits, shape, np.uint8)
    return QuantizedMatrix(words, scales, zeros, layout.bits, layout.rows, layout.group_size, layout.convention)


def _copy(stream: Words) -> Words:
    copy = aligned(len(stream))
    copy[:] = stream
    return copy


def _timed(call: Callable[[], int]) -> float:
    start = time.perf_counter()
    status = call()
    seconds = time.perf_counter() - start
    if status:
        raise_failure(status)
    return seconds
