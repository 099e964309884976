"""The port: all that an engine may ask of a device.

An engine that brings experts to a device and runs them needs little of it: memory, copies, kernels, and an order among
them. That little is written down here, and twice fulfilled: by `lowbit_cuda.cuda`, a GPU, and by `lowbit_gpusim.sim`, a
simulation with a time of its own that also proves that the order asked for is enough. The engine knows this file and
neither of them.

**Memory** is allocated on the device, within a budget, or *pinned* on the host, where copies can reach it while the
host goes on. A `Span` is a part of it; everything that works on memory is given spans. An allocation counts as what the
device takes for it (`charge`), not as what was asked for. The budget is for allocations alone: code, graphs and the
local memory of threads lie beside it, and a port opens only where the device has room for both.

Freeing or allocating memory may make a device wait for all of its work, so a program that cares for its time does both
only while the device is idle, and has its kernels loaded before it begins (`DevicePort.load`).

**Order.** A *stream* does what it was given in the order in which it was given it. Between streams, and between a
stream and the host, there is no order but what *events* make: `record` marks a place in a stream, `wait` makes another
stream wait for the mark, `synchronize` the host. Nothing else may be relied on; in particular not that a copy is fast.

**Kernels** are described (`Kernel`) by the arguments that they take and, for each span among them, whether it is read
or written and how many bytes of it. The simulation derives from this which operations must not run at once. Launching a
kernel with a span too short for it is refused before anything runs. A few arguments may lie in pinned memory: a kernel
that reaches them there does not wait for the copies that are on their way.

**Graphs.** What a stream was given between `capture` and the end of its block is not run but kept, and can be run
again by one call. Spans and numbers in it are those of the time of capture.

**Errors.** Memory beyond the budget is refused with a `DeviceMemoryError` and leaves everything as it was. A call that
the device fails is a `DeviceError` and has asked for nothing. An operation may also fail *late*, when its call has long
returned. What it should have written is then undefined; what its stream is given after it does not begin, nor does what
waits for that; and no event behind it is ever reached: to wait for one is an error, and asking is answered with no or
with the error. Any later call may raise it, at the latest one that waits for what was not done.

A GPU whose work failed late is *lost* to the process: the error is a `DeviceLostError`, and so is every later call, at
once. Only `free` and `close` still succeed then; they ask nothing of the device, whose memory goes back when the
process ends. The simulation can also fail late and then go on, which is harder on a program: it has to know what was
done.

Source: lowbit's own; the terms are those of the CUDA programming guide.
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

ALIGNMENT = 256
"""Bytes: every allocation begins at a multiple of this."""
PIECE = 2 << 20
"""Bytes: a GPU takes its memory in pieces of this size."""
SHARED = 1 << 20
"""Bytes: allocations that are smaller than this share pieces; a larger one has pieces of its own."""


def charge(nbytes: int) -> int:
    """What an allocation counts as: a small one rounded up to `ALIGNMENT`, a larger one to `PIECE`.

    >>> charge(1), charge(256), charge(257)
    (256, 256, 512)
    >>> charge(SHARED - 256), charge(SHARED), charge(PIECE + 1)
    (1048320, 2097152, 4194304)
    """
    unit = ALIGNMENT if nbytes < SHARED else PIECE
    return -(-nbytes // unit) * unit


def largest(budget: int) -> int:
    """The most bytes of one allocation that counts as at most `budget`.

    >>> largest(1000), largest(PIECE - 1) == SHARED - ALIGNMENT, largest(PIECE + 1) == PIECE
    (768, True, True)
    """
    if budget >= PIECE:
        return budget // PIECE * PIECE
    return min(budget // ALIGNMENT * ALIGNMENT, SHARED - ALIGNMENT)


Place = Literal["device", "host"]
Access = Literal["read", "write", "update"]
"""What a kernel does to a span: reads it, writes all that it declares of it without reading, or both."""


class DeviceError(LowbitError, RuntimeError):
    """The device failed an operation: which, and in its own words why."""


class DeviceLostError(DeviceError):
    """The device is lost to this process: what it held is gone, and every later call fails with this error too."""


class DeviceMemoryError(DeviceError):
    """Memory that the budget, or the device, does not have.

    Attributes:
        what: what it was for.
        asked: bytes.
        used: bytes in use when it was asked for.
        budget: bytes in all.
    """

    def __init__(self, what: str, asked: int, used: int, budget: int) -> None:
        super().__init__(f"device memory for {what}: {asked} bytes asked, {budget - used} of {budget} left")
        self.what, self.asked, self.used, self.budget = what, asked, used, budget


# **Memory.**


@dataclass(eq=False)
class Memory:
    """What `DevicePort.allocate` and `DevicePort.pin` give out; `DevicePort.free` takes it back.

    Attributes:
        what: what it is for, as errors and reports say it.
        nbytes: how many.
        place: ``device`` or ``host``.
        handle: the port's own.
    """

    what: str
    nbytes: int
    place: Place
    handle: Any = field(repr=False, default=None)

    def span(self, offset: int = 0, nbytes: int | None = None) -> "Span":
        """A part of it, by default all from `offset`.

        Raises:
            ArgumentError: it would reach outside.
        """
        nbytes = self.nbytes - offset if nbytes is None else nbytes
        _check_inside(offset, nbytes, self.nbytes)
        return Span(self, offset, nbytes)


@dataclass(frozen=True, eq=False)
class Span:
    """A run of bytes in one memory."""

    memory: Memory
    offset: int
    nbytes: int

    def part(self, offset: int, nbytes: int | None = None) -> "Span":
        """A part of it; refused with an `ArgumentError` where it would reach outside."""
        nbytes = self.nbytes - offset if nbytes is None else nbytes
        _check_inside(offset, nbytes, self.nbytes)
        return Span(self.memory, self.offset + offset, nbytes)


def _check_inside(offset: int, nbytes: int, whole: int) -> None:
    if type(offset) is type(nbytes) is int and 0 <= offset <= whole - nbytes <= whole:  # spans are cut at every launch
        return
    check_integer("offset", offset, 0, whole)
    check_integer("nbytes", nbytes, 0, whole - offset)


# **Kernels**, as far as a port must know them.

Number = int | float
Numbers = Mapping[str, Number]

LIMITS = {kind: (np.iinfo(kind).min, np.iinfo(kind).max) for kind in ("int32", "int64")}
"""The least and the most number of the kinds of whole numbers."""


REMEMBERED = 1024
"""Launches of a kernel with different numbers whose sizes are remembered."""


@dataclass(frozen=True)
class Parameter:
    """One argument of a kernel.

    Attributes:
        name: as in the kernel's source and in launches.
        kind: the type of a number (``int32``, ``int64``, ``float32``), or of what a span holds.
        access: what is done to a span; None for a number.
        extent: for a span, how many elements of it are touched, from the numbers of the launch: the elements from 0.
            Where that depends on what memory holds, the most that it can be.
        exact: False where the extent is such a most, so that bytes in it may be left alone.
        alignment: for a span, bytes that its place is a multiple of, where that is more than an element's.
        host: whether a span may also lie in pinned memory, which the kernel then reaches over the link: for what is few
            and touched once.
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
        """Bytes of which the span's place is a multiple."""
        return max(self.alignment, np.dtype(self.kind).itemsize)

    def nbytes(self, numbers: Numbers) -> int:
        """How many bytes of the span a launch touches."""
        assert self.extent is not None
        return self.extent(numbers) * np.dtype(self.kind).itemsize


@dataclass(frozen=True, eq=False)
class Kernel:
    """A kernel that a port can launch.

    Attributes:
        name: of the function, ``extern "C"``, in the compiled program.
        source: the file that it is compiled from, in `lowbit_cuda.kernels`.
        parameters: in the order of its arguments.
        grid: blocks in x, y and z, from the numbers of the launch.
        block: threads of a block, in x.
        shared: bytes of dynamic shared memory, from the numbers of the launch.
        meaning: the same in numpy. It is given an array for each span, of its kind and extent, and each number, by
            name; it fills what is written.
        check: raises an `ArgumentError` for numbers that the kernel cannot do.
        flops: floating-point operations of a launch, for a model of its time; 0 where only its bytes take time.
    """

    name: str
    source: str
    parameters: tuple[Parameter, ...]
    grid: Callable[[Numbers], tuple[int, int, int]]
    block: int
    meaning: Callable[..., None]
    shared: Callable[[Numbers], int] = lambda numbers: 0
    check: Callable[[Numbers], None] = lambda numbers: None
    flops: Callable[[Numbers], float] = lambda numbers: 0.0
    _sizes: dict[tuple[Number, ...], dict[str, int]] = field(default_factory=dict, init=False, repr=False)

    def checked(self, arguments: Mapping[str, Span | Number]) -> tuple[dict[str, Span], dict[str, Number]]:
        """The spans, each cut to what the kernel touches of it, and the numbers.

        Raises:
            ArgumentError: an argument that is missing, unknown or of the wrong sort; a number that its kind cannot
                hold; a span that is too short, lies on the host where the kernel does not reach, or is not aligned to
                its elements.
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
        """Bytes of each span; remembered for numbers that were found good, since nearly every launch has old ones."""
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
            raise ArgumentError(self._argument(parameter), f"a {type(value).__name__}", "a number")
        limits = LIMITS.get(parameter.kind)
        if limits and not (limits[0] <= value <= limits[1] and value == int(value)):
            raise ArgumentError(self._argument(parameter), value, f"a number that {parameter.kind} holds")
        return value

    def _cut(self, parameter: Parameter, value: Span | Number, nbytes: int) -> Span:
        if not isinstance(value, Span):
            raise ArgumentError(self._argument(parameter), f"a {type(value).__name__}", "a span")
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


# **The protocol.** Streams, events and graphs are the port's own; whoever uses them only hands them on.


class Stream(Protocol):
    """A queue of operations that run one after another."""

    @property
    def name(self) -> str:
        """As errors and traces call it."""


class Event(Protocol):
    """A place in a stream, reached or not. It marks one place only; recording again makes another event."""


class Graph(Protocol):
    """Operations that were captured."""


class DevicePort(Protocol):
    """A device, its memory and its clock; see the top of this file for what holds of all of them."""

    @property
    def budget(self) -> int:
        """Bytes of device memory that may be in use."""

    @property
    def used(self) -> int:
        """Bytes of device memory in use, each allocation counted as what `charge` says."""

    @property
    def peak(self) -> int:
        """The most that were ever in use."""

    @property
    def pinned(self) -> int:
        """Bytes of pinned host memory in use."""

    def describe(self) -> Mapping[str, str]:
        """What a report should state: the device's name, versions, presets."""

    # Memory.

    def allocate(self, nbytes: int, what: str) -> Memory:
        """Memory on the device; what it holds is not defined.

        Raises:
            ArgumentError: not a positive number of bytes.
            DeviceMemoryError: more than is left, and nothing has changed.
        """

    def pin(self, nbytes: int, what: str) -> Memory:
        """Page-locked memory on the host, not counted in the budget.

        Raises:
            ArgumentError: not a positive number of bytes.
            DeviceMemoryError: the host does not have it.
        """

    def free(self, memory: Memory) -> None:
        """Give memory back, after waiting for what was given to streams with it; twice is harmless."""

    def write(self, span: Span, data: Array) -> None:
        """The host writes pinned memory, now: as many bytes as the C-contiguous array has."""

    def read(self, span: Span, dtype: npt.DTypeLike, shape: Sequence[int]) -> Array:
        """The host reads pinned memory, now: an array of its own."""

    # What streams do.

    def stream(self, name: str) -> Stream:
        """A new stream."""

    def load(self, kernels: Iterable[Kernel]) -> None:
        """Bring the code of kernels to the device, before anything runs that should not wait for it.

        A kernel that was not loaded is loaded by its first launch. That takes long, needs memory, and may wait for
        everything that the device has been given.

        Raises:
            DeviceError: one of them cannot be loaded.
        """

    def copy(self, target: Span, source: Span, stream: Stream) -> None:
        """Copy between spans of equal length, in either direction or on the device.

        Raises:
            ArgumentError: lengths differ, or both lie on the host.
        """

    def launch(self, kernel: Kernel, arguments: Mapping[str, Span | Number], stream: Stream) -> None:
        """Run a kernel; see `Kernel.checked` for what is refused."""

    def record(self, stream: Stream) -> Event:
        """Mark the end of what the stream was given so far."""

    def wait(self, stream: Stream, event: Event) -> None:
        """Let what the stream is given from now on begin only when the event is reached."""

    def capture(self, stream: Stream) -> AbstractContextManager[Callable[[], Graph]]:
        """Keep, instead of running, what the stream is given in this block: copies, launches, and nothing else.

        The block gives a function that answers with the graph when the block has ended.
        """

    def replay(self, graph: Graph, stream: Stream) -> None:
        """Run a graph, as if the stream were given its operations again."""

    def batch(self) -> AbstractContextManager[None]:
        """A block of many calls, each of which costs less within it. Between calls other libraries in the thread may
        find the device's context current; after the block they find what they had."""

    # What the host waits for, and when it is.

    def synchronize(self, event: Event) -> None:
        """Wait on the host until the event is reached."""

    def finish(self) -> None:
        """Wait on the host until every stream has done all that it was given."""

    def reached(self, event: Event) -> bool:
        """Whether the event is reached, without waiting; once True, the host may rely on it."""

    def seconds(self, first: Event, second: Event) -> float:
        """Between two events that are both reached, on the device's clock."""

    def now(self) -> float:
        """The host's clock, in seconds from some beginning."""

    def on_host(self, what: str, reads: Sequence[Span], function: Callable[..., Any]) -> Any:
        """Call a function on the host with an array (uint8, read only, in place) for each span of pinned memory that it
        reads; a simulation charges the host the time of reading them. Until the function returns nothing may overwrite
        these bytes, and afterwards it may not look at them."""

    def close(self) -> None:
        """Wait, and give back everything. Closing twice is harmless."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...
