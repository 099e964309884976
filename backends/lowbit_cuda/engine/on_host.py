"""Experts that the host computes where they lie, instead of copying them to the device.

`lowbit_cuda.engine.cost` chooses them. This module supplies what that choice needs: it counts the copies in progress by
their events. An expert in a slot or a staging buffer is never computed here. In swap mode an expert may still be on its
way back to the host; the host waits for it first.
"""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from lowbit.arrays import U8
from lowbit_cuda.engine.cost import Job, Rates, choose
from lowbit_cuda.engine.storage import ExpertStorage
from lowbit_cuda.port import DevicePort, Event

ComputeOnHost = Callable[[int, U8], Any]
"""Computes one expert on the host from its number and its buffer, and stores the answer for the caller."""


class OnHost:
    """Chooses the experts that the host computes, and runs them."""

    def __init__(self, port: DevicePort, rates: Rates | None, expert_bytes: int) -> None:
        self._port, self._rates, self._expert_bytes = port, rates, expert_bytes
        self._pending: deque[Event] = deque()

    def expect(self, arrived: Event) -> None:
        """Count a copy to the device that was issued."""
        if self._rates is not None:
            self._in_progress()  # keeps the queue short where the host never computes
            self._pending.append(arrived)

    def forget(self) -> None:
        """Forget all copies: none is in progress."""
        self._pending.clear()

    def choose(self, locations: Mapping[int, str], tokens: Mapping[int, int]) -> tuple[int, ...]:
        """The experts that the host computes, given the location of each needed one, by ascending number."""
        if self._rates is None:
            return ()
        copy = self._expert_bytes / self._rates.bandwidth
        jobs, busy = [], 0.0
        for expert, place in locations.items():
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
        return choose(jobs, queued=self._in_progress() * copy, busy=busy).on_host

    def _in_progress(self) -> int:
        """The number of copies that the link has not completed, the one in progress counted as a whole."""
        while self._pending and self._port.reached(self._pending[0]):
            self._pending.popleft()
        return len(self._pending)

    def compute(self, layer: int, expert: int, place: ExpertStorage, function: ComputeOnHost) -> None:
        """Compute an expert on the host, after its bytes have arrived there."""
        if place.written is not None:
            self._port.synchronize(place.written)
        self._port.on_host(f"expert {expert} of layer {layer}", [place.span], lambda array: function(expert, array))
