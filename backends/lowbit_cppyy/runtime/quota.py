"""The processor time that this process may use, where Linux limits it by control groups.

A container that may use the time of two processors can still run on all sixty-four of its machine. Sixty-four threads
would then spend the time of a period in a thirty-second of it, and all wait for the next period.

Source: the Linux kernel's documentation of control groups: ``cpu.max`` in version 2, ``cpu.cfs_quota_us`` in 1.
"""

from collections.abc import Iterator
from math import ceil
from pathlib import Path, PurePosixPath


def processor_quota(root: Path = Path("/")) -> int | None:
    """The quota of this process in processors, rounded up so that all of it is used.

    Args:
        root: the folder that stands for ``/``.

    Returns:
        The smallest quota of the groups of this process; ``None`` if there is no limit, or no readable one.
    """
    quotas = [quota for folder in _groups(root) if (quota := _quota(folder)) is not None]
    return max(1, ceil(min(quotas))) if quotas else None


def _groups(root: Path) -> Iterator[Path]:
    """The folder of every group of this process whose mount is visible to it, the innermost first."""
    memberships = [line.split(":", 2) for line in _lines(root / "proc/self/cgroup")]
    for line in _lines(root / "proc/self/mountinfo"):
        left, _, right = line.partition(" - ")
        mount, kind = left.split(), right.split()
        if len(mount) < 5 or len(kind) < 3:
            continue
        top, place = PurePosixPath(mount[3]), root / mount[4].lstrip("/")
        for membership in memberships:
            if len(membership) == 3 and _mounted(membership[1], kind[0], kind[2]):
                yield from _upwards(place, top, PurePosixPath(membership[2]))


def _mounted(controllers: str, kind: str, options: str) -> bool:
    """Whether a mount belongs to the hierarchy that limits processors: version 2, or the controller ``cpu``."""
    if kind == "cgroup2":
        return controllers == ""
    return kind == "cgroup" and "cpu" in controllers.split(",") and "cpu" in options.split(",")


def _upwards(place: Path, top: PurePosixPath, group: PurePosixPath) -> Iterator[Path]:
    """The folders of a group and of the groups around it, below a mount whose root is the group `top`."""
    inside = group.relative_to(top) if group.is_relative_to(top) else PurePosixPath()
    for part in (inside, *inside.parents):
        yield place / part


def _quota(folder: Path) -> float | None:
    """Quota divided by period, both in microseconds; version 2 has them in one file, where ``max`` means no limit."""
    numbers = [line.split() for line in _lines(folder / "cpu.max")]
    if not numbers:
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        numbers = [[line for name in names for line in _lines(folder / name)]]
    try:
        quota, period = map(int, numbers[0])
    except ValueError:
        return None
    return quota / period if quota > 0 and period > 0 else None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(errors="replace").splitlines()
    except OSError:
        return []
