"""Tasks of quantising that wait: the blocks from the third on, until a file tells them to go on."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowbit.rewriting.apart import Task, Written
from lowbit.rewriting.writing import Part


@dataclass(frozen=True)
class Slow:
    """A task that notes each block that it begins, and waits.

    Attributes:
        gate: the folder of the notes, and of the file ``open``.
        task: what it does then.
    """

    gate: Path
    task: Task

    @classmethod
    def of(cls, gate: Path) -> Callable[..., "Slow"]:
        """In place of `Task`."""

        def made(*arguments: Any) -> Slow:
            return cls(gate, Task(*arguments))

        return made

    def __call__(self, number: int, threads: int) -> Part | Written:
        if number >= 2:
            (self.gate / f"waiting-{number}-{os.getpid()}").touch()
            while not (self.gate / "open").exists():
                time.sleep(0.05)
        return self.task(number, threads)
