"""Memory on a GPU and pinned memory on its host, counted as the driver takes it.

Every allocation is one of the driver's (``cuMemAlloc``, ``cuMemHostAlloc``), so freed memory is released at once. The
driver takes device memory in pieces of two MiB: a large allocation is counted in whole pieces, small ones share pieces
(`lowbit_cuda.port.charge`). Pinned memory is counted in multiples of `ALIGNMENT`. If a process asks for more of it than
the host or its container has, the request is not refused: the system kills a process, often this one, without a
message. So a large request is first compared with what is available (`lowbit.system.memory`).

An `Allocation` records the streams that use it, because memory must not be freed while such work may still run:
`Heap.free` waits for those streams, and the driver may then wait for the others. So memory should be freed while the
device is idle, not during a run.

On a lost device, memory is only removed from the counts. The driver answers every call with the known error, and it
releases both kinds of memory when the process ends.

The calls are those of the CUDA driver API.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lowbit.arrays import U8
from lowbit.contract.checks import check_integer
from lowbit.errors import ArgumentError
from lowbit.system.memory import available_bytes
from lowbit.text import kind_of
from lowbit_cuda.cuda.driver import OUT_OF_MEMORY, DriverError
from lowbit_cuda.port import (
    ALIGNMENT,
    PIECE,
    DeviceError,
    DeviceLostError,
    DeviceMemoryError,
    Memory,
    Place,
    Span,
    charge,
)

PINNED = 1 | 2
"""CU_MEMHOSTALLOC_PORTABLE, pinned for every context of the process, and DEVICEMAP, accessible to kernels. With unified
addressing, which all supported devices have, its address is the same on host and device."""


class ExhaustedError(DeviceMemoryError):
    """The driver has no more memory although the budget allows it; nothing has changed."""

    def __init__(self, place: Place, what: str, asked: int, used: int, budget: int, text: str, free: int) -> None:
        super().__init__(what, asked, used, budget)
        if place == "device":
            where = f"the device has only {free} bytes free, although {budget - used} of the budget's {budget} are left"
            advice = "other programs use the device too: end them, or give a smaller budget"
        else:
            where = "the host cannot page-lock them"
            advice = "free host memory, or raise the memory limit of the container (cgroup)"
        self.args = (f"{place} memory for {what}: {asked} bytes asked, but {where} ({text}); {advice}",)


@dataclass(eq=False)
class Allocation:
    """One allocation.

    Attributes:
        heap: the heap that it belongs to.
        place: ``device`` or ``host``.
        pointer: its address, on the device or the host.
        charged: bytes that it counts as.
        users: the streams that were given work that uses it.
        view: for pinned memory, its bytes as an array.
    """

    heap: "Heap"
    place: Place
    pointer: int
    charged: int
    users: set[Any] = field(default_factory=set)
    view: U8 | None = None


class Heap:
    """Allocations of one device within a budget.

    Args:
        budget: bytes of device memory.
        call: as `lowbit_cuda.cuda.driver.call`.

    Attributes:
        budget: bytes of device memory.
        used: bytes of device memory in use.
        peak: the largest value of `used` so far.
        pinned: bytes of pinned memory in use.
    """

    def __init__(self, budget: int, call: Callable[..., Any]) -> None:
        self._call = call
        self.budget, self.used, self.peak, self.pinned = budget, 0, 0, 0
        self.held: dict[int, Memory] = {}

    def allocate(self, nbytes: int, what: str) -> Memory:
        """Memory on the device; a `DeviceMemoryError`, with nothing changed, if the budget or the device is
        exhausted."""
        from cuda.bindings import driver

        check_integer("nbytes", nbytes, 1)
        charged = charge(nbytes)
        if charged > self.budget - self.used:
            raise DeviceMemoryError(what, nbytes, self.used, self.budget)
        pointer = int(self._allocate("device", nbytes, what, driver.cuMemAlloc, charged))
        self.used += charged
        self.peak = max(self.peak, self.used)
        return self._keep(Memory(what, nbytes, "device", Allocation(self, "device", pointer, charged)))

    def pin(self, nbytes: int, what: str) -> Memory:
        """Pinned memory; a `DeviceMemoryError`, with nothing changed, if the host is exhausted."""
        from cuda.bindings import driver

        check_integer("nbytes", nbytes, 1)
        charged = -(-nbytes // ALIGNMENT) * ALIGNMENT
        if charged >= PIECE and (free := available_bytes()) is not None and charged > free:
            raise ExhaustedError("host", what, nbytes, self.used, self.budget, f"{free} bytes are available", free)
        pointer = int(self._allocate("host", nbytes, what, driver.cuMemHostAlloc, charged, PINNED))
        view = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(pointer))
        self.pinned += charged
        return self._keep(Memory(what, nbytes, "host", Allocation(self, "host", pointer, charged, view=view)))

    def _allocate(self, place: Place, nbytes: int, what: str, function: Callable[..., Any], *arguments: int) -> Any:
        from cuda.bindings import driver

        try:
            return self._call(f"allocating {nbytes} bytes for {what}", function, *arguments)
        except DriverError as error:
            if error.code != OUT_OF_MEMORY:
                raise
            free = self._call("asking for free memory", driver.cuMemGetInfo)[0] if place == "device" else 0
            raise ExhaustedError(place, what, nbytes, self.used, self.budget, error.code, int(free)) from error

    def _keep(self, memory: Memory) -> Memory:
        self.held[id(memory)] = memory
        return memory

    def free(self, memory: Memory, wait: Callable[[Any], None], *, lost: bool = False) -> None:
        """Free an allocation after the streams that use it have finished; freeing twice is harmless.

        Args:
            memory: an allocation of this heap.
            wait: waits for a stream.
            lost: whether the device is lost; then nothing is waited for, and only the counts change.

        Raises:
            DeviceError: the memory belongs to another device.
            DeviceLostError: the device turned out to be lost; the memory is no longer counted.
            DriverError: the memory was not freed, and is still counted.
        """
        from cuda.bindings import driver

        if memory.handle is None:
            return
        allocation = self.of(memory)
        try:
            if not lost:
                for stream in allocation.users:
                    wait(stream)
                function = driver.cuMemFree if allocation.place == "device" else driver.cuMemFreeHost
                self._call(f"freeing the memory for {memory.what}", function, allocation.pointer)
        except DeviceLostError:  # there is nothing to free
            self._uncount(memory, allocation)
            raise
        self._uncount(memory, allocation)

    def _uncount(self, memory: Memory, allocation: Allocation) -> None:
        del self.held[id(memory)]
        memory.handle = allocation.view = None
        if allocation.place == "device":
            self.used -= allocation.charged
        else:
            self.pinned -= allocation.charged

    # Addresses and bytes.

    def of(self, memory: Memory) -> Allocation:
        """The allocation behind it; `DeviceError` if it was given back or is another device's."""
        allocation = memory.handle
        if isinstance(allocation, Allocation) and allocation.heap is self and self.held.get(id(memory)) is memory:
            return allocation
        raise DeviceError(f"{'use after free' if allocation is None else 'memory of another device'}: {memory.what}")

    def bytes_of(self, span: Span, nbytes: int) -> U8:
        """The first bytes of a span of pinned memory, without copying them."""
        if not isinstance(span, Span):
            raise ArgumentError("span", kind_of(span), "a Span of pinned memory")
        view = self.of(span.memory).view
        if view is None:
            raise ArgumentError("span", f"on the device ({span.memory.what})", "a span of pinned memory")
        if nbytes > span.nbytes:
            raise ArgumentError("data", f"{nbytes} bytes", f"at most the span's {span.nbytes}")
        return view[span.offset : span.offset + nbytes]
