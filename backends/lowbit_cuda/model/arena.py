"""An arena: a stream of a device, and the memory allocated for the work in it.

A model allocates all of its device memory through an `Arena`, which frees everything at once. So nothing leaks, however
loading or running ends.
"""

from collections.abc import Iterable
from contextlib import ExitStack

import numpy as np
import numpy.typing as npt

from lowbit_cuda.port import DevicePort, Kernel, Memory, Number, Span, Stream, charge

UPLOAD = 1 << 24
"""Bytes of the pinned staging buffer through which weights are copied to the device."""


def charged(sizes: Iterable[int]) -> int:
    """The bytes that allocations of these sizes count as.

    >>> charged([1, 256, 257])
    1024
    """
    return sum(map(charge, sizes))


class Arena:
    """A stream, and the memory allocated for its work.

    Attributes:
        port: the device.
        stream: the stream of the model's kernels and copies.
    """

    def __init__(self, port: DevicePort, name: str) -> None:
        self.port, self.stream = port, port.stream(name)
        self._held: list[Memory] = []
        self._upload: Memory | None = None

    # Memory.

    def allocate(self, nbytes: int, what: str) -> Span:
        """Memory on the device."""
        self._held.append(self.port.allocate(nbytes, what))
        return self._held[-1].span()

    def pin(self, nbytes: int, what: str) -> Span:
        """Pinned memory on the host."""
        self._held.append(self.port.pin(nbytes, what))
        return self._held[-1].span()

    def store(self, data: npt.NDArray[np.generic], what: str) -> Span:
        """Memory on the device with these bytes, which are copied when this returns."""
        span = self.allocate(data.nbytes, what)
        self.upload(span, data)
        return span

    def upload(self, span: Span, data: npt.NDArray[np.generic]) -> None:
        """Copy bytes to the device in pieces, and wait until they have arrived."""
        flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        if self._upload is None or self._upload.nbytes < min(flat.size, UPLOAD):
            self.drop_upload()
            self._upload = self.port.pin(min(flat.size, UPLOAD), "upload")
        for start in range(0, flat.size, self._upload.nbytes):
            piece = flat[start : start + self._upload.nbytes]
            self.port.write(self._upload.span(), piece)
            self.port.copy(span.part(start, piece.size), self._upload.span(0, piece.size), self.stream)
            self.wait()

    def drop_upload(self) -> None:
        """Free the staging buffer of `upload`, which allocates it again when needed."""
        if self._upload is not None:
            self.port.free(self._upload)
            self._upload = None

    def close(self) -> None:
        """Free everything, the latest allocation first; a failure does not stop the others."""
        with ExitStack() as rest:
            for memory in self._held:
                rest.callback(self.port.free, memory)
            self._held = []
            rest.callback(self.drop_upload)

    # Work in the stream.

    def load(self, *kernels: Kernel) -> None:
        """Load kernels that will be launched."""
        self.port.load(kernels)

    def launch(self, kernel: Kernel, **arguments: Span | Number) -> None:
        """Launch a kernel."""
        self.port.launch(kernel, arguments, self.stream)

    def copy(self, target: Span, source: Span) -> None:
        """Copy bytes, as many as the shorter of the two has."""
        nbytes = min(target.nbytes, source.nbytes)
        self.port.copy(target.part(0, nbytes), source.part(0, nbytes), self.stream)

    def wait(self) -> None:
        """Make the host wait until the stream has finished."""
        self.port.synchronize(self.port.record(self.stream))


def check_stream(arena: Arena, stream: Stream) -> None:
    """Assert that a stream is the arena's: nothing orders it relative to other streams."""
    assert stream is arena.stream, "an expert's kernels must run in the model's stream"
