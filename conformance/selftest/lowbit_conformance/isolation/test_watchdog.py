"""No run waits for ever: a judge or a host that is stopped, a pipe that somebody holds open."""

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace

import attacking
import pytest
from hosting import failures_of

from lowbit_conformance.isolation import descendants, watchdog
from lowbit_conformance.isolation.arena import Arena
from lowbit_conformance.isolation.events import EventReader
from lowbit_conformance.isolation.process import HostEndedError, HostProcess

KEY = bytes(32)
TELLS = """import os, sys
from lowbit_conformance.isolation.events import EventPipe
pipe = EventPipe(int(sys.argv[1]), bytes(32))
"""


def followed(
    program: str, deadline: float = 30.0, stdin: int = subprocess.DEVNULL
) -> tuple[watchdog.Ending, list[str], int]:
    """Follow a process that runs `TELLS` and then this: how it ended, the kinds of its events, its status."""
    reader, writer = os.pipe()
    kinds: list[str] = []
    command = [sys.executable, "-c", TELLS + program, str(writer)]
    with (
        open(reader, "rb", buffering=0),
        descendants.adopting(),
        subprocess.Popen(
            command, pass_fds=[writer], stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as judge,
    ):
        os.close(writer)
        ending = watchdog.follow(judge, reader, EventReader(KEY), deadline, lambda event: kinds.append(event["event"]))
    return ending, kinds, judge.returncode


def test_a_process_is_followed_to_its_end() -> None:
    """All events, what it printed, its status."""
    ending, kinds, status = followed("for i in range(500): pipe.send('many')\nprint('done'); sys.exit(7)")
    assert (len(kinds), ending.output, ending.stopped, status) == (500, "done\n", "", 7)


def test_a_stopped_judge_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all that it started; the system says that it is stopped."""
    monkeypatch.setattr(watchdog, "STOPPED", 1.0)
    program = """
child = os.fork()
if not child:
    os.setsid()
    import time; time.sleep(100)
pipe.send(str(child))
os.kill(os.getpid(), 19)
"""
    ending, kinds, status = followed(program)
    assert ending.stopped.startswith("UNDECIDED: the process that judges was stopped, and was ended after ")
    assert status == -signal.SIGKILL
    assert not Path(f"/proc/{int(kinds[0])}").exists()


def test_a_judge_that_is_stopped_and_goes_on_is_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by Ctrl-Z and fg, or a debugger: seconds of a stop count only in a row."""
    waiting, goes_on = os.pipe()
    looks = itertools.count(1)

    def state(process: int) -> str:
        look = next(looks)
        if look == 20:
            os.close(goes_on)  # the judge ends by itself
        return "TS"[look % 2]

    monkeypatch.setattr(watchdog, "TICK", 0.02)
    monkeypatch.setattr(watchdog, "STOPPED", 3 * 0.02)  # more than one look counts at most
    monkeypatch.setattr(watchdog, "state", state)
    ending, _, status = followed("sys.stdin.read()", stdin=waiting)
    os.close(waiting)
    assert (ending.stopped, status) == ("", 0)
    assert next(looks) > 20


def test_a_silent_judge_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that runs and says nothing, after a multiple of the deadline; signs of life keep another alive."""
    monkeypatch.setattr(watchdog, "SILENCE", 0.5)
    ending, _, status = followed("import time; time.sleep(100)", deadline=0.3)
    assert ending.stopped.startswith("UNDECIDED: the process that judges gave no sign of life for")
    assert status == -signal.SIGKILL


def test_signs_of_life_keep_a_judge_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long computation without a verdict; the sign comes from a thread. By this clock each look takes a second."""
    waiting, goes_on = os.pipe()
    seconds = itertools.count()

    def clock() -> int:
        now = next(seconds)
        if now == 2 * watchdog.SILENCE:
            os.close(goes_on)  # the computation has been long enough
        return now

    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=clock))
    program = (
        "import lowbit_conformance.isolation.events as events; "
        "events.BEAT = 0.002; pipe.start_beating(); sys.stdin.read()"
    )
    ending, kinds, status = followed(program, deadline=0.1, stdin=waiting)
    os.close(waiting)
    assert (ending.stopped, status, set(kinds)) == ("", 0, {"beat"})
    assert next(seconds) > 2 * watchdog.SILENCE


def test_a_leftover_process_with_the_pipes_does_not_hold_the_run() -> None:
    """A daemon that keeps the pipes of the judge open: the run ends with the judge, and then the daemon ends."""
    program = """
told, telling = os.pipe()
if os.fork() == 0:
    os.setsid()
    pipe.send(str(os.getpid()))
    os.write(telling, b'.')
    import time; time.sleep(600)
os.read(told, 1)
"""
    started = time.monotonic()
    ending, kinds, status = followed(program)
    assert time.monotonic() - started < 300  # which is less than the daemon's time
    assert (ending.stopped, status) == ("", 0)
    assert not Path(f"/proc/{int(kinds[0])}").exists()


def test_a_leftover_process_that_writes_for_ever_does_not_hold_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written after the judge's end is read for a while only."""
    monkeypatch.setattr(watchdog, "LATE", 0.3)
    program = """
told, telling = os.pipe()
if os.fork() == 0:
    os.setsid()
    os.write(1, b'x' * 1000)
    os.write(telling, b'.')
    while True: os.write(1, b'x' * 1000)
os.read(told, 1)
"""
    ending, _, status = followed(program)
    assert status == 0
    assert len(ending.output) <= watchdog.MOST_OUTPUT


def test_a_backend_that_stops_the_judge_ends_the_run() -> None:
    """Where nothing separates them; where something does, the judge is not stopped."""
    failures = failures_of(attacking.StopsTheJudge, "none")
    assert [failure["verdict"] for failure in failures] == ["UNDECIDED"]
    assert {failure["verdict"] for failure in failures_of(attacking.StopsTheJudge, "")} == {"WRONG"}


def test_a_long_chain_of_processes_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is the child of the one before; there are more of them than calls may be nested."""
    alive = set(range(1, 5000))
    monkeypatch.setattr(descendants, "children", lambda process: [process + 1] if process + 1 in alive else [])
    monkeypatch.setattr(descendants, "state", lambda process: "S" if process in alive else "Z")
    monkeypatch.setattr(descendants, "kill", lambda process: None)
    found = list(descendants.below(0))
    assert found == sorted(alive)
    monkeypatch.setattr(descendants, "kill", alive.discard)
    descendants.end_below(0)
    assert not alive


@pytest.mark.parametrize("orphans", [True, False])
def test_what_cannot_be_ended_is_given_up(monkeypatch: pytest.MonkeyPatch, orphans: bool) -> None:
    """Processes of another user, or stuck in a driver: the run does not wait for them for ever."""
    monkeypatch.setattr(descendants, "LONGEST", 0.2)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True) as stuck:
        monkeypatch.setattr(descendants, "children", lambda process=0: [] if process else [stuck.pid])
        monkeypatch.setattr(descendants, "kill", lambda process: None)
        killing = threading.Timer(60, stuck.kill)
        killing.start()
        try:
            descendants.end_orphans(frozenset()) if orphans else descendants.end_below(0)
            assert killing.is_alive(), "it waited until the process had ended"
        finally:
            killing.cancel()
            stuck.kill()


# **The host.**


@pytest.fixture
def arena() -> Iterator[Arena]:
    with closing(Arena()) as memory:
        yield memory


@pytest.mark.parametrize("size", [10, 10**6])
def test_a_stopped_host_has_hung(arena: Arena, size: int) -> None:
    """Whether the request fits the channel, or the judge would wait for the host to read it."""
    host = HostProcess(arena)
    os.kill(host._inside, signal.SIGSTOP)
    with pytest.raises(HostEndedError, match=r"HUNG: longer than 0\.5 s"):
        host.ask({"do": "x" * size}, 0.5)
    with suppress(ProcessLookupError):
        os.kill(host._inside, 0)
        raise AssertionError("the host lives on")
