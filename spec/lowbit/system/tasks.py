"""Tasks: a long job in parts that run in parallel, on several processes or machines.

The parts of a job are *items*, and one function does the *work* on each of them. An executor calls it elsewhere and
yields the results as they arrive, in any order. The caller stores a result, for example on disk, and requests the next
one.

- **What is lost is repeated.** If a process or machine ends, so do its tasks; they start again on another. A task that
  is lost repeatedly while nothing else finishes ends the job.
- **A bounded number is under way**, so a caller that is slow to keep results does not let them pile up in memory.
- **An error of a task is an error of the job.** No further task starts, and stored results remain.

The work gets an item and the number of threads that it may use; its result must depend on the item alone.
"""

import os
import signal
import socket
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import TypeVar

from lowbit.errors import UnavailableError
from lowbit.system.threads import usable_processors, worker_environment
from lowbit.text import quoted

Item = TypeVar("Item")
Result = TypeVar("Result")
Work = Callable[[Item, int], Result]
"""Takes an item and a number of threads. It is sent to other processes, so it must be picklable, such as a function of
a module."""

Results = Generator[tuple[Item, Result], None, None]
"""Items with their results; closing it starts no further task."""

MOST_LOSSES = 3
"""The most consecutive losses of processes or machines without a finished task."""


class Executor(ABC):
    """An executor of tasks."""

    @abstractmethod
    def run(self, work: Work[Item, Result], items: Sequence[Item]) -> Results[Item, Result]:
        """Each item with its result, as they finish.

        Args:
            work: the function to call; picklable.
            items: picklable. Items of a ``deque`` are removed as they start, and a caller that has a result may append
                further items.

        Raises:
            UnavailableError: processes or machines fail repeatedly, or there are none.
            Exception: whatever the work raises.
        """


class Processes(Executor):
    """Tasks in other processes of this machine.

    Args:
        processes: how many, at least 1; each task may use an equal part of the usable processors.
    """

    def __init__(self, processes: int) -> None:
        self._processes = processes

    def run(self, work: Work[Item, Result], items: Sequence[Item]) -> Results[Item, Result]:
        waiting, losses = queue_of(items), 0
        while waiting:
            running = dict[Future[Result], Item]()
            try:
                for item, result in self._until_lost(work, waiting, running):
                    losses = 0
                    yield item, result
            except BrokenProcessPool as lost:
                losses += 1
                waiting.extendleft(reversed(running.values()))
                if losses >= MOST_LOSSES:
                    raise lost_too_often("a process", waiting[0]) from lost

    def _until_lost(
        self, work: Work[Item, Result], waiting: deque[Item], running: dict[Future[Result], Item]
    ) -> Results[Item, Result]:
        """Results, until all are complete or a process is lost; the items left in `running` then have none."""
        threads = max(1, usable_processors() // self._processes)
        environment = (worker_environment(threads),)
        pool = ProcessPoolExecutor(self._processes, get_context("spawn"), _begun, environment)
        try:
            while waiting or running:
                while waiting and len(running) <= self._processes:  # one extra, so that no process waits for the caller
                    running[pool.submit(work, waiting[0], threads)] = waiting[0]
                    waiting.popleft()
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    result = future.result()
                    yield running.pop(future), result
        finally:
            # An idle pool ends in milliseconds. If Python exits meanwhile, its exit handler may write to a pipe that
            # the pool has just closed, and print a traceback. Tasks that still run may take long.
            pool.shutdown(wait=all(future.done() for future in running), cancel_futures=True)


def queue_of(items: Sequence[Item]) -> deque[Item]:
    """The queue that a caller gave, or one of the items."""
    return items if isinstance(items, deque) else deque(items)


def check_there(path: Path) -> None:
    """Refuse work on files that the machine of a task does not have.

    Raises:
        UnavailableError: nothing is there.
    """
    if not path.exists():
        reason = f"nothing is there on machine {socket.gethostname()}, which has a part of the work"
        raise UnavailableError(quoted(str(path)), reason, "put it under the same path on every machine")


def lost_too_often(what: str, item: object) -> UnavailableError:
    """The error for a job whose tasks are lost.

    Args:
        what: a process or a machine.
        item: the current item.
    """
    reason = f"{what} that works on part {item} ended {MOST_LOSSES} times without a result, perhaps for lack of memory"
    return UnavailableError("the result", reason, "use fewer processes at a time")


def _begun(environment: dict[str, str]) -> None:
    """Set up a worker process: it ends with its parent, and without a traceback at an interrupt."""
    os.environ |= environment
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    if (parent := parent_process()) is not None:
        parent.join()
        os._exit(1)
