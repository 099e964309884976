"""Measuring a kernel: in the cache, without the work that every kernel has; and from memory, as a model runs it.

**In the cache.** A call lays out the activations and then multiplies. Laying out takes longer for some methods and does
not depend on the number of columns. So two matrices of the same rows are measured, a narrow and a wide one that both
stay in the second-level cache, by one thread. The difference in time by the difference in bytes is the kernel's time
per byte. The rest of the time of the narrow one is that of the activations. Both are extrapolated to the whole matrix:
time per byte × bytes ÷ threads, and the rest by the number of rows.

**From memory.** Every call reads another copy of the whole matrix. The copies together are larger
than the last-level cache, so each is read from memory, whichever candidate read it before. All threads compute.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import cycle

import numpy as np

from lowbit.arrays import Array
from lowbit.quantization.affine import QuantizedMatrix
from lowbit.quantization.packing import CODES_PER_UNIT
from lowbit_cppyy.codegen.isa import InstructionSet
from lowbit_cppyy.codegen.kernels import Kernel
from lowbit_cppyy.layout.memory import aligned
from lowbit_cppyy.layout.panels import PanelLayout, Words
from lowbit_cppyy.recipe import Purpose, Recipe
from lowbit_cppyy.runtime.activations import ActivationStream
from lowbit_cppyy.runtime.compiler import Linear, Pool, Route, raise_failure, runtime
from lowbit_cppyy.runtime.hardware import cache_bytes
from lowbit_cppyy.tuning.search import Location

ROWS_IN_CACHE = 2048
NARROW = 128
"""Columns of the narrow matrix: one panel or two."""

FRACTION_OF_CACHE = 0.5
"""The size of the wide matrix as a fraction of the second-level cache."""

TIMES_THE_CACHE = 4
"""The size of all copies together as a multiple of the last-level cache."""

CALLS = 5
"""The number of calls of one sample in the cache. The shortest counts, because it is the least disturbed."""

VECTORS: Mapping[Purpose, int] = {"vector": 1, "rows": 4, "many rows": 16, "integer vector": 1, "integer rows": 4}
"""The number of rows of x with which a purpose is measured."""


@dataclass(frozen=True)
class Problem:
    """The problem of a search.

    Attributes:
        layout: of the whole matrix, in column panels.
        table: the instruction set.
        purpose: what for.
        threads: the number of threads.
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
        self._calls: dict[tuple[Recipe, Location], Callable[[], float]] = {}
        self._linears: dict[tuple[PanelLayout, Location], list[Linear]] = {}
        self._next_copy: dict[PanelLayout, cycle[int]] = {}

    def close(self) -> None:
        """End the threads."""
        self._alone.stop()
        self._all.stop()

    def sample(self, recipe: Recipe, location: Location) -> float:
        """As `lowbit_cppyy.tuning.search.Stopwatch`."""
        key = recipe, location
        if key not in self._calls:
            self._calls[key] = self._in_cache(recipe) if location == "cache" else self._from_memory(recipe)
            self._calls[key]()
        return self._calls[key]()

    def _in_cache(self, recipe: Recipe) -> Callable[[], float]:
        whole = replace(self.problem.layout, panel=recipe.panel)
        wide = part_in_cache(whole)
        narrow = replace(wide, columns=NARROW)
        route = self._route(recipe, wide)
        calls = [self._call(self._linear(each, "cache")[0], route, each) for each in (narrow, wide)]
        more = wide.nbytes - narrow.nbytes

        def sample() -> float:
            short, long = (min(_timed(call) for _ in range(CALLS)) for call in calls)
            per_byte = max(long - short, 0.0) / more
            rest = max(short - per_byte * narrow.nbytes, 0.0)
            return rest * whole.rows / wide.rows + per_byte * whole.nbytes / self.problem.threads

        return sample

    def _from_memory(self, recipe: Recipe) -> Callable[[], float]:
        layout = replace(self.problem.layout, panel=recipe.panel)
        route = self._route(recipe, layout)
        calls = [self._call(linear, route, layout) for linear in self._linear(layout, "memory")]
        # One cycle through the copies for all candidates; otherwise each would warm the next one's copy.
        copies = self._next_copy.setdefault(layout, cycle(range(len(calls))))
        return lambda: _timed(calls[next(copies)])

    def _route(self, recipe: Recipe, layout: PanelLayout) -> Route:
        kernel, start = Kernel(recipe, self.problem.table), time.perf_counter()
        route = Route(kernel, ActivationStream(recipe, layout))
        self.compile_seconds.setdefault(kernel.name, time.perf_counter() - start)
        return route

    def _call(self, linear: Linear, route: Route, layout: PanelLayout) -> Callable[[], int]:
        rng, vectors = np.random.default_rng(1), self.problem.vectors
        x = rng.standard_normal((vectors, layout.rows)).astype(np.float32)
        out = np.empty((vectors, layout.columns), np.float32)
        integer = self.problem.purpose.startswith("integer")
        multiply = runtime().multiply_cast if integer else runtime().multiply
        return lambda: multiply(linear.handle, route.handle, x, out, vectors)

    def _linear(self, layout: PanelLayout, location: Location) -> list[Linear]:
        """The matrix once, or enough copies that no cache holds them all."""
        if (layout, location) not in self._linears:
            stream = layout.apply(some_matrix(layout))
            if location == "cache":
                self._linears[layout, location] = [Linear(layout, stream, self._alone)]
            else:
                copies = -(-TIMES_THE_CACHE * cache_bytes(3) // stream.nbytes)
                streams = [stream, *(_copy(stream) for _ in range(max(2, copies) // 2 * 2))]  # an odd number in all
                self._linears[layout, location] = [Linear(layout, each, self._all) for each in streams]
        return self._linears[layout, location]


def part_in_cache(layout: PanelLayout) -> PanelLayout:
    """The upper left part of a matrix that stays in the second-level cache: whole groups, if they are small."""
    group = layout.group_size
    rows = min(layout.rows, max(ROWS_IN_CACHE // group * group, ROWS_IN_CACHE if group > ROWS_IN_CACHE else group))
    rows -= rows % CODES_PER_UNIT[layout.bits]
    part = replace(layout, rows=rows, columns=layout.panel, group_size=min(group, rows))
    panels = int(FRACTION_OF_CACHE * cache_bytes(2)) // part.nbytes
    return replace(part, columns=max(panels * layout.panel, 2 * NARROW))


def some_matrix(layout: PanelLayout) -> QuantizedMatrix:
    """A matrix of random codes and small scales; the speed does not depend on their values."""
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
