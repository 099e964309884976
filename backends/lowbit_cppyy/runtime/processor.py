"""The instruction set and the number of threads to use: those requested, or the best of this machine."""

import os
import re
import warnings
from functools import cache

from lowbit.contract.checks import spoken
from lowbit.errors import UnavailableError
from lowbit.system.threads import usable_processors
from lowbit_cppyy.codegen.isa import TABLES, InstructionSet
from lowbit_cppyy.runtime.compiler import preparing
from lowbit_cppyy.runtime.quota import processor_quota

ISA_VARIABLE = "LOWBIT_CPPYY_ISA"
THREADS_VARIABLE = "LOWBIT_NUM_THREADS"
OPENMP_VARIABLE = "OMP_NUM_THREADS"


_pretended: tuple[str, ...] | None = None


def pretend(features: tuple[str, ...]) -> None:
    """Use these as the features of the processor, because kernels run on an emulated one."""
    global _pretended
    _pretended = features


def has(feature: str) -> bool:
    """Whether the processor has a feature, by archspec's name for it."""
    return _detected(feature) if _pretended is None else feature in _pretended


@cache
def _detected(feature: str) -> bool:
    with preparing:  # a fork meanwhile would leave the child with a module whose import never finishes
        import archspec.cpu  # takes 50 ms, so it is delayed until it is needed
        import archspec.cpu.detect

    with warnings.catch_warnings(action="ignore"):  # without /proc/cpuinfo nothing is known
        # `host()` gives the closest known processor, which may have fewer features than the system reports.
        return feature in archspec.cpu.host() or feature in archspec.cpu.detect.detected_info().features


def choose_table(isa: str | None) -> InstructionSet:
    """The instruction table for this processor.

    Args:
        isa: the table to use; with ``None``, that of ``LOWBIT_CPPYY_ISA``, or else the best.

    Raises:
        UnavailableError: the requested one is unknown, or this processor lacks it.
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
    """The number of threads: as requested, or from ``LOWBIT_NUM_THREADS``, or as many as the limits allow.

    The smallest limit applies: the processors that the calling thread may run on (`taskset`, Slurm); the quota of the
    process's control groups (containers); the first number of ``OMP_NUM_THREADS``, which is ignored if any part of it
    is malformed, as OpenMP's libraries do. ``LOWBIT_NUM_THREADS`` overrides all limits, and a malformed value is an
    error. Threads start when the first matrix is prepared, with the affinity of the preparing thread; later changes
    apply to backends created later.

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


def openmp_threads() -> int | None:
    """The first number of ``OMP_NUM_THREADS``; ``None`` if it is not a list of positive numbers."""
    value = os.environ.get(OPENMP_VARIABLE, "")
    numbers = [number.strip(" \t") for number in value.split(",")]
    if not all(re.fullmatch("0*[1-9][0-9]{0,8}", number) for number in numbers):
        return None
    return int(numbers[0].lstrip("0"))


MOST_THREADS = 1024
