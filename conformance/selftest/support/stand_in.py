"""The stand-in for NVIDIA's driver: how it is built, how a test runs a script on it, and what the script may do.

The stand-in (``fake_cuda``) is a library of the driver's name. A child process that is told to look for it first loads
it in the driver's place, so the device for GPUs runs as it is, with NVIDIA's own packages, where there is no GPU. What
kernels do is told to it in numpy (`Control.teach`): it is no GPU, and nothing here says anything of a kernel's code.
But the bytes of a kernel's arguments are placed as the compiled kernel itself says, so their packing is tested.
"""

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from lowbit_cuda.port import Kernel, Number
from lowbit_gpusim.meanings import meaning_of

HERE = Path(__file__).parent
LIBRARY = "libcuda.so.1"
NEEDS = ("cuda.core", "cuda.bindings")
LAUNCH_FAILED, ILLEGAL_ADDRESS, UNKNOWN = 719, 700, 999


def compiler() -> str | None:
    """The C++ compiler, or None."""
    return shutil.which("g++") or shutil.which("c++")


def build(folder: Path) -> None:
    """Compile the stand-in into a folder."""
    command = [
        str(compiler()),
        "-std=c++17",
        "-Wall",
        "-Wextra",
        "-shared",
        "-fPIC",
        "-o",
        str(folder / LIBRARY),
    ]
    subprocess.run([*command, str(HERE / "fake_cuda/driver.cpp")], check=True, timeout=120)


def run(folder: Path, script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a Python script on the stand-in that was built into a folder; its cache is there too."""
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {
        "PYTHONPATH": path,
        "LD_LIBRARY_PATH": str(folder),
        "LOWBIT_CACHE": str(folder / "cache"),
    }
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(
        command, env=environment | variables, capture_output=True, text=True, timeout=300, check=False, cwd=folder
    )


BEGIN = """
import json, gc, os, sys
import numpy as np
import port_contract as contract
from lowbit.errors import ArgumentError, LowbitError, UnavailableError
from lowbit_cuda.cuda.availability import availability
from lowbit_cuda.cuda.device import CudaDevice
from lowbit_cuda.port import DeviceError, DeviceMemoryError
from port_contract import BUDGET, COUNT, KERNELS, fetched, ramp, sent
from stand_in import Control

control = Control()
control.teach([contract.fill, contract.add, contract.turn])
gc.freeze()  # so that collecting what is left of a device takes no time
open_device = lambda budget=BUDGET: CudaDevice(budget, kernels=KERNELS)
"""
"""What most scripts begin with."""


def said(folder: Path, script: str, **variables: str) -> list[str]:
    """The lines that a script printed after `BEGIN`; the script must end without an error."""
    done = run(folder, BEGIN + script, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


# **In the child.**

CONTEXTS = "none", "the device's", "another library's"
MEANING = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_uint8), ctypes.POINTER(ctypes.c_uint32))


class Control:
    """The stand-in as a script sees it.

    Attributes:
        errors: what the numpy form of a kernel raised.
        launched: each kernel that ran: its name, its numbers, and its grid, block and shared memory.
    """

    def __init__(self) -> None:
        from cuda.bindings import driver

        self._library = ctypes.CDLL(LIBRARY)
        for name in ("standInReport", "standInWaits", "standInAfterwards"):
            getattr(self._library, name).restype = ctypes.c_char_p
        self._library.standInTake.argtypes = [ctypes.c_size_t]
        self._library.standInPlace.restype = ctypes.c_void_p
        self._library.standInCalls.restype = ctypes.c_long
        for code in driver.CUresult:
            self._library.standInName(int(code), code.name.encode())
        self._kept: list[Any] = []
        self.errors: list[BaseException] = []
        self.launched: list[tuple[str, dict[str, Number], tuple[int, ...]]] = []

    def fail(self, call: str, nth: int, code: int) -> None:
        """Let the nth call of an entry point from now on fail; ``run`` is whatever a stream runs."""
        self._library.standInFail(call.encode(), nth, code)

    def calls(self, name: str) -> int:
        """How often an entry point was called."""
        return int(self._library.standInCalls(name.encode()))

    def report(self) -> list[str]:
        """What is not given back, and what was done wrong."""
        return str(self._library.standInReport().decode()).splitlines()

    def lose(self, code: int) -> None:
        """The device's work fails with this error, of which the next calls will tell."""
        self._library.standInLose(code)

    def waits(self) -> list[str]:
        """The calls that made the device wait for all of its work, while it had some."""
        return str(self._library.standInWaits().decode()).splitlines()

    def afterwards(self) -> list[str]:
        """The calls that were made in a context that an error had broken."""
        return str(self._library.standInAfterwards().decode()).splitlines()

    def switch(self, context: str) -> None:
        """Another library makes a context current in this thread."""
        self._library.standInSwitch(CONTEXTS.index(context))

    @property
    def current(self) -> str:
        """Which context is current in this thread."""
        return CONTEXTS[self._library.standInCurrent()]

    def take(self, nbytes: int) -> None:
        """Another process takes this number of bytes of the device."""
        self._library.standInTake(nbytes)

    def forget(self) -> None:
        """Begin anew."""
        self._library.standInForget()
        self.errors.clear()
        self.launched.clear()

    def teach(self, kernels: Iterable[Kernel]) -> None:
        """Let kernels do what their descriptions mean."""
        for kernel in kernels:
            self._kept.append(function := MEANING(self._meaning(kernel)))
            self._library.standInKernel(kernel.name.encode(), function)

    def _meaning(self, kernel: Kernel) -> Any:
        def run(packed: Any, sizes: Any) -> int:
            try:
                return self._run(kernel, packed, tuple(sizes[:7]))
            except BaseException as error:
                self.errors.append(error)
                return LAUNCH_FAILED

        return run

    def _run(self, kernel: Kernel, packed: Any, sizes: tuple[int, ...]) -> int:
        addresses, numbers = unpacked(kernel, packed)
        self.launched.append((kernel.name, numbers, sizes))
        wanted = (*kernel.grid(numbers), kernel.block, 1, 1, kernel.shared(numbers))
        assert sizes == wanted, f"{kernel.name} is launched with {sizes} instead of {wanted}"
        arrays = {}
        for parameter in kernel.parameters:
            if parameter.access is None:
                continue
            nbytes, address = parameter.nbytes(numbers), addresses[parameter.name]
            place = self._library.standInPlace(ctypes.c_uint64(address), ctypes.c_size_t(nbytes))
            if place is None:
                return ILLEGAL_ADDRESS
            bytes_there = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(place))
            arrays[parameter.name] = bytes_there.view(np.dtype(parameter.kind))
        meaning_of(kernel)(**arrays, **numbers)
        return 0


def unpacked(kernel: Kernel, packed: Any) -> tuple[dict[str, int], dict[str, Number]]:
    """Addresses and numbers from the bytes of a kernel's arguments, each at a multiple of its size."""
    addresses, numbers, offset = dict[str, int](), dict[str, Number](), 0
    for parameter in kernel.parameters:
        kind = np.dtype("uint64" if parameter.access else parameter.kind)
        offset = -(-offset // kind.itemsize) * kind.itemsize
        value = np.frombuffer(bytes(packed[offset : offset + kind.itemsize]), kind)[0].item()
        if parameter.access:
            addresses[parameter.name] = value
        else:
            numbers[parameter.name] = value
        offset += kind.itemsize
    return addresses, numbers
