"""Shared memory in which every array lies next to a page that cannot be read or written.

One file in memory is mapped by two processes: the *judge*, which writes arguments and reads results, and the *host*,
which owns the code under test. The host may touch only the pages of the call that it is in: arguments to read, the
result to write. All other pages are out of bounds for it, so a read or write beside an array, or of an array of an
earlier call, ends the host with a fault whose address says what was done.

An array lies either against the page on its right, so that the first byte after it cannot be read, or against the
page on its left. What is left of its own pages, the *padding*, is filled with a byte that differs between the two.

This is the judge's side; the host's is in `channel`.
"""

import bisect
import ctypes
import fcntl
import math
import mmap
import os
import sys
import tempfile
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from lowbit.arrays import U8, Array
from lowbit.backend.wire import Get, Tree

Side = Literal["right", "left"]

PAGE = mmap.PAGESIZE
CONTROL = PAGE  # the first page, which the fault handler writes
ARGUMENTS = 3 << 30  # bytes of address space; pages that are never touched cost nothing
RESULTS = 1 << 30
GUARD = 16  # pages between two arrays
WHOLE = 1 << 20  # bytes; arrays up to this size are compared with their former contents


@dataclass(frozen=True)
class Placement:
    """The placement of the arrays of one call.

    Attributes:
        side: the side whose guard page the arrays touch.
        padding: the byte around them.
        alignment: in bytes, or 0 for that of the elements.
        overread: readable bytes after the end.
        offset: the distance from the page's border, in elements, or in steps of a declared alignment.
    """

    side: Side
    padding: int
    alignment: int = 0
    overread: int = 0
    offset: int = 0


@dataclass(frozen=True)
class Segment:
    """One array in the arena; all offsets are bytes from the beginning of the memory.

    Attributes:
        name: the argument, for messages.
        first: the start of its pages.
        pages: the number of its pages.
        start: the start of the array.
        nbytes: its size.
        itemsize: bytes of an element.
        writeable: whether the host may write to it.
        padding: the byte around it.
        content: what was written there, for comparison afterwards.
    """

    name: str
    first: int
    pages: int
    start: int
    nbytes: int
    itemsize: int
    writeable: bool
    padding: int
    content: U8

    @property
    def end(self) -> int:
        """The first byte after the array."""
        return self.start + self.nbytes

    @property
    def last(self) -> int:
        """The first byte after its pages."""
        return self.first + self.pages * PAGE


class Arena:
    """The memory, and the pages in use.

    Attributes:
        file: the descriptor that the host maps too.
    """

    def __init__(self) -> None:
        self.file = _anonymous_file()
        os.ftruncate(self.file, CONTROL + ARGUMENTS + RESULTS)
        if sys.platform == "linux":  # a host that truncates it would kill this process by SIGBUS
            fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self._map = mmap.mmap(self.file, CONTROL + ARGUMENTS + RESULTS)
        self.bytes: U8 = np.frombuffer(self._map, np.uint8)
        self._taken: list[tuple[int, int]] = []  # (first, last) of every segment, ascending

    def close(self) -> None:
        os.close(self.file)  # the mapping is freed with its last view

    def place(self, name: str, array: Array, how: Placement, writeable: bool) -> Segment:
        """Copy the bytes of an array, in memory order, into pages of its own.

        Raises:
            MemoryError: there is no room.
        """
        content = _bytes_of(array)
        unit = max(how.alignment, array.itemsize)
        room = content.size + how.overread + unit * (1 + how.offset)
        pages = max(1, -(-room // PAGE))
        first = self._take(pages)
        start = first + how.offset * unit
        if how.side == "right":
            start = (first + pages * PAGE - how.overread - content.size) // unit * unit - how.offset * unit
        segment = Segment(name, first, pages, start, content.size, array.itemsize, writeable, how.padding, content)
        self.bytes[first:start] = how.padding
        self.bytes[start : segment.end] = content
        self.bytes[segment.end : segment.last] = how.padding
        return segment

    def rewrite(self, segment: Segment, array: Array) -> Segment:
        """Give an array that is already placed other contents of the same size."""
        content = _bytes_of(array)
        if content.size != segment.nbytes:
            raise ValueError(f"{content.size} bytes where {segment.nbytes} lie")
        self.bytes[segment.start : segment.end] = content
        return replace(segment, content=content)

    def free(self, segments: list[Segment]) -> None:
        """Release pages."""
        for segment in segments:
            self._taken.remove((segment.first, segment.last))

    def spoilt(self, segment: Segment) -> str:
        """A verdict on writes outside the allowed memory; empty if there were none."""
        around = np.concatenate([self.bytes[segment.first : segment.start], self.bytes[segment.end : segment.last]])
        if (around != segment.padding).any():
            wrong = int(np.flatnonzero(around != segment.padding)[0])
            before = segment.start - segment.first
            place = f"{before - wrong} bytes before" if wrong < before else f"{wrong - before} bytes after"
            return f"OOB_WRITE: bytes were written {place} the {'start' if wrong < before else 'end'} of {segment.name}"
        if not segment.writeable and segment.nbytes <= WHOLE:
            given = self.bytes[segment.start : segment.end]
            if (given != segment.content).any():
                return f"INPUT_MUTATED: {segment.name} was changed"
        return ""

    def read(self, dtype: np.dtype[Any], shape: tuple[int, ...], tree: dict[str, Tree]) -> Array:
        """A copy of an array that the host reports at ``tree["at"]``.

        Raises:
            ValueError: it is not inside the memory.
        """
        size, at = math.prod(shape) * dtype.itemsize, tree.get("at")
        if type(at) is not int or not 0 <= at <= self.bytes.size - size:
            raise ValueError("an array outside the shared memory")
        return self.bytes[at : at + size].copy().view(dtype).reshape(shape)

    def reading(self) -> Get:
        """A reader of the results in one reply, which are stored after the arguments.

        It copies no more than there is room for: a reply could name one array a thousand times, or pages that the host
        never wrote, which reading would allocate.
        """
        left = RESULTS

        def read(dtype: np.dtype[Any], shape: tuple[int, ...], tree: dict[str, Tree]) -> Array:
            nonlocal left
            left -= math.prod(shape) * dtype.itemsize
            if left < 0:
                raise ValueError(f"more than {RESULTS} bytes of results")
            if type(at := tree.get("at")) is int and at < CONTROL + ARGUMENTS:
                raise ValueError("an array outside the memory of results")
            return self.read(dtype, shape, tree)

        return read

    def control(self) -> npt.NDArray[np.uint64]:
        """The words that the fault handler writes."""
        return self.bytes[:CONTROL].view(np.uint64)

    def _take(self, pages: int) -> int:
        """The first byte of this many free pages, with guard pages on both sides."""
        at = CONTROL + GUARD * PAGE
        for first, last in self._taken:
            if first - at >= (pages + GUARD) * PAGE:
                break
            at = last + GUARD * PAGE
        if at + (pages + GUARD) * PAGE > CONTROL + ARGUMENTS:
            raise MemoryError("the arguments of the calls do not fit the shared memory")
        bisect.insort(self._taken, (at, at + pages * PAGE))
        return at


def _anonymous_file() -> int:
    if sys.platform == "linux":
        return os.memfd_create("arrays", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    else:
        descriptor, name = tempfile.mkstemp()
        os.unlink(name)
        return descriptor


def _bytes_of(array: Array) -> U8:
    """The bytes from the lowest to the highest address of an array, in the order of addresses."""
    if array.flags.c_contiguous:
        return np.frombuffer(array.tobytes(), np.uint8)
    low, high = np.lib.array_utils.byte_bounds(array)
    return np.frombuffer(ctypes.string_at(low, high - low), np.uint8)
