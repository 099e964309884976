"""Work for the tests of executors, in a module that other processes can import."""

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Generic

from lowbit.errors import ArgumentError
from lowbit.system.tasks import Item, Result, Work


def square(item: int, threads: int) -> int:
    return item * item


def refuse_three(item: int, threads: int) -> int:
    if item == 3:
        raise ArgumentError("item", item, "another one")
    return item


def threads_of(item: int, threads: int) -> int:
    return threads


def variables(item: int, threads: int) -> dict[str, str]:
    return dict(os.environ)


@dataclass(frozen=True)
class Killing:
    """Work that kills its own process.

    Attributes:
        folder: has a file for each time.
        items: on which.
        times: so often in all.
    """

    folder: Path
    items: tuple[int, ...]
    times: int

    def __call__(self, item: int, threads: int) -> int:
        for number in range(self.times) if item in self.items else ():
            with suppress(FileExistsError):  # of two processes at once only one makes it
                (self.folder / str(number)).touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
        return item * item


@dataclass(frozen=True)
class KilledOnce(Generic[Item, Result]):
    """Other work, whose process is killed when it begins an item for the first time.

    Attributes:
        work: the other work.
        folder: gets a file then.
        item: which one, as a message names it.
    """

    work: Work[Item, Result]
    folder: Path
    item: str

    def __call__(self, item: Item, threads: int) -> Result:
        if str(item) == self.item and not any(self.folder.iterdir()):
            (self.folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.work(item, threads)


@dataclass(frozen=True)
class Noting:
    """Work that notes each item that it begins."""

    folder: Path

    def __call__(self, item: int, threads: int) -> int:
        (self.folder / str(item)).touch()
        return item


@dataclass(frozen=True)
class Waiting:
    """Work that notes its process and waits for ever."""

    folder: Path

    def __call__(self, item: int, threads: int) -> int:
        (self.folder / str(os.getpid())).touch()
        while True:
            time.sleep(1)
