r"""Elementwise operations: the steps of a decoder between its products, by the formulas or on a backend.

The chapter `block` computes everything but the linear layers in float64, for readability and so that backends differ
only in their products. A fast backend also has norms, activations, rotations and attention, and a decoder that leaves
these to numpy spends much of its time there. So a decoder takes them as `ElementwiseOps`. `lowbit.model.block.FORMULAS`
are those of the specification; `lowbit.runtime.elementwise` makes them from a backend, and then every value between
them is float32.

**The cache** is one of the chapter `caches`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit.arrays import F32
from lowbit.attention.attention import KeyValueCache
from lowbit.attention.rope import Rotation
from lowbit.model.config import Routing
from lowbit.moe.routing import Ids

Numbers = npt.NDArray[Any]
"""Values of a decoder: float64 or float32, the dtype of its elementwise operations."""


@dataclass(frozen=True)
class ElementwiseOps:
    """The operations of a decoder between its linear layers.

    Attributes:
        dtype: of every value: float64, or float32 if a backend computes some of the operations.
        norm: makes a norm, R × n to R × n, from a gain (float32, n) and ε.
        swiglu: silu of the first argument times the second, T × m.
        geglu: gelu of the first argument times the second, T × m.
        clamped_swiglu: `lowbit.model.layers.clamped_swiglu`, of two arguments and a limit.
        rotate: `lowbit.attention.rope.rotate`.
        gate: `lowbit.moe.routing.gate`, of values and a router; float32, T × E.
        route: the experts of each token, int64, T × k, and their weights, of such scores and a routing.
        attend: `lowbit.attention.attention.attend`, of queries, a cache and a window.
        attend_shaped: `lowbit.attention.shaped.attend_shaped`, of queries, a cache, a window, a factor of the scores,
            their soft cap and sinks (float32, H).
        soft_cap: `lowbit.linear.elementary.soft_cap`, of scores and a cap.
        cache: makes an empty cache for a number of key-value heads, channels of a head, and tokens at first.
    """

    dtype: np.dtype[Any]
    norm: Callable[[F32, float], Callable[[Numbers], Numbers]]
    swiglu: Callable[[Numbers, Numbers], Numbers]
    geglu: Callable[[Numbers, Numbers], Numbers]
    clamped_swiglu: Callable[[Numbers, Numbers, float], Numbers]
    rotate: Callable[[Numbers, Rotation], Numbers]
    gate: Callable[[Numbers, F32], F32]
    route: Callable[[F32, Routing], tuple[Ids, Numbers]]
    attend: Callable[[Numbers, KeyValueCache, int | None], Numbers]
    attend_shaped: Callable[[Numbers, KeyValueCache, int | None, float | None, float | None, F32 | None], Numbers]
    soft_cap: Callable[[Numbers, float], Numbers]
    cache: Callable[[int, int, int], KeyValueCache]
