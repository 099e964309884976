"""Running kernels in this process, with checked accesses.

A `lowbit_gpusim.sim.device.SimDevice` can use `ShimKernels` in place of numpy. Any error in a kernel raises a
`KernelError`; the process continues, and the arrays are unchanged.
"""

import ctypes
import mmap
import re
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

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
    check_description,
    slot,
)

GAP = 1 << 20  # bytes between arrays, so that reading beyond one does not reach another
ALIGNMENT = 512  # bytes, twice the largest alignment of a span
MESSAGE = 4096
TIMEOUT = 60  # seconds
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
                    bytes_of(launch.arrays[parameter.name])[:] = copies[parameter.name]

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
            offset += (parameter.multiple - room.ctypes.data - offset) % ALIGNMENT
            copy = copies[parameter.name] = room[offset : offset + given.nbytes]
            copy[:] = POISON if access_code(parameter) == WRITE else bytes_of(given)
            offset += given.nbytes + GAP
        return copies


def bytes_of(array: Array) -> Array:
    """The bytes of an array, not copied."""
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
