"""Faults: the n-th call fails, so that a test can make each call fail in turn.

Every call of `SimDevice` that a real device can fail, or that Ctrl-C can interrupt, is counted. A test runs its program
once and reads the count (`SimDevice.calls`). Then it runs the program again for each number up to that count with a
`Failure` there, and examines the state afterwards.

The kinds of failure:

``error``
    the call is refused: a `DeviceError`, for memory a `DeviceMemoryError`. It has changed nothing.
``interrupt``
    a `KeyboardInterrupt` in place of the call, which has changed nothing.
``late``
    the call returns normally, but a copy, a launch or a graph is never done, and the contents of its outputs are
    undefined; `lowbit_cuda.port` says what follows. The device reports it by a `DeviceError` from the call that comes
    the given number of calls later, or from an earlier call that waits for the missing work or would make a graph of
    it. The call that reports it changes nothing itself, and operations that are issued afterwards are done again. A GPU
    is lost in this case; continuing is a harder test for a program.
``lost``
    as ``late``, but the device is then lost, as a GPU is: the error is a `DeviceLostError`, and every later call that
    is counted raises it again.

Each of the other kinds happens once. `free` and `close` do not fail, so that a program can always clean up.
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
"""The calls that are counted. ``end capture`` is the end of the block of `capture`, where the graph is created."""


@dataclass(frozen=True)
class Failure:
    """Which call fails, and how.

    Attributes:
        at: the number of the call, from 1.
        kind: ``error``, ``interrupt``, ``late`` or ``lost``.
        of: count only these calls, one of `CALLS`; None for all.
        later: for ``late`` and ``lost``, the number of calls (of any kind) after which the device reports it at the
            latest.
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
    """Counts calls, and makes one fail.

    Attributes:
        calls: the number of calls of each kind.
        happened: whether the failure has happened; for a late one, whether it was reported.
        lost: why the device is lost; empty while it is not.
    """

    def __init__(self, failure: Failure | None) -> None:
        self.calls: Counter[str] = Counter()
        self.happened = False
        self._failure, self._reported_at, self._undone, self.lost = failure, 0, "", ""

    def call(self, kind: str, what: str, memory: tuple[int, int, int] = (0, 0, 0)) -> bool:
        """Count a call; `memory` is bytes requested, used and in all. Returns whether the call must not be carried out.

        Raises:
            DeviceError: the call fails, or reports an earlier failure.
            KeyboardInterrupt: it is interrupted.
        """
        self.calls[kind] += 1
        if self.lost:
            raise DeviceLostError(f"{kind} of {what}: the device is lost since an earlier error: {self.lost}")
        failure = self._failure
        if failure is None or self.happened:
            return False
        if self._reported_at:
            if self.calls.total() >= self._reported_at:
                self.report()
            return False
        if self._count() != failure.at:
            return False
        if failure.kind in ("late", "lost"):
            self._reported_at, self._undone = self.calls.total() + failure.later, f"{kind} of {what}"
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

    def report(self) -> NoReturn:
        """Report that an earlier call has failed.

        Raises:
            DeviceError: always; a `DeviceLostError` if the device is lost.
        """
        self.happened = True
        message = f"an earlier {self._undone} has failed: found late, as asked for"
        if self._failure is not None and self._failure.kind == "lost":
            self.lost = message
            raise DeviceLostError(f"{message}; the device is lost to this process")
        raise DeviceError(message)
