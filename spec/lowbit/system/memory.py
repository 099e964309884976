"""Memory: how much this process can still allocate, checked before a large allocation.

A file can claim a tensor of any size, and a sparse file of a terabyte takes no space on a disk. An allocation that is
too large does not always fail: Linux grants memory that it does not have, and ends this process, or another one, when
the memory is used. So a claim is compared with the available memory before anything is allocated. The available memory
is the least of three: the memory of the machine that can be used without swapping, the rest of the limit of the
process's control group, and the rest of its limit on the address space (``ulimit -v``).
"""

import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from lowbit.errors import UnavailableError

PROC, CONTROL_GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
KIB, MIB = 2**10, 2**20


def check_memory(what: str, needed: int) -> None:
    """Refuse an allocation that cannot fit, before it is made.

    Args:
        what: the use of the memory, for the message.
        needed: bytes.

    Raises:
        UnavailableError: less memory is available.
    """
    if (available := available_bytes()) is not None and needed > available:
        reason = f"{_mebibytes(needed)} are needed and {_mebibytes(available)} are available"
        raise UnavailableError(f"memory for {what}", reason, "free some, raise its limits, or ask for less")


def check_address_space(what: str, needed: int) -> None:
    """Refuse a call of a library that would end the process if its allocation failed.

    Args:
        what: the caller, for the message.
        needed: bytes of address space.

    Raises:
        UnavailableError: the limit (``ulimit -v``) leaves less.
    """
    if (left := next(_of_address_space(), None)) is not None and needed > left:
        reason = f"it needs {_mebibytes(needed)} of address space, and the limit leaves {_mebibytes(max(0, left))}"
        raise UnavailableError(what, reason, "raise the limit, which `ulimit -v` shows in KiB")


def _mebibytes(size: int) -> str:
    return f"{-(-size // MIB)} MiB"


def available_bytes() -> int | None:
    """Bytes that this process can still allocate; None if the system does not say."""
    found = [*_of_machine(), *_of_address_space()]
    found += _of_control_groups(enough=min(found, default=None))
    return max(0, min(found)) if found else None


def _of_machine() -> Iterator[int]:
    with suppress(OSError, ValueError, StopIteration):
        lines = (PROC / "meminfo").read_text().splitlines()
        yield int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) * KIB


def _of_control_groups(enough: int | None) -> Iterator[int]:
    """The unused part of the limit of each control group, including file pages that it can drop.

    Args:
        enough: file pages are not counted for a group with more than this unused, since counting is slow.
    """
    with suppress(OSError):
        for line in os.fsdecode((PROC / "self/cgroup").read_bytes()).split("\n")[:-1]:  # names are bytes
            _, kinds, path = line.split(":", 2)
            if kinds == "":
                base, limit, usage = CONTROL_GROUPS, "memory.max", "memory.current"
            elif "memory" in kinds.split(","):
                base, limit, usage = CONTROL_GROUPS / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            else:
                continue
            own = base / path.strip("/")
            for folder in (own, *own.parents):
                if folder.is_relative_to(base):
                    with suppress(OSError, ValueError):  # missing, or "max"
                        left = int((folder / limit).read_text()) - int((folder / usage).read_text())
                        yield left if enough is not None and left > enough else left + _droppable(folder)


def _droppable(folder: Path) -> int:
    fields = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    return int(fields.get("active_file", 0)) + int(fields.get("inactive_file", 0))


def _of_address_space() -> Iterator[int]:
    """The unused part of the limit on the address space; nothing if there is no limit."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        with suppress(OSError, ValueError):
            yield limit - int((PROC / "self/statm").read_text().split()[0]) * resource.getpagesize()
