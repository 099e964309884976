"""Memory of the simulated device: numpy bytes, a record of which were written, and a budget.

**Unwritten bytes** are 0xFF, which is NaN in float16 and float32 and −1 as a signed integer, so a kernel that computes
with them produces visible errors. The simulation also records which bytes were written (`Ranges`), so reading others is
detected even where the result hides it.

**Sizes without bytes.** A model that is too large for this host can still be run for its virtual time: with
``backed=False``, memory of more than `SMALL` bytes has a size and no bytes. Nothing is copied to or from it, and
reading it gives zeros, which are valid numbers, indices and codes. A kernel that is given such a span is not run; its
outputs elsewhere become zeros too. Memory of at most `SMALL` bytes, which holds control data, keeps its bytes.

**Budget.** An allocation counts in the device's budget as on every port (`lowbit_cuda.port.charge`). Pinned memory
counts in the host's as its size rounded up to `ALIGNMENT`.
"""

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lowbit.arrays import U8
from lowbit.errors import ArgumentError
from lowbit_cuda.port import ALIGNMENT, DeviceError, DeviceMemoryError, Memory, Span, charge
from lowbit_gpusim.sim.order import Access

UNWRITTEN = 0xFF
"""The value of every byte until it is written."""

SMALL = 1 << 16
"""Bytes: memory of at most this size keeps its bytes even where ``backed`` is False."""


class Ranges:
    """A set of bytes, kept as ranges that neither overlap nor touch."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []

    def add(self, begin: int, end: int) -> None:
        """Add the bytes from `begin` to before `end`."""
        if begin == end:
            return
        first = bisect_left(self._ends, begin)
        last = first
        while last < len(self._begins) and self._begins[last] <= end:
            begin, end = min(begin, self._begins[last]), max(end, self._ends[last])
            last += 1
        self._begins[first:last], self._ends[first:last] = [begin], [end]

    def missing(self, begin: int, end: int) -> int | None:
        """The first byte of a range that is not in the set, or None."""
        if begin == end:
            return None
        at = bisect_left(self._ends, begin + 1)
        if at == len(self._begins) or self._begins[at] > begin:
            return begin
        return None if self._ends[at] >= end else self._ends[at]


@dataclass(eq=False)
class Allocation:
    """The simulation's record of one `Memory`, stored as its handle.

    Attributes:
        owner: the device that allocated it.
        memory: the `Memory` that it belongs to.
        data: its bytes, or None where it has only a size.
        written: the bytes that were written.
        accesses: accesses that may conflict with later operations (`lowbit_gpusim.sim.order`).
    """

    owner: object
    memory: Memory
    data: U8 | None
    written: Ranges = field(default_factory=Ranges)
    accesses: list[Access] = field(default_factory=list)


class Pool:
    """Memory of one place, within a budget.

    Attributes:
        budget: the budget in bytes.
        used: bytes in use.
        peak: the largest value of `used` so far.
        allocations: the allocations in use, in order of allocation.
    """

    def __init__(self, owner: object, place: Any, budget: int, backed_up_to: int | None) -> None:
        self.budget, self.used, self.peak = budget, 0, 0
        self.allocations: dict[int, Allocation] = {}
        self._owner, self._place, self._backed_up_to, self._count = owner, place, backed_up_to, 0

    def allocate(self, nbytes: int, what: str) -> Memory:
        """Memory whose bytes are all `UNWRITTEN`; raises as `lowbit_cuda.port.DevicePort.allocate` does."""
        charged = self._charge(nbytes)
        if self.used + charged > self.budget:
            raise DeviceMemoryError(what, nbytes, self.used, self.budget)
        backed = self._backed_up_to is None or nbytes <= self._backed_up_to
        memory = Memory(what, nbytes, self._place)
        memory.handle = Allocation(self._owner, memory, aligned(nbytes) if backed else None)
        self.used += charged
        self.peak = max(self.peak, self.used)
        self.allocations[id(memory.handle)] = memory.handle
        return memory

    def free(self, allocation: Allocation) -> None:
        """Free an allocation; its bytes are gone."""
        del self.allocations[id(allocation)]
        self.used -= self._charge(allocation.memory.nbytes)
        allocation.data, allocation.accesses = None, []

    def _charge(self, nbytes: int) -> int:
        return charge(nbytes) if self._place == "device" else -(-nbytes // ALIGNMENT) * ALIGNMENT

    def holds(self, allocation: Allocation) -> bool:
        """Whether the allocation is of this pool and still in use."""
        return id(allocation) in self.allocations


def aligned(nbytes: int) -> U8:
    """Bytes that start at a multiple of `ALIGNMENT`, all `UNWRITTEN`.

    >>> aligned(2)
    array([255, 255], dtype=uint8)
    """
    room = np.full(nbytes + ALIGNMENT, UNWRITTEN, np.uint8)
    begin = -room.ctypes.data % ALIGNMENT
    return room[begin : begin + nbytes]


def allocation_of(owner: object, span: Span, *pools: Pool) -> Allocation:
    """The allocation of a span, checked to be of this device and in use.

    Raises:
        DeviceError: the memory is another device's, or was freed.
        ArgumentError: the argument is not a span.
    """
    if not isinstance(span, Span):
        raise ArgumentError("span", f"a {type(span).__name__}", "a Span of memory of this device")
    check_owner(owner, span.memory)
    allocation: Allocation = span.memory.handle
    if not any(pool.holds(allocation) for pool in pools):
        raise DeviceError(f"use after free: {span.memory.what}")
    return allocation


def check_owner(owner: object, memory: Memory) -> None:
    """Refuse a `Memory` that `owner` did not allocate, including a copy of one that it did.

    Raises:
        DeviceError: the memory is another device's, or no device's.
    """
    allocation = memory.handle
    if not isinstance(allocation, Allocation) or allocation.owner is not owner or allocation.memory is not memory:
        raise DeviceError(f"memory of another device: {memory.what}")


def view(span: Span) -> U8 | None:
    """The bytes of a span, not copied, or None where there are none."""
    data = span.memory.handle.data
    return None if data is None else data[span.offset : span.offset + span.nbytes]


def pinned(span: Span) -> Span:
    """The span, checked to be in pinned memory."""
    if not isinstance(span, Span):
        raise ArgumentError("span", f"a {type(span).__name__}", "a Span of pinned memory")
    if span.memory.place != "host":
        raise ArgumentError("span", f"on the device ({span.memory.what})", "a span of pinned memory")
    return span


def fits(argument: str, nbytes: int, span: Span) -> int:
    """The number of bytes, checked to fit into a span."""
    if nbytes > span.nbytes:
        raise ArgumentError(argument, f"{nbytes} bytes", f"at most the span's {span.nbytes}")
    return nbytes
