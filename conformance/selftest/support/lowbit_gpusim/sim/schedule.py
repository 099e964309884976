"""Schedules: the order in which the simulation actually runs operations.

A correct program gives the same results in every order that its streams and events allow, so tests use several:

``eager``
    each operation at once, when it is issued: an infinitely fast device.
``late``
    nothing until the host waits, and then only what it waits for: an infinitely slow device.
``random``
    after each call some of the operations that may run, in random order, the same for the same seed.

Operations are run whole, one after another. Two that could run at the same moment and must not are found by
`lowbit_gpusim.sim.order`, not by interleaving their bytes.
"""

import random
from collections.abc import Callable

from lowbit.contract.checks import check_choice
from lowbit_gpusim.sim.clock import Task

SCHEDULES = ("eager", "late", "random")


def run(task: Task) -> None:
    """Run a task; it counts as done even if it raises, so that nothing runs twice."""
    action: Callable[[], None] | None = task.run
    task.run, task.after, task.done = None, (), True
    if action is not None:
        action()


class Schedule:
    """``eager``."""

    def add(self, task: Task) -> None:
        """A task was issued."""
        run(task)

    def need(self, task: Task) -> None:
        """Make sure that a task is done, because the host relies on it."""


class Late(Schedule):
    """``late``."""

    def add(self, task: Task) -> None:
        pass

    def need(self, task: Task) -> None:
        todo = [task]
        while todo:
            task = todo[-1]
            first = [before for before in task.after if not before.done]
            if first and not task.done:
                todo.extend(reversed(first))
            else:
                todo.pop()
                if not task.done:
                    run(task)


class Random(Schedule):
    """``random``."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._pending: list[Task] = []

    def add(self, task: Task) -> None:
        self._pending.append(task)
        while self._pending and self._random.random() < 0.6:  # on average a little faster than tasks are added
            self._run_one()

    def need(self, task: Task) -> None:
        while not task.done:
            self._run_one()

    def _run_one(self) -> None:
        able = [at for at, task in enumerate(self._pending) if all(before.done for before in task.after)]
        run(self._pending.pop(self._random.choice(able)))


def schedule(name: str, seed: int) -> Schedule:
    """The schedule of that name.

    Raises:
        ArgumentError: there is no such schedule.
    """
    check_choice("schedule", name, SCHEDULES)
    return Schedule() if name == "eager" else Late() if name == "late" else Random(seed)
