"""Traffic: copies and kernels, each after everything that it must come after and after nothing else.

There are three streams. Kernels run on the caller's; copies to the device have one of their own and copies back to the
host another, because a link carries both ways at once. Between streams nothing is ordered unless an event makes it so,
and two rules make all the order there is:

1. Who *reads* a home waits for the copy that wrote it.
2. Who *writes* a home waits for everything that has read it since it was written. The copy that wrote it is before it
   in any case: all copies to the device are in one stream, and all copies to the host.

An expert's kernels thus wait for its copy (1); a copy into a block waits for the kernels of the expert that lay there
(2) and, under swap, until that expert is back on the host (2); it is put back only when the newcomer whose place it
takes has arrived (2). Nobody waits on the host.

Source: MoE offloading §3.3, "used to copy and prefetch experts asynchronously, without modifying existing experts".
"""

from collections.abc import Callable

from lowbit_cuda.engine.blobs import Expert, Home
from lowbit_cuda.engine.journal import Journal
from lowbit_cuda.port import DevicePort, Event, Span, Stream

Work = Callable[[int, Span, Stream], None]
"""Gives a stream the kernels of one expert: its number, its blob on the device, the stream."""


class Traffic:
    """The streams and the two rules.

    Attributes:
        compute: the caller's stream.
        to_device, to_host: the streams of copies.
    """

    def __init__(self, port: DevicePort, compute: Stream, journal: Journal | None = None) -> None:
        """With a journal where copies may overwrite what lies nowhere else."""
        self._port, self._journal, self.compute = port, journal, compute
        self.to_device, self.to_host = port.stream("experts to device"), port.stream("experts to host")

    def copy(self, expert: Expert, target: Home, source: Home) -> Event:
        """Copy an expert from one home to another; answers with the event of its arrival."""
        stream = self.to_device if target.on_device else self.to_host
        self._before_reading(source, stream)
        self._before_writing(target, stream)
        move = self._journal.begin(expert, target, source) if self._journal else None
        self._port.copy(target.span, source.span, stream)
        arrived = self._port.record(stream)
        if move:
            move.done = arrived
        source.read[id(stream)] = stream, arrived
        target.written, target.seen, target.read = arrived, [stream], {}
        return arrived

    def compute_with(self, expert: int, block: Home, work: Work) -> None:
        """Run an expert's kernels."""
        self._before_reading(block, self.compute)
        work(expert, block.span, self.compute)
        block.read[id(self.compute)] = self.compute, self._port.record(self.compute)

    def _before_reading(self, home: Home, stream: Stream) -> None:
        if home.written is not None and stream not in home.seen:
            self._port.wait(stream, home.written)
            home.seen.append(stream)

    def _before_writing(self, home: Home, stream: Stream) -> None:
        for reader, event in home.read.values():
            if reader is not stream:
                self._port.wait(stream, event)
