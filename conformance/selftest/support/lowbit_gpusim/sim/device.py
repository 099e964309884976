"""`SimDevice`: a simulated device, for tests without a GPU and for computed instead of measured time.

It implements `lowbit_cuda.port.DevicePort`, with numpy for kernels. Beyond what a device does, it

- checks the order: a `RaceError` for any two conflicting operations that the program leaves unordered
  (`lowbit_gpusim.sim.order`);
- has a virtual clock that does not depend on this computer (`lowbit_gpusim.sim.clock`, `lowbit_gpusim.sim.machines`);
- runs operations at once, as late as possible, or in random order (`lowbit_gpusim.sim.schedule`);
- counts memory, and detects reads of unwritten bytes, use after free, and leaks (`lowbit_gpusim.sim.memory`);
- makes chosen calls fail (`lowbit_gpusim.sim.faults`).

A host that overwrites memory while it is being copied:

>>> import numpy as np
>>> device = SimDevice("t4", budget=4096)
>>> copies = device.stream("copies")
>>> host, slot = device.pin(1024, "expert"), device.allocate(1024, "slot 0")
>>> device.write(host.span(), np.arange(256, dtype=np.float32))
>>> device.copy(slot.span(), host.span(), copies)
>>> device.write(host.span(), np.zeros(256, np.float32))
Traceback (most recent call last):
lowbit_gpusim.sim.order.RaceError: race on bytes 0 to 1024 of expert: #3 write expert (the host) writes them, and #2 \
copy expert → slot 0 (stream copies) reads them and may not be done; missing: the host must wait for an event recorded \
in copies after #2 (it waits for nothing of copies)
>>> device.synchronize(device.record(copies))
>>> device.used, device.peak, device.log[1].kind
(1024, 1024, 'copy')
>>> device.close()
>>> device.leaks()
('expert', 'slot 0')

It must not be used from several threads at once.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import prod
from typing import Any, NoReturn, Self

import numpy as np
import numpy.typing as npt

from lowbit.arrays import Array
from lowbit.contract.checks import check_choice, check_integer
from lowbit.errors import ArgumentError
from lowbit_cuda import port
from lowbit_cuda.port import DeviceError, Kernel, Memory, Number, Span
from lowbit_gpusim.sim.clock import Task
from lowbit_gpusim.sim.faults import Failure, Faults
from lowbit_gpusim.sim.machines import Link, Machine, machine_of
from lowbit_gpusim.sim.memory import SMALL, UNWRITTEN, Allocation, Pool, allocation_of, check_owner, fits, pinned, view
from lowbit_gpusim.sim.operations import Compute, Operation, Touch, copy_operation, in_numpy, launch_operation, lost
from lowbit_gpusim.sim.order import FUNCTION, HOST, Access, Clock, join
from lowbit_gpusim.sim.report import Reported
from lowbit_gpusim.sim.schedule import schedule as schedule_named
from lowbit_gpusim.sim.streams import OnRace, OnUnwritten, SimEvent, SimGraph, SimStream, Streams

HOST_MEMORY = 1 << 40
"""The default limit of pinned bytes."""


class SimDevice(Reported):
    """A simulated device.

    Args:
        machine: a name in `lowbit_gpusim.sim.machines.MACHINES`, or a `Machine`.
        budget: bytes of device memory; by default all of the machine's.
        link: a link other than the machine's: a name in `LINKS`, or a `Link`.
        host_memory: the limit of pinned bytes.
        schedule: ``eager``, ``late`` or ``random``.
        seed: the seed of ``random``.
        backed: False gives memory of more than `small` bytes only a size (`lowbit_gpusim.sim.memory`).
        small: see `backed`.
        on_race: ``raise`` a `RaceError`, or ``list`` it in `races` and continue.
        on_unwritten: ``raise`` a `DeviceError` where unwritten bytes are read, or ``count`` it in `unwritten`.
        free_waits: False makes a `free` that must wait for a stream a `RaceError`, for programs that claim never to
            free memory in use.
        fail: the call that fails, if any.
        kernels: runs the kernels: in numpy, or their own C++ (`lowbit_gpusim.shim`).
        log_limit: the number of latest operations that the log keeps.

    Raises:
        ArgumentError: a preset does not exist, or a number is out of range.
    """

    def __init__(
        self,
        machine: str | Machine = "a100",
        *,
        budget: int | None = None,
        link: str | Link | None = None,
        host_memory: int = HOST_MEMORY,
        schedule: str = "eager",
        seed: int = 0,
        backed: bool = True,
        small: int = SMALL,
        on_race: OnRace = "raise",
        on_unwritten: OnUnwritten = "count",
        free_waits: bool = True,
        fail: Failure | None = None,
        kernels: Compute = in_numpy,
        log_limit: int = 100_000,
    ) -> None:
        budget = machine_of(machine, link).memory if budget is None else budget
        for name, number in (("budget", budget), ("host_memory", host_memory), ("small", small)):
            check_integer(name, number, 0)
        check_integer("log_limit", log_limit, 0)
        check_choice("on_race", on_race, ("raise", "list"))
        check_choice("on_unwritten", on_unwritten, ("raise", "count"))
        streams = Streams(schedule_named(schedule, seed), on_race, on_unwritten, log_limit)
        largest = None if backed else small
        pools = Pool(self, "device", budget, largest), Pool(self, "host", host_memory, largest)
        how = {"schedule": schedule, "seed": str(seed), "backed": str(backed)}
        super().__init__(machine_of(machine, link), streams, pools, Faults(fail), how)
        self._free_waits, self._kernels = free_waits, kernels

    # Memory.

    def allocate(self, nbytes: int, what: str) -> Memory:
        """See `DevicePort.allocate`."""
        return self._allocate("allocate", self._device, nbytes, what)

    def pin(self, nbytes: int, what: str) -> Memory:
        """See `DevicePort.pin`."""
        return self._allocate("pin", self._host, nbytes, what)

    def free(self, memory: Memory) -> None:
        """See `DevicePort.free`. A program must not use it to wait: it orders nothing else."""
        check_owner(self, memory)
        allocation: Allocation = memory.handle
        pool = self._device if memory.place == "device" else self._host
        if not pool.holds(allocation):
            return
        if self._streams.captures(memory):
            raise ArgumentError(f"memory for {memory.what}", "in use by a graph being captured", "unused memory")
        pending = self._streams.pending(allocation)
        if any(access.stream == FUNCTION for access in pending):
            raise ArgumentError(f"memory for {memory.what}", "being read by a function", "unused memory")
        if not self._free_waits:
            task = Task(0, "host", "free", memory.what)
            self._streams.check(Access(0, memory.nbytes, True, HOST, task), allocation)
        try:  # a kernel that is run only now may raise
            self._streams.host_waits("free", memory.what, [access.task for access in pending], {})
        finally:
            pool.free(allocation)

    def write(self, span: Span, data: Array) -> None:
        """See `DevicePort.write`."""
        if not isinstance(data, np.ndarray) or not data.flags.c_contiguous or data.dtype.hasobject:
            raise ArgumentError("data", f"a {type(data).__name__}", "a C-contiguous array of numbers")
        part = pinned(span).part(0, fits("data", data.nbytes, span))
        self._call("write", span.memory.what, host=True)
        self._on_host("write", Touch("span", part, False, True))
        there = view(part)
        if there is not None:
            there[:] = data.reshape(-1).view(np.uint8)

    def read(self, span: Span, dtype: npt.DTypeLike, shape: Sequence[int]) -> Array:
        """See `DevicePort.read`."""
        for size in shape:
            check_integer("shape", size, 0)
        part = pinned(span).part(0, fits("dtype and shape", prod(shape) * np.dtype(dtype).itemsize, span))
        answer = np.zeros(tuple(shape), dtype)
        self._call("read", span.memory.what, host=True)
        self._on_host("read", Touch("span", part, True, False))
        here = view(part)
        if here is not None:
            answer.reshape(-1).view(np.uint8)[:] = here
        return answer

    # Work in streams.

    def stream(self, name: str) -> SimStream:
        """See `DevicePort.stream`."""
        self._call("stream", name)
        return self._streams.add(name, self)

    def load(self, kernels: Iterable[Kernel]) -> None:
        """See `DevicePort.load`; the simulation only records which kernels were loaded."""
        names = [kernel.name for kernel in kernels]
        self._call("load", ", ".join(names), host=True)
        self._loaded.update(names)

    def copy(self, target: Span, source: Span, stream: port.Stream) -> None:
        """See `DevicePort.copy`."""
        for span in (target, source):
            allocation_of(self, span, self._device, self._host)
        operation = copy_operation(self.machine, target, source)
        own, failed = self._own(stream), self._call("copy", operation.what)
        self._give(own, [operation], failed)

    def launch(self, kernel: Kernel, arguments: Mapping[str, Span | Number], stream: port.Stream) -> None:
        """See `DevicePort.launch`."""
        operation = launch_operation(self.machine, kernel, arguments, self._kernels)
        for touch in operation.touches:
            allocation_of(self, touch.span, self._device, self._host)
        own, failed = self._own(stream), self._call("launch", kernel.name)
        if kernel.name not in self._loaded:
            self._loaded.add(kernel.name)
            self._loaded_late.append(kernel.name)
        self._give(own, [operation], failed)

    def record(self, stream: port.Stream) -> SimEvent:
        """See `DevicePort.record`."""
        own = self._own(stream, "record")
        self._call("record", own.name)
        return self._streams.mark(own)

    def wait(self, stream: port.Stream, event: port.Event) -> None:
        """See `DevicePort.wait`."""
        own, mark = self._own(stream, "wait"), self._event(event)
        self._call("wait", own.name)
        if mark.never and self._faults.happened:
            self._faults.report()
        self._streams.wait(own, mark)

    @contextmanager
    def capture(self, stream: port.Stream) -> Iterator[Callable[[], SimGraph]]:
        """See `DevicePort.capture`."""
        own, graphs = self._own(stream, "capture"), list[SimGraph]()
        self._call("capture", own.name)
        kept = own.captured = list[Operation]()

        def graph() -> SimGraph:
            if not graphs:
                raise ArgumentError("graph", "still being captured", "asked for after the block")
            return graphs[0]

        try:
            yield graph
        finally:
            own.captured = None
        self._call("end capture", own.name)
        if any(operation.failed for operation in kept):
            self._report()
        graphs.append(SimGraph(tuple(kept), self))

    def replay(self, graph: port.Graph, stream: port.Stream) -> None:
        """See `DevicePort.replay`."""
        own = self._own(stream, "replay")
        if not isinstance(graph, SimGraph) or graph.owner is not self:
            raise ArgumentError("graph", f"a {type(graph).__name__}", "one of this device")
        for operation in graph.operations:
            for touch in operation.touches:
                allocation_of(self, touch.span, self._device, self._host)
        self._give(own, graph.operations, self._call("replay", own.name))

    def batch(self) -> AbstractContextManager[None]:
        """See `DevicePort.batch`; here it has no effect."""
        return nullcontext()

    # Waiting and time.

    def synchronize(self, event: port.Event) -> None:
        """See `DevicePort.synchronize`."""
        mark = self._event(event)
        self._call("synchronize", mark.stream.name)
        if mark.never:
            self._report()
        self._streams.host_waits("synchronize", f"#{mark.task.number}", [mark.task], mark.clock)

    def finish(self) -> None:
        """See `DevicePort.finish`."""
        for stream in self._streams.all:
            self._own(stream, "finish")
        self._call("finish", "all streams")
        if self._streams.broken:
            self._report()
        self._finish()

    def reached(self, event: port.Event) -> bool:
        """See `DevicePort.reached`."""
        mark = self._event(event)
        self._call("reached", mark.stream.name)
        return self._streams.reached(mark)

    def seconds(self, first: port.Event, second: port.Event) -> float:
        """See `DevicePort.seconds`; virtual time.

        Raises:
            ArgumentError: the host has not waited for them.
        """
        ends = []
        for mark in (self._event(first), self._event(second)):
            if not self._streams.known(mark):
                raise ArgumentError("events", "not known to be reached", "those that the host has waited for")
            assert mark.task.end is not None
            ends.append(mark.task.end)
        return ends[1] - ends[0]

    def now(self) -> float:
        """See `DevicePort.now`; virtual time."""
        return self._streams.clock.now

    def on_host(self, what: str, reads: Sequence[Span], function: Callable[..., Any]) -> Any:
        """See `DevicePort.on_host`; memory without bytes reads as zeros, and the arrays contain `UNWRITTEN` after the
        function has returned."""
        touches = [Touch("reads", pinned(span), True, False) for span in reads]
        for touch in touches:
            allocation_of(self, touch.span, self._host)
        self._call("on_host", what, host=True)
        seconds = self.machine.host_seconds(sum(span.nbytes for span in reads))
        shown = [np.zeros(span.nbytes, np.uint8) if (data := view(span)) is None else data.copy() for span in reads]
        arrays = [array.view() for array in shown]
        for array in arrays:
            array.flags.writeable = False
        try:
            with self._streams.function(what, seconds, touches):
                return function(*arrays)
        finally:
            for array in shown:
                array.fill(UNWRITTEN)

    def close(self) -> None:
        """See `DevicePort.close`; `leaks` still lists memory that was not freed."""
        if self._closed:
            return
        self._leaks = self._in_use()
        try:
            self._finish()
        finally:
            for pool in (self._device, self._host):
                for allocation in list(pool.allocations.values()):
                    pool.free(allocation)
            self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # Shared by these methods.

    def _call(self, kind: str, what: str, *, host: bool = False, memory: tuple[int, int, int] = (0, 0, 0)) -> bool:
        """Count a call that may fail; calls to the device take the host's time."""
        if self._closed:
            raise DeviceError(f"{kind} of {what}: the device is closed")
        if not host:
            self._streams.clock.spend(self.machine.call)
        try:
            return self._faults.call(kind, what, memory)
        except DeviceError:
            self._streams.repair()
            raise

    def _report(self) -> NoReturn:
        """Report a failure now, because the program waits for work that was not done."""
        self._streams.repair()
        self._faults.report()

    def _allocate(self, kind: str, pool: Pool, nbytes: int, what: str) -> Memory:
        check_integer("nbytes", nbytes, 1)
        self._call(kind, what, memory=(nbytes, pool.used, pool.budget))
        return pool.allocate(nbytes, what)

    def _give(self, stream: SimStream, operations: Sequence[Operation], failed: bool) -> None:
        """Issue operations to a stream or record them in a graph; if they fail late, the stream does nothing after
        them."""
        if failed:
            operations = [lost(operation) for operation in operations]
        if stream.captured is not None:
            stream.captured += operations
            return
        for operation in operations:
            self._streams.give(stream, operation)
        stream.broken = stream.broken or failed

    def _on_host(self, kind: str, touch: Touch) -> None:
        allocation_of(self, touch.span, self._host)
        seconds = self.machine.host_seconds(touch.span.nbytes)
        self._streams.host(kind, touch.span.memory.what, seconds, (touch,))

    def _finish(self) -> None:
        known: Clock = {}
        for stream in self._streams.all:
            join(known, self._streams.order.clocks[stream.number])
        last = [stream.last for stream in self._streams.all if stream.last is not None]
        self._streams.host_waits("finish", "all streams", last, known)

    def _own(self, stream: port.Stream, call: str = "") -> SimStream:
        """The stream, checked to be of this device; `call` names a call that is not allowed during a capture."""
        if not isinstance(stream, SimStream) or stream.owner is not self:
            raise ArgumentError("stream", f"a {type(stream).__name__}", "one of this device")
        if call and stream.captured is not None:
            raise ArgumentError(f"stream {stream.name}", "capturing a graph", "only copies and launches until then")
        return stream

    def _event(self, event: port.Event) -> SimEvent:
        if not isinstance(event, SimEvent) or event.stream.owner is not self:
            raise ArgumentError("event", f"a {type(event).__name__}", "one of this device")
        return event


_implements: type[port.DevicePort] = SimDevice  # checked by mypy
