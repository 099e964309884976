"""The operations of a decode step between its linear layers.

Their kernels are compiled when an operation is first called. Only large operations are split between threads.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from lowbit.arrays import F32
from lowbit.attention.rope import Rotation
from lowbit.backend import Declaration
from lowbit.contract.rounding import Arithmetic
from lowbit.errors import ArgumentError
from lowbit_cppyy.caching import cached_property
from lowbit_cppyy.codegen.attention import mixed, query_counts, scores, tile_channels
from lowbit_cppyy.codegen.elementwise import CHUNK, pass_kernel
from lowbit_cppyy.codegen.isa import InstructionSet
from lowbit_cppyy.recipe import NONE
from lowbit_cppyy.runtime.bfp_operations import BlockOperations
from lowbit_cppyy.runtime.calls import DOUBLES, FLOATS, NUMBERS, Calls, KernelSet, done
from lowbit_cppyy.runtime.compiler import Pool, preparing, runtime
from lowbit_cppyy.runtime.prefetching import distance_of_rows

_HALVINGS = 6  # log2 of CHUNK


def sum_roundings(length: int, _: int) -> int:
    """The roundings of a sum along a row: a product, at most ⌈n/64⌉ − 1 additions to a running sum that begins at 0,
    and one for each halving of the 64 running sums."""
    return -(-length // CHUNK) + _HALVINGS


SUMS = Declaration(arithmetic=Arithmetic("direct", "float32", sum_roundings))


def head_roundings(length: int, _: int) -> int:
    """The roundings of attention. A score of d_h channels takes a product, ⌈d_h/16⌉ − 1 additions to a running sum, and
    four to combine the 16 sums. A mix of S tokens takes a product, an addition for every second token, and one for
    every 64. The sum of S exponentials takes `sum_roundings`, and that of S − 1 with a sink one more. The result is at
    least each of these numbers."""
    return length // 2 + length // CHUNK + _HALVINGS + 1


HEADS = Declaration(arithmetic=Arithmetic("direct", "float32", head_roundings))
ROTATIONS = Declaration(arithmetic=Arithmetic("direct", "float32", lambda length, _: 3))
"""A cosine is rounded when it is stored, multiplied and added."""


class DecodeKernels(Calls):
    """The functions of ``cpp/decode.h``."""

    def __init__(self, table: InstructionSet, pool: Pool) -> None:
        super().__init__("decode.h", table, pool)
        self._heads: dict[int, KernelSet] = {}

    @cached_property
    def rms_norm(self) -> Callable[..., int]:
        return self._call("rms_norm", ("squares", "normed"), FLOATS, FLOATS, 1.0, 0, 0, FLOATS)

    @cached_property
    def swiglu(self) -> Callable[..., int]:
        return self._call("gated_unit", ("gated",), FLOATS, FLOATS, 0, FLOATS)

    @cached_property
    def geglu(self) -> Callable[..., int]:
        return self._call("gated_unit", ("gelu_gated",), FLOATS, FLOATS, 0, FLOATS)

    @cached_property
    def clamped_swiglu(self) -> Callable[..., int]:
        return self._call("clamped_unit", ("clamped_gated",), FLOATS, FLOATS, 1.0, 0, FLOATS)

    @cached_property
    def soft_cap(self) -> Callable[..., int]:
        return self._call("soft_cap", ("capped",), FLOATS, 1.0, 0, FLOATS)

    @cached_property
    def softmax(self) -> Callable[..., int]:
        return self._call("softmax", ("largest", "exponentials", "sums", "scaled"), FLOATS, 0, 0, FLOATS)

    @cached_property
    def rotate(self) -> Callable[..., int]:
        return self._call("rotate", ("rotated",), FLOATS, DOUBLES, DOUBLES, NUMBERS, 0, 0, 0, FLOATS)

    @cached_property
    def attend(self) -> Callable[..., int]:
        """Its first argument is a result of `heads`."""
        return self._function("attend", 0, FLOATS, FLOATS, FLOATS, *[0] * 8, FLOATS)

    @cached_property
    def attend_shaped(self) -> Callable[..., int]:
        """Its first argument is a result of `heads`."""
        return self._function("attend_shaped", 0, FLOATS, FLOATS, FLOATS, *[0] * 8, 1.0, 1.0, FLOATS, False, FLOATS)

    def heads(self, head_dim: int) -> int:
        """The kernels of `attend` and `attend_shaped` for heads with this many channels."""
        kernel_set = self._heads.get(head_dim)
        if kernel_set is None:
            with preparing:
                kernel_set = self._heads.setdefault(head_dim, self._heads_kernels(head_dim))
        return kernel_set.handle

    def _heads_kernels(self, head_dim: int) -> KernelSet:
        middle = [pass_kernel(name, self._table) for name in ("largest", "exponentials", "sums")]
        kernels = [scores(head_dim, self._table), *middle, mixed(head_dim, self._table)]
        kernels += [pass_kernel(name, self._table) for name in ("scaled", "widened", "capped")]
        ahead = distance_of_rows()
        kernels += [scores(head_dim, self._table, 1, ahead), mixed(head_dim, self._table, 1, ahead)]
        for queries in query_counts(self._table)[1:]:
            for distance in (NONE, ahead):
                kernels.append(scores(head_dim, self._table, queries, distance))
                kernels.append(mixed(head_dim, self._table, queries, distance))
        return KernelSet(kernels, self._pool, tile_channels(head_dim, self._table.lanes))


class DecodeOperations(BlockOperations):
    """The operations of a decode step, with those of Block Floating Point."""

    declared: ClassVar[dict[str, Declaration]] = {
        "blocks.rms_norm": SUMS,
        "blocks.swiglu": SUMS,
        "blocks.geglu": SUMS,
        "blocks.clamped_swiglu": SUMS,
        "blocks.soft_cap": SUMS,
        "attention.softmax": SUMS,
        "attention.attend": HEADS,
        "attention.attend_shaped": HEADS,
        "rope.rotate": ROTATIONS,
        **BlockOperations.declared,
    }

    @cached_property
    def _decode(self) -> DecodeKernels:
        return DecodeKernels(self._table, self._require_pool())

    def warm_up(self, operation: str) -> None:
        """Compile the kernels of an operation; see `lowbit.backend.Backend.warm_up`."""
        runtime()
        if operation in self.declared:
            chapter, _, name = operation.partition(".")
            getattr(self._blocks if chapter == "bfp" else self._decode, name)

    def _blocks_rms_norm(self, x: F32, gain: F32, epsilon: float) -> F32:
        out = np.empty_like(x)
        return done(self._decode.rms_norm(x, gain, float(epsilon), *x.shape, out), out)

    def _blocks_swiglu(self, gate: F32, up: F32) -> F32:
        out = np.empty_like(gate)
        return done(self._decode.swiglu(gate, up, gate.size, out), out)

    def _blocks_geglu(self, gate: F32, up: F32) -> F32:
        out = np.empty_like(gate)
        return done(self._decode.geglu(gate, up, gate.size, out), out)

    def _blocks_clamped_swiglu(self, gate: F32, up: F32, limit: float) -> F32:
        out = np.empty_like(gate)
        return done(self._decode.clamped_swiglu(gate, up, float(limit), gate.size, out), out)

    def _blocks_soft_cap(self, x: F32, cap: float) -> F32:
        out = np.empty_like(x)
        return done(self._decode.soft_cap(x, float(cap), x.size, out), out)

    def _attention_softmax(self, scores: F32) -> F32:
        out = np.empty_like(scores)
        return done(self._decode.softmax(scores, *scores.shape, out), out)

    def _rope_rotate(self, x: F32, rotation: Rotation) -> F32:
        out = np.empty_like(x)
        cosines, sines = (np.ascontiguousarray(each, np.float64) for each in (rotation.cos, rotation.sin))
        partners = np.ascontiguousarray(rotation.layout.partner, np.int64)
        if sines.shape != cosines.shape or partners.shape != cosines.shape[1:]:
            raise ArgumentError("turn", f"sines {sines.shape} and {partners.size} partners", f"{cosines.shape}, both")
        return done(self._decode.rotate(x, cosines, sines, partners, *x.shape, out), out)

    def _attention_attend(self, queries: F32, keys: F32, values: F32, window: int | None = None) -> F32:
        """Heads of keys and of values may be any distance apart, as in a cache with room for more tokens.

        cppyy does not accept arrays with gaps, so it gets the first head and the distance to the next.
        """
        out = np.empty_like(queries)
        return done(self._decode.attend(*self._heads_of(queries, keys, values, window), out), out)

    def _attention_attend_shaped(
        self,
        queries: F32,
        keys: F32,
        values: F32,
        window: int | None = None,
        scale: float | None = None,
        cap: float | None = None,
        sinks: F32 | None = None,
    ) -> F32:
        """Heads of keys and of values may be any distance apart, as in `_attention_attend`."""
        out = np.empty_like(queries)
        shape = float(scale or 0), float(cap or 0), FLOATS if sinks is None else sinks, sinks is not None
        own = self._heads_of(queries, keys, values, window)
        return done(self._decode.attend_shaped(*own, *shape, out), out)

    def _heads_of(self, queries: F32, keys: F32, values: F32, window: int | None) -> tuple[Any, ...]:
        """The kernels, the arrays and their sizes, as `attend` takes them."""
        kv_heads, length, head_dim = keys.shape
        sizes = *queries.shape[:2], kv_heads, length, head_dim, min(window or 0, length)
        apart = keys.strides[0] // keys.itemsize, values.strides[0] // values.itemsize
        return self._decode.heads(head_dim), queries, keys[0], values[0], *sizes, *apart
