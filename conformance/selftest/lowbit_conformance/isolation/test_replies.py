"""What a host answers is believed in nothing but its form: a reply of another form is a verdict, never a traceback."""

import os
import struct
from collections.abc import Iterator
from contextlib import closing

import attacking
import pytest
from hosting import verdict_on

from lowbit_conformance.isolation.arena import Arena
from lowbit_conformance.isolation.process import HostEndedError, HostProcess


@pytest.fixture
def arena() -> Iterator[Arena]:
    with closing(Arena()) as memory:
        yield memory


REPLIES = {
    "nested": b"[" * 100_000,
    "a long number": b'{"token": ' + b"9" * 10_000 + b"}",
    "no token": b"{}",
    "no object": b"NaN",
    "twice": b'{"token": "x", "token": 1e999}',
    "no text": b"\xff\xfe\x00",
}


@pytest.mark.parametrize("reply", list(REPLIES.values()), ids=list(REPLIES))
def test_a_reply_that_is_none_is_a_crash(arena: Arena, monkeypatch: pytest.MonkeyPatch, reply: bytes) -> None:
    """Whatever JSON can be, and cannot."""
    program = f"import os, sys, time; os.write(0, {struct.pack('<Q', len(reply))!r})\n"
    program += f"rest = {reply!r}\nwhile rest: rest = rest[os.write(0, rest):]\ntime.sleep(600)"
    monkeypatch.setattr("lowbit_conformance.isolation.process.BOOT", program)
    with pytest.raises(HostEndedError, match="CRASHED: the process broke the protocol"):
        HostProcess(arena)


def test_a_host_that_ends_by_a_real_time_signal(arena: Arena) -> None:
    """Such a signal has no name."""
    host = HostProcess(arena)
    os.kill(host._inside, 40)  # not the process that waits for it, after whose end it may answer for a while
    os.waitid(os.P_PID, host._process.pid, os.WEXITED | os.WNOWAIT)  # it may answer until the signal has arrived
    with pytest.raises(HostEndedError, match=r"CRASHED\(SIG40\)"):
        host.ask({"do": "capabilities"}, 5.0)


@pytest.mark.parametrize("change", attacking.CHANGES)
def test_a_reply_of_another_form_is_a_verdict(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that puts its own words in the place of the host's."""
    monkeypatch.setenv("CHANGE", change)
    expected = "CRASHED: the process answered with what is no reply: "
    if change in ("no such argument", "empty ones"):
        expected = "STALE_OUTPUT: the call did not return the array it was given as out"
    assert verdict_on(attacking.ChangesReplies).startswith(expected)
