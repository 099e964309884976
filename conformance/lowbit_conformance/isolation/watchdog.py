"""Following the process that judges to its end, whatever that is.

The command waits for three things at once: events, what the process prints, and its end. It does not wait for the ends
of pipes, which a process that was left behind could hold open. A judge that gives no sign of life is ended: after
`STOPPED` seconds if the system says that it is stopped, and otherwise after `SILENCE` seconds or four times the
deadline of a call, whichever is longer, since a machine may be busy. Time in which the command itself did not run does
not count, such as after Ctrl-Z.
"""

import os
import select
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from lowbit.system.interpreters import signal_name
from lowbit_conformance.isolation.descendants import end_below, kill, state
from lowbit_conformance.isolation.events import Event, EventReader

STOPPED = 5.0  # seconds
SILENCE = 120.0
DEADLINES = 4
TICK = 0.5
LATE = 2.0  # seconds of reading what the judge wrote before it ended
MOST_OUTPUT = 1 << 16  # number of last bytes of its output that are kept


@dataclass
class Ending:
    """How the process ended.

    Attributes:
        output: the end of what it printed.
        stopped: why it was killed from here, as the text of a verdict; empty if it ended by itself.
    """

    output: str = ""
    stopped: str = ""


def follow(
    judge: subprocess.Popen[bytes], pipe: int, reader: EventReader, deadline: float, take: Callable[[Event], None]
) -> Ending:
    """Pass each event to `take` until the process has ended and was waited for.

    Args:
        judge: the process; its standard output is a pipe.
        pipe: the descriptor from which its events come.
        reader: checks that they are the judge's.
        deadline: seconds that one call of the backend may take.
        take: called for each event.
    """
    assert judge.stdout is not None
    output = judge.stdout.fileno()
    sources = Sources([pipe, output], judge.pid)
    ending, printed = Ending(), bytearray()
    silent = stopped = 0.0

    def listen(found: Iterable[tuple[int, bytes]]) -> bool:
        """Read what is available; returns whether it contains an event."""
        heard = False
        for source, data in found:
            if source == output:
                printed.extend(data)
                del printed[:-MOST_OUTPUT]
                continue
            for event in reader.feed(data):
                heard = True
                take(event)
        return heard

    try:
        last = time.monotonic()
        while judge.poll() is None:
            heard = listen(sources.ready(TICK))
            now = time.monotonic()
            passed, last = min(now - last, 2 * TICK), now
            silent = 0.0 if heard else silent + passed
            stopped = stopped + passed if not heard and state(judge.pid) in ("T", "t") else 0.0
            ending.stopped = reason_to_end(stopped, silent, deadline)
            if ending.stopped:
                end_below(judge.pid)
                kill(judge.pid)
                judge.wait()
        until = time.monotonic() + LATE
        while time.monotonic() < until and (late := list(sources.ready(0))):
            listen(late)
    finally:
        sources.close()
    ending.output = printed.decode(errors="replace")
    return ending


def reason_to_end(stopped: float, silent: float, deadline: float) -> str:
    """Why a judge that was stopped or silent for some seconds is killed; empty if it is not.

    >>> reason_to_end(6.0, 6.0, 30.0)
    'UNDECIDED: the process that judges was stopped, and was ended after 6 s'
    >>> reason_to_end(0.0, 119.0, 30.0) + reason_to_end(0.0, 140.0, 60.0)
    ''
    """
    if stopped >= STOPPED:
        return f"UNDECIDED: the process that judges was stopped, and was ended after {stopped:.0f} s"
    if silent >= max(SILENCE, DEADLINES * deadline):
        return f"UNDECIDED: the process that judges gave no sign of life for {silent:.0f} s, and was ended"
    return ""


def death(returncode: int, output: str) -> str:
    """How the process ended, as the text of a verdict.

    >>> death(-9, ""), death(3, "no such file")
    ('CRASHED(SIGKILL)', 'CRASHED: the process that judges ended with status 3: no such file')
    """
    if returncode < 0:
        return f"CRASHED({signal_name(-returncode)})"
    last = " ".join(output.split()[-20:])
    return f"CRASHED: the process that judges ended with status {returncode}{': ' + last if last else ''}"


class Sources:
    """Descriptors to read from, without waiting for any single one."""

    def __init__(self, descriptors: list[int], process: int) -> None:
        self._open = descriptors
        for descriptor in descriptors:
            os.set_blocking(descriptor, False)
        self._end = os.pidfd_open(process) if hasattr(os, "pidfd_open") else -1  # readable when the process has ended

    def ready(self, seconds: float) -> Iterator[tuple[int, bytes]]:
        """What can be read now from each of them, after waiting for at most the given seconds."""
        watched = self._open if self._end < 0 else [*self._open, self._end]
        found = select.select(watched, [], [], seconds if self._end >= 0 else min(seconds, 0.05))[0]
        for descriptor in [each for each in found if each != self._end]:
            data = b""
            with suppress(BlockingIOError):
                data = os.read(descriptor, 1 << 16)
                if not data:
                    self._open.remove(descriptor)
            if data:
                yield descriptor, data

    def close(self) -> None:
        if self._end >= 0:
            os.close(self._end)
