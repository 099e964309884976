"""The processes that a run starts, and ending all of them.

A process that leaves its session is not reached by a signal to the session. It still has a parent: when that ends, the
kernel gives it to the nearest process above that adopts orphans, as the judge does, and the command for as long as a
run lasts. So a search from there finds every one of them.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator, Set
from contextlib import contextmanager, suppress

SET_CHILD_SUBREAPER, GET_CHILD_SUBREAPER = 36, 37  # of prctl
LONGEST = 10.0  # longest time, in seconds, of killing processes that keep starting others
PAUSE = 0.001


def adopt_orphans(adopt: bool = True) -> bool:
    """Set whether this process adopts orphans below it; returns the previous setting."""
    if sys.platform != "linux":
        return False
    library, before = ctypes.CDLL(None), ctypes.c_int()
    library.prctl(GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    library.prctl(SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0)
    return bool(before.value)


@contextmanager
def adopting() -> Iterator[None]:
    """Adopt orphans while the block runs, and kill the remaining ones at its end."""
    before, known = adopt_orphans(), frozenset(children())
    try:
        yield
    finally:
        end_orphans(known)
        adopt_orphans(before)


def children(process: int | str = "self") -> list[int]:
    """The child processes of a process, including those that ended and were not waited for; empty outside Linux."""
    found: list[int] = []
    with suppress(OSError):
        for task in os.listdir(f"/proc/{process}/task"):
            with suppress(OSError), open(f"/proc/{process}/task/{task}/children") as file:
                found += map(int, file.read().split())
    return found


def state(process: int) -> str:
    """The letter with which Linux shows the state of a process: R, S, D, T (stopped), t (traced), Z (ended) …

    Empty if the process is gone, or if the system does not show it.
    """
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return ""


def end_orphans(living: Set[int]) -> None:
    """Kill the children of this process that are in another session than its own, except for those `living`.

    It gives up after `LONGEST` seconds: a chain of processes, each of which starts the next and ends, can only be
    stopped if the system can kill them all at once (`lowbit_conformance.isolation.confinement`).
    """
    until = time.monotonic() + LONGEST
    while strays := [child for child in children() if child not in living and _in_another_session(child)]:
        for child in strays:
            kill(child)
        if not any([_reaped(child) for child in strays]):  # then the children of ended processes are ours, and are next
            time.sleep(PAUSE)
        if time.monotonic() > until:
            return


def end_below(process: int) -> None:
    """Kill all descendants of a process, but not the process itself; gives up after `LONGEST` seconds."""
    until = time.monotonic() + LONGEST
    while found := [child for child in below(process) if state(child) not in ("Z", "")]:
        for child in found:
            kill(child)
        if time.monotonic() > until:
            return


def _reaped(process: int) -> bool:
    """Whether a child had ended and has now been waited for."""
    try:
        return os.waitpid(process, os.WNOHANG)[0] != 0
    except OSError:
        return True


def kill(process: int) -> None:
    """Kill a process if it still exists and is ours."""
    with suppress(OSError):
        os.kill(process, signal.SIGKILL)


def below(process: int) -> Iterator[int]:
    """The descendants of a process."""
    found = children(process)
    while found:  # no recursion, which a long chain of processes would break
        child = found.pop()
        yield child
        found += children(child)


def _in_another_session(process: int) -> bool:
    try:
        return os.getsid(process) != os.getsid(0)
    except OSError:
        return False
