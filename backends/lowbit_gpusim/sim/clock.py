"""Virtual time: when each operation would begin and end on a machine of the model.

**Engines.** The device has one engine that copies from the host, one that copies to it, and one for kernels and copies
on the device; an engine does one operation at a time. Kernels of different streams therefore never overlap: true of
kernels that fill a device, and a limit of the model for others.

**When an operation begins.** It is *ready* when the host has given it to the device, the operation before it in its
stream has ended, and the events have been reached that its stream waits for. An engine that is free takes the
operation that was ready first, and of two the one that was given first; what it has begun it ends. Events and waits
take no time and no engine.

**The host's clock** moves by what the host does itself, and when it waits: to the end of what it waits for.

Begin and end follow from the order of calls alone. In which order the simulation really runs things
(`lowbit_gpusim.sim.schedule`) changes nothing. How long a thing takes is settled by `lowbit_gpusim.sim.machines`.

Everything that begins by the host's time is settled, since whatever the host asks for later is ready later; what would
begin afterwards is left open, because something else may come first.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

Engine = Literal["to device", "to host", "compute"]
ENGINES: tuple[Engine, ...] = ("to device", "to host", "compute")


@dataclass(eq=False, slots=True)
class Task:
    """One operation, as order, time and schedule see it.

    Attributes:
        number: from 1, in the order in which the host gave or did them.
        stream: its name; ``host`` for what the host does.
        kind: ``copy``, ``launch``, ``record``, ``wait``, ``write``, ``read``, ``on_host``, ``free`` or ``synchronize``.
        what: of which memory, or the kernel's name.
        engine: which does it, or None.
        duration: seconds.
        run: what it really does; None when it has been done, or where there is nothing to do.
        after: what must be done before it and has not been.
        given: when the host gave or began it.
        ready: not before this second.
        begin, end: seconds, None until settled.
        done: whether it has really been run.
        unsettled, dependents: for the clock.
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
        """The host does something itself."""
        self.now += seconds
        self._settle_until(self.now)

    def add(self, task: Task) -> None:
        """The host gives a task to the device, now."""
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
        """The host waits until a task has ended."""
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
        """Settle a task, and those that need no engine and were waiting for it, and so on."""
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
