"""Tasks that wait: those of all items but the first two, until a file tells them to go on."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic

from lowbit.system.on_ray import OnRay
from lowbit.system.tasks import Item, Result, Results, Work


@dataclass(frozen=True)
class Slow(Generic[Item, Result]):
    """Work that notes each item that it begins, and waits.

    Attributes:
        gate: the folder of the notes, and of the file ``open``.
        work: what it does then.
        free: the items for which it does not wait.
    """

    gate: Path
    work: Work[Item, Result]
    free: tuple[Item, ...]

    def __call__(self, item: Item, threads: int) -> Result:
        if item not in self.free:
            (self.gate / f"waiting-{item}-{os.getpid()}").touch()
            while not (self.gate / "open").exists():
                time.sleep(0.05)
        return self.work(item, threads)


def slow_down(gate: Path) -> None:
    """Make all work on clusters that this process begins wait."""
    run = OnRay.run

    def slowly(self: OnRay, work: Work[Item, Result], items: Sequence[Item]) -> Results[Item, Result]:
        return run(self, Slow(gate, work, tuple(items[:2])), items)

    OnRay.run = slowly  # type: ignore[method-assign]  # of a process that does nothing else
