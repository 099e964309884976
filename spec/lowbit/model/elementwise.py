r"""Between the linear layers: by the formulas, or on a backend.

The chapter `block` computes everything between linear layers in float64, because it is there to be read, and so that
backends differ in nothing but their products. A fast backend has these steps too, and a decoder that computes
everything else on it spends a good part of its time waiting for numpy. So what lies between linear layers is a value,
which a decoder is given.

**A choice, never a substitution.** Steps on a backend are float32, with the bounds that their operations promise; the
logits differ in their last digits from those of the formulas, and where two tokens are nearly as likely, so may the
one that is chosen. What a backend does not declare, for this model's heads and windows, stays with the formulas, and
`Steps.names` says which operations it took.

**The cache** of such a decoder is float32. A key-value head is a run of rows in it, so that attention reads it in
place, a key-value head at a time.

Source: lowbit's own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from lowbit.arrays import F32, F64
from lowbit.attention.attention import KeyValueCache
from lowbit.attention.rope import Rotation
from lowbit.errors import NotDeclaredError
from lowbit.model.config import LlamaConfig

if TYPE_CHECKING:  # which knows all operations, and so the chapter `block`, which is made with what is here
    from lowbit.backend.base import Backend


@dataclass(frozen=True)
class Between:
    """How what lies between linear layers is computed.

    Attributes:
        norm: from a gain, or None where there is none, and ε to the norm: float64, … × n, to the same.
        swiglu: silu of the first, times the second: float64, T × m.
        rotate: as `lowbit.attention.rope.rotate`.
        attend: queries, a cache and a window to what `lowbit.attention.attention.attend` gives.
        cache: an empty cache, by key-value heads, channels of a head, and tokens that it has room for at first.
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


# **On a backend.** Each function goes through float32 and back, as `lowbit.model.block.through` does for linear layers.


@dataclass(frozen=True)
class Steps:
    """What lies between linear layers, as far as a backend computes it.

    Attributes:
        between: for a decoder.
        names: the operations that the backend computes, sorted.
    """

    between: Between
    names: tuple[str, ...]


def on_backend(backend: "Backend", config: LlamaConfig, otherwise: Between) -> Steps:
    """Every step that the backend declares for this model.

    Args:
        backend: one that is usable.
        config: of the model, whose heads and windows decide.
        otherwise: what computes the other steps.

    Raises:
        UnavailableError: the backend's own, where it cannot make ready what it needs.
    """
    windows = {"none" if config.layer_window(n) is None else "sliding" for n in range(config.layers)}
    asked: dict[str, list[Mapping[str, object]]] = {
        "blocks.rms_norm": [{}],
        "blocks.swiglu": [{}],
        "rope.rotate": [{"head_dim": config.head_dim}],
        "attention.attend": [{"head_dim": config.head_dim, "window": window} for window in sorted(windows)],
    }
    calls: dict[str, Callable[..., Any]] = {}
    for name, choices in asked.items():
        try:
            calls[name] = backend.unchecked(name, *choices)
        except NotDeclaredError:
            continue
        backend.warm_up(name)
    made = otherwise
    if call := calls.get("blocks.rms_norm"):
        made = replace(made, norm=_norm(call, otherwise))
    if call := calls.get("blocks.swiglu"):
        made = replace(made, swiglu=_swiglu(call))
    if call := calls.get("rope.rotate"):
        made = replace(made, rotate=_rotate(call))
    if call := calls.get("attention.attend"):
        made = replace(made, attend=_attend(call), cache=Float32Cache)
    return Steps(made, tuple(sorted(calls)))


def _narrow(x: F64) -> F32:
    return x.astype(np.float32)


def _norm(call: Callable[..., F32], otherwise: Between) -> Callable[[F32 | None, float], Callable[[F64], F64]]:
    def norm(gain: F32 | None, epsilon: float) -> Callable[[F64], F64]:
        if gain is None:
            return otherwise.norm(gain, epsilon)
        channels = gain.size
        return lambda x: call(_narrow(x).reshape(-1, channels), gain, epsilon).astype(np.float64).reshape(x.shape)

    return norm


def _swiglu(call: Callable[..., F32]) -> Callable[[F64, F64], F64]:
    return lambda gate, up: call(_narrow(gate), _narrow(up)).astype(np.float64)


def _rotate(call: Callable[..., F32]) -> Callable[[F64, Rotation], F64]:
    return lambda x, turn: call(_narrow(x), turn).astype(np.float64)


def _attend(call: Callable[..., F32]) -> Callable[[F64, KeyValueCache, int | None], F64]:
    def attend(queries: F64, cache: KeyValueCache, window: int | None) -> F64:
        keys: Any = cache.keys
        values: Any = cache.values
        group = queries.shape[1] // len(keys)
        mixed = np.empty(queries.shape)
        for j in range(len(keys)):
            own = slice(j * group, (j + 1) * group)
            narrow = np.ascontiguousarray(queries[:, own], np.float32)
            mixed[:, own] = call(narrow, keys[j : j + 1], values[j : j + 1], window)
        return mixed

    return attend
