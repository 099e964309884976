"""The backend whose C++ is emulated."""

import struct
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import numpy as np

from lowbit.arrays import F32, U64, Array
from lowbit.backend import Availability, Backend
from lowbit.errors import UnavailableError
from lowbit_cppyy.backend import CppyyBackend
from lowbit_cppyy.codegen.isa import NEON, NEONDOT, InstructionSet
from lowbit_cppyy.codegen.lowering import Compilable, prelude
from lowbit_cppyy.emulation.guest import (
    HOLD,
    LOAD,
    PROCESSORS,
    RELEASE,
    REMEDY,
    SEND_BACK,
    Guest,
    bridge,
    missing,
    of_bytes,
)
from lowbit_cppyy.runtime import processor
from lowbit_cppyy.runtime.compiler import Runtime, replace_runtime
from lowbit_cppyy.step.source import StepSource

Result = TypeVar("Result")


class EmulatedRuntime(Runtime):
    """A cross compiler and an emulated process in place of cppyy."""

    def __init__(self, guest: Guest) -> None:
        self._guest = guest
        self._kernels: dict[str, int] = {}
        self.bridge = bridge(self._guest)
        self.multiply, self.multiply_cast = self.bridge.multiply, self.bridge.multiply_cast
        self.multiply_blocks = self.bridge.multiply_blocks

    @property
    def children(self) -> tuple[int, ...]:
        return self._guest.children

    def include(self, header: str, first_calls: Callable[[], None] | None = None) -> None:
        """The guest has all headers."""

    def apart(self, work: Callable[[], Result]) -> Result:
        return work()

    def address(self, array: Array) -> int:
        """The address of the guest's copy of an array; the copy lives as long as the array."""
        held = self._guest.ask(HOLD, of_bytes(array.tobytes()))
        weakref.finalize(array, self._release, held).atexit = False
        return held

    @contextmanager
    def written(self, arrays: Sequence[Array]) -> Iterator[U64]:
        """The addresses of copies, which are sent back at the end of the context."""
        held = [self._guest.ask(HOLD, of_bytes(each.tobytes())) for each in arrays]
        try:
            yield np.array(held, np.uint64)
            for array, place in zip(arrays, held, strict=True):
                self._guest.ask(SEND_BACK, struct.pack("<qq", place, array.nbytes), array)
        finally:
            for place in held:
                self._release(place)

    def _release(self, held: int) -> None:
        if not self._guest.forked:
            with suppress(UnavailableError):  # a process that has ended holds nothing
                self._guest.ask(RELEASE, struct.pack("<q", held))

    def kernel(self, kernel: Compilable) -> int:
        """The guest's address of a kernel, which is a separate library."""
        if kernel.name not in self._kernels:
            header = "step.h" if isinstance(kernel, StepSource) else "activations.h"
            source = f'#include "{header}"\n' + prelude(kernel.table) + kernel.source
            source += 'extern "C" std::int64_t kernel_address() {\n  return reinterpret_cast<std::int64_t>'
            source += f"(&lowbit::{kernel.table.name}::{kernel.name});\n}}\n"
            library = self._guest.compiled(source, "-shared")
            self._kernels[kernel.name] = self._guest.ask(LOAD, of_bytes(bytes(library) + b"\0"))
        return self._kernels[kernel.name]


RUNTIMES = {table.name: EmulatedRuntime(Guest(table)) for table in (NEONDOT, NEON)}
"""The runtimes of this process."""


class EmulatedBackend(CppyyBackend):
    """`lowbit_cppyy` on an emulated processor. A process that has created one can have no other backend of this
    package.

    Args:
        table: the instruction set, one of ARM's.
    """

    def __init__(self, table: InstructionSet) -> None:
        self._emulated = table
        super().__init__(isa=table.name, threads=2)
        replace_runtime(RUNTIMES[table.name])
        processor.pretend(table.requires)

    def availability(self) -> Availability:
        tool = missing()
        return Availability(tool is None, f"{tool} is not installed" if tool else "", REMEDY if tool else "")

    @property
    def children(self) -> tuple[int, ...]:
        """The emulated process. It is a part of this backend, so the suite does not end it."""
        return RUNTIMES[self._emulated.name].children

    kept_step = Backend.kept_step

    def _details(self) -> dict[str, str]:
        name = self._emulated.name
        return {"instruction set": name, "threads": "2", "processor": f"{PROCESSORS[name]}, emulated by QEMU"}

    def _attention_attend(self, queries: F32, keys: F32, values: F32, window: int | None = None) -> F32:
        """The operation on copies of keys and values without gaps, so that all of them can be sent."""
        return super()._attention_attend(queries, np.array(keys), np.array(values), window)

    def _attention_attend_shaped(self, queries: F32, keys: F32, values: F32, *shape: Any) -> F32:
        """The same for shaped scores."""
        return super()._attention_attend_shaped(queries, np.array(keys), np.array(values), *shape)


class Neon(EmulatedBackend):
    """The backend on a processor without dot products of bytes."""

    def __init__(self) -> None:
        super().__init__(NEON)


class NeonDot(EmulatedBackend):
    """The backend on a processor with dot products of bytes."""

    def __init__(self) -> None:
        super().__init__(NEONDOT)
