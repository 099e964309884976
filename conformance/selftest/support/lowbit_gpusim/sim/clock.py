"""Virtual time: when each operation begins and ends on a modelled machine.

**Engines.** The device has one engine for copies from the host, one for copies to the host, and one for kernels and for
copies within the device. An engine does one operation at a time. Kernels of different streams therefore never overlap,
which is true of kernels that fill a device, and a limit of the model for others.

**When an operation begins.** It is *ready* when the host has issued it, the operation before it in its stream has
ended, and the events that its stream waits for have been reached. A free engine takes the operation that was ready
first; ties go to the one that was issued first. It completes what it has begun. Events and waits take no time and no
engine.

**The host's clock** advances by the host's own work and by waiting, to the end of what it waits for.

Begin and end depend only on the order of calls. The order in which the simulation actually runs the operations
(`lowbit_gpusim.sim.schedule`) changes nothing. Durations come from `lowbit_gpusim.sim.machines`.

Every operation that begins by the host's time is settled, because later requests are ready later. Operations that would
begin afterwards stay open, because something else may come first.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

Engine = Literal["to device", "to host", "compute"]
ENGINES: tuple[Engine, ...] = ("to device", "to host", "compute")


@dataclass(eq=False, slots=True)
class Task:
    """One operation: its order, its time and its state.

    Attributes:
        number: from 1, in the order in which the host issued or did them.
        stream: the name of its stream; ``host`` for operations of the host.
        kind: ``copy``, ``launch``, ``record``, ``wait``, ``write``, ``read``, ``on_host``, ``free`` or ``synchronize``.
        what: the memory, or the kernel's name.
        engine: the engine that does it, or None.
        duration: seconds.
        run: the action; None after it was done, or where there is none.
        after: tasks that must be done first and have not been.
        given: the time at which the host issued or began it.
        ready: the earliest time at which it can begin.
        begin, end: seconds, None until settled.
        done: whether the action was run.
        unsettled, dependents: private to the clock.
    """

    number: int
    stream: str
    kind: str
    what: str
    engine: Engine | None = None
    duration: float = 0.0
    run: Callable[[], None] | None = None
    after: tuple["Task", ...] = ()
    given: float = 0.0
    ready: float = 0.0
    begin: float | None = None
    end: float | None = None
    done: bool = False
    unsettled: int = 0
    dependents: list["Task"] = field(default_factory=list)

    def __str__(self) -> str:
        where = "the host" if self.stream == "host" else f"stream {self.stream}"
        return f"#{self.number} {self.kind} {self.what} ({where})"


class VirtualClock:
    """The clock of the host and of the engines.

    Attributes:
        now: the host's time, seconds.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._free = dict.fromkeys(ENGINES, 0.0)
        self._ready: dict[Engine, list[tuple[float, int, Task]]] = {engine: [] for engine in ENGINES}

    def spend(self, seconds: float) -> None:
        """Advance the host's time by work of its own."""
        self.now += seconds
        self._settle_until(self.now)

    def add(self, task: Task) -> None:
        """Issue a task to the device at the host's time."""
        task.given = task.ready = self.now
        for before in task.after:
            if before.end is None:
                before.dependents.append(task)
                task.unsettled += 1
            else:
                task.ready = max(task.ready, before.end)
        if not task.unsettled:
            self._make_ready(task)

    def wait(self, task: Task) -> None:
        """Advance the host's time to the end of a task."""
        while task.end is None:
            self._settle_next()
        self.now = max(self.now, task.end)
        self._settle_until(self.now)

    def reached(self, task: Task) -> bool:
        """Whether a task has ended by the host's time."""
        return task.end is not None and task.end <= self.now

    # Settling, in the order of time.

    def _make_ready(self, task: Task) -> None:
        if task.engine is None:
            self._settle(task, task.ready)
        else:
            heapq.heappush(self._ready[task.engine], (task.ready, task.number, task))

    def _next(self) -> tuple[float, int, Engine] | None:
        """When the next task begins, its number, and on which engine."""
        starts = [
            (max(self._free[engine], queue[0][0]), queue[0][1], engine)
            for engine, queue in self._ready.items()
            if queue
        ]
        return min(starts, default=None)

    def _settle_next(self) -> None:
        found = self._next()
        assert found is not None, "a task can only wait for tasks that were given before it"
        begin, _, engine = found
        task = heapq.heappop(self._ready[engine])[2]
        self._settle(task, begin)
        assert task.end is not None
        self._free[engine] = task.end

    def _settle_until(self, time: float) -> None:
        while (found := self._next()) is not None and found[0] <= time:
            self._settle_next()

    def _settle(self, task: Task, begin: float) -> None:
        """Settle a task and, transitively, the dependents that need no engine."""
        open_tasks = [(task, begin)]
        while open_tasks:
            task, begin = open_tasks.pop()
            task.begin, task.end = begin, begin + task.duration
            dependents, task.dependents = task.dependents, []
            for dependent in dependents:
                dependent.ready = max(dependent.ready, task.end)
                dependent.unsettled -= 1
                if dependent.unsettled:
                    continue
                if dependent.engine is None:
                    open_tasks.append((dependent, dependent.ready))
                else:
                    self._make_ready(dependent)
