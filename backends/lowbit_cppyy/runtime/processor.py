"""What to use of this machine: the best instruction set that it has or the one asked for, and how many threads."""

import os
import re
from functools import cache

from lowbit.contract.checks import spoken
from lowbit.errors import UnavailableError
from lowbit_cppyy.codegen.isa import TABLES, InstructionSet
from lowbit_cppyy.runtime.compiler import preparing
from lowbit_cppyy.runtime.quota import processor_quota

ISA_VARIABLE = "LOWBIT_CPPYY_ISA"
THREADS_VARIABLE = "LOWBIT_NUM_THREADS"
OPENMP_VARIABLE = "OMP_NUM_THREADS"


@cache
def has(feature: str) -> bool:
    """Whether this processor has a feature, by archspec's name for it."""
    with preparing:  # no fork meanwhile, which would leave the child with a module that is being imported for ever
        import archspec.cpu  # takes 50 ms, so not before it is needed
        import archspec.cpu.detect

    # The features as the system reports them; `host()` answers with a known processor, and may know fewer.
    return feature in archspec.cpu.host() or feature in archspec.cpu.detect.detected_info().features


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
        reason = f"{ISA_VARIABLE} is {wanted[:40]!r}"
        raise UnavailableError("backend cppyy", reason, f"set it to {spoken(tuple(TABLES))}, or unset it")
    missing = [feature for feature in TABLES[wanted].requires if not has(feature)]
    if missing:
        reason = f"this processor lacks {spoken(missing)}, which the instruction set {wanted} needs"
        raise UnavailableError("backend cppyy", reason, "use the instruction set plain")
    return TABLES[wanted]


def choose_threads(threads: int | None) -> int:
    """How many threads to use: those asked for, or ``LOWBIT_NUM_THREADS``, or as many as the limits allow.

    The limits, of which the smallest counts: the processors that the calling thread may run on (`taskset`, Slurm); the
    quota of the process's control groups (containers); ``OMP_NUM_THREADS``, of whose list the first number counts, and
    which is ignored as a whole where it is malformed, as OpenMP's libraries do. ``LOWBIT_NUM_THREADS`` is obeyed even
    beyond them, and its mistakes are errors. Threads start when the first matrix is prepared, with the affinity that
    the preparing thread has then; what is changed later applies to backends made later.

    Raises:
        UnavailableError: ``LOWBIT_NUM_THREADS`` is not a number of threads.
    """
    if threads is not None:
        return threads
    wanted = os.environ.get(THREADS_VARIABLE)
    if wanted:
        number = int(wanted) if re.fullmatch("[0-9]{1,9}", wanted) else 0
        if not 1 <= number <= MOST_THREADS:
            reason = f"{THREADS_VARIABLE} is {wanted[:40]!r}"
            raise UnavailableError("backend cppyy", reason, f"set it to 1 … {MOST_THREADS}, or unset it")
        return number
    limits = (usable_processors(), processor_quota(), openmp_threads(), MOST_THREADS)
    return min(limit for limit in limits if limit is not None)


def usable_processors() -> int:
    """The processors that the calling thread may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def openmp_threads() -> int | None:
    """The first number of ``OMP_NUM_THREADS``, a list of positive numbers; ``None`` where it is none."""
    value = os.environ.get(OPENMP_VARIABLE, "")
    numbers = [number.strip(" \t") for number in value.split(",")]
    if not all(re.fullmatch("0*[1-9][0-9]{0,8}", number) for number in numbers):
        return None
    return int(numbers[0].lstrip("0"))


MOST_THREADS = 1024
