"""The parts of a step: the calls that create its C++ objects, their kernels, and the arrays that they point to.

A `Recorder` stands in for the runtime while a step is made. It compiles nothing and calls nothing. Each kernel, array
and object gets a *name* where C++ would have an address: a number from `FIRST_NAME` on, which no size reaches. When the
calls are repeated, each name is replaced by its current address.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from lowbit.arrays import Array
from lowbit_cppyy.codegen.lowering import Compilable
from lowbit_cppyy.runtime.compiler import Runtime

FIRST_NAME = 2**62
POOL = "create_pool"

Result = TypeVar("Result")
Named = tuple[str, int | str]
"""``array`` with its number, ``kernel`` with its name, or ``made`` with the number of the call."""


@dataclass(frozen=True)
class Call:
    """A call of a function of ``lowbit::bridge`` that creates an object.

    Attributes:
        function: its name.
        arguments: integers, and lists of integers for arrays; both may contain names.
    """

    function: str
    arguments: list[int | list[int]]


@dataclass
class Recording:
    """Everything that a step is made of.

    Attributes:
        calls: in order.
        names: the meaning of each name.
        arrays: the arrays that C++ points to, without duplicates.
        kernels: by name.
    """

    calls: list[Call] = field(default_factory=list)
    names: list[Named] = field(default_factory=list)
    arrays: list[Array] = field(default_factory=list)
    kernels: dict[str, Compilable] = field(default_factory=dict)

    def named(self, kind: str, which: int | str) -> int:
        """A new name."""
        self.names.append((kind, which))
        return FIRST_NAME + len(self.names) - 1


class Recorder(Runtime):
    """A runtime that only records."""

    def __init__(self) -> None:
        self.recording = Recording()
        self.bridge: Any = _Bridge(self.recording)
        self.multiply, self.multiply_cast = self.bridge.multiply, self.bridge.multiply_cast
        self.multiply_blocks = self.bridge.multiply_blocks
        self._named: dict[str, int] = {}
        self._arrays: dict[tuple[str, tuple[int, ...], bytes], int] = {}

    def include(self, header: str, first_calls: Callable[[], None] | None = None) -> None:
        """The libraries have all headers."""

    def apart(self, work: Callable[[], Result]) -> Result:
        """Call `work` directly: there is nothing to compile."""
        self.bridge.first_calls = True
        try:
            return work()
        finally:
            self.bridge.first_calls = False

    def kernel(self, kernel: Compilable) -> int:
        """The name of a kernel."""
        name = kernel.name
        if name not in self._named:
            self.recording.kernels[name] = kernel
            self._named[name] = self.recording.named("kernel", name)
        return self._named[name]

    def address(self, array: Array) -> int:
        """The name of an array; small arrays with equal content share it."""
        if array.nbytes > SMALL:
            return self._kept(array)
        key = array.dtype.name, array.shape, array.tobytes()
        if key not in self._arrays:
            self._arrays[key] = self._kept(array)
        return self._arrays[key]

    def _kept(self, array: Array) -> int:
        self.recording.arrays.append(array)
        return self.recording.named("array", len(self.recording.arrays) - 1)


SMALL = 2**16  # bytes: such arrays describe a layout, and many matrices have the same one


class _Bridge:
    """`lowbit::bridge`, whose functions create names instead of objects."""

    def __init__(self, recording: Recording) -> None:
        self.recording, self.first_calls = recording, False

    def __getattr__(self, function: str) -> "_Function":
        return _Function(self, function)


class _Function:
    """A function of the bridge."""

    def __init__(self, bridge: _Bridge, name: str) -> None:
        self._bridge, self._name, self.__release_gil__ = bridge, name, False

    def __call__(self, *arguments: Any) -> int:
        if self._name.startswith("create_"):
            recording = self._bridge.recording
            plain = [each.tolist() if isinstance(each, np.ndarray) else int(each) for each in arguments]
            recording.calls.append(Call(self._name, plain))
            return recording.named("made", len(recording.calls) - 1)
        if not (self._bridge.first_calls or self._name.startswith(("destroy_", "stop_"))):
            raise RuntimeError("a recorded step was called; only what is made of the recording can be")
        return 0
