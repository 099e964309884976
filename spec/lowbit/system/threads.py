"""Threads: the same work on several matrices in parallel.

numpy releases the interpreter's lock while it computes, so threads can use all processors to quantise many matrices or
to fill them with random numbers. The work on each item is independent of the others, so the results depend on neither
the number of threads nor their order.

>>> side_by_side(abs, [3, -2, 1], threads=2)
[3, 2, 1]
"""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def usable_processors() -> int:
    """The number of processors that the calling thread may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


BLAS = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""The variables that limit the threads of numpy's products."""
OPENMP = "OMP_NUM_THREADS"
"""The variable that limits those of backends, and of numpy's products if none of `BLAS` does."""


def worker_environment(threads: int) -> dict[str, str]:
    """The variables of a process that does a part of this process's work.

    The order of roundings in numpy's float32 products depends on the number of threads. So a worker uses as many for
    them as this process, and its results are the same.

    Args:
        threads: of backends.
    """
    given = [os.environ[name] for name in (*BLAS, OPENMP) if os.environ.get(name)]
    own = given[0] if given else str(usable_processors())
    return {**dict.fromkeys(BLAS, own), OPENMP: str(threads)}


def side_by_side(work: Callable[[Item], Result], items: Iterable[Item], threads: int) -> list[Result]:
    """The results of some work on each of the items, in their order.

    If the work on an item fails, no further item is started, and the error is raised when the running ones have ended;
    of several errors, that of the earliest item. The same holds for an interrupt.

    Args:
        work: called with one item, on any thread.
        items: what to work on.
        threads: the most items at a time; with one, the work runs on the caller's thread.
    """
    if threads <= 1:
        return [work(item) for item in items]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, items))
