"""The command line for tests: each run is a fork of one process that has already imported it.

To start Python and to import takes longer than most answers. A run has its own arguments, variables, path of imports,
current folder and standard streams, and it ends like any other process. What Python does while it starts is the same
for all of them, so tests of closed streams, of Python's own variables and of interrupts start ``python -m lowbit``.
"""

import gc
import io
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import IO, cast

from lowbit.system.interpreters import python_command, python_environment

MOST_BYTES = 2**20
LONGEST = 300.0  # seconds: only a run that hangs takes as long
SUPPORT = Path(__file__).parent
IMPORTED = ("lowbit.cli", "numpy", "rich.columns", "rich.markdown", "rich.table", "rich.traceback")
"""What every run needs. `typer.rich_utils` is not among it, because it reads variables while it is imported."""


class CommandLine:
    """Runs commands of lowbit.

    Args:
        end: the connection to the process that runs them.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def run(
        self,
        *arguments: str,
        path: str | Path = "",
        stdout: int | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> "subprocess.CompletedProcess[str]":
        """Run ``lowbit`` with these arguments.

        Args:
            arguments: after ``lowbit``.
            path: folders of packages, as in ``PYTHONPATH``.
            stdout: a file descriptor to be standard output, in place of one whose text is returned.
            variables: of the environment, beside those of this process.
        """
        environment = python_environment() | ({"PYTHONPATH": str(path)} if path else {})
        environment.update(variables or {})
        message = json.dumps({"arguments": arguments, "environment": environment, "path": str(path)}).encode()
        assert len(message) <= MOST_BYTES
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            socket.send_fds(self._end, [message], [out.fileno() if stdout is None else stdout, err.fileno()])
            status = int(self._end.recv(100))
            return subprocess.CompletedProcess(["lowbit", *arguments], status, _text(out), _text(err))


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return str(file.read(), "utf-8")


@contextmanager
def command_line(*imported: str) -> Iterator[CommandLine]:
    """A process that runs commands.

    Args:
        imported: the modules that it imports first, beside ``lowbit.cli``.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.settimeout(LONGEST)
        program = f"import sys; sys.path.append({str(SUPPORT)!r}); import command_line; command_line.serve()"
        command = python_command("-c", program, str(theirs.fileno()), *IMPORTED, *imported)
        process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        theirs.close()
        try:
            yield CommandLine(ours)
        finally:
            ours.close()
            process.wait(LONGEST)


# **In that process.**


def serve() -> None:
    """Import what the arguments name, then run commands until the connection is closed; in a child, run one."""
    number, *modules = sys.argv[1:]
    for module in modules:
        import_module(module)
    sys.path.remove(str(SUPPORT))
    gc.freeze()  # what is there is of all of them: it is not copied to be looked through
    with socket.socket(fileno=int(number)) as end:
        while message := _received(end):
            process = os.fork()
            if not process:
                break
            _, status = os.waitpid(process, 0)
            end.send(str(os.waitstatus_to_exitcode(status)).encode())
    if message:
        _run(**json.loads(message))


def _received(end: socket.socket) -> bytes:
    """The next message; its two files become standard output and standard error."""
    message, files, _, _ = socket.recv_fds(end, MOST_BYTES, 2)
    for number, file in enumerate(files, 1):
        os.dup2(file, number)
        os.close(file)
    return message


def _run(arguments: list[str], environment: Mapping[str, str], path: str) -> None:
    """Be ``python -m lowbit``."""
    from lowbit.__main__ import main

    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = path.split(os.pathsep) if path else []
    raw, at_once = io.FileIO(1, "w", closefd=False), bool(environment.get("PYTHONUNBUFFERED"))
    written = cast("io.BufferedWriter", raw) if at_once else io.BufferedWriter(raw)  # as Python does it
    sys.stdout = io.TextIOWrapper(written, "utf-8", write_through=at_once)
    sys.argv = ["lowbit", *arguments]
    main()
