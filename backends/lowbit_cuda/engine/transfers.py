"""Transfers: copies and kernels, each ordered after everything that it depends on and nothing else.

There are three streams. Kernels run in the caller's stream; copies to the device have their own stream and copies back
to the host another, because a link transfers both ways at once. Events alone order work between streams, and two rules
state all the order that is needed:

1. Work that *reads* storage waits for the copy that wrote it.
2. A copy that *writes* storage waits for everything that has read it since it was last written. It always follows the
   previous copy into the same storage: all copies to the device share one stream, and so do all copies to the host.

Thus an expert's kernels wait for its copy (1). A copy into device storage waits for the kernels of the expert that was
there (2) and, in swap mode, until that expert is back on the host (2). That expert is copied back only after the
newcomer has left the place on the host (2). The host waits for nothing.

Source: MoE offloading §3.3, "used to copy and prefetch experts asynchronously, without modifying existing experts".
"""

from collections.abc import Callable

from lowbit_cuda.engine.storage import Expert, ExpertStorage
from lowbit_cuda.port import DevicePort, Event, Span, Stream

Work = Callable[[int, Span, Stream], None]
"""Launches the kernels of one expert: its number, its buffer on the device, the stream."""


class Transfers:
    """The streams and the two rules.

    Attributes:
        compute: the caller's stream.
        to_device, to_host: the streams of copies.
    """

    def __init__(self, port: DevicePort, compute: Stream) -> None:
        self._port, self.compute = port, compute
        self.to_device, self.to_host = port.stream("experts to device"), port.stream("experts to host")

    def copy(self, expert: Expert, target: ExpertStorage, source: ExpertStorage) -> Event:
        """Copy an expert from one storage to another; returns the event of its arrival."""
        stream = self.to_device if target.on_device else self.to_host
        self._before_reading(source, stream)
        self._before_writing(target, stream)
        target.holds = None  # an interrupt from here on leaves it unknown how much of the copy was done
        self._port.copy(target.span, source.span, stream)
        arrived = self._port.record(stream)
        source.read[id(stream)] = stream, arrived
        target.written, target.seen, target.read = arrived, [stream], {}
        target.holds = expert
        return arrived

    def compute_with(self, expert: int, storage: ExpertStorage, work: Work) -> None:
        """Launch an expert's kernels."""
        self._before_reading(storage, self.compute)
        work(expert, storage.span, self.compute)
        storage.read[id(self.compute)] = self.compute, self._port.record(self.compute)

    def _before_reading(self, storage: ExpertStorage, stream: Stream) -> None:
        if storage.written is not None and stream not in storage.seen:
            self._port.wait(stream, storage.written)
            storage.seen.append(stream)

    def _before_writing(self, storage: ExpertStorage, stream: Stream) -> None:
        for reader, event in storage.read.values():
            if reader is not stream:
                self._port.wait(stream, event)
