"""The emulated process, and the requests to it (``cpp/guest.cpp`` has the other side)."""

import atexit
import os
import re
import shutil
import struct
import subprocess
import threading
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np

from lowbit.arrays import Array
from lowbit.errors import UnavailableError
from lowbit.system.storage import code_folder
from lowbit_cppyy.codegen.isa import InstructionSet
from lowbit_cppyy.kept.libraries import CPP, kept_library
from lowbit_cppyy.runtime.compiler import FORKED

COMPILER, EMULATOR = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
REMEDY = "install g++-aarch64-linux-gnu and qemu-user"
LIBRARIES = "/usr/aarch64-linux-gnu"
PROCESSORS = MappingProxyType({"neondot": "max", "neon": "cortex-a53"})
"""The processor that QEMU emulates for a table: all extensions that it knows, or a processor without dot products."""

ENDS = "stop_", "destroy_"
"""The prefixes of functions that stop or destroy an object."""

PATIENCE = 10
"""Seconds that the process has to end after its input is closed; then it is killed."""

HOLD, RELEASE, LOAD, SEND_BACK, FIRST_FUNCTION = range(5)
"""Kinds of requests; the functions follow in their order."""


def missing() -> str | None:
    """The name of a tool that is not installed, if any."""
    tools = {"aarch64-linux-gnu-g++": COMPILER, "qemu-aarch64": EMULATOR}
    return next((name for name, path in tools.items() if path is None), None)


def compiled(source: str, table: InstructionSet, *options: str) -> Path:
    """A program or a library for the guest, kept under a digest of all that determines it.

    Raises:
        UnavailableError: a tool is missing, or cannot compile it.
    """
    if tool := missing():
        raise UnavailableError("backend cppyy", f"{tool} is not installed", REMEDY)
    folder = code_folder("emulated")
    return folder / kept_library(folder, table.name, str(COMPILER), source, options)


def command(program: Path, table: InstructionSet) -> list[str]:
    """The command that runs a program on a processor with the table's instructions."""
    return [str(EMULATOR), "-L", LIBRARIES, "-cpu", PROCESSORS[table.name], str(program)]


class Guest:
    """The emulated process. It starts with the first request and ends when it is closed, at the latest with this
    process."""

    def __init__(self, table: InstructionSet) -> None:
        self._table, self._lock, self._owner, self._closed = table, threading.RLock(), 0, False

    @cached_property
    def _process(self) -> "subprocess.Popen[bytes]":
        self._owner = os.getpid()
        cases = (f"case {number}: serve(&{name}); break;" for number, name in enumerate(functions(), FIRST_FUNCTION))
        source = (CPP / "guest.cpp").read_text("utf-8").replace("FUNCTIONS", "\n".join(cases))
        program = self.compiled(source, "-pthread", "-rdynamic", "-ldl")
        atexit.register(self.close)
        return subprocess.Popen(self._command(program), stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def compiled(self, source: str, *options: str) -> Path:
        """A program or a library for this process."""
        return compiled(source, self._table, *options)

    def _command(self, program: Path) -> list[str]:
        return command(program, self._table)

    @property
    def children(self) -> tuple[int, ...]:
        """The process, if it was started."""
        return (self._process.pid,) if self._owner else ()

    @property
    def forked(self) -> bool:
        """Whether the process belongs to a parent of this one, which alone may send it requests."""
        return self._owner not in (0, os.getpid())

    def close(self) -> None:
        """End the process, if it was started by this one. Later requests are refused."""
        with self._lock:
            if self._closed or self._owner != os.getpid():
                return
            self._closed = True
            atexit.unregister(self.close)
            try:
                self._process.communicate(timeout=PATIENCE)  # closes its input, which ends it
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.communicate()

    def ask(self, kind: int, arguments: bytes, *written: Array) -> int:
        """The answer to a request; `written` are the arrays that it fills.

        Raises:
            UnavailableError: the process ended, or was closed.
        """
        with self._lock:
            try:
                return self._answer(kind, arguments, written)
            except (EOFError, BrokenPipeError) as error:
                raise UnavailableError("backend cppyy", "the emulated process ended", "load it again") from error

    def _answer(self, kind: int, arguments: bytes, written: Sequence[Array]) -> int:
        if self._closed:
            raise EOFError
        assert self._process.stdin is not None
        self._process.stdin.write(struct.pack("<q", kind) + arguments)
        self._process.stdin.flush()
        (result,) = struct.unpack("<q", self._read(8))
        for array in written:
            array.reshape(-1).view(np.uint8)[:] = np.frombuffer(self._read(array.nbytes), np.uint8)
        return int(result)

    def _read(self, count: int) -> bytes:
        assert self._process.stdout is not None
        found = self._process.stdout.read(count)
        if len(found) < count:
            raise EOFError
        return found


def of_bytes(data: bytes) -> bytes:
    """Bytes, encoded as a part of a request."""
    return struct.pack("<q", len(data)) + data


def of_array(array: Array) -> bytes:
    """The memory that a function reads from the start of an array: if it is the first row of another array, all rows.

    `attend` takes the first head and the distance between heads.
    """
    base = array.base
    if isinstance(base, np.ndarray) and base.shape[1:] == array.shape and base.ctypes.data == array.ctypes.data:
        return of_bytes(base.tobytes())
    return of_bytes(array.tobytes())


class Function:
    """A function of `lowbit::bridge`, called as cppyy calls it: with arrays for pointers."""

    def __init__(self, guest: Guest, kind: int, name: str, written: Sequence[int]) -> None:
        self._guest, self._kind, self._written = guest, kind, written
        self._ends = name.startswith(ENDS)

    def __call__(self, *arguments: Any) -> int:
        if self._guest.forked:
            return FORKED
        parts = [of_array(each) if isinstance(each, np.ndarray) else of_number(each) for each in arguments]
        try:
            return self._guest.ask(self._kind, b"".join(parts), *(arguments[place] for place in self._written))
        except UnavailableError:
            if not self._ends:
                raise
            return 0  # it already ended with the process


def of_number(number: float) -> bytes:
    """A number, encoded as a part of a request."""
    return struct.pack("<d", number) if isinstance(number, float) else struct.pack("<q", number)


@cache
def functions() -> Mapping[str, list[int]]:
    """The functions of `lowbit::bridge` by name, with the indices of the pointer arguments that each writes to."""
    texts = [re.split(r"namespace (?:lowbit::)?bridge \{", path.read_text("utf-8")) for path in sorted(CPP.glob("*.h"))]
    return declared("".join(parts[1] for parts in texts if len(parts) == 2))


def declared(text: str) -> Mapping[str, list[int]]:
    """The same for one text.

    >>> declared("inline int total(std::uintptr_t pool, const float* x, std::int64_t n, float* out) {")
    {'total': [3]}
    """
    found = re.findall(r"^inline \S+ (\w+)\(([^)]*)\)", text, re.MULTILINE)
    return {
        name: [place for place, each in enumerate(parameters.split(",")) if "*" in each and "const" not in each]
        for name, parameters in found
    }


def bridge(guest: Guest) -> Any:
    """`lowbit::bridge` of the guest."""
    numbered = enumerate(functions().items(), FIRST_FUNCTION)
    return SimpleNamespace(**{name: Function(guest, kind, name, written) for kind, (name, written) in numbered})
