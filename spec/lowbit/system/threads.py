"""Work side by side: several matrices at a time, with the results of one after the other.

numpy lets go of the interpreter while it computes, so threads are enough to use all processors for what is done to many
matrices: quantising them, or drawing them at random. The work on one knows nothing of the others, so neither the number
of threads nor their order can be seen in what comes out.

>>> side_by_side(abs, [3, -2, 1], threads=2)
[3, 2, 1]

Source: lowbit's own.
"""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def usable_processors() -> int:
    """The processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def side_by_side(work: Callable[[Item], Result], items: Iterable[Item], threads: int) -> list[Result]:
    """The results of some work on each of the items, in their order.

    Where the work on an item fails, the error is raised when what has begun has ended, and nothing else begins; of
    several errors it is that of the earliest item. So it is with an interrupt.

    Args:
        work: called with one item, on any thread.
        items: what to work on.
        threads: at most so many at a time; one is the caller's own thread.
    """
    if threads <= 1:
        return [work(item) for item in items]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, items))
