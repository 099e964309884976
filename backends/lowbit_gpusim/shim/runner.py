"""Running kernels: in this process with checked accesses, or in a separate process under a sanitizer.

A `lowbit_gpusim.sim.device.SimDevice` can use `ShimKernels` in place of numpy. Any error in a kernel raises a
`KernelError`; the process continues, and the arrays are unchanged.
"""

import ctypes
import mmap
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from lowbit.arrays import Array
from lowbit_cuda.port import Kernel, Number
from lowbit_gpusim.shim import build
from lowbit_gpusim.shim.launching import (
    POISON,
    WRITE,
    KernelError,
    Launch,
    Mutation,
    Options,
    access_code,
    alignment_of,
    check_description,
    slot,
)

__all__ = [
    "KernelError",
    "Launch",
    "Mutation",
    "Options",
    "Sanitized",
    "ShimKernels",
    "Watched",
    "kernel_sources",
    "watched_kernels",
]

GAP = 1 << 20  # bytes between arrays, so that reading beyond one does not reach another
ALIGNMENT = 512  # bytes, twice the largest alignment of a span
MESSAGE = 4096
TIMEOUT = 60  # seconds for launches under a sanitizer
# Without addresses and process numbers, so that messages are reproducible.
_COMPLAINT = re.compile(r"((?:Address|Thread)Sanitizer: [\w -]+?(?= on | \(pid|:|$)|runtime error: .*)", re.M)
_PLACE = re.compile(r"(\w+\.cuh):(\d+)")
_ALONE = threading.Lock()  # the library is loaded once, and runs one launch at a time
_LINE = re.compile(r"\{line ([0-9a-f]+)\}")


class _Region(ctypes.Structure):
    _fields_ = (
        ("begin", ctypes.c_void_p),
        ("nbytes", ctypes.c_int64),
        ("access", ctypes.c_int32),
        ("unused", ctypes.c_int32),
        ("name", ctypes.c_char_p),
    )


class _Launch(ctypes.Structure):
    _fields_ = (
        ("kernel", ctypes.c_char_p),
        ("slots", ctypes.c_char_p),
        ("regions", ctypes.POINTER(_Region)),
        ("shared", ctypes.c_int64),
        ("seed", ctypes.c_uint64),
        ("slot_count", ctypes.c_int32),
        ("region_count", ctypes.c_int32),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32),
        ("strict", ctypes.c_int32),
        ("mutation_line", ctypes.c_int32),
        ("mutation_file", ctypes.c_char_p),
        ("message", ctypes.c_void_p),
        ("room", ctypes.c_int64),
    )


class Watched:
    """Kernels in this process, with every memory access checked.

    Args:
        sources: files of kernels; by default all of `lowbit_cuda.kernels`.

    Raises:
        UnavailableError: there is no g++, or it refuses a source.
    """

    def __init__(self, sources: Sequence[Path] | None = None) -> None:
        self._path = build.build(kernel_sources() if sources is None else sources, build.WATCHED)
        self._library = ctypes.CDLL(str(self._path))
        self._library.lowbit_shim_describe.restype = ctypes.c_char_p
        self._library.lowbit_shim_meetings.restype = ctypes.c_char_p
        self._message = ctypes.create_string_buffer(MESSAGE)
        self._room = _Room()
        self._checked: set[Kernel] = set()

    def run(self, launch: Launch) -> None:
        """Run a kernel, which writes to the arrays of the launch.

        Raises:
            KernelError: what it does wrong; no array has changed.
        """
        with _ALONE:
            self._check(launch.kernel)
            copies = self._room.copies(launch)
            if self._library.lowbit_shim_run(ctypes.byref(self._given(launch, copies))):
                kind, _, message = self._message.value.decode().partition("\n")
                raise KernelError(launch.kernel.name, kind, self._with_lines(message))
            for parameter in launch.kernel.parameters:
                if parameter.access in ("write", "update"):
                    _bytes_of(launch.arrays[parameter.name])[:] = copies[parameter.name]

    def meetings(self) -> list[tuple[str, str, int]]:
        """The barriers, shuffles and votes that threads executed since the last call: name, file and line of each."""
        with _ALONE:
            lines = self._library.lowbit_shim_meetings().decode().splitlines()
        return [(name, file, int(line)) for name, file, line in (re.split("[ :]", line) for line in lines)]

    def _check(self, kernel: Kernel) -> None:
        if kernel not in self._checked:
            description = self._library.lowbit_shim_describe(kernel.name.encode())
            if description is None:
                raise KernelError(kernel.name, "table", "no source has a kernel of this name")
            check_description(kernel, description.decode())
            self._checked.add(kernel)

    def _given(self, launch: Launch, copies: Mapping[str, Array]) -> _Launch:
        kernel, options = launch.kernel, launch.options
        slots, regions = b"", []
        for parameter in kernel.parameters:
            if parameter.access is None:
                slots += slot(parameter, launch.numbers[parameter.name])
                continue
            copy = copies[parameter.name]
            slots += copy.ctypes.data.to_bytes(8, "little")
            name = parameter.name.encode()
            regions.append(_Region(copy.ctypes.data, copy.nbytes, access_code(parameter), 0, name))
        mutation = options.mutation or Mutation("", 0)
        return _Launch(
            kernel.name.encode(),
            slots,
            (_Region * len(regions))(*regions),
            kernel.shared(launch.numbers),
            options.seed,
            len(kernel.parameters),
            len(regions),
            (ctypes.c_uint32 * 3)(*kernel.grid(launch.numbers)),
            kernel.block,
            options.strict,
            mutation.line,
            mutation.file.encode(),
            ctypes.addressof(self._message),
            MESSAGE,
        )

    def _with_lines(self, message: str) -> str:
        """The source lines of code addresses: the line in the kernel, and those in functions that it calls."""
        return _LINE.sub(lambda found: self._line(int(found[1], 16)), message)

    def _line(self, address: int) -> str:
        command = ["addr2line", "-i", "-e", str(self._path), hex(address - 1)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=True)
        except (OSError, subprocess.SubprocessError):
            return f"code {address:#x}"
        lines = [line.split("/")[-1].split(" ")[0] for line in done.stdout.splitlines()]
        return " in ".join(line for line in lines if not line.startswith("launch.h:"))


class _Room:
    """Memory for the arrays of a launch, with gaps, reused by later launches."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 1)

    def copies(self, launch: Launch) -> dict[str, Array]:
        """Each array's bytes, with exactly its alignment; outputs are poisoned."""
        spans = [parameter for parameter in launch.kernel.parameters if parameter.access]
        size = sum(launch.arrays[parameter.name].nbytes + GAP + ALIGNMENT for parameter in spans) + GAP
        if size > len(self._memory):
            self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        room = np.frombuffer(self._memory, np.uint8)
        copies, offset = {}, GAP
        for parameter in spans:
            given = launch.arrays[parameter.name]
            offset += (alignment_of(parameter) - room.ctypes.data - offset) % ALIGNMENT
            copy = copies[parameter.name] = room[offset : offset + given.nbytes]
            copy[:] = POISON if access_code(parameter) == WRITE else _bytes_of(given)
            offset += given.nbytes + GAP
        return copies


def _bytes_of(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)


@cache
def watched_kernels() -> Watched:
    """All kernels of `lowbit_cuda.kernels`, compiled once per process."""
    return Watched()


def kernel_sources() -> list[Path]:
    """The sources of `lowbit_cuda.kernels`."""
    return [path for path in sorted(build.KERNELS.glob("*.cuh")) if build.kernel_names(path)]


@dataclass
class ShimKernels:
    """Runs kernels of a simulated device: called with a kernel, its arrays and numbers, it runs the kernel's own C++.

    Attributes:
        seed: of the next launch; every launch has another.
        strict: see `Options`.
        watched: the kernels.
    """

    seed: int = 0
    strict: bool = False
    watched: Watched = field(default_factory=watched_kernels)

    def __call__(self, kernel: Kernel, arrays: Mapping[str, Array], numbers: Mapping[str, Number]) -> None:
        """Run a kernel.

        Raises:
            KernelError: what it does wrong.
        """
        self.watched.run(Launch(kernel, arrays, numbers, Options(self.seed, self.strict)))
        self.seed += 1


class Sanitized:
    """Kernels under a sanitizer, in a separate process for each call of `run`.

    Args:
        flavor: `build.ADDRESS` or `build.THREAD`.
        sources: as for `Watched`.

    Raises:
        UnavailableError: there is no g++ with this sanitizer, or it refuses a source.
    """

    def __init__(self, flavor: build.Flavor, sources: Sequence[Path] | None = None) -> None:
        self._program = build.build(kernel_sources() if sources is None else sources, flavor)

    def run(self, *launches: Launch) -> None:
        """Run launches one after another, which write to their arrays.

        Raises:
            KernelError: of the kind ``sanitizer`` what the sanitizer says, or what the runtime does; no array has
                changed then.
        """
        try:
            done = subprocess.run(
                [*self._prefix, str(self._program)],
                input=b"".join(_serialized(launch) for launch in launches),
                capture_output=True,
                timeout=TIMEOUT,
                check=False,
                env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0", "TSAN_OPTIONS": "halt_on_error=1:exitcode=66"},
            )
        except subprocess.TimeoutExpired:
            name = ", ".join(dict.fromkeys(launch.kernel.name for launch in launches))
            raise KernelError(name, "endless", f"the process has not ended after {TIMEOUT} seconds") from None
        answers = _answers(done.stdout)
        results: list[tuple[Array, bytes]] = []
        for launch in launches:
            message = next(answers, None)
            if message is None:
                raise KernelError(launch.kernel.name, *_complaint(done.stderr.decode(errors="replace")))
            if message:
                kind, _, rest = message.decode().partition("\n")
                raise KernelError(launch.kernel.name, kind, rest)
            for parameter in launch.kernel.parameters:
                if parameter.access in ("write", "update"):
                    results.append((launch.arrays[parameter.name], next(answers)))
        if done.returncode:
            raise KernelError(launches[-1].kernel.name, *_complaint(done.stderr.decode(errors="replace")))
        for array, result in results:
            _bytes_of(array)[:] = np.frombuffer(result, np.uint8)

    @cached_property
    def _prefix(self) -> list[str]:
        # ThreadSanitizer needs limited randomisation of the address space.
        setarch = shutil.which("setarch")
        return [setarch, "-R"] if setarch else []


def _serialized(launch: Launch) -> bytes:
    """A launch in the format that driver.cpp reads."""
    kernel, options = launch.kernel, launch.options
    mutation = options.mutation or Mutation("", 0)
    sizes = (*kernel.grid(launch.numbers), kernel.block, kernel.shared(launch.numbers))
    numbers = (*sizes, options.seed, int(options.strict), mutation.line, len(kernel.parameters))
    parts = [np.array(numbers, np.int64).tobytes(), _text(kernel.name.encode()), _text(mutation.file.encode())]
    for parameter in kernel.parameters:
        if parameter.access is None:
            parts += [np.int64(0).tobytes(), slot(parameter, launch.numbers[parameter.name])]
            continue
        given = _bytes_of(launch.arrays[parameter.name])
        poison = access_code(parameter) == WRITE
        parts += [np.int64(1).tobytes(), _text(parameter.name.encode())]
        parts.append(np.array([access_code(parameter), alignment_of(parameter)], np.int64).tobytes())
        parts.append(_text(bytes([POISON]) * given.nbytes if poison else given.tobytes()))
    return b"".join(parts)


def _text(content: bytes) -> bytes:
    return np.int64(len(content)).tobytes() + content


def _answers(output: bytes) -> Any:
    """The complete parts of an answer."""
    while len(output) >= 8:
        size = int.from_bytes(output[:8], "little")
        if len(output) < 8 + size:
            return
        yield output[8 : 8 + size]
        output = output[8 + size :]


def _complaint(said: str) -> tuple[str, str]:
    """The kind and message of the error of a process that did not finish."""
    found = _COMPLAINT.search(said)
    if found:
        places = dict.fromkeys(f"{name}:{line}" for name, line in _PLACE.findall(said))
        return "sanitizer", f"{re.sub('0x[0-9a-f]+ ', '', found[1])}; at {', '.join(list(places)[:4])}"
    lines = said.strip().splitlines()
    if len(lines) == 2:
        return lines[0], lines[1]  # an error of the runtime, with operating-system threads
    return "sanitizer", " ".join(lines) or "the process died without a word"
