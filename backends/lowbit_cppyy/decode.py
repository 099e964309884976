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
from lowbit.errors import ArgumentError
from lowbit.rope import Rotation
from lowbit_cppyy import processor
from lowbit_cppyy.compiler import Pool, preparing, raise_failure, runtime
from lowbit_cppyy.heads import mixed, scores, tile_channels
from lowbit_cppyy.isa import InstructionSet
from lowbit_cppyy.pieces import TURN, Piece, piece

STRANGE = 5
"""What a call answers where an argument is wrong that no check of the specification looks at."""

# For a call with nothing to do.
FLOATS, DOUBLES, NUMBERS = np.zeros(1, np.float32), np.zeros(1, np.float64), np.zeros(1, np.int64)

_HALVINGS = 6  # log2 of TURN


def sum_roundings(length: int, _: int) -> int:
    """Of a sum along a row: a product, at most ⌈n/64⌉ − 1 additions to a running sum, which begins at 0, and one for
    each time that the 64 of them are halved."""
    return -(-length // TURN) + _HALVINGS


SUMS = Declaration(arithmetic=Arithmetic("direct", "float32", sum_roundings))


def head_roundings(length: int, _: int) -> int:
    """Of a score of d_h channels: a product, ⌈d_h/16⌉ − 1 additions to a running sum, four as the 16 are put together.
    Of a mix of S tokens: a product, an addition for every second one, and one for every 64. Of the sum of S
    exponentials what `sum_roundings` says. This is at least each of them."""
    return length // 2 + length // TURN + _HALVINGS + 1


HEADS = Declaration(arithmetic=Arithmetic("direct", "float32", head_roundings))
TURNS = Declaration(arithmetic=Arithmetic("direct", "float32", lambda length, _: 3))
"""A cosine is rounded when it is stored, multiplied and added."""


class Passes:
    """The kernels of one operation as C++ sees them; keeps alive what it points to."""

    def __init__(self, pieces: Sequence[Piece], pool: Pool, channels: int = 0) -> None:
        compiled = runtime()
        self._kept = pool
        kernels = np.array([compiled.kernel(one) for one in pieces], np.uint64)
        sizes = len(kernels), pieces[0].table.lanes, channels
        self.handle: int = compiled.bridge.create_passes(pool.handle, kernels, *sizes)
        weakref.finalize(self, compiled.bridge.destroy_passes, self.handle).atexit = False


class DecodeKernels:
    """For one instruction set and one pool of threads: functions that answer with 0 or a code of `FAILURES`."""

    def __init__(self, table: InstructionSet, pool: Pool) -> None:
        self._table, self._pool = table, pool
        self._heads: dict[int, Passes] = {}
        with preparing:
            runtime().include("decode.h")
        self._bridge: Any = runtime().bridge

    @cached_property
    def rms_norm(self) -> Callable[..., int]:
        return self._call("rms_norm", ("squares", "normed"), FLOATS, FLOATS, 1.0, 0, 0, FLOATS)

    @cached_property
    def swiglu(self) -> Callable[..., int]:
        return self._call("swiglu", ("gated",), FLOATS, FLOATS, 0, FLOATS)

    @cached_property
    def softmax(self) -> Callable[..., int]:
        return self._call("softmax", ("largest", "exponentials", "sums", "scaled"), FLOATS, 0, 0, FLOATS)

    @cached_property
    def rotate(self) -> Callable[..., int]:
        return self._call("rotate", ("turned",), FLOATS, DOUBLES, DOUBLES, NUMBERS, 0, 0, 0, FLOATS)

    @cached_property
    def attend(self) -> Callable[..., int]:
        """With what `heads` answers as its first argument."""
        return self._function("attend", 0, FLOATS, FLOATS, FLOATS, *[0] * 8, FLOATS)

    def heads(self, head_dim: int) -> int:
        """The kernels of `attend` for heads of so many channels."""
        made = self._heads.get(head_dim)
        if made is None:
            with preparing:
                if head_dim not in self._heads:
                    middle = [piece(name, self._table) for name in ("largest", "exponentials", "sums")]
                    pieces = [scores(head_dim, self._table), *middle, mixed(head_dim, self._table)]
                    pieces.append(piece("scaled", self._table))
                    self._heads[head_dim] = Passes(pieces, self._pool, tile_channels(head_dim, self._table.lanes))
                made = self._heads[head_dim]
        return made.handle

    def _call(self, name: str, passes: tuple[str, ...], *nothing: object) -> Callable[..., int]:
        """A function of `lowbit::bridge` with the kernels that it takes first."""
        with preparing:
            made = Passes([piece(one, self._table) for one in passes], self._pool)
            function = self._function(name, made.handle, *nothing)
        return lambda *arguments: function(made.handle, *arguments)

    def _function(self, name: str, *nothing: object) -> Callable[..., int]:
        """A function of `lowbit::bridge`, called once with nothing to do: so cppyy compiles here what it needs for the
        call, and not where a fork may meet it."""
        with preparing:
            function: Callable[..., int] = getattr(self._bridge, name)
            function.__release_gil__ = True  # type: ignore[attr-defined]  # cppyy's
            function(*nothing)
        return function


class DecodeOperations:
    """The hooks of the chapters `lowbit.blocks`, `lowbit.attention` and `lowbit.rope`."""

    declared: ClassVar[dict[str, Declaration]] = {
        "blocks.rms_norm": SUMS,
        "blocks.swiglu": SUMS,
        "attention.softmax": SUMS,
        "attention.attend": HEADS,
        "rope.rotate": TURNS,
    }
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
        return _done(self._decode.rms_norm(x, gain, float(epsilon), *x.shape, out), out)

    def _blocks_swiglu(self, gate: Floats, up: Floats) -> Floats:
        out = np.empty_like(gate)
        return _done(self._decode.swiglu(gate, up, gate.size, out), out)

    def _attention_softmax(self, scores: Floats) -> Floats:
        out = np.empty_like(scores)
        return _done(self._decode.softmax(scores, *scores.shape, out), out)

    def _rope_rotate(self, x: Floats, turn: Rotation) -> Floats:
        out = np.empty_like(x)
        cosines, sines = np.ascontiguousarray(turn.cos, np.float64), np.ascontiguousarray(turn.sin, np.float64)
        partners = np.ascontiguousarray(turn.layout.partner, np.int64)
        if sines.shape != cosines.shape or partners.shape != cosines.shape[1:]:
            raise ArgumentError("turn", f"sines {sines.shape} and {partners.size} partners", f"{cosines.shape}, both")
        return _done(self._decode.rotate(x, cosines, sines, partners, *x.shape, out), out)

    def _attention_attend(self, queries: Floats, keys: Floats, values: Floats, window: int | None = None) -> Floats:
        out = np.empty_like(queries)
        tokens, heads, head_dim = queries.shape
        kv_heads, length, _ = keys.shape
        sizes = (
            tokens,
            heads,
            kv_heads,
            length,
            head_dim,
            min(window or 0, length),
            length * head_dim,
            length * head_dim,
        )
        kernels = self._decode.heads(head_dim)
        return _done(self._decode.attend(kernels, queries, keys, values, *sizes, out), out)


def _done(status: int, out: Floats) -> Floats:
    """The result, if there is one."""
    if status == STRANGE:
        raise ArgumentError("turn", "a partner outside the head", "channels of the head")
    if status:
        raise_failure(status)
    return out
