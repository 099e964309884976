"""Streams: each operation is checked, timed, run by the schedule and logged, in that order.

Checks depend only on what was requested, so they find the same errors under every schedule.

**A late failure** breaks its stream: the stream still accepts operations, which are checked and timed as usual, but
none is done and no event behind them is reached. A stream that waits for such an event breaks too. All streams work
again after the failure was reported; those events are still never reached.

**Unwritten bytes.** A copy or a kernel that reads some is detected (`Streams.unwritten`), considering all operations
issued before it. Extents that are declared as upper limits are exempt.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from lowbit_cuda.port import DeviceError, Memory
from lowbit_gpusim.sim.clock import Task, VirtualClock
from lowbit_gpusim.sim.memory import Allocation
from lowbit_gpusim.sim.operations import Operation, Touch
from lowbit_gpusim.sim.order import FUNCTION, HOST, Access, Clock, Order, RaceError
from lowbit_gpusim.sim.schedule import Schedule

OnRace = Literal["raise", "list"]
OnUnwritten = Literal["raise", "count"]


@dataclass(eq=False)
class SimStream:
    """A stream.

    Attributes:
        name: its name.
        number: its number, from 1; 0 is the host.
        owner: the device.
        last: its last task.
        captured: the operations of a capture in progress, or None.
        broken: whether it does nothing, because of a failure that was not reported yet.
    """

    name: str
    number: int
    owner: object
    last: Task | None = None
    captured: list[Operation] | None = None
    broken: bool = False


@dataclass(frozen=True, eq=False)
class SimEvent:
    """A mark in a stream, the clock of everything ordered before it, and whether it will never be reached."""

    task: Task
    clock: Clock
    stream: SimStream
    never: bool


@dataclass(frozen=True, eq=False)
class SimGraph:
    """Captured operations."""

    operations: tuple[Operation, ...]
    owner: object


@dataclass(eq=False)
class Streams:
    """All streams of a device and the host.

    Attributes:
        schedule: the order in which tasks are run.
        on_race: ``raise`` a `RaceError`, or ``list`` it and continue.
        on_unwritten: ``raise`` a `DeviceError` for a read of unwritten bytes, or ``count`` it.
        log_limit: the number of latest tasks that the log keeps.
        races: the races found, where they are listed.
        unwritten: reads of unwritten bytes, with their counts.
    """

    schedule: Schedule
    on_race: OnRace
    on_unwritten: OnUnwritten
    log_limit: int
    clock: VirtualClock = field(default_factory=VirtualClock)
    order: Order = field(default_factory=Order)
    all: list[SimStream] = field(default_factory=list)
    races: list[RaceError] = field(default_factory=list)
    unwritten: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.tasks: deque[Task] = deque(maxlen=self.log_limit)
        self._number = 0

    def add(self, name: str, owner: object) -> SimStream:
        """A new stream."""
        stream = SimStream(name, len(self.all) + 1, owner)
        self.all.append(stream)
        self.order.add(stream.number)
        return stream

    def give(self, stream: SimStream, operation: Operation) -> None:
        """Issue an operation to a stream.

        Raises:
            RaceError: it conflicts with an operation that it is not ordered after; it is not run.
        """
        task = self._task(stream.name, operation.kind, operation.what)
        task.engine, task.duration = operation.engine, operation.seconds
        task.run = None if stream.broken else operation.run
        self.order.give(stream.number, task.number)
        self._check(stream.number, task, operation.touches)
        self._enqueue(stream, task, ())

    def mark(self, stream: SimStream) -> SimEvent:
        """An event that is reached when a stream has finished its work so far."""
        task = self._task(stream.name, "record", "event")
        clock = dict(self.order.give(stream.number, task.number))
        self._enqueue(stream, task, ())
        return SimEvent(task, clock, stream, stream.broken)

    def wait(self, stream: SimStream, event: SimEvent) -> None:
        """Make a stream wait for an event."""
        task = self._task(stream.name, "wait", f"for #{event.task.number} of {event.stream.name}")
        self.order.wait(stream.number, event.clock)
        self.order.give(stream.number, task.number)
        self._enqueue(stream, task, (event.task,))
        stream.broken = stream.broken or event.never

    @property
    def broken(self) -> bool:
        """Whether any stream is broken."""
        return any(stream.broken for stream in self.all)

    def repair(self) -> None:
        """Let all streams work again, after the failure was reported."""
        for stream in self.all:
            stream.broken = False

    # The host.

    def host(self, kind: str, what: str, seconds: float, touches: Iterable[Touch]) -> Task:
        """Do work of the host, now.

        Raises:
            RaceError: it conflicts with work of a stream that may not be done.
        """
        task = self._task("host", kind, what)
        self._check(HOST, task, touches)
        self._spend(task, seconds)
        return task

    @contextmanager
    def function(self, what: str, seconds: float, touches: Sequence[Touch]) -> Iterator[None]:
        """Run a function of the host in this block; nothing may overwrite what it reads before the block ends.

        Raises:
            RaceError: it conflicts with work of a stream that may not be done.
        """
        task = self.host("on_host", what, seconds, touches)
        reading = [(touch.span.memory.handle, self._access(FUNCTION, task, touch)) for touch in touches]
        for allocation, access in reading:
            allocation.accesses.append(access)
        try:
            yield
        finally:
            for allocation, access in reading:
                allocation.accesses = [other for other in allocation.accesses if other is not access]

    def host_waits(self, kind: str, what: str, last: Iterable[Task], clock: Clock) -> None:
        """Make the host wait for tasks; afterwards everything in `clock` is ordered before its work."""
        task = self._task("host", kind, what)
        task.given = task.begin = self.clock.now
        for other in last:
            self.clock.wait(other)
            self.schedule.need(other)
        task.end, task.done = self.clock.now, True
        self.tasks.append(task)
        self.order.wait(HOST, clock)

    def reached(self, event: SimEvent) -> bool:
        """Whether an event is reached by the host's time; the host may rely on True."""
        if event.never or not self.clock.reached(event.task):
            return False
        self.schedule.need(event.task)
        self.order.wait(HOST, event.clock)
        return True

    def known(self, event: SimEvent) -> bool:
        """Whether the host knows that an event is reached."""
        return not event.never and self.order.waited(HOST, event.stream.number) >= event.task.number

    def pending(self, allocation: Allocation) -> list[Access]:
        """The accesses to an allocation that the host has not waited for."""
        return self.order.pending(allocation.accesses)

    def captures(self, memory: Memory) -> bool:
        """Whether a graph that is being captured uses a memory."""
        kept = (operation for stream in self.all for operation in stream.captured or ())
        return any(touch.span.memory is memory for operation in kept for touch in operation.touches)

    # Shared by these methods.

    def _task(self, stream: str, kind: str, what: str) -> Task:
        self._number += 1
        return Task(self._number, stream, kind, what)

    def _enqueue(self, stream: SimStream, task: Task, events: tuple[Task, ...]) -> None:
        task.after = events if stream.last is None else (stream.last, *events)
        stream.last = task
        self.tasks.append(task)
        self.clock.add(task)
        self.schedule.add(task)

    def _spend(self, task: Task, seconds: float) -> None:
        task.given = task.begin = self.clock.now
        self.clock.spend(seconds)
        task.end, task.done = self.clock.now, True
        self.tasks.append(task)

    def _check(self, stream: int, task: Task, touches: Iterable[Touch]) -> None:
        """Check the order of all accesses, then reads of unwritten bytes; then record the accesses."""
        accesses = [(self._access(stream, task, touch), touch) for touch in touches]
        for access, touch in accesses:
            self.check(access, touch.span.memory.handle)
        for access, touch in accesses:
            allocation: Allocation = touch.span.memory.handle
            missing = allocation.written.missing(access.begin, access.end) if touch.reads and touch.exact else None
            if missing is not None:
                self._notice(task, allocation, missing)
        for access, touch in accesses:
            allocation = touch.span.memory.handle
            allocation.accesses = self.order.remember(allocation.accesses, access)
            if touch.writes:
                allocation.written.add(access.begin, access.end)

    def check(self, access: Access, allocation: Allocation) -> None:
        """Raise or list a race with an earlier access."""
        old = self.order.check(allocation.accesses, access)
        if old is None:
            return
        race = RaceError(old, access, allocation.memory.what, self.order.waited(access.stream, old.stream))
        if self.on_race == "raise":
            raise race
        self.races.append(race)

    def _notice(self, task: Task, allocation: Allocation, at: int) -> None:
        if self.on_unwritten == "raise":
            raise DeviceError(f"{task} reads byte {at} of {allocation.memory.what}, which nobody wrote")
        self.unwritten[f"{task.kind} {task.what} reads what nobody wrote of {allocation.memory.what}"] += 1

    @staticmethod
    def _access(stream: int, task: Task, touch: Touch) -> Access:
        span = touch.span
        return Access(span.offset, span.offset + span.nbytes, touch.writes, stream, task)
