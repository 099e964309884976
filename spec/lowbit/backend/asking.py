"""Descriptions of backends, each made in a process of its own.

A package may do anything while it is imported: end its process, hang, fork, print, close standard output. So the list
of backends is not made by the process that shows it. Each backend is imported in a child process with a deadline, which
answers through a pipe. A backend that does not answer is listed as not usable, with the fate of its process, and the
others are listed as usual.
"""

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from lowbit.backend.base import Backend
from lowbit.backend.registry import find
from lowbit.errors import ArgumentError, UnavailableError, words_of
from lowbit.system.interpreters import python_command, python_environment, signal_name
from lowbit.system.threads import usable_processors

Description = dict[str, Any]

DEADLINE = 60.0  # seconds for the import and the answer, which take a few at most
MOST_ANSWER, MOST_SAID = 2**24, 2**16  # bytes
PIECE, PAUSE = 2**16, 0.05
REMEDY = "repair or reinstall its package"
CHILD = "from lowbit.backend.asking import answer; answer()"


def ask(names: list[str]) -> Iterator[tuple[str, Description, str]]:
    """The name and description of each backend, and what it printed.

    A description is what the JSON answer of ``lowbit backends`` holds: usable or not and why, the limits of each
    operation, and whether stored matrices can be prepared. As many backends are queried in parallel as there are
    processors.

    Args:
        names: of installed backends, or ``module:Class``.
    """
    together = usable_processors()
    for start in range(0, len(names), together):
        asked: list[_Question] = []
        try:
            for name in names[start : start + together]:
                asked.append(_Question(name))
            while any([not question.finished() for question in asked]):  # a list, so that each one is served
                _wait([pipe for question in asked for pipe in question.open])
            for question in asked:
                yield question.name, question.description(), str(question.said, "utf-8", "replace")
        finally:
            for question in asked:
                question.end()


def _wait(pipes: list[int]) -> None:
    """Wait a moment, or until one of these can be read."""
    with selectors.DefaultSelector() as selector:
        for pipe in pipes:
            selector.register(pipe, selectors.EVENT_READ)
        selector.select(PAUSE)


class _Question:
    """A backend whose description is pending.

    Attributes:
        name: of the backend.
        open: the pipes that its process can still write to.
        said: what it has printed, up to a limit.
    """

    def __init__(self, name: str) -> None:
        self.name, self.said, self._answer = name, b"", b""
        self.open: list[int] = []
        self._problem = ""
        self._until = time.monotonic() + DEADLINE
        reader, writer = os.pipe()
        try:
            self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
                python_command("-c", CHILD, json.dumps(name), str(writer)),
                env=python_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[writer],
                start_new_session=True,  # so that its children are ended with it
            )
        except OSError as error:
            self._process, self._problem = None, f"its process cannot be started: {error.strerror}"
            os.close(reader)
            return
        finally:
            os.close(writer)
        assert self._process.stdout is not None
        self._reader, self._printed = reader, self._process.stdout.fileno()
        self.open = [self._reader, self._printed]
        for pipe in self.open:
            os.set_blocking(pipe, False)

    def finished(self) -> bool:
        """Whether the process has ended or timed out; reads available output."""
        if self._process is None or self._problem:
            return True
        ended = self._ended()  # checked first: its output is then in the pipes
        self._read()
        if len(self._answer) > MOST_ANSWER:
            self._problem = f"its answer has more than {MOST_ANSWER} bytes"
        elif not ended and time.monotonic() > self._until:
            self._problem = f"it gave no answer within {DEADLINE:g} seconds"
        return ended or bool(self._problem)

    def _ended(self) -> bool:
        """Whether the process has ended. It is not reaped yet, so that its process id still identifies its session."""
        assert self._process is not None
        if not hasattr(os, "waitid"):  # on macOS
            return self._process.poll() is not None
        try:
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # where the signal of ended children is ignored
            return True

    def _read(self) -> None:
        """Read available output, a bounded amount from each pipe."""
        for pipe in tuple(self.open):
            for _ in range(MOST_ANSWER // PIECE + 1):
                try:
                    piece = os.read(pipe, PIECE)
                except BlockingIOError:
                    break
                if not piece:
                    self.open.remove(pipe)
                    break
                if pipe == self._reader:
                    self._answer += piece
                else:
                    self.said = (self.said + piece)[:MOST_SAID]

    def description(self) -> Description:
        """Its answer, or why there is none."""
        self.end()
        problem, status = self._problem, None if self._process is None else self._process.returncode
        if not problem:
            with suppress(ValueError, RecursionError):
                found = json.loads(self._answer)
                if _is_description(found):
                    return dict(found)
            how = f"by {signal_name(-status)}" if status is not None and status < 0 else f"with status {status}"
            problem = f"its process ended {how} and gave no answer"
        return {"usable": False, "reason": problem, "remedy": REMEDY}

    def end(self) -> None:
        """End the process and its children; a second call does nothing."""
        if self._process is None or self._process.returncode is not None:
            return
        with suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._reader)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self.open = []


def _is_description(found: Any) -> bool:
    """Whether an answer has the form of `describe`'s."""
    if not isinstance(found, dict) or not isinstance(found.get("usable"), bool):
        return False
    if not found["usable"]:
        return isinstance(found.get("reason"), str) and isinstance(found.get("remedy"), str)
    operations = found.get("operations")
    if not isinstance(operations, dict) or not isinstance(found.get("details"), dict):
        return False
    if not isinstance(found.get("prepares_stored"), bool):
        return False
    limits = [each for each in operations.values() if isinstance(each, dict)]
    return len(limits) == len(operations) and all(
        isinstance(each, list | dict) for one in limits for each in one.values()
    )


# **In the child.**


def answer() -> None:
    """Describe the backend named by the first argument; write the description to the file descriptor in the second."""
    name, pipe, process = json.loads(sys.argv[1]), int(sys.argv[2]), os.getpid()
    told = json.dumps(describe(name)).encode()
    if os.getpid() == process:  # not in a fork made by the package, which would answer again
        with suppress(BaseException):  # the package may have closed or replaced it
            sys.stdout.flush()
        with suppress(OSError), open(pipe, "wb") as stream:
            stream.write(told)
    os._exit(0)  # without waiting for threads or other remains of the package


def describe(name: str) -> Description:
    """One backend as in the JSON answer; a backend that raises an error is not usable."""
    try:
        return _asked(find(name))
    except UnavailableError as error:
        return {"usable": False, "reason": error.reason, "remedy": error.remedy}
    except ArgumentError as error:
        return {"usable": False, "reason": str(error), "remedy": "correct the name"}
    except BaseException as error:  # also interrupts: this process has no terminal to send one
        return {"usable": False, "reason": f"it fails with {words_of(error)}", "remedy": REMEDY}


def _asked(backend: Backend) -> Description:
    """A backend's description of itself, in JSON types."""
    state = backend.availability()
    if not state.usable:
        return {"usable": False, "reason": str(state.reason), "remedy": str(state.remedy)}
    capabilities = backend.capabilities()
    operations = {operation: declared.told_limits for operation, declared in capabilities.operations.items()}
    details, prepares = dict(capabilities.details or {}), backend.prepares_stored
    answer = {"usable": True, "operations": operations, "prepares_stored": prepares, "details": details}
    json.dumps(answer, allow_nan=False)
    return answer
