"""Calls: one kernel on arrays of the host, which are copied to the device and back.

Each operation of the suite is one call: its arrays go to the device, a kernel runs, its results come back. This is how
the suite tests a kernel; a model keeps its data on the device instead (`lowbit_cuda.model`).
"""

from collections import deque
from collections.abc import Mapping

import numpy as np

from lowbit.arrays import Array
from lowbit_cuda.model.arena import Arena
from lowbit_cuda.port import DevicePort, Kernel, Memory, Number, Span


class ArgumentMemory:
    """Device memory and pinned memory for one argument; both grow when they are too small."""

    def __init__(self, port: DevicePort, what: str) -> None:
        self._port, self._what = port, what
        self._device: Memory | None = None
        self._host: Memory | None = None

    def of(self, nbytes: int) -> tuple[Span, Span]:
        """The same number of bytes on the device and on the host."""
        if self._device is None or self._host is None or self._device.nbytes < nbytes:
            self.close()
            self._device = self._port.allocate(nbytes, self._what)
            self._host = self._port.pin(nbytes, self._what)
        return self._device.span(0, nbytes), self._host.span(0, nbytes)

    def close(self) -> None:
        """Free both."""
        for memory in (self._device, self._host):
            if memory is not None:
                self._port.free(memory)
        self._device = self._host = None


class Calls:
    """Runs kernels on arrays.

    Attributes:
        arena: the stream in which they run, and its memory.
        closed: whether everything was released.
    """

    def __init__(self, port: DevicePort) -> None:
        self.arena = Arena(port, "operations")
        self.closed = False
        self._memory: dict[str, ArgumentMemory] = {}
        self._released = deque[Memory]()
        self._idle = True

    def __call__(self, kernel: Kernel, given: Mapping[str, Array | Span], **numbers: Number) -> None:
        """Run a kernel; it fills the arrays that it writes, and uses spans in place."""
        if not self._idle:  # a call was interrupted, and its copies may still be in progress
            self.arena.port.finish()
        self._idle = False
        self.free_released()
        self.arena.load(kernel)
        arrays = {name: array for name, array in given.items() if not isinstance(array, Span)}
        # All memory is there before anything runs.
        memory = {name: self._memory_of(name).of(array.nbytes) for name, array in arrays.items()}
        access = {parameter.name: parameter.access for parameter in kernel.parameters}
        for name, array in arrays.items():
            there, here = memory[name]
            if access[name] != "write":
                self.arena.port.write(here, np.ascontiguousarray(array))
                self.arena.copy(there, here)
        spans = {name: part for name, part in given.items() if isinstance(part, Span)}
        spans |= {name: there for name, (there, _) in memory.items()}
        self.arena.launch(kernel, **spans, **numbers)
        results = [name for name in arrays if access[name] != "read"]
        for name in results:
            there, here = memory[name]
            self.arena.copy(here, there)
        self.arena.wait()
        for name in results:
            array = arrays[name]
            array[...] = self.arena.port.read(memory[name][1], array.dtype, array.shape)
        self._idle = True

    def release(self, memory: Memory) -> None:
        """Free memory when nothing runs: at the next call or in `close`. Any thread may call this at any time."""
        self._released.append(memory)

    def free_released(self) -> None:
        """Free the memory passed to `release`; the device must be idle."""
        while self._released:
            self.arena.port.free(self._released.popleft())

    def _memory_of(self, name: str) -> ArgumentMemory:
        return self._memory.setdefault(name, ArgumentMemory(self.arena.port, f"argument {name}"))

    def close(self) -> None:
        """Release everything."""
        self.closed = True
        self.free_released()
        for memory in self._memory.values():
            memory.close()
        self.arena.close()
