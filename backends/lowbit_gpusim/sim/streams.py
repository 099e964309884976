"""What streams were given: each operation is checked, timed, run by the schedule, and logged, in that order.

Checks look only at what was asked for, so they find the same under every schedule.

**What fails late** breaks its stream: from then on the stream is still given operations, and they are checked and timed
like others, but none is done and no event behind them is reached. A stream that waits for such an event breaks too. All
are whole again when the program has been told; the events stay as they are.

**Bytes that nobody wrote.** A copy or a kernel that reads some is noticed (`Streams.unwritten`), by what was written by
the operations before it. An extent that is declared as the most that may be read is not held to this.
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
        name: as it was given.
        number: its own, from 1; 0 is the host.
        owner: the device.
        last: the last that it was given.
        captured: where operations are kept during a capture, else None.
        broken: whether it does nothing, since something failed of which the program has not been told.
    """

    name: str
    number: int
    owner: object
    last: Task | None = None
    captured: list[Operation] | None = None
    broken: bool = False


@dataclass(frozen=True, eq=False)
class SimEvent:
    """A place in a stream, all that is ordered before it, and whether the stream will never come to it."""

    task: Task
    clock: Clock
    stream: SimStream
    never: bool


@dataclass(frozen=True, eq=False)
class SimGraph:
    """Operations that were captured."""

    operations: tuple[Operation, ...]
    owner: object


@dataclass(eq=False)
class Streams:
    """All streams of a device and the host.

    Attributes:
        schedule: in which order things are run.
        on_race: ``raise`` a `RaceError`, or ``list`` it and go on.
        on_unwritten: ``raise`` a `DeviceError` for a read of bytes that nobody wrote, or ``count`` it.
        log_limit: how many of the latest tasks the log keeps.
        races: that were found, where they are listed.
        unwritten: reads of bytes that nobody wrote, with how often.
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
        """A stream is given an operation.

        Raises:
            RaceError: it is not ordered after one that it conflicts with; it is not run then.
        """
        task = self._task(stream.name, operation.kind, operation.what)
        task.engine, task.duration = operation.engine, operation.seconds
        task.run = None if stream.broken else operation.run
        self.order.give(stream.number, task.number)
        self._check(stream.number, task, operation.touches)
        self._enqueue(stream, task, ())

    def mark(self, stream: SimStream) -> SimEvent:
        """An event that is reached when a stream has done what it was given so far."""
        task = self._task(stream.name, "record", "event")
        clock = dict(self.order.give(stream.number, task.number))
        self._enqueue(stream, task, ())
        return SimEvent(task, clock, stream, stream.broken)

    def wait(self, stream: SimStream, event: SimEvent) -> None:
        """A stream waits for an event."""
        task = self._task(stream.name, "wait", f"for #{event.task.number} of {event.stream.name}")
        self.order.wait(stream.number, event.clock)
        self.order.give(stream.number, task.number)
        self._enqueue(stream, task, (event.task,))
        stream.broken = stream.broken or event.never

    @property
    def broken(self) -> bool:
        """Whether any stream is."""
        return any(stream.broken for stream in self.all)

    def mend(self) -> None:
        """The program has been told what failed."""
        for stream in self.all:
            stream.broken = False

    # The host.

    def host(self, kind: str, what: str, seconds: float, touches: Iterable[Touch]) -> Task:
        """The host does something itself, now.

        Raises:
            RaceError: a stream may not have done what conflicts with it.
        """
        task = self._task("host", kind, what)
        self._check(HOST, task, touches)
        self._spend(task, seconds)
        return task

    @contextmanager
    def function(self, what: str, seconds: float, touches: Sequence[Touch]) -> Iterator[None]:
        """The host runs a function in this block; what it touches may not be overwritten before it ends.

        Raises:
            RaceError: a stream may not have done what conflicts with it.
        """
        task = self.host("on_host", what, seconds, touches)
        reading = [(touch.span.memory.handle, self._access(FUNCTION, task, touch)) for touch in touches]
        for block, access in reading:
            block.accesses.append(access)
        try:
            yield
        finally:
            for block, access in reading:
                block.accesses = [other for other in block.accesses if other is not access]

    def host_waits(self, kind: str, what: str, last: Iterable[Task], clock: Clock) -> None:
        """The host waits for tasks, and knows afterwards as done what `clock` says."""
        task = self._task("host", kind, what)
        task.given = task.begin = self.clock.now
        for other in last:
            self.clock.wait(other)
            self.schedule.need(other)
        task.end, task.done = self.clock.now, True
        self.tasks.append(task)
        self.order.wait(HOST, clock)

    def reached(self, event: SimEvent) -> bool:
        """Whether an event is reached by the host's time; the host may rely on it if so."""
        if event.never or not self.clock.reached(event.task):
            return False
        self.schedule.need(event.task)
        self.order.wait(HOST, event.clock)
        return True

    def known(self, event: SimEvent) -> bool:
        """Whether the host knows an event as reached."""
        return not event.never and self.order.waited(HOST, event.stream.number) >= event.task.number

    def pending(self, block: Allocation) -> list[Access]:
        """What was given to streams with a block and is not known as done."""
        return self.order.pending(block.accesses)

    def captures(self, memory: Memory) -> bool:
        """Whether a graph in the making uses a memory."""
        kept = (operation for stream in self.all for operation in stream.captured or ())
        return any(touch.span.memory is memory for operation in kept for touch in operation.touches)

    # What they are made of.

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
        """Order first, for all that is touched; then whether it was written; and it is remembered."""
        accesses = [(self._access(stream, task, touch), touch) for touch in touches]
        for access, touch in accesses:
            self.check(access, touch.span.memory.handle)
        for access, touch in accesses:
            block: Allocation = touch.span.memory.handle
            missing = block.written.missing(access.begin, access.end) if touch.reads and touch.exact else None
            if missing is not None:
                self._notice(task, block, missing)
        for access, touch in accesses:
            block = touch.span.memory.handle
            block.accesses = self.order.remember(block.accesses, access)
            if touch.writes:
                block.written.add(access.begin, access.end)

    def check(self, access: Access, block: Allocation) -> None:
        """Refuse, or list, an access that races with an earlier one."""
        old = self.order.check(block.accesses, access)
        if old is None:
            return
        race = RaceError(old, access, block.memory.what, self.order.waited(access.stream, old.stream))
        if self.on_race == "raise":
            raise race
        self.races.append(race)

    def _notice(self, task: Task, block: Allocation, at: int) -> None:
        if self.on_unwritten == "raise":
            raise DeviceError(f"{task} reads byte {at} of {block.memory.what}, which nobody wrote")
        self.unwritten[f"{task.kind} {task.what} reads what nobody wrote of {block.memory.what}"] += 1

    @staticmethod
    def _access(stream: int, task: Task, touch: Touch) -> Access:
        span = touch.span
        return Access(span.offset, span.offset + span.nbytes, touch.writes, stream, task)
