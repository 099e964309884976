"""The port: all that an engine may ask of a device.

An engine that copies experts to a device and runs them needs memory, copies, kernels, and an order among them. This
file defines these operations. Two classes implement them: `lowbit_cuda.cuda.device.CudaDevice` for a GPU, and a
simulated device for tests, which has a virtual clock and also checks that the requested order is sufficient. The
engine imports this file and neither implementation.

**Memory** is allocated on the device, within a budget, or *pinned* on the host, where copies can read it while the host
continues. A `Span` is a part of a memory; every operation on memory takes spans. An allocation counts as the bytes that
the device takes for it (`charge`), not the bytes requested. The budget covers allocations only: code, graphs and the
local memory of threads come on top, and a port opens only if the device has room for both.

Allocating and freeing may make a device wait for all of its work. A program that must be fast does both only while the
device is idle, and loads its kernels before it starts (`DevicePort.load`).

**Order.** A *stream* runs its operations in the order in which they were given to it. Between streams, and between a
stream and the host, only *events* create an order: `record` marks a point in a stream, `wait` makes another stream wait
for it, `synchronize` makes the host wait. Programs must not rely on any other order, nor on a copy being fast.

**Kernels** are described (`Kernel`) by their arguments and, for each span among them, whether it is read or written and
how many bytes of it. From this a simulation derives which operations must not overlap. A launch with a span that is too
short is refused before anything runs. A few arguments may be in pinned memory; a kernel that accesses them there does
not wait for copies in progress.

**Graphs.** Work given to a stream inside `capture` is recorded instead of run, and one call can then run it any number
of times. Its spans and numbers are those at the time of capture.

**Errors.** An allocation beyond the budget raises a `DeviceMemoryError` and changes nothing. A call that the device
refuses raises a `DeviceError` and issues no work. An operation may also fail *late*, after its call has returned. Then
the contents of its outputs are undefined, later work in its stream and work that waits for it does not start, and no
event behind it is ever reached: waiting for such an event is an error, and querying it returns False or raises. Any
later call may raise the error; at the latest, a call that waits for the failed work does.

A GPU whose work failed late is *lost* to the process: the error is a `DeviceLostError`, and so is every later call, at
once. Only `free` and `close` still succeed; they do not touch the device, whose memory is released when the process
ends. A simulation can also fail late and continue, which is harder for a program: it must find out what was done.

The terms are those of the CUDA programming guide.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol, Self

import numpy as np
import numpy.typing as npt

from lowbit.arrays import Array
from lowbit.contract.checks import check_integer
from lowbit.errors import ArgumentError, LowbitError
from lowbit.text import kind_of

ALIGNMENT = 256
"""Bytes: every allocation starts at a multiple of this."""
PIECE = 2 << 20
"""Bytes: a GPU allocates memory in pieces of this size."""
SHARED = 1 << 20
"""Bytes: smaller allocations share pieces; larger ones have their own."""


def charge(nbytes: int) -> int:
    """The bytes that an allocation counts as: a small one is rounded up to `ALIGNMENT`, a larger one to `PIECE`.

    >>> charge(1), charge(256), charge(257)
    (256, 256, 512)
    >>> charge(SHARED - 256), charge(SHARED), charge(PIECE + 1)
    (1048320, 2097152, 4194304)
    """
    unit = ALIGNMENT if nbytes < SHARED else PIECE
    return -(-nbytes // unit) * unit


def largest(budget: int) -> int:
    """The largest allocation that counts as at most `budget` bytes.

    >>> largest(1000), largest(PIECE - 1) == SHARED - ALIGNMENT, largest(PIECE + 1) == PIECE
    (768, True, True)
    """
    if budget >= PIECE:
        return budget // PIECE * PIECE
    return min(budget // ALIGNMENT * ALIGNMENT, SHARED - ALIGNMENT)


Place = Literal["device", "host"]
Access = Literal["read", "write", "update"]
"""How a kernel uses a span: it reads it, writes its whole declared extent without reading it, or both."""


class DeviceError(LowbitError, RuntimeError):
    """The device failed an operation; the message says which one, and why."""


class DeviceLostError(DeviceError):
    """The device is lost to this process: its contents are gone, and every later call raises this error too."""


class DeviceMemoryError(DeviceError):
    """An allocation exceeds the budget or the device's memory.

    Attributes:
        what: the purpose of the allocation.
        asked: bytes requested.
        used: bytes in use at that time.
        budget: the budget in bytes.
    """

    def __init__(self, what: str, asked: int, used: int, budget: int) -> None:
        super().__init__(f"device memory for {what}: {asked} bytes asked, {budget - used} of {budget} left")
        self.what, self.asked, self.used, self.budget = what, asked, used, budget


# **Memory.**


@dataclass(eq=False)
class Memory:
    """An allocation by `DevicePort.allocate` or `DevicePort.pin`, released by `DevicePort.free`.

    Attributes:
        what: its purpose, for errors and reports.
        nbytes: its size.
        place: ``device`` or ``host``.
        handle: private to the port.
    """

    what: str
    nbytes: int
    place: Place
    handle: Any = field(repr=False, default=None)

    def span(self, offset: int = 0, nbytes: int | None = None) -> "Span":
        """A part of it, by default everything from `offset`.

        Raises:
            ArgumentError: the part would extend beyond the memory.
        """
        nbytes = self.nbytes - offset if nbytes is None else nbytes
        _check_inside(offset, nbytes, self.nbytes)
        return Span(self, offset, nbytes)


@dataclass(frozen=True, eq=False)
class Span:
    """A contiguous range of bytes in one memory."""

    memory: Memory
    offset: int
    nbytes: int

    def part(self, offset: int, nbytes: int | None = None) -> "Span":
        """A part of it; an `ArgumentError` if the part would extend beyond the span."""
        nbytes = self.nbytes - offset if nbytes is None else nbytes
        _check_inside(offset, nbytes, self.nbytes)
        return Span(self.memory, self.offset + offset, nbytes)


def _check_inside(offset: int, nbytes: int, whole: int) -> None:
    if (
        type(offset) is type(nbytes) is int and 0 <= offset <= whole - nbytes <= whole
    ):  # the fast path: every launch creates spans
        return
    check_integer("offset", offset, 0, whole)
    check_integer("nbytes", nbytes, 0, whole - offset)


# **Kernels**: what a port must know about them.

Number = int | float
Numbers = Mapping[str, Number]

LIMITS = {kind: (np.iinfo(kind).min, np.iinfo(kind).max) for kind in ("int32", "int64")}
"""The smallest and the largest value of each integer kind."""


REMEMBERED = 1024
"""The number of launches per kernel, with different numbers, whose sizes are cached."""


@dataclass(frozen=True)
class Parameter:
    """One argument of a kernel.

    Attributes:
        name: as in the kernel's source and in launches.
        kind: the type of a number (``int32``, ``int64``, ``float32``), or of a span's elements.
        access: how a span is used; None for a number.
        extent: for a span, the number of elements that are used, counted from the first, as a function of the launch's
            numbers. Where that depends on the contents of memory, it is an upper limit.
        exact: False where the extent is an upper limit, so that the kernel may leave some of it untouched.
        alignment: for a span, the alignment in bytes, where it is larger than an element's size.
        host: whether a span may also be in pinned memory, which the kernel then accesses over the link: for small data
            that is used once.
    """

    name: str
    kind: str
    access: Access | None = None
    extent: Callable[[Numbers], int] | None = None
    exact: bool = True
    alignment: int = 1
    host: bool = False

    @cached_property
    def multiple(self) -> int:
        """The span's alignment in bytes."""
        return max(self.alignment, np.dtype(self.kind).itemsize)

    def nbytes(self, numbers: Numbers) -> int:
        """The number of bytes of the span that a launch uses."""
        assert self.extent is not None
        return self.extent(numbers) * np.dtype(self.kind).itemsize


@dataclass(frozen=True, eq=False)
class Kernel:
    """A kernel that a port can launch.

    Attributes:
        name: of the function, ``extern "C"``, in the compiled program.
        source: the file in `lowbit_cuda.kernels` that contains it.
        parameters: in the order of its arguments.
        grid: blocks in x, y and z, as a function of the launch's numbers.
        block: threads per block, in x.
        shared: bytes of dynamic shared memory, as a function of the launch's numbers.
        check: raises an `ArgumentError` for numbers that the kernel does not support.
        flops: floating-point operations of a launch, for a model of its time; 0 where only memory traffic counts.
    """

    name: str
    source: str
    parameters: tuple[Parameter, ...]
    grid: Callable[[Numbers], tuple[int, int, int]]
    block: int
    shared: Callable[[Numbers], int] = lambda numbers: 0
    check: Callable[[Numbers], None] = lambda numbers: None
    flops: Callable[[Numbers], float] = lambda numbers: 0.0
    _sizes: dict[tuple[Number, ...], dict[str, int]] = field(default_factory=dict, init=False, repr=False)

    def checked(self, arguments: Mapping[str, Span | Number]) -> tuple[dict[str, Span], dict[str, Number]]:
        """The spans, each cut to the bytes that the kernel uses, and the numbers.

        Raises:
            ArgumentError: an argument is missing, unknown or of the wrong type; a number does not fit its kind; a span
                is too short, is on the host although the kernel does not allow that, or is not aligned.
        """
        given, wanted = set(arguments), {parameter.name for parameter in self.parameters}
        if given != wanted:
            raise ArgumentError(f"arguments of {self.name}", sorted(given ^ wanted), "each of its parameters, once")
        numbers: dict[str, Number] = {}
        for parameter in self.parameters:
            if parameter.access is None:
                numbers[parameter.name] = self._number(parameter, arguments[parameter.name])
        sizes = self._sizes_for(numbers)
        return {p.name: self._cut(p, arguments[p.name], sizes[p.name]) for p in self.parameters if p.access}, numbers

    def _sizes_for(self, numbers: dict[str, Number]) -> dict[str, int]:
        """Bytes of each span; cached, because nearly every launch repeats earlier numbers."""
        key = tuple(numbers.values())
        found = self._sizes.get(key)
        if found is None:
            self.check(numbers)
            found = {p.name: p.nbytes(numbers) for p in self.parameters if p.access}
            if len(self._sizes) == REMEMBERED:
                self._sizes.clear()
            self._sizes[key] = found
        return found

    def _number(self, parameter: Parameter, value: Span | Number) -> Number:
        if not isinstance(value, int | float | np.integer | np.floating) or isinstance(value, bool):
            raise ArgumentError(self._argument(parameter), kind_of(value), "a number")
        limits = LIMITS.get(parameter.kind)
        if limits and not (limits[0] <= value <= limits[1] and value == int(value)):
            raise ArgumentError(self._argument(parameter), value, f"a number that {parameter.kind} holds")
        return value

    def _cut(self, parameter: Parameter, value: Span | Number, nbytes: int) -> Span:
        if not isinstance(value, Span):
            raise ArgumentError(self._argument(parameter), kind_of(value), "a span")
        if value.memory.place != "device" and not parameter.host:
            raise ArgumentError(self._argument(parameter), "on the host", "a span on the device")
        if value.nbytes < nbytes:
            raise ArgumentError(self._argument(parameter), f"{value.nbytes} bytes", f"at least {nbytes}")
        if value.offset % parameter.multiple:
            raise ArgumentError(
                self._argument(parameter), f"at byte {value.offset}", f"a multiple of {parameter.multiple}"
            )
        return value if value.nbytes == nbytes else value.part(0, nbytes)

    def _argument(self, parameter: Parameter) -> str:
        return f"{parameter.name} of {self.name}"


# **The protocol.** Streams, events and graphs are private to the port; callers only pass them back.


class Stream(Protocol):
    """A queue whose operations run one after another."""

    @property
    def name(self) -> str:
        """Its name in errors and traces."""


class Event(Protocol):
    """A mark in a stream, reached or not yet. Recording again creates another event."""


class Graph(Protocol):
    """Captured operations."""


class DevicePort(Protocol):
    """A device, its memory and its clock; the top of this file states the rules that all methods obey."""

    @property
    def budget(self) -> int:
        """The largest number of bytes of device memory that may be in use."""

    @property
    def used(self) -> int:
        """Bytes of device memory in use, each allocation counted by `charge`."""

    @property
    def peak(self) -> int:
        """The largest value of `used` so far."""

    @property
    def pinned(self) -> int:
        """Bytes of pinned host memory in use."""

    def describe(self) -> Mapping[str, str]:
        """Facts for a report: the device's name, versions, settings."""

    # Memory.

    def allocate(self, nbytes: int, what: str) -> Memory:
        """Memory on the device, with undefined contents.

        Raises:
            ArgumentError: `nbytes` is not positive.
            DeviceMemoryError: more than is available; nothing has changed.
        """

    def pin(self, nbytes: int, what: str) -> Memory:
        """Page-locked memory on the host, which the budget does not count.

        Raises:
            ArgumentError: `nbytes` is not positive.
            DeviceMemoryError: the host does not have enough memory.
        """

    def free(self, memory: Memory) -> None:
        """Release memory, after waiting for the issued work that uses it; freeing twice is harmless."""

    def write(self, span: Span, data: Array) -> None:
        """Write a C-contiguous array to pinned memory, immediately, from the host."""

    def read(self, span: Span, dtype: npt.DTypeLike, shape: Sequence[int]) -> Array:
        """Read pinned memory into a new array, immediately, from the host."""

    # Work in streams.

    def stream(self, name: str) -> Stream:
        """A new stream."""

    def load(self, kernels: Iterable[Kernel]) -> None:
        """Load the code of kernels onto the device, before work starts that should not wait for it.

        A kernel that was not loaded is loaded by its first launch. That is slow, needs memory, and may wait for all
        work of the device.

        Raises:
            DeviceError: a kernel cannot be loaded.
        """

    def copy(self, target: Span, source: Span, stream: Stream) -> None:
        """Copy between spans of equal length, in either direction or within the device.

        Raises:
            ArgumentError: the lengths differ, or both spans are on the host.
        """

    def launch(self, kernel: Kernel, arguments: Mapping[str, Span | Number], stream: Stream) -> None:
        """Launch a kernel; `Kernel.checked` says which arguments are refused."""

    def record(self, stream: Stream) -> Event:
        """Record an event at the current end of the stream."""

    def wait(self, stream: Stream, event: Event) -> None:
        """Make all later work of the stream wait until the event is reached."""

    def capture(self, stream: Stream) -> AbstractContextManager[Callable[[], Graph]]:
        """Record the copies and launches that the stream is given in this block, instead of running them.

        Nothing else is allowed in the block. It yields a function that returns the graph after the block has ended.
        """

    def replay(self, graph: Graph, stream: Stream) -> None:
        """Run a graph, as if its operations were given to the stream again."""

    def batch(self) -> AbstractContextManager[None]:
        """A block in which many calls take less time each. Between these calls, other libraries in the thread may find
        the device's context current; after the block they find their own again."""

    # Waiting and time.

    def synchronize(self, event: Event) -> None:
        """Make the host wait until the event is reached."""

    def finish(self) -> None:
        """Make the host wait until every stream has finished."""

    def reached(self, event: Event) -> bool:
        """Whether the event is reached, without waiting; the host may rely on True."""

    def seconds(self, first: Event, second: Event) -> float:
        """Seconds between two events that are both reached, on the device's clock."""

    def now(self) -> float:
        """The host's clock, in seconds from an arbitrary origin."""

    def on_host(self, what: str, reads: Sequence[Span], function: Callable[..., Any]) -> Any:
        """Call a function on the host with an array (uint8, read only, not copied) for each span of pinned memory that
        it reads; a simulation adds the time of reading them. Nothing may overwrite these bytes until the function
        returns, and the function may not use them afterwards."""

    def close(self) -> None:
        """Wait, and release everything. Closing twice is harmless."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...


def finish_after_failure(port: DevicePort) -> None:
    """Make the host wait until every stream has finished, where the first error may be a late report of a failure that
    has been raised before.

    Raises:
        DeviceLostError: the device is lost.
        DeviceError: it fails a second time.
    """
    try:
        port.finish()
    except DeviceLostError:
        raise
    except DeviceError:
        port.finish()
