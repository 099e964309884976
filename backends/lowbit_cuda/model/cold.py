"""Cold experts: run on the host by another backend where that is faster than copying them to the device.

The host holds each expert in the device's layout. When an expert is first run here, it is converted to the layout of
the backend and kept: an expert that was run on the host once is likely to be run there again. It then takes its memory
twice.

Before the first token, copying an expert and running it on the device and on the host are measured, for one token and
for many. The engine's cost model (`lowbit_cuda.engine.cost`) chooses by these times.
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from lowbit.arrays import F32, U8
from lowbit.backend import Backend
from lowbit.model.block import Interpreter
from lowbit.model.program import BEGIN, END
from lowbit.model.step import gated
from lowbit.runtime.linears import BackendLinears
from lowbit_cuda.engine.cost import Rates, measured
from lowbit_cuda.model.arena import Arena
from lowbit_cuda.model.matrices import ExpertLayout
from lowbit_cuda.model.workspace import Workspace
from lowbit_cuda.port import Span

REPEATS = 3
"""The number of measurements; the shortest counts."""
LEAST_SECONDS = 1e-9
"""The least time reported: a clock may be too coarse for one expert."""


class ColdExperts:
    """Experts that another backend runs on the host.

    Attributes:
        layout: the layout of their bytes.
    """

    def __init__(self, backend: Backend, layout: ExpertLayout) -> None:
        self.layout, self._linear = layout, BackendLinears(backend)
        self._prepared: dict[tuple[int, int], Interpreter] = {}

    def answer(self, expert: tuple[int, int], packed: U8, x: F32) -> F32:
        """The output of an expert, by layer and number, for tokens (float32, T × hidden)."""
        if expert not in self._prepared:
            self._prepared[expert] = self.prepare(packed)
        return self.run(self._prepared[expert], x)

    def prepare(self, packed: U8) -> Interpreter:
        """Prepare an expert for this backend."""
        return Interpreter(gated("silu", BEGIN, END), self.layout.restore(packed.copy()).linears(), self._linear)

    @staticmethod
    def run(expert: Interpreter, x: F32) -> F32:
        """Run a prepared expert."""
        answer: F32 = expert(x.astype(np.float64)).astype(np.float32)
        return answer


def measure(arena: Arena, work: Workspace, cold: ColdExperts, packed: U8) -> Rates:
    """Measure the speed of this machine with one expert's bytes, in memory that is freed again."""
    port, counts = arena.port, sorted({1, work.sizes.chunk})
    zeros = np.zeros((work.sizes.chunk, work.sizes.config.hidden), np.float32)
    arena.upload(work["normed"], zeros)
    arena.load(*cold.layout.kernels())
    prepared = cold.prepare(packed)
    staging = port.pin(packed.size, "measuring an expert")
    try:
        there = port.allocate(packed.size, "measuring an expert")
        try:
            port.write(staging.span(), packed)
            copying = _on_device(arena, partial(arena.copy, there.span(), staging.span()))
            run = partial(cold.layout.run, arena, there.span(), work["out"], work["normed"], work["inner"])
            device = {n: _on_device(arena, partial(run, work.device.get("spare"), n)) for n in counts}
            host = {n: _on_host(arena, staging.span(), partial(cold.run, prepared, zeros[:n])) for n in counts}
        finally:
            port.free(there)
    finally:
        port.free(staging)
    return Rates(packed.size / copying, measured(device), measured(host))


def _on_device(arena: Arena, work: Callable[[], object]) -> float:
    """The shortest time on the device's clock, in seconds."""
    times = []
    for _ in range(REPEATS):
        begin = arena.port.record(arena.stream)
        work()
        end = arena.port.record(arena.stream)
        arena.port.synchronize(end)
        times.append(arena.port.seconds(begin, end))
    return max(min(times), LEAST_SECONDS)


def _on_host(arena: Arena, reads: Span, work: Callable[[], object]) -> float:
    """The shortest time on the host's clock, in seconds, of work that reads an expert."""
    times = []
    for _ in range(REPEATS):
        begin = arena.port.now()
        arena.port.on_host("measuring an expert", [reads], lambda data: work())
        times.append(arena.port.now() - begin)
    return max(min(times), LEAST_SECONDS)
