"""Schedules: in which order the simulation really runs what streams were given.

A right program gives the same results in every order that its streams and events allow, so a test runs it in several:

``eager``
    each operation at once, as it is given: the device is infinitely fast.
``late``
    nothing until the host waits, and then only what it must: the device is infinitely slow, and what was not waited
    for has not happened.
``random``
    after each call some of what may run, in any order: the same order for the same seed.

Operations are run whole, one after another. Two that could run at the same moment and must not are found by
`lowbit_gpusim.sim.order`, not by interleaving their bytes.
"""

import random
from collections.abc import Callable

from lowbit.contract.checks import check_choice
from lowbit_gpusim.sim.clock import Task

SCHEDULES = ("eager", "late", "random")


def run(task: Task) -> None:
    """Do what a task does; it counts as done even where that fails, so that nothing is done twice."""
    action: Callable[[], None] | None = task.run
    task.run, task.after, task.done = None, (), True
    if action is not None:
        action()


class Schedule:
    """``eager``."""

    def add(self, task: Task) -> None:
        """A task was given to a stream."""
        run(task)

    def need(self, task: Task) -> None:
        """The host relies on a task from now on: it must be done."""


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
        while self._pending and self._random.random() < 0.6:  # a little faster than it is given more
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
        ArgumentError: there is none.
    """
    check_choice("schedule", name, SCHEDULES)
    return Schedule() if name == "eager" else Late() if name == "late" else Random(seed)
