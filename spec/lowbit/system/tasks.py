"""Tasks: a long job in parts that need nothing of one another, on several processes or machines.

The parts of a job are *items*, and one function does the *work* on each of them. An executor calls it elsewhere and
gives the results as they come, in any order. The caller keeps a result, on disk for example, and asks for the next one.

- **What is lost is done again.** If a process or machine ends, so do the tasks on it; they begin anew on another. A
  task that is lost again and again while nothing else finishes ends the job.
- **A bounded number is under way**, so a caller that is slow to keep results does not let them pile up in memory.
- **An error of a task is an error of the job.** No further task is begun, and what was kept stays.

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
"""Of an item and a number of threads; it is sent to other processes, so it is a function of a module or the like."""

Results = Generator[tuple[Item, Result], None, None]
"""Items with their results; to close it begins no further task."""

MOST_LOSSES = 3
"""Processes or machines in a row that are lost before anything finishes."""


class Executor(ABC):
    """Where tasks run."""

    @abstractmethod
    def run(self, work: Work[Item, Result], items: Sequence[Item]) -> Results[Item, Result]:
        """Each item with the result of the work on it, as they finish.

        Args:
            work: what is done; it can be pickled.
            items: all different; they can be pickled.

        Raises:
            UnavailableError: processes or machines are lost again and again, or there are none.
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
        left, losses = list(items), 0
        while left:
            done = []
            try:
                for item, result in self._until_lost(work, left):
                    done.append(item)
                    yield item, result
            except BrokenProcessPool:
                losses = 1 if done else losses + 1
            left = [item for item in left if item not in done]
            if left and losses >= MOST_LOSSES:
                raise lost_too_often("a process", left[0])

    def _until_lost(self, work: Work[Item, Result], items: Sequence[Item]) -> Results[Item, Result]:
        threads = max(1, usable_processors() // self._processes)
        waiting, running = deque(items), dict[Future[Result], Item]()
        environment = (worker_environment(threads),)
        pool = ProcessPoolExecutor(self._processes, get_context("spawn"), _begun, environment)
        try:
            while waiting or running:
                while waiting and len(running) <= self._processes:  # one more, so that no process waits for the caller
                    item = waiting.popleft()
                    running[pool.submit(work, item, threads)] = item
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(future), future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def check_there(path: Path) -> None:
    """Refuse work on files that the machine of a task does not have.

    Raises:
        UnavailableError: nothing is there.
    """
    if not path.exists():
        reason = f"nothing is there on machine {socket.gethostname()}, which has a part of the work"
        raise UnavailableError(quoted(str(path)), reason, "put it under the same path on every machine")


def lost_too_often(what: str, item: object) -> UnavailableError:
    """The error of a job whose tasks are lost.

    Args:
        what: is lost: a process or a machine.
        item: that was worked on.
    """
    reason = f"{what} that works on part {item} ended {MOST_LOSSES} times without a result, perhaps for lack of memory"
    return UnavailableError("the result", reason, "use fewer processes at a time")


def _begun(environment: dict[str, str]) -> None:
    """In a process of its own: end with the process that began it, and at an interrupt without a traceback."""
    os.environ |= environment
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    if (parent := parent_process()) is not None:
        parent.join()
        os._exit(1)
