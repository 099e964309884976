"""The host's memory: how much of it can still be page-locked.

Page-locked memory cannot be swapped out, and the driver locks it in the kernel, where ``ulimit -l`` does not count it.
If a process asks for more than the host or its container has, the request is not refused: the system kills a process,
often this one, without a message. So the device checks before it pins a large amount.

The host has ``MemAvailable``, the kernel's own estimate. A container's control group may allow less: its limit less the
memory in use there, not counting pages of files, which can be dropped.

Source: proc(5), and the Linux kernel's documentation of cgroup v2.
"""

from contextlib import suppress
from pathlib import Path

ROOT = Path("/")
GROUP = "sys/fs/cgroup"
"""The path at which a container sees its own control group."""


def available(root: Path | None = None) -> int | None:
    """Bytes that a process may still allocate, or None if the system does not report it."""
    root = ROOT if root is None else root
    known = [number for number in (_of_host(root), _of_group(root)) if number is not None]
    return max(0, min(known)) if known else None


def _of_host(root: Path) -> int | None:
    kilobytes = _numbers(root / "proc/meminfo").get("MemAvailable")
    return None if kilobytes is None else kilobytes << 10


def _of_group(root: Path) -> int | None:
    folder = root / GROUP
    with suppress(OSError, ValueError):
        limit, used = (int((folder / name).read_text()) for name in ("memory.max", "memory.current"))
        return limit - used + _numbers(folder / "memory.stat").get("file", 0)
    return None  # no group, or no limit: memory.max is then "max"


def _numbers(path: Path) -> dict[str, int]:
    """The lines of a file that consist of a name and a number."""
    found = {}
    with suppress(OSError):
        for line in path.read_text().splitlines():
            name, number, *_ = [*line.replace(":", " ").split(), "", ""]
            if number.isdecimal():
                found[name] = int(number)
    return found
