"""Faults: the n-th call fails, so that a test can let each of them fail in turn.

Every call of `SimDevice` that a real device can fail, or during which a person can press Ctrl-C, is counted. A test
runs its program once and reads the count (`SimDevice.calls`), then runs it again for each number up to that with a
`Failure` there, and looks at what remains.

The kinds of failure:

``error``
    the call is refused: a `DeviceError`, for memory a `DeviceMemoryError`. It has changed nothing.
``interrupt``
    a `KeyboardInterrupt` in place of the call, which has changed nothing.
``late``
    the call returns as if all were well, but a copy, a launch or a graph is never done, and what it should have
    written is undefined; `lowbit_cuda.port` says what follows from that. The device tells by a `DeviceError` of the
    call so many calls later, if there is one, or of an earlier one that waits for what was not done or would make a
    graph of it. The call that tells changes nothing itself, and what is given from then on is done again.
``lost``
    as ``late``, but the device is lost then, as a GPU is: the error is a `DeviceLostError`, and every later call that
    is counted raises it again.

Each of the others happens once. `free` and `close` do not fail: they are how a program gets out.
"""

from collections import Counter
from dataclasses import dataclass
from typing import NoReturn

from lowbit.contract.checks import check_choice, check_integer
from lowbit_cuda.port import DeviceError, DeviceLostError, DeviceMemoryError

KINDS = ("error", "interrupt", "late", "lost")
MEMORY_CALLS = ("allocate", "pin")
CALLS = (
    *MEMORY_CALLS, "stream", "load", "copy", "launch", "record", "wait", "capture", "end capture", "replay",
    "synchronize", "finish", "reached", "write", "read", "on_host",
)  # fmt: skip
"""The calls that are counted. ``end capture`` is the end of the block of `capture`, where a graph is made."""


@dataclass(frozen=True)
class Failure:
    """What fails, when and how.

    Attributes:
        at: the number of the call, from 1.
        kind: ``error``, ``interrupt`` or ``late``.
        of: count only these calls, one of `CALLS`; None for all.
        later: for ``late`` and ``lost``, by how many calls later (of any kind) the device tells at the latest.
    """

    at: int
    kind: str = "error"
    of: str | None = None
    later: int = 1

    def __post_init__(self) -> None:
        check_integer("at", self.at, 1)
        check_choice("kind", self.kind, KINDS)
        check_choice("of", self.of, (None, *CALLS))
        check_integer("later", self.later, 1)


class Faults:
    """Counts calls and lets one fail.

    Attributes:
        calls: how many there were, of each kind.
        happened: whether the failure has happened; a late one, whether it has been told.
        lost: why the device is lost; empty while it is not.
    """

    def __init__(self, failure: Failure | None) -> None:
        self.calls: Counter[str] = Counter()
        self.happened = False
        self._failure, self._told_at, self._undone, self.lost = failure, 0, "", ""

    def call(self, kind: str, what: str, memory: tuple[int, int, int] = (0, 0, 0)) -> bool:
        """Count a call; `memory` is bytes asked, in use and in all. Returns whether it shall not be done.

        Raises:
            DeviceError: the call fails, or tells of an earlier one.
            KeyboardInterrupt: it is interrupted.
        """
        self.calls[kind] += 1
        if self.lost:
            raise DeviceLostError(f"{kind} of {what}: the device is lost since an earlier error: {self.lost}")
        failure = self._failure
        if failure is None or self.happened:
            return False
        if self._told_at:
            if self.calls.total() >= self._told_at:
                self.tell()
            return False
        if self._count() != failure.at:
            return False
        if failure.kind in ("late", "lost"):
            self._told_at, self._undone = self.calls.total() + failure.later, f"{kind} of {what}"
            return True
        self.happened = True
        if failure.kind == "interrupt":
            raise KeyboardInterrupt
        if kind in MEMORY_CALLS:
            raise DeviceMemoryError(what, *memory)
        raise DeviceError(f"{kind} of {what}: failed as asked for, call {failure.at}")

    def _count(self) -> int:
        assert self._failure is not None
        return self.calls.total() if self._failure.of is None else self.calls[self._failure.of]

    def tell(self) -> NoReturn:
        """Say that an earlier call has failed.

        Raises:
            DeviceError: always; a `DeviceLostError` where the device is lost with it.
        """
        self.happened = True
        told = f"an earlier {self._undone} has failed: found late, as asked for"
        if self._failure is not None and self._failure.kind == "lost":
            self.lost = told
            raise DeviceLostError(f"{told}; the device is lost to this process")
        raise DeviceError(told)
