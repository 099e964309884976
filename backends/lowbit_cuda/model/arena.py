"""A arena: one stream of a device, with the memory that was taken for what runs in it.

Everything that a model has on a device was taken through a `Arena`, which gives all of it back at once. So nothing is
left behind wherever building or running ends.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from lowbit_cuda.port import DeviceError, DevicePort, Kernel, Memory, Number, Span, Stream, charge

UPLOAD = 1 << 24
"""Bytes of pinned memory through which weights go to the device."""


def charged(sizes: Iterable[int]) -> int:
    """What allocations of these sizes count as.

    >>> charged([1, 256, 257])
    1024
    """
    return sum(map(charge, sizes))


class Arena:
    """A stream, and memory to be given back.

    Attributes:
        port: the device.
        stream: where kernels and copies of the model go.
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
        """Memory on the device that holds these bytes; they are there when this returns."""
        span = self.allocate(data.nbytes, what)
        self.upload(span, data)
        return span

    def upload(self, span: Span, data: npt.NDArray[np.generic]) -> None:
        """Bring bytes to the device, a piece at a time, and wait until they are there."""
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
        """Give back what `upload` works with; it takes it again where it is needed."""
        if self._upload is not None:
            self.port.free(self._upload)
            self._upload = None

    def close(self) -> None:
        """Give everything back, what was taken last first; where the device fails at one thing, the others too.

        Raises:
            DeviceError: the first failure.
        """
        if self._upload is not None:
            self._held.append(self._upload)
            self._upload = None
        failures = []
        while self._held:
            try:
                self.port.free(self._held.pop())
            except DeviceError as error:
                failures.append(error)
        if failures:
            raise failures[0]

    # What the stream does.

    def load(self, *kernels: Kernel) -> None:
        """Bring kernels to the device that will be launched."""
        self.port.load(kernels)

    def launch(self, kernel: Kernel, **arguments: Span | Number) -> None:
        """Run a kernel."""
        self.port.launch(kernel, arguments, self.stream)

    def copy(self, target: Span, source: Span) -> None:
        """Copy bytes, as many as the shorter of the two has."""
        nbytes = min(target.nbytes, source.nbytes)
        self.port.copy(target.part(0, nbytes), source.part(0, nbytes), self.stream)

    def wait(self) -> None:
        """Wait on the host until the stream has done all that it was given."""
        self.port.synchronize(self.port.record(self.stream))


def through(arena: Arena, stream: Stream) -> None:
    """Refuse a stream that is not the arena's: what runs in it is ordered by nothing else."""
    assert stream is arena.stream, "kernels of an expert belong in the stream of the model"
