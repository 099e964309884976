"""Tasks that wait: those of all but the first two parts of a job, until a file tells them to go on."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic

from lowbit.rewriting.apart import Group
from lowbit.system.on_ray import OnRay
from lowbit.system.tasks import Item, Result, Results, Work


@dataclass(frozen=True)
class Slow(Generic[Item, Result]):
    """Work that notes each item that it begins, and waits.

    Attributes:
        gate: the folder of the notes, and of the file ``open``.
        work: what it does then.
        free: the parts for whose items it does not wait.
    """

    gate: Path
    work: Work[Item, Result]
    free: tuple[object, ...]

    def __call__(self, item: Item, threads: int) -> Result:
        if part_of(item) not in self.free:
            (self.gate / f"waiting-{item}-{os.getpid()}").touch()
            while not (self.gate / "open").exists():
                time.sleep(0.05)
        return self.work(item, threads)


def part_of(item: object) -> object:
    """The block that a group of matrices is in; other items are parts themselves."""
    return item.number if isinstance(item, Group) else item


def slow_down(gate: Path) -> None:
    """Make all work on clusters that this process begins wait."""
    run = OnRay.run

    def slowly(self: OnRay, work: Work[Item, Result], items: Sequence[Item]) -> Results[Item, Result]:
        first = items[0] if items else None
        free = (first.number, first.number + 1) if isinstance(first, Group) else tuple(items)[:2]
        yield from run(self, Slow(gate, work, free), items)

    OnRay.run = slowly  # type: ignore[method-assign]  # of a process that does nothing else
