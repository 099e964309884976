"""Which instruction set to use: the best that this processor has, or the one that is asked for."""

import os
from functools import cache

from lowbit.check import spoken
from lowbit.errors import UnavailableError
from lowbit_cppyy.isa import TABLES, InstructionSet

ISA_VARIABLE = "LOWBIT_CPPYY_ISA"
THREADS_VARIABLE = "LOWBIT_NUM_THREADS"


@cache
def has(feature: str) -> bool:
    """Whether this processor has a feature, by archspec's name for it."""
    import archspec.cpu  # takes 50 ms, so not before it is needed

    return feature in archspec.cpu.host()


def choose_table(isa: str | None) -> InstructionSet:
    """The instruction table for this processor.

    Args:
        isa: the one to use; ``None`` stands for the environment's ``LOWBIT_CPPYY_ISA``, or else the best.

    Raises:
        UnavailableError: the one asked for is unknown, or this processor lacks it.
    """
    wanted = isa or os.environ.get(ISA_VARIABLE)
    if not wanted:
        return next(table for table in TABLES.values() if all(map(has, table.requires)))
    if wanted not in TABLES:
        reason = f"{ISA_VARIABLE} is {wanted!r}"
        raise UnavailableError("backend cppyy", reason, f"set it to {spoken(tuple(TABLES))}, or unset it")
    missing = [feature for feature in TABLES[wanted].requires if not has(feature)]
    if missing:
        reason = f"this processor lacks {spoken(missing)}, which the instruction set {wanted} needs"
        raise UnavailableError("backend cppyy", reason, "use the instruction set plain")
    return TABLES[wanted]


def choose_threads(threads: int | None) -> int:
    """How many threads to use: those asked for, or ``LOWBIT_NUM_THREADS``, or one for each processor we may use.

    Raises:
        UnavailableError: ``LOWBIT_NUM_THREADS`` is not a number of threads.
    """
    if threads is not None:
        return threads
    wanted = os.environ.get(THREADS_VARIABLE)
    if wanted:
        if not (wanted.isascii() and wanted.isdigit() and 1 <= int(wanted) <= MOST_THREADS):
            reason = f"{THREADS_VARIABLE} is {wanted!r}"
            raise UnavailableError("backend cppyy", reason, f"set it to 1 … {MOST_THREADS}, or unset it")
        return int(wanted)
    if hasattr(os, "sched_getaffinity"):
        return min(len(os.sched_getaffinity(0)), MOST_THREADS)
    return min(os.cpu_count() or 1, MOST_THREADS)


MOST_THREADS = 1024
