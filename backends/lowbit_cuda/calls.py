"""Calls: one kernel on arrays of the host, brought there and back.

An operation of the suite is one call: its arrays go to the device, a kernel runs, its results come back. That is not
how a model runs (`lowbit_cuda.model`); it is how a kernel is shown to be right.
"""

from collections import deque
from collections.abc import Mapping

import numpy as np

from lowbit.arrays import Array
from lowbit_cuda.model.arena import Arena
from lowbit_cuda.port import DevicePort, Kernel, Memory, Number, Span


class Room:
    """Memory on the device and pinned memory beside it, which grow when they are too small."""

    def __init__(self, port: DevicePort, what: str) -> None:
        self._port, self._what = port, what
        self._device: Memory | None = None
        self._host: Memory | None = None

    def of(self, nbytes: int) -> tuple[Span, Span]:
        """So many bytes on the device, and as many on the host."""
        if self._device is None or self._host is None or self._device.nbytes < nbytes:
            self.close()
            self._device = self._port.allocate(nbytes, self._what)
            self._host = self._port.pin(nbytes, self._what)
        return self._device.span(0, nbytes), self._host.span(0, nbytes)

    def close(self) -> None:
        """Give both back."""
        for memory in (self._device, self._host):
            if memory is not None:
                self._port.free(memory)
        self._device = self._host = None


class Calls:
    """Runs kernels on arrays.

    Attributes:
        arena: where they run.
        closed: whether everything was given back.
    """

    def __init__(self, port: DevicePort) -> None:
        self.arena = Arena(port, "operations")
        self.closed = False
        self._rooms: dict[str, Room] = {}
        self._unused = deque[Memory]()
        self._calm = True

    def __call__(self, kernel: Kernel, given: Mapping[str, Array | Span], **numbers: Number) -> None:
        """Run a kernel; the arrays that it writes are filled, and spans are used where they lie."""
        if not self._calm:  # a call was interrupted, and its copies may still be on their way
            self.arena.port.finish()
        self._calm = False
        self.tidy()
        self.arena.load(kernel)
        arguments: dict[str, Span | Number] = dict(numbers)
        results: list[tuple[Array, Span, Span]] = []
        arrays = {name: array for name, array in given.items() if not isinstance(array, Span)}
        rooms = {name: self._room(name).of(array.nbytes) for name, array in arrays.items()}  # before anything runs
        for parameter in kernel.parameters:
            if parameter.access is None:
                continue
            array = given[parameter.name]
            if isinstance(array, Span):
                arguments[parameter.name] = array
                continue
            there, here = rooms[parameter.name]
            if parameter.access != "write":
                self.arena.port.write(here, np.ascontiguousarray(array))
                self.arena.copy(there, here)
            if parameter.access != "read":
                results.append((array, there, here))
            arguments[parameter.name] = there
        self.arena.port.launch(kernel, arguments, self.arena.stream)
        for _, there, here in results:
            self.arena.copy(here, there)
        self.arena.wait()
        for array, _, here in results:
            array[...] = self.arena.port.read(here, array.dtype, array.shape)
        self._calm = True

    def give_back(self, memory: Memory) -> None:
        """Free memory when nothing runs: at the next call or at the end. May be called at any time, by any thread."""
        self._unused.append(memory)

    def tidy(self) -> None:
        """Free what was given back; the device is idle."""
        while self._unused:
            self.arena.port.free(self._unused.popleft())

    def _room(self, name: str) -> Room:
        return self._rooms.setdefault(name, Room(self.arena.port, f"argument {name}"))

    def close(self) -> None:
        """Give everything back."""
        self.closed = True
        self.tidy()
        for room in self._rooms.values():
            room.close()
        self.arena.close()
