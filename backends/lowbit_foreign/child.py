"""A child process that answers each line with one line. None of its output is trusted."""

import contextlib
import os
import selectors
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from lowbit.errors import UnavailableError, on_one_line
from lowbit.system.interpreters import program_environment

MOST_LINE = 1 << 28
"""Bytes of one answer; a child that writes more is ended before its answer fills the memory."""
MOST_SAID = 4096  # bytes of standard error that are kept for a message
PIECE = 1 << 16
GRACE = 2.0  # seconds in which a program may end by itself after its standard input is closed


# A program that hangs does not notice the end of its standard input, so Linux is asked to kill it with its parent. An
# interpreter does that in the child and then becomes the program.
TIE = """import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
os.execvp(sys.argv[2], sys.argv[2:])"""


class BrokenLineError(RuntimeError):
    """The child has ended, or its output is not an answer; it cannot be used any more."""


class Child:
    """A program with pipes to its standard streams.

    Attributes:
        pid: its process.
    """

    def __init__(self, words: Sequence[str]) -> None:
        """Start it.

        Raises:
            UnavailableError: it cannot be started.
        """
        self.name = os.path.basename(words[0])
        what = f"command {words[0]}"
        if shutil.which(words[0]) is None:
            raise UnavailableError(what, "there is no such executable program", "correct its name or build it")
        try:
            self._process = subprocess.Popen(
                _tied(words),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                env=program_environment(),
            )
        except (OSError, ValueError) as error:
            raise UnavailableError(what, f"it cannot be started: {error}", "correct it") from None
        self.pid = self._process.pid
        streams = (self._process.stdin, self._process.stdout, self._process.stderr)
        self._in, self._out, self._err = (stream.fileno() for stream in streams if stream is not None)
        for descriptor in (self._in, self._out, self._err):
            os.set_blocking(descriptor, False)
        self._said = b""

    def exchange(self, line: bytes, seconds: float | None = None) -> bytes:
        """Write one line, and read the one line that answers it.

        All three streams are served at once, so that a child which answers early or writes many errors does not block.

        Args:
            line: without its end.
            seconds: how long to wait; None waits for ever.

        Raises:
            BrokenLineError: the child ends or closes its output, answers before it was asked, with more than one line
                or with too long a line, or does not answer in time. It has then been killed.
        """
        try:
            return self._exchange(memoryview(line + b"\n"), None if seconds is None else time.monotonic() + seconds)
        except BrokenLineError:
            self.end(0)
            raise

    def _exchange(self, pending: memoryview, deadline: float | None) -> bytes:
        answer = bytearray()
        with selectors.DefaultSelector() as ready:
            ready.register(self._out, selectors.EVENT_READ)
            ready.register(self._err, selectors.EVENT_READ)
            ready.register(self._in, selectors.EVENT_WRITE)
            while True:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                served = {int(key.fd) for key, _ in ready.select(left)}
                if not served:
                    raise self._broken("does not answer in time")
                if self._err in served and not self._hear():
                    ready.unregister(self._err)
                if self._in in served:
                    pending = pending[self._write(pending) :]
                    if not pending:
                        ready.unregister(self._in)
                if self._out in served and self._read(answer):
                    if pending:
                        raise self._broken("answers before it has read its line")
                    return self._whole(answer)

    def _write(self, pending: memoryview) -> int:
        try:
            return os.write(self._in, pending[:PIECE])
        except BlockingIOError:
            return 0
        except OSError:
            raise self._broken("does not read its standard input any more") from None

    def _read(self, answer: bytearray) -> bool:
        """Read what is available; whether it ends a line."""
        try:
            piece = os.read(self._out, PIECE)
        except BlockingIOError:
            return False
        if not piece:
            raise self._broken("closes its standard output")
        answer += piece
        if len(answer) > MOST_LINE:
            raise self._broken(f"writes a line of more than {MOST_LINE} bytes")
        return b"\n" in piece

    def _whole(self, answer: bytearray) -> bytes:
        line, _, rest = bytes(answer).partition(b"\n")
        if rest:
            raise self._broken(f"writes more than the one requested line: {shown(rest)}")
        return line

    def _hear(self) -> bool:
        """Keep the end of the child's standard error; False once that is closed."""
        try:
            piece = os.read(self._err, PIECE)
        except BlockingIOError:
            return True
        self._said = (self._said + piece)[-MOST_SAID:]
        return bool(piece)

    def _broken(self, what: str) -> BrokenLineError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.2)  # its output ends shortly before the process does
        while self._err_waits() and self._hear():
            pass
        status = self._process.returncode
        ended = f", and has ended {_status(status)}" if status is not None else ""
        said = f"; the end of its standard error: {shown(self._said[-400:])}" if self._said.strip() else ""
        return BrokenLineError(f"{self.name} {what}{ended}{said}")

    def _err_waits(self) -> bool:
        with selectors.DefaultSelector() as ready:
            ready.register(self._err, selectors.EVENT_READ)
            return bool(ready.select(0))

    @property
    def alive(self) -> bool:
        """Whether it is still running."""
        return self._process.poll() is None

    def end(self, grace: float = GRACE) -> None:
        """End it: close its standard input, wait a little, then kill. Ending twice is harmless."""
        process = self._process
        if process.stdin is not None:
            process.stdin.close()
        try:
            process.wait(grace)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def _tied(words: Sequence[str]) -> list[str]:
    """The command of a process that ends when this one does.

    Only in the main thread: Linux treats the end of the thread that started it as the end of its parent.
    """
    if sys.platform != "linux" or not sys.executable or threading.current_thread() is not threading.main_thread():
        return list(words)
    return [sys.executable, "-I", "-S", "-c", TIE, str(os.getpid()), *words]


def _status(code: int) -> str:
    return f"by signal {-code}" if code < 0 else f"with status {code}"


def shown(text: bytes) -> str:
    """The output of a program, on one line for a message."""
    return on_one_line(text[:400].decode(errors="replace"))
