"""The operations of a decode step beside its linear layers: hooks of the backend, and what they call.

Their kernels are compiled when an operation is first called. Nothing is split between threads but what is large.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from lowbit.affine import Floats
from lowbit.backend import Declaration
from lowbit.bounds import Arithmetic
from lowbit_cppyy import processor
from lowbit_cppyy.compiler import Pool, preparing, raise_failure, runtime
from lowbit_cppyy.isa import InstructionSet
from lowbit_cppyy.pieces import TURN, Piece, piece

_HALVINGS = 6  # log2 of TURN


def sum_roundings(length: int, _: int) -> int:
    """Of a sum along a row: a product, at most ⌈n/64⌉ − 1 additions to a running sum, which begins at 0, and one for
    each time that the 64 of them are halved."""
    return -(-length // TURN) + _HALVINGS


SUMS = Declaration(arithmetic=Arithmetic("direct", "float32", sum_roundings))


class Passes:
    """The kernels of one operation as C++ sees them; keeps alive what it points to."""

    def __init__(self, pieces: Sequence[Piece], pool: Pool) -> None:
        compiled = runtime()
        self._kept = pool
        kernels = np.array([compiled.kernel(one) for one in pieces], np.uint64)
        self.handle: int = compiled.bridge.create_passes(pool.handle, kernels, len(kernels))
        weakref.finalize(self, compiled.bridge.destroy_passes, self.handle).atexit = False


class DecodeKernels:
    """For one instruction set and one pool of threads: functions that answer with 0 or a code of `FAILURES`."""

    def __init__(self, table: InstructionSet, pool: Pool) -> None:
        self._table, self._pool = table, pool
        self._made: dict[object, Passes] = {}
        with preparing:
            runtime().include("decode.h")
        self._bridge: Any = runtime().bridge

    @cached_property
    def rms_norm(self) -> Callable[..., int]:
        none = np.zeros(1, np.float32)
        return self._call("rms_norm", ("squares", "normed"), none, none, 1.0, 0, 0, none)

    @cached_property
    def swiglu(self) -> Callable[..., int]:
        none = np.zeros(1, np.float32)
        return self._call("swiglu", ("gated",), none, none, 0, none)

    @cached_property
    def softmax(self) -> Callable[..., int]:
        none = np.zeros(1, np.float32)
        return self._call("softmax", ("largest", "exponentials", "sums", "scaled"), none, 0, 0, none)

    def _call(self, name: str, passes: tuple[str, ...], *nothing: object) -> Callable[..., int]:
        """A function of `lowbit::bridge` with the kernels that it takes first, called once with nothing to do: so cppyy
        compiles what it needs for the call here, and not where a fork may meet it."""
        with preparing:
            function = getattr(self._bridge, name)
            function.__release_gil__ = True
            made = Passes([piece(one, self._table) for one in passes], self._pool)
            self._made[name] = made
            handle = made.handle
            function(handle, *nothing)
        return lambda *arguments: function(handle, *arguments)


class DecodeOperations:
    """The hooks of the chapters `lowbit.blocks` and `lowbit.attention`."""

    declared: ClassVar[dict[str, Declaration]] = dict.fromkeys(
        ("blocks.rms_norm", "blocks.swiglu", "attention.softmax"), SUMS
    )
    _isa: str | None
    _threads_of_this: Callable[[], Pool]

    @cached_property
    def _decode(self) -> DecodeKernels:
        return DecodeKernels(processor.choose_table(self._isa), self._threads_of_this())

    def warm_up(self, operation: str) -> None:
        """Compile the kernels of an operation; see `lowbit.backend.Backend.warm_up`."""
        if operation in self.declared:
            getattr(self._decode, operation.partition(".")[2])

    def _blocks_rms_norm(self, x: Floats, gain: Floats, epsilon: float) -> Floats:
        out = np.empty_like(x)
        if status := self._decode.rms_norm(x, gain, float(epsilon), *x.shape, out):
            raise_failure(status)
        return out

    def _blocks_swiglu(self, gate: Floats, up: Floats) -> Floats:
        out = np.empty_like(gate)
        if status := self._decode.swiglu(gate, up, gate.size, out):
            raise_failure(status)
        return out

    def _attention_softmax(self, scores: Floats) -> Floats:
        out = np.empty_like(scores)
        if status := self._decode.softmax(scores, *scores.shape, out):
            raise_failure(status)
        return out
