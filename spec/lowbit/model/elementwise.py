r"""Elementwise operations: the steps of a decoder between its products, by the formulas or on a backend.

The chapter `block` computes all that is not a linear layer in float64, because it is written to be read and so that
backends differ in their products only. A fast backend has norms, activations, rotations and attention too, and a
decoder that leaves these to numpy spends a good part of its time there. So a decoder takes them as `ElementwiseOps`.
`lowbit.model.block.FORMULAS` are those of the specification; `lowbit.runtime.elementwise` makes them from a backend.

**The cache** of a decoder whose attention runs on a backend is float32. A key-value head is a contiguous run of rows in
it, so attention reads each head in place.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lowbit.arrays import F32, F64
from lowbit.attention.attention import KeyValueCache
from lowbit.attention.rope import Rotation


@dataclass(frozen=True)
class ElementwiseOps:
    """What a decoder computes between its linear layers.

    Attributes:
        norm: makes a norm, float64, … × n to … × n, of a gain (None for a norm without one) and ε.
        swiglu: silu of the first argument times the second, float64, T × m.
        rotate: `lowbit.attention.rope.rotate`.
        attend: `lowbit.attention.attention.attend`, of queries, a cache and a window.
        cache: makes an empty cache, of a number of key-value heads, channels of a head, and tokens to begin with.
    """

    norm: Callable[[F32 | None, float], Callable[[F64], F64]]
    swiglu: Callable[[F64, F64], F64]
    rotate: Callable[[F64, Rotation], F64]
    attend: Callable[[F64, KeyValueCache, int | None], F64]
    cache: Callable[[int, int, int], KeyValueCache]


class Float32Cache(KeyValueCache):
    """Keys and values of one layer in float32.

    >>> cache = Float32Cache(kv_heads=2, head_dim=4)
    >>> cache.append(np.ones((3, 2, 4)), np.ones((3, 2, 4)))
    >>> cache.keys.dtype, cache.keys[1].flags.c_contiguous
    (dtype('float32'), True)
    """

    dtype = np.dtype(np.float32)
