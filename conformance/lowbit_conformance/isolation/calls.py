"""Calls of the backend under test, to be made and to be made again, and what lives in the host between them."""

import inspect
import json
import weakref
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, Protocol

import numpy as np

from lowbit.arrays import F32, Array
from lowbit.backend.wire import encode
from lowbit.operations import OPERATIONS
from lowbit.quantization.affine import QuantizedMatrix
from lowbit.quantization.bfp import Blocks
from lowbit_conformance.isolation.arena import Segment
from lowbit_conformance.isolation.process import Message
from lowbit_conformance.isolation.verdicts import BrokenPromiseError

POISON = (0x7FC0DEAD, 0xFFC0BEEF)  # NaNs that arithmetic does not produce


@dataclass
class Call:
    """A recorded call, which can be repeated.

    Attributes:
        what: ``run``, ``prepare``, ``open``, ``qgemv``, ``qgemm``, ``qgemm_bfp`` or ``step``.
        operation: its id.
        arguments: as the test gave them.
        choices: those given by name.
        owner: the prepared matrix or session of which it is a method.
        out: the position of the output array; -1 if none.
        poisoned: whether that array is filled with recognisable bytes beforehand.
        result: the result.
        again: the result of the same call repeated, if it was different.
    """

    what: str
    operation: str
    arguments: tuple[Any, ...]
    choices: dict[str, Any] = field(default_factory=dict)
    owner: "Held | None" = None
    out: int = -1
    poisoned: bool = False
    result: Any = None
    again: Any = None

    @cached_property
    def kind(self) -> str:
        """Everything about the call except its owner and the contents of its arrays."""

        def put(array: Array) -> Message:
            return {"writeable": bool(array.flags.writeable), "strides": list(array.strides)}

        parts = [encode(part, put) for part in (*self.arguments, *self.choices.values())]
        return json.dumps([self.what, self.operation, parts, list(self.choices), self.out])

    @cached_property
    def nbytes(self) -> int:
        """The bytes of the arrays among the arguments."""
        sizes: list[int] = []

        def put(array: Array) -> Message:
            sizes.append(array.nbytes)
            return {}

        for argument in (*self.arguments, *self.choices.values()):
            encode(argument, put)
        return sum(sizes)

    @property
    def names(self) -> list[str]:
        """The names of the arguments."""
        if self.what in ("qgemv", "qgemm", "qgemm_bfp"):
            return ["x", "out"]
        if self.what in ("prepare", "step"):
            parameters = ["matrix"] if self.what == "prepare" else []
        else:
            parameters = _parameters(self.operation)
        return parameters + [f"argument {number}" for number in range(len(parameters), len(self.arguments))]


@cache
def _parameters(operation: str) -> list[str]:
    return list(inspect.signature(OPERATIONS[operation].reference).parameters)


@dataclass(frozen=True)
class Variant:
    """How one attempt at a call differs from others.

    Attributes:
        side: 0 if arrays touch the guard page on their right, 1 on their left.
        padding: the byte around them, number 0 or 1.
        filling: the byte in fresh memory, number 0 or 1.
        offset: of the first array, see `lowbit_conformance.isolation.arena.Placement`.
        stride: the difference between the offsets of consecutive arrays.
        handle: the handle of the owner to call; -1 for that of the side.
    """

    side: int = 0
    padding: int = 0
    filling: int = 0
    offset: int = 0
    stride: int = 0
    handle: int = -1


SIDES = (Variant(), Variant(1, 1, 1))
"""The two variants of every call."""


class Performer(Protocol):
    """Performs the calls of something held: a `lowbit_conformance.isolation.remote.Remote`."""

    started: int

    def perform(self, call: Call) -> Any: ...

    def forget(self, host: int, handles: list[int], segments: list[list[Segment]]) -> None: ...


class Held:
    """An object in the host: a prepared matrix or a session, one for each side."""

    def __init__(self, remote: "Performer", handles: list[int], segments: list[list[Segment]]) -> None:
        self.remote, self.handles, self.host = remote, handles, remote.started
        self.segments = segments
        self._forget = weakref.finalize(self, remote.forget, self.host, handles, segments)

    def handle(self, side: int) -> int:
        if self.host != self.remote.started:
            raise BrokenPromiseError("CRASHED: the process in which this was prepared has ended since")
        return self.handles[min(side, len(self.handles) - 1)]


class RemoteLinear(Held):
    """A matrix that the backend has prepared, with the methods of a `lowbit.backend.PreparedLinear`."""

    matrix: QuantizedMatrix
    rows: int
    columns: int
    nbytes: int

    def qgemv(self, x: Any, out: Any = None) -> Any:
        return self._multiply("qgemv", x, out)

    def qgemm(self, x: Any, out: Any = None) -> Any:
        return self._multiply("qgemm", x, out)

    def qgemm_bfp(self, x: Any, out: Any = None) -> Any:
        return self._multiply("qgemm_bfp", x, out)

    def guarded(self, x: F32, vectors: int) -> F32:
        """The product of ``x[0]``, or of x if the case has several vectors, written to an array that reveals unwritten
        elements."""
        call = self.call("qgemm", x) if vectors else self.call("qgemv", x[0])
        result: F32 = self.remote.perform(call)
        return result

    def guarded_blocks(self, x: Blocks) -> F32:
        """The product of blocks, written to an array that reveals unwritten elements."""
        result: F32 = self.remote.perform(self.call("qgemm_bfp", x))
        return result

    def call(self, what: str, x: Any) -> Call:
        """A product, written to an array that reveals unwritten elements."""
        shape = (x.rows,) if isinstance(x, Blocks) else x.shape[:-1]
        out = np.zeros((*shape, self.columns), np.float32)
        return Call(what, f"linear.{what}", (x, out), owner=self, out=1, poisoned=True)

    def _multiply(self, what: str, x: Any, out: Any) -> Any:
        if out is None:
            return self.remote.perform(Call(what, f"linear.{what}", (x,), owner=self))
        return self.remote.perform(Call(what, f"linear.{what}", (x, out), owner=self, out=1))


class RemoteSession(Held):
    """A stateful operation that the backend has opened."""

    operation: str
    opened_with: tuple[Any, ...]

    def step(self, *arguments: Any) -> Any:
        """The session's result for one step."""
        return self.remote.perform(Call("step", self.operation, arguments, owner=self))

    def close(self) -> None:
        """Release it now."""
        self._forget()


def poisoned(out: Array, filling: int) -> Array:
    """An array of this shape whose elements are recognisable as unwritten."""
    return np.full(out.shape, POISON[filling], np.uint32).view(out.dtype)
