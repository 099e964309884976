"""Workplaces: temporary folders, and the removal of those whose process was killed.

A file that takes a long time is made in a folder beside its destination, the *workplace*, and renamed when it is
complete. A process that fails or is interrupted removes its workplace; one that is killed cannot. So a process holds a
lock on its workplace (``flock``), which the system releases whenever the process ends. A workplace that is not locked
is abandoned: the next process that works in the folder takes what it can use from it and removes the rest. A locked one
is left alone.

Where a file system has no locks, a workplace counts as abandoned after a day. So does the temporary file of a write
(`lowbit.system.storage.written`), which has no lock.
"""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = ".fetching-"
TEMPORARY_SUFFIX = ".part"
STALE_SECONDS = 24 * 60 * 60
LOCK_NOW = fcntl.LOCK_EX | fcntl.LOCK_NB


@contextmanager
def workplace(folder: Path) -> Iterator[Path]:
    """A new workplace in a folder, removed at the end of the block.

    Raises:
        OSError: the folder does not exist or cannot be written.
    """
    while True:
        with tempfile.TemporaryDirectory(prefix=PREFIX, dir=folder, ignore_cleanup_errors=True) as name:
            path = Path(name)
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue  # another process removed it as abandoned before it was opened
            try:
                with suppress(OSError):  # a file system without locks
                    fcntl.flock(descriptor, fcntl.LOCK_EX)
                if not _is(path, descriptor):
                    continue  # another process removed it as abandoned before it was locked
                yield path
                return
            finally:
                os.close(descriptor)


def abandoned(folder: Path) -> Iterator[Path]:
    """The workplaces of a folder whose processes have ended, one after another; each is removed after use."""
    for path in sorted(folder.glob(f"{PREFIX}*")):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # gone, or not a folder
            continue
        try:
            if _belongs_to_nobody(descriptor) and _is(path, descriptor):
                yield path
                with suppress(RecursionError):  # nesting a thousand deep, not made by lowbit; it stays
                    shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(descriptor)


def sweep(folder: Path) -> None:
    """Remove the workplaces of a folder whose processes have ended, and temporary files at least a day old."""
    for _ in abandoned(folder):
        pass
    for leftover in folder.glob(f".*{TEMPORARY_SUFFIX}"):
        with suppress(OSError):
            if _is_stale(leftover.lstat()):
                leftover.unlink()


def _belongs_to_nobody(descriptor: int) -> bool:
    """Try to lock a workplace; whether that succeeded."""
    try:
        fcntl.flock(descriptor, LOCK_NOW)
    except BlockingIOError:
        return False
    except OSError:
        return _is_stale(os.fstat(descriptor))
    return True


def _is_stale(status: os.stat_result) -> bool:
    return time.time() - status.st_mtime > STALE_SECONDS


def _is(path: Path, descriptor: int) -> bool:
    """Whether an open folder still has this name."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except OSError:
        return False
