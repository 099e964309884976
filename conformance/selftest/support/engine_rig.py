"""A rig for tests of the engine: a simulated device, experts whose bytes identify them, and a kernel that shows which
bytes it was given."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lowbit.arrays import U8
from lowbit.moe.offload import Arrangement, Request, Trace, trace
from lowbit_cuda.engine.engine import Engine
from lowbit_cuda.engine.recovery import inventories, missing
from lowbit_cuda.engine.storage import device_bytes, stride
from lowbit_cuda.port import ALIGNMENT, Kernel, Parameter, Span, Stream
from lowbit_gpusim.meanings import Meant
from lowbit_gpusim.sim.device import SimDevice
from lowbit_gpusim.sim.machines import MACHINES, Link, Machine

NBYTES = 40
"""Of a expert_data: not a multiple of the alignment, so that storages are further apart than blobs are long."""


def expert_data(layer: int, expert: int, nbytes: int = NBYTES) -> U8:
    """The bytes of an expert: no two experts have the same."""
    content = np.random.default_rng((layer, expert)).integers(0, 256, nbytes, np.uint8)
    content[:2] = layer, expert
    return content


def show(nbytes: int, seconds: float = 0.0) -> Kernel:
    """A kernel that copies an expert's data to where a test finds it; on `slow_machine` it takes `seconds`."""

    def extent(numbers: object) -> int:
        return nbytes

    def meaning(expert_data: U8, out: U8) -> None:
        out[:] = expert_data

    aligned = Parameter("expert_data", "uint8", "read", extent, alignment=ALIGNMENT)
    parameters = aligned, Parameter("out", "uint8", "write", extent)
    return Meant("show", "none", parameters, lambda _: (1, 1, 1), 32, meaning=meaning, flops=lambda _: seconds)


def slow_machine(copy_seconds: float, nbytes: int = NBYTES) -> Machine:
    """A machine on which an expert's copy takes so many seconds and everything else but kernels takes none."""
    return replace(
        MACHINES["t4"],
        link=Link("slow", nbytes / copy_seconds, 0.0),
        memory_bandwidth=1e30,
        float32_rate=1.0,
        host_bandwidth=1e30,
        kernel_latency=0.0,
        call=0.0,
    )


class Rig:
    """An engine that is filled, and what its kernels showed.

    Attributes:
        device: what it runs on.
        engine: the engine.
        events: of all requests since the last `forget`.
    """

    def __init__(
        self,
        arrangement: Arrangement,
        *,
        device: SimDevice | None = None,
        engine: type[Engine] = Engine,
        kernel: Kernel | None = None,
        rows: int = 400,
        fill: bool = True,
        **options: Any,
    ) -> None:
        """With room for what `rows` kernels show."""
        self.arrangement = arrangement
        self.device = SimDevice(on_unwritten="raise") if device is None else device
        self.stream = self.device.stream("compute")
        self._kernel = show(NBYTES) if kernel is None else kernel
        self._out = self.device.allocate(rows * NBYTES, "shown")
        self._back = self.device.pin(rows * NBYTES, "shown, on the host")
        self.shown: list[tuple[int, int]] = []
        self.events: list[Any] = []
        self.layer = -1
        self.engine = engine(self.device, arrangement, NBYTES, self.stream, **{"prefetch": "on", **options})
        if fill:
            self.fill()

    def fill(self) -> None:
        """Fill the experts that are not there, in no particular order."""
        for expert in reversed(range(self.arrangement.experts)):
            for layer in range(self.arrangement.layers):
                if (layer, expert) not in self.engine._filling.filled:
                    self.engine.fill(layer, expert, expert_data(layer, expert))

    def work(self, expert: int, span: Span, stream: Stream) -> None:
        """Show the expert_data that is said to be this expert's."""
        row = self._out.span(NBYTES * len(self.shown), NBYTES)
        self.shown.append((self.layer, expert))
        self.device.launch(self._kernel, {"expert_data": span, "out": row}, stream)

    def run(self, layer: int, needed: Iterable[int], guesses: Iterable[int] = (), **options: Any) -> Trace:
        """A request."""
        self.layer = layer
        events = self.engine.run(layer, needed, guesses, self.work, **options)
        self.events += events
        return events

    def ask(self, request: Request) -> Trace:
        """The same."""
        return self.run(request.layer, request.needed, request.guesses)

    def wait(self) -> None:
        """Wait for the compute stream, as a model does that must read its gate."""
        self.device.synchronize(self.device.record(self.stream))

    def check(self, requests: Sequence[Request] | None = None) -> None:
        """Every kernel since the last `forget` was given its expert's bytes, and the events are the specification's."""
        if self.shown:
            size = len(self.shown) * NBYTES
            self.device.copy(self._back.span(0, size), self._out.span(0, size), self.stream)
            self.wait()
            shown = self.device.read(self._back.span(), np.uint8, (len(self.shown), NBYTES))
            for row, (layer, expert) in zip(shown, self.shown, strict=True):
                assert (row == expert_data(layer, expert)).all(), (
                    f"expert {expert} of layer {layer}: {row[:2]} was shown"
                )
        requests = self.engine.requests if requests is None else requests
        assert self.engine.requests == list(requests)
        assert self.events == list(trace(self.arrangement, requests) if requests else ())

    def check_storage(self) -> None:
        """Every expert lies where it should, its bytes with it, under swap in one place only."""
        engine, device = self.engine, self.device
        device.finish()
        found = inventories(engine._host.places, engine._device_storage.all)
        assert not list(missing(found, self.arrangement.experts))
        for layer, counted in enumerate(found):
            for expert, place in counted.on_host.items():
                assert (device.read(place.span, np.uint8, (NBYTES,)) == expert_data(layer, expert)).all()
            for expert, storage in counted.on_device.items():
                device.copy(self._back.span(0, NBYTES), storage.span, self.stream)
                self.wait()
                assert (device.read(self._back.span(), np.uint8, (NBYTES,)) == expert_data(layer, expert)).all()
            if self.arrangement.memory == "swap":
                slots = [storage.holds for storage in engine._in_slot[layer].values()]
                assert sorted(holds[1] for holds in slots if holds) == sorted(counted.on_device)
                assert len(slots) == len(counted.on_device) == self.arrangement.slots
                assert len(counted.on_host) == self.arrangement.experts - self.arrangement.slots
            else:
                assert len(counted.on_host) == self.arrangement.experts

    def forget(self) -> None:
        """Begin to count anew."""
        self.shown.clear()
        self.events.clear()

    def close(self) -> None:
        """Give everything back; whatever is left then was leaked."""
        self.engine.close()
        self.device.free(self._out)
        self.device.free(self._back)
        assert self.device.leaks() == ()
        assert self.device.used == 0 and self.device.pinned == 0
        self.device.close()


def room_for(arrangement: Arrangement, rows: int = 400) -> int:
    """The budget that a rig needs, to the byte."""
    return device_bytes(arrangement, NBYTES) + stride(rows * NBYTES)
