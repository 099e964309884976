"""The adapter for programs: the conversation, and every way to break it."""

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from building import SOURCES
from hosting import PATIENCE, has_ended

from lowbit.errors import ArgumentError, NotDeclaredError, UnavailableError
from lowbit.moe.offload import Arrangement, Request
from lowbit.quantization.affine import quantize
from lowbit.quantization.bfp import Format, cast
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.isolation.verdicts import BrokenPromiseError
from lowbit_foreign import CommandBackend, child, command

CODES = np.zeros((8, 3), np.uint8)


def program(how: str) -> str:
    """The command line of the odd program."""
    return f"'{sys.executable}' -S '{SOURCES / 'odd.py'}' '{how}'"


@pytest.fixture
def odd(request: pytest.FixtureRequest) -> Iterator[CommandBackend]:
    """The odd program that behaves as the test's parameter says, by default well."""
    with closing(CommandBackend(program(getattr(request, "param", "echo")))) as backend:
        yield backend


def test_values_cross(odd: CommandBackend) -> None:
    """Records with arrays and lists of records come back as they went."""
    blocks = cast(np.arange(12, dtype=np.float32).reshape(3, 4), Format(4, 5))
    given = odd.run("bfp.store", blocks)
    assert given.format == blocks.format
    assert np.array_equal(given.mantissas, blocks.mantissas)
    requests = (Request(0, (1, 2), (3,)), Request(1, (0,)))
    assert odd.run("offload.trace", Arrangement(2, 4, 2), requests) == requests
    assert odd.run("packing.pack", CODES, 4).shape == (8, 3)


def test_it_is_started_when_needed_and_ended(odd: CommandBackend) -> None:
    """No process before the first question, one afterwards, none after the end; its name is what it calls itself."""
    before = odd.children
    assert before == ()
    assert odd.name.startswith("python")
    assert odd.availability().usable
    assert odd.name == "odd"
    assert not odd.capabilities().concurrent, "one line at a time"
    (pid,) = odd.children
    odd.close()
    odd.close()
    assert odd.children == ()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


BROKEN = {
    "dies": "closes its standard output, and has ended by signal 9",
    "leaves": "has ended with status 3; the end of its standard error: no more of this",
    "closes": "closes its standard output",
    "garbage": "a line: content is .*JSON in UTF-8: Traceback",
    "bytes": "JSON in UTF-8",
    "nan": "the number NaN.*JSON in UTF-8",
    "deep": "recursion.*JSON in UTF-8",
    "other-id": "does not answer request 2",
    "no-id": "does not answer request 2",
    "more": "more than the one line",
    "kind": "unknown kind unkind",
}


@pytest.mark.parametrize(("odd", "text"), BROKEN.items(), indirect=["odd"])
def test_a_broken_conversation_ends(odd: CommandBackend, text: str) -> None:
    """It is an error of one line that says what happened; the process is gone, and the next call starts another."""
    assert odd.availability().usable
    (pid,) = odd.children
    with pytest.raises(child.BrokenLineError, match=text) as caught:
        odd.run("packing.pack", CODES, 4)
    assert "\n" not in str(caught.value)
    assert odd.children == ()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert odd.run("offload.trace", Arrangement(2, 4, 2), (Request(0, (1,)),)) == (Request(0, (1,)),)


@pytest.mark.parametrize("how", ["other-id", "garbage", "more", "deep"])
def test_a_broken_conversation_is_a_crash(how: str) -> None:
    """Each of the two attempts at a call breaks off in words of its own; the verdict is not that they differ."""
    with closing(Remote("command", program(how), PATIENCE)) as remote, closing(remote.arena):
        remote.load()
        with pytest.raises(BrokenPromiseError, match=r"^CRASHED: BrokenLineError: "):
            remote.run("packing.pack", CODES, 4)


ANSWERED: dict[str, tuple[type[Exception], str]] = {
    "argument": (ArgumentError, "refused by odd; allowed: for no reason"),
    "not declared": (NotDeclaredError, "for no reason"),
    "failed": (RuntimeError, "odd fails: for no reason"),
    "no-value": (RuntimeError, "odd gives no result of packing.pack"),
}


@pytest.mark.parametrize(("odd", "error"), ANSWERED.items(), indirect=["odd"])
def test_errors_are_answers(odd: CommandBackend, error: tuple[type[Exception], str]) -> None:
    """An error that the program tells leaves the conversation whole: the same process goes on."""
    assert odd.availability().usable
    before = odd.children
    with pytest.raises(error[0], match=error[1]):
        odd.run("packing.pack", CODES, 4)
    assert odd.run("offload.trace", Arrangement(2, 4, 2), (Request(0, (1,)),)) == (Request(0, (1,)),)
    assert odd.children == before


@pytest.mark.parametrize("odd", ["shouts"], indirect=True)
def test_complaints_do_not_block(odd: CommandBackend) -> None:
    """More on standard error than a pipe holds is read away, and no answer."""
    assert odd.run("packing.pack", CODES, 4).shape == (8, 3)


@pytest.mark.parametrize("odd", ["long"], indirect=True)
def test_endless_lines_are_cut(odd: CommandBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line without an end is given up before it fills the memory."""
    monkeypatch.setattr(child, "MOST_LINE", 1 << 20)
    with pytest.raises(child.BrokenLineError, match="more than 1048576 bytes"):
        odd.run("packing.pack", CODES, 4)


@pytest.mark.parametrize("odd", ["early"], indirect=True)
def test_greetings_are_refused(odd: CommandBackend) -> None:
    """A program that speaks before it is asked is unavailable."""
    state = odd.availability()
    assert not state.usable
    assert "line" in state.reason


@pytest.mark.parametrize("odd", ["silent"], indirect=True)
def test_silence_is_no_answer(odd: CommandBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that says nothing at first is unavailable after a while, and ended."""
    monkeypatch.setattr(command, "START", 0.5)
    assert "in time" in odd.availability().reason  # the program itself would answer later
    assert odd.children == ()


def test_commands_that_cannot_be(tmp_path: Path) -> None:
    """An empty command, an open quote, no such program, a file that is none, programs that do not know the protocol."""
    for line in ("", "  ", "program 'of"):
        with pytest.raises(ArgumentError, match="command"):
            CommandBackend(line)
    text = tmp_path / "text"
    text.write_text("no program")
    for line in (str(tmp_path / "none"), str(text), "true", "cat", "echo hello", f"{sys.executable} -c 'print(1/0)'"):
        with closing(CommandBackend(line)) as backend:
            state = backend.availability()
            assert not state.usable, line
            assert state.remedy
            with pytest.raises(UnavailableError):
                backend.capabilities()


def test_handles_are_given_back(odd: CommandBackend) -> None:
    """What nobody holds any more is released with the next request: the program says how many live."""
    matrix = quantize(np.ones((8, 1), np.float32), bits=4, group_size=8)
    x, out = np.zeros((1, 8), np.float32), np.zeros((1, 1), np.float32)
    first, second = odd.prepare(matrix), odd.prepare(matrix)
    assert first.qgemm(x, out) is out
    assert out[0, 0] == 2
    del second
    gc.collect()
    assert first.qgemm(x)[0, 0] == 1
    with odd.open("offload.engine", Arrangement(2, 4, 2)) as engine:
        handle, request = engine.step(Request(0, (1,)))
        assert handle.startswith("handle")
        assert request == Request(0, (1,))
        assert first.qgemm(x)[0, 0] == 2
    assert first.qgemm(x)[0, 0] == 1
    with pytest.raises(RuntimeError, match="gives no result"):  # of another shape than it has
        first.qgemm(np.zeros((2, 8), np.float32))
    os.kill(odd.children[0], signal.SIGKILL)
    with pytest.raises(RuntimeError):
        first.qgemm(x)
    with pytest.raises(RuntimeError, match="was restarted"):
        odd.run("offload.trace", Arrangement(2, 4, 2), (Request(0, (1,)),))
        first.qgemm(x)


@pytest.mark.parametrize("odd", ["unprepared"], indirect=True)
def test_without_prepare_the_matrix_comes_along(odd: CommandBackend) -> None:
    """A program that declares no prepare is given x and the matrix each time, as it was when it was prepared."""
    matrix = quantize(np.ones((8, 1), np.float32), bits=4, group_size=8)
    prepared = odd.prepare(matrix)
    matrix.words[...] = 0
    assert prepared.qgemm(np.zeros((1, 8), np.float32))[0, 0] == 2


def test_a_program_ends_with_its_owner() -> None:
    """Even one that hangs, and an owner that is killed."""
    text = (
        "import sys, threading, os, signal, numpy\nfrom lowbit_foreign import CommandBackend\n"
        "backend = CommandBackend(sys.argv[1])\nbackend.capabilities()\nprint(backend.children[0], flush=True)\n"
        "threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()\n"
        "backend.run('packing.pack', numpy.zeros((8, 3), numpy.uint8), 4)\n"
    )
    done = subprocess.run([sys.executable, "-c", text, program("hangs")], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert has_ended(int(done.stdout)), "it lives on"
