"""One host process: starting it, asking it, and saying how it ended."""

import contextlib
import json
import os
import secrets
import select
import signal
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Sequence
from importlib.resources import files
from typing import IO

from lowbit.backend.wire import Tree
from lowbit.system.interpreters import python_command, python_environment, signal_name
from lowbit_conformance.isolation import methods as isolation
from lowbit_conformance.isolation.arena import ARGUMENTS, CONTROL, Arena
from lowbit_conformance.isolation.descendants import adopt_orphans, children, end_orphans, kill

Message = dict[str, Tree]
MOST_REPLY = 1 << 24  # bytes; replies contain no arrays, so that only a hostile one is this long
LONG = 1 << 20  # bytes of a request; a longer one gets more time in proportion
NOT_ISOLATED = ("none", "unobserved")
ENDING = 10.0  # seconds that the kernel may take to end a killed process
# Signals reserved by the C library, which handles one of them from the first started thread on.
OF_LIBRARY = sum(1 << (number - 1) for number in range(32, int(getattr(signal, "SIGRTMIN", 32))))

# The interpreter reads its program from standard input, which is the socket: the number of texts, and each text after
# ten digits of its length. The host's own text is the last. It leaves no `__file__`, which `multiprocessing` would run
# again in each process that it spawns.
BOOT = """import os
def read(size):
    text = b""
    while len(text) < size:
        text += os.read(0, size - len(text)) or os._exit(1)
    return text
for number in range(int(read(1))):
    exec(compile(read(int(read(10))), "<string>", "exec"))"""

# Read once, so that no backend can replace the program of a later host.
CONFINEMENT, *PROGRAM = (
    (files("lowbit_conformance.isolation") / f"{name}.py").read_bytes()
    for name in ("confinement", "state", "channel", "host")
)

_living: set[int] = set()  # the hosts of this process


class HostEndedError(Exception):
    """The host process ended, or had to be killed, during a request; the text says how."""


class HostProcess:
    """A running host.

    Attributes:
        base: the address of the shared memory in the host.
        isolation: the method that isolates it from this process.
    """

    def __init__(self, arena: Arena, methods: Sequence[str] | None = None) -> None:
        """Start one, isolated by the first method that works."""
        self._arena = arena
        adopt_orphans()  # processes that a host leaves behind become children of this one, and `end` finds them
        self._channel, theirs = socket.socketpair()
        self._output: list[IO[bytes]] = [tempfile.TemporaryFile(buffering=0) for _ in range(2)]  # noqa: SIM115 - closed by `end`
        with theirs:
            self._process = subprocess.Popen(
                python_command("-c", BOOT),
                stdin=theirs.fileno(),
                stdout=self._output[0],
                stderr=self._output[1],
                pass_fds=[arena.file],
                env=python_environment(neutral_environment()),
                start_new_session=True,
            )
        _living.add(self._process.pid)
        self._ends = [self._channel.fileno()]  # becomes readable when it answers or ends
        self._first = -1  # process 1 of its namespaces, with which all others inside end
        self._watched = os.pidfd_open(self._process.pid) if hasattr(os, "pidfd_open") else -1
        if self._watched >= 0:  # a child may hold its end of the channel, which is then not closed
            self._ends.append(self._watched)
        methods = isolation.methods() if methods is None else methods
        confining = f"ISOLATION = confine({list(methods)})".encode()
        texts = (CONFINEMENT, confining, *PROGRAM)
        try:
            self._channel.sendall(b"%d" % len(texts) + b"".join(b"%010d" % len(text) + text for text in texts))
        except ConnectionError as error:  # it has ended before it read them
            raise HostEndedError(self._death(error)) from None
        arena.control()[:16] = 0
        reply = self.ask({"file": arena.file, "control": CONTROL, "arguments": ARGUMENTS}, 60.0)
        self.base, self.isolation = int(reply["base"]), str(reply["isolation"])
        if not self.isolation:
            self.end()
            raise HostEndedError(f"NOT_ISOLATED: the host cannot be separated from the judge by {' or '.join(methods)}")
        self._inside = self._process.pid
        if self.isolation == "namespaces":
            self._inside = self._first = _child(self._inside)
        if self.isolation not in NOT_ISOLATED:  # a process waits for it, and with namespaces two
            self._inside = _child(self._inside)
        self._printed, self._state = 0, dict[str, str]()

    def ask(self, message: Message, deadline: float) -> Message:
        """Send a request and wait for its reply.

        Args:
            message: the request, without arrays.
            deadline: seconds that an ordinary request may take. One of more than `LONG` bytes, such as a trace of
                thousands of steps, gets more in proportion to its length.

        Raises:
            HostEndedError: the process ended, or did not answer in time and was killed.
        """
        token = secrets.token_hex(8)  # so that only an answer to this request counts
        text = json.dumps(message | {"token": token}).encode()
        deadline *= max(1.0, len(text) / LONG)
        until = time.monotonic() + deadline
        try:
            self._channel.settimeout(deadline)  # a stopped host does not read
            self._channel.sendall(struct.pack("<Q", len(text)) + text)
            size = struct.unpack("<Q", self._receive(8, until))[0]
            if size > MOST_REPLY:
                raise ValueError(f"a reply of {size} bytes")
            reply = json.loads(self._receive(size, until))
        except TimeoutError:
            self.end()
            raise HostEndedError(f"HUNG: longer than {deadline:g} s") from None
        except (ConnectionError, ValueError, RecursionError, MemoryError) as error:
            raise HostEndedError(self._death(error)) from None
        if not isinstance(reply, dict) or reply.pop("token", None) != token:
            raise HostEndedError(self._death(ValueError("not a reply to what it was asked")))
        return reply

    def remember(self) -> None:
        """Record the present signal handlers, file mode mask and folder as the right ones."""
        self._state = self._state_now()

    def seen(self) -> list[tuple[str, str]]:
        """Breaches that are visible from here; those of `state.Watch` are found within reach of the watched code.

        Raises:
            HostEndedError: a thread that was left running ended the process just after its answer.
        """
        found = []
        size = os.fstat(self._output[0].fileno()).st_size
        if size > self._printed:
            text = os.pread(self._output[0].fileno(), min(size - self._printed, 200), self._printed)
            found.append(("WROTE_TO_STDOUT", repr(text.decode(errors="replace"))))
        self._printed = size
        if self._state and (now := self._state_now()) != self._state:
            if self._ends_within(0.2):  # a fault removes the handlers first
                raise HostEndedError(self._death(ConnectionResetError("it has ended")))
            for name, before in self._state.items():
                if now.get(name) != before:
                    found.append(("STATE_CHANGED", f"{name}: {now.get(name)}, before {before}"))
            self._state = now
        return found

    def _ends_within(self, seconds: float) -> bool:
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _state_now(self) -> dict[str, str]:
        """Signal sets, file mode mask and folder of the process, from Linux; empty on other systems."""
        names, folder = ("SigBlk:", "SigIgn:", "SigCgt:"), f"/proc/{self._inside}/cwd"
        with contextlib.suppress(OSError), open(f"/proc/{self._inside}/status", errors="replace") as file:
            lines = dict(line.split()[:2] for line in file if line.startswith((*names, "Umask:")))
            signals = " ".join(f"{int(lines[name], 16) & ~OF_LIBRARY:016x}" for name in names)
            state = {"signals blocked, ignored or caught": signals, "the file mode mask": lines["Umask:"]}
            return state | {"the folder": os.readlink(folder)}
        return {}

    def _receive(self, size: int, until: float) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            ready = select.select(self._ends, [], [], max(0.0, until - time.monotonic()))[0]
            if not ready:
                raise TimeoutError
            if ready == [self._watched]:
                raise ConnectionResetError("it has ended")
            part = self._channel.recv(min(size - len(parts), 1 << 20))
            if not part:
                raise ConnectionResetError("it closed the channel")
            parts += part
        return bytes(parts)

    def _death(self, error: Exception) -> str:
        """How the process ended, as a verdict without the place of a fault."""
        try:
            status = self._process.wait(2.0)
        except subprocess.TimeoutExpired:  # it is still running
            self.end()
            return f"CRASHED: the process broke the protocol: {error}"
        last = self._last_output()
        self.end()
        if status < 0:
            return f"CRASHED({signal_name(-status)}){': ' + last if last else ''}"
        return f"CRASHED: the process ended with status {status}{': ' + last if last else ''}"

    def _last_output(self) -> str:
        """The end of what the process wrote to standard error."""
        size = os.fstat(self._output[1].fileno()).st_size
        text = os.pread(self._output[1].fileno(), 2000, max(0, size - 2000)).decode(errors="replace")
        return " ".join(text.split())[-300:]

    def end(self) -> None:
        """Kill the process and all that it started. Ending twice is harmless."""
        if self._process.returncode is None or self._channel.fileno() >= 0:
            self._end_inside()
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            kill(self._process.pid)
            with contextlib.suppress(subprocess.TimeoutExpired):  # a process that is stuck in a driver cannot be killed
                self._process.wait(ENDING)
            _living.discard(self._process.pid)
            self._channel.close()
            if self._watched >= 0:
                os.close(self._watched)
            for file in self._output:
                file.close()
            end_orphans(_living)

    def _end_inside(self) -> None:
        """Let the system kill all that the host has started, at once, if it is isolated."""
        if self._process.poll() is not None or not (isolated := getattr(self, "isolation", "none")):
            return
        if isolated == "namespaces":
            kill(self._first)
        elif isolated == "landlock":
            self._process.send_signal(signal.SIGTERM)
        else:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(ENDING)


def _child(process: int) -> int:
    """The only child of a process; the process itself if the system does not show it."""
    return next(iter(children(process)), process)


SETTINGS = ("LOWBIT_CACHE", "LOWBIT_NUM_THREADS", "LOWBIT_CPPYY_")
"""Prefixes of variables with which users configure backends; no other variable of lowbit is passed on."""


def neutral_environment() -> dict[str, str]:
    """The environment without variables that reveal a test; those that configure backends stay."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(SETTINGS) or not name.startswith(("PYTEST_", "LOWBIT_"))
    }
