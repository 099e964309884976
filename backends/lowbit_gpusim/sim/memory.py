"""Memory of the simulated device: numpy bytes, what was ever written of them, and a budget.

**Bytes that nobody wrote** are 0xFF: as float16 and as float32 that is NaN, as a signed integer −1, so that a kernel
that computes with them shows it. What was written is also remembered (`Ranges`), so that reading the rest is noticed
even where the result hides it.

**Sizes without bytes.** A model of a size that this host does not have can still be run for its virtual time: with
``backed=False``, memory of more than `SMALL` bytes has a size and no bytes. Nothing is moved to or from it, and what is
read of it is zero, which is a valid number, index and code. A kernel that is given such a span is not run; what it
writes elsewhere becomes zero too. Memory of at most `SMALL` bytes, where control data is, keeps its bytes.

**Budget.** An allocation counts as on every port (`lowbit_cuda.port.charge`) in the device's budget. Pinned memory
counts as its size rounded up to `ALIGNMENT` in the host's.
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
"""What every byte is until it is written."""

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
    """What `SimDevice` keeps of one `Memory`, as its handle.

    Attributes:
        owner: the device that gave it out.
        memory: the `Memory` it belongs to.
        data: its bytes, or None where it has only a size.
        written: which of them were written.
        accesses: those that a later operation may still conflict with (`lowbit_gpusim.sim.order`).
    """

    owner: object
    memory: Memory
    data: U8 | None
    written: Ranges = field(default_factory=Ranges)
    accesses: list[Access] = field(default_factory=list)


class Pool:
    """Memory of one place, within a budget.

    Attributes:
        budget: bytes in all.
        used: bytes in use.
        peak: the most that were ever in use.
        blocks: what is in use, in the order in which it was given out.
    """

    def __init__(self, owner: object, place: Any, budget: int, backed_up_to: int | None) -> None:
        self.budget, self.used, self.peak = budget, 0, 0
        self.blocks: dict[int, Allocation] = {}
        self._owner, self._place, self._backed_up_to, self._count = owner, place, backed_up_to, 0

    def allocate(self, nbytes: int, what: str) -> Memory:
        """Memory whose bytes are all `UNWRITTEN`; see `lowbit_cuda.port.DevicePort.allocate` for what is refused."""
        charged = self._charge(nbytes)
        if self.used + charged > self.budget:
            raise DeviceMemoryError(what, nbytes, self.used, self.budget)
        backed = self._backed_up_to is None or nbytes <= self._backed_up_to
        memory = Memory(what, nbytes, self._place)
        memory.handle = Allocation(self._owner, memory, aligned(nbytes) if backed else None)
        self.used += charged
        self.peak = max(self.peak, self.used)
        self.blocks[id(memory.handle)] = memory.handle
        return memory

    def free(self, block: Allocation) -> None:
        """Take it back; its bytes are gone."""
        del self.blocks[id(block)]
        self.used -= self._charge(block.memory.nbytes)
        block.data, block.accesses = None, []

    def _charge(self, nbytes: int) -> int:
        return charge(nbytes) if self._place == "device" else -(-nbytes // ALIGNMENT) * ALIGNMENT

    def holds(self, block: Allocation) -> bool:
        """Whether it was given out here and is still in use."""
        return id(block) in self.blocks


def aligned(nbytes: int) -> U8:
    """Bytes that begin at a multiple of `ALIGNMENT`, all `UNWRITTEN`.

    >>> aligned(2)
    array([255, 255], dtype=uint8)
    """
    room = np.full(nbytes + ALIGNMENT, UNWRITTEN, np.uint8)
    begin = -room.ctypes.data % ALIGNMENT
    return room[begin : begin + nbytes]


def allocation_of(owner: object, span: Span, *pools: Pool) -> Allocation:
    """The block that a span lies in, if this device gave it out and it is in use.

    Raises:
        DeviceError: memory of another device, or memory that was freed.
        ArgumentError: not a span.
    """
    if not isinstance(span, Span):
        raise ArgumentError("span", f"a {type(span).__name__}", "a Span of memory of this device")
    check_owner(owner, span.memory)
    block: Allocation = span.memory.handle
    if not any(pool.holds(block) for pool in pools):
        raise DeviceError(f"use after free: {span.memory.what}")
    return block


def check_owner(owner: object, memory: Memory) -> None:
    """Refuse a `Memory` that `owner` did not make, a copy of one among them.

    Raises:
        DeviceError: of another device, or of none.
    """
    block = memory.handle
    if not isinstance(block, Allocation) or block.owner is not owner or block.memory is not memory:
        raise DeviceError(f"memory of another device: {memory.what}")


def view(span: Span) -> U8 | None:
    """The bytes of a span themselves, or None where there are none."""
    data = span.memory.handle.data
    return None if data is None else data[span.offset : span.offset + span.nbytes]


def pinned(span: Span) -> Span:
    """The span, if it is of pinned memory."""
    if not isinstance(span, Span):
        raise ArgumentError("span", f"a {type(span).__name__}", "a Span of pinned memory")
    if span.memory.place != "host":
        raise ArgumentError("span", f"on the device ({span.memory.what})", "a span of pinned memory")
    return span


def fits(argument: str, nbytes: int, span: Span) -> int:
    """The number of bytes, if a span has as many."""
    if nbytes > span.nbytes:
        raise ArgumentError(argument, f"{nbytes} bytes", f"at most the span's {span.nbytes}")
    return nbytes
