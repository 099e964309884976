"""Cold experts: run on the host by another backend, where that is quicker than to copy them.

What lies on the host are the bytes that a device wants. The first time that an expert is run here, they are laid out
anew as this backend wants them, and kept: an expert that is run on the host once will be again, and takes its memory
there twice.

How long everything takes is measured before the first token: a copy, an expert on the device, an expert on the host,
for one token and for many. The engine's cost model (`lowbit_cuda.engine.cost`) chooses by these.

Source: lowbit's own.
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from lowbit.arrays import F32
from lowbit.backend import Backend
from lowbit.model.block import FORMULAS, Gated
from lowbit.runtime.linears import BackendLinears
from lowbit_cuda.engine.cost import Rates, measured
from lowbit_cuda.model.lane import Lane
from lowbit_cuda.model.matrices import Blob, ExpertLayout
from lowbit_cuda.model.workspace import Workspace
from lowbit_cuda.port import Span

REPEATS = 3
"""Measurements, of which the shortest counts."""
LEAST_SECONDS = 1e-9
"""A clock may be too coarse to see an expert."""


class ColdExperts:
    """Experts on the host.

    Attributes:
        layout: of their bytes.
    """

    def __init__(self, backend: Backend, layout: ExpertLayout) -> None:
        self.layout, self._linear = layout, BackendLinears(backend)
        self._ready: dict[tuple[int, int], Gated] = {}

    def answer(self, expert: tuple[int, int], blob: Blob, x: F32) -> F32:
        """What an expert, by layer and number, answers to tokens (float32, T × hidden)."""
        if expert not in self._ready:
            self._ready[expert] = self.made(blob)
        return self.once(self._ready[expert], x)

    def made(self, blob: Blob) -> Gated:
        """An expert made ready."""
        return Gated("silu", self.layout.restore(blob.copy()), self._linear, FORMULAS)

    @staticmethod
    def once(expert: Gated, x: F32) -> F32:
        """Run one that is ready."""
        return expert(x.astype(np.float64)).astype(np.float32)


def measure(lane: Lane, work: Workspace, cold: ColdExperts, blob: Blob) -> Rates:
    """What this machine can do, with one expert's bytes; takes room for one expert, and gives it back."""
    port, counts = lane.port, sorted({1, work.sizes.chunk})
    zeros = np.zeros((work.sizes.chunk, work.sizes.config.hidden), np.float32)
    lane.upload(work["normed"], zeros)
    lane.load(*cold.layout.kernels())
    ready = cold.made(blob)
    passage = port.pin(blob.size, "an expert to measure with")
    try:
        there = port.allocate(blob.size, "an expert to measure with")
        try:
            port.write(passage.span(), blob)
            copying = _on_device(lane, partial(lane.copy, there.span(), passage.span()))
            run = partial(cold.layout.run, lane, there.span(), work["out"], work["normed"], work["inner"])
            device = {n: _on_device(lane, partial(run, work.device.get("spare"), n)) for n in counts}
            host = {n: _on_host(lane, passage.span(), partial(cold.once, ready, zeros[:n])) for n in counts}
        finally:
            port.free(there)
    finally:
        port.free(passage)
    return Rates(blob.size / copying, measured(device), measured(host))


def _on_device(lane: Lane, work: Callable[[], object]) -> float:
    """Seconds on the device's clock."""
    times = []
    for _ in range(REPEATS):
        begin = lane.port.record(lane.stream)
        work()
        end = lane.port.record(lane.stream)
        lane.port.synchronize(end)
        times.append(lane.port.seconds(begin, end))
    return max(min(times), LEAST_SECONDS)


def _on_host(lane: Lane, reads: Span, work: Callable[[], object]) -> float:
    """Seconds on the host's clock, for something that reads an expert."""
    times = []
    for _ in range(REPEATS):
        begin = lane.port.now()
        lane.port.on_host("measuring an expert", [reads], lambda data: work())
        times.append(lane.port.now() - begin)
    return max(min(times), LEAST_SECONDS)
