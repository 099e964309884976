"""The elementwise operations of a decoder on a backend.

A fast backend computes more than linear layers. `on_backend` takes from it the norms, activations, rotations and
attention that it declares for a model; the formulas compute the others, and `Steps.names` says which operations the
backend took. Nothing is substituted silently.

Elementwise operations on a backend are float32, with the bounds that the operations promise. So the logits differ in
their last digits from those of the formulas, and where two tokens are nearly as likely, another one may be chosen.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lowbit.arrays import F32, F64
from lowbit.attention.attention import KeyValueCache
from lowbit.attention.rope import Rotation
from lowbit.backend.base import Backend
from lowbit.errors import NotDeclaredError
from lowbit.model.config import LlamaConfig
from lowbit.model.elementwise import ElementwiseOps, Float32Cache

OPERATIONS = ("attention.attend", "blocks.rms_norm", "blocks.swiglu", "rope.rotate")
"""The elementwise operations of a decoder that a backend may compute."""


@dataclass(frozen=True)
class Steps:
    """Elementwise operations, some of which a backend computes.

    Attributes:
        ops: for a decoder.
        names: the operations that the backend computes, sorted.
    """

    ops: ElementwiseOps
    names: tuple[str, ...]


def on_backend(
    backend: Backend, config: LlamaConfig, otherwise: ElementwiseOps, names: Collection[str] = OPERATIONS
) -> Steps:
    """The operations that the backend declares for this model, and `otherwise` for the others.

    Args:
        backend: one that is usable.
        config: of the model; its heads and windows decide what the backend declares.
        otherwise: computes what the backend does not declare, and what is not asked of it.
        names: the operations of `OPERATIONS` that are asked of the backend.

    Raises:
        UnavailableError: raised by the backend, where it cannot prepare an operation, for example by compiling it.
    """
    windows = {"none" if config.layer_window(n) is None else "sliding" for n in range(config.layers)}
    asked: dict[str, list[Mapping[str, object]]] = {
        "blocks.rms_norm": [{}],
        "blocks.swiglu": [{}],
        "rope.rotate": [{"head_dim": config.head_dim}],
        "attention.attend": [{"head_dim": config.head_dim, "window": window} for window in sorted(windows)],
    }
    calls: dict[str, Callable[..., Any]] = {}
    for name in names:
        try:
            calls[name] = backend.unchecked(name, *asked[name])
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


# Each function goes through float32 and back, as `lowbit.model.block.through` does for linear layers.


def _narrow(x: F64) -> F32:
    return x.astype(np.float32)


def _norm(call: Callable[..., F32], otherwise: ElementwiseOps) -> Callable[[F32 | None, float], Callable[[F64], F64]]:
    def norm(gain: F32 | None, epsilon: float) -> Callable[[F64], F64]:
        if gain is None:
            return otherwise.norm(gain, epsilon)
        channels = gain.size
        return lambda x: call(_narrow(x).reshape(-1, channels), gain, epsilon).astype(np.float64).reshape(x.shape)

    return norm


def _swiglu(call: Callable[..., F32]) -> Callable[[F64, F64], F64]:
    return lambda gate, up: call(_narrow(gate), _narrow(up)).astype(np.float64)


def _rotate(call: Callable[..., F32]) -> Callable[[F64, Rotation], F64]:
    return lambda x, rotation: call(_narrow(x), rotation).astype(np.float64)


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
