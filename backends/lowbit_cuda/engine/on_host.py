"""On the host: experts that are computed where they lie, instead of being copied.

The choice is that of `lowbit_cuda.engine.cost`; here is what it must know. How many copies the link has before it is
counted by their events. An expert that is in a slot or a buffer is never computed here, and one that under swap is
still on its way back to the host is waited for first.

Source: lowbit's own.
"""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from lowbit.arrays import U8
from lowbit_cuda.engine.blobs import Home
from lowbit_cuda.engine.cost import Job, Rates, choose
from lowbit_cuda.port import DevicePort, Event

ComputeOnHost = Callable[[int, U8], Any]
"""Computes one expert on the host, from its number and its blob, and keeps the answer for the caller."""


class OnHost:
    """Chooses what the host computes, and lets it."""

    def __init__(self, port: DevicePort, rates: Rates | None, blob_bytes: int) -> None:
        self._port, self._rates, self._blob_bytes = port, rates, blob_bytes
        self._coming: deque[Event] = deque()

    def expect(self, arrived: Event) -> None:
        """A copy to the device was asked for."""
        if self._rates is not None:
            self._on_the_way()  # or copies would pile up here where the host is never asked to compute
            self._coming.append(arrived)

    def forget(self) -> None:
        """No copy is on its way."""
        self._coming.clear()

    def choose(self, where: Mapping[int, str], tokens: Mapping[int, int]) -> tuple[int, ...]:
        """The experts that the host computes; `where` says where each needed one lies, ascending."""
        if self._rates is None:
            return ()
        copy = self._blob_bytes / self._rates.bandwidth
        jobs, busy = [], 0.0
        for expert, place in where.items():
            count = tokens.get(expert, 1)
            device = self._rates.device(count)
            if place == "slot":
                busy += device
            elif place == "buffer":
                jobs.append(Job(expert, 0.0, device))
            else:
                jobs.append(Job(expert, copy, device, self._rates.host(count)))
        if not any(job.host is not None for job in jobs):
            return ()
        return choose(jobs, queued=self._on_the_way() * copy, busy=busy).on_host

    def _on_the_way(self) -> int:
        """How many copies the link has before it, the one that it is doing counted whole."""
        while self._coming and self._port.reached(self._coming[0]):
            self._coming.popleft()
        return len(self._coming)

    def compute(self, layer: int, expert: int, place: Home, function: ComputeOnHost) -> None:
        """Let the host compute an expert, once its bytes are there: under swap they may still be on their way back."""
        if place.written is not None:
            self._port.synchronize(place.written)
        self._port.on_host(f"expert {expert} of layer {layer}", [place.span], lambda array: function(expert, array))
