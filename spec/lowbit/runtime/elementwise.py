"""The elementwise operations of a decoder on a backend.

A fast backend computes more than linear layers. `on_backend` takes from it the norms, activations, rotations and
attention that it declares for a model; the formulas compute the others, and `Steps.names` lists the backend's
operations. Nothing is substituted silently.

With elementwise operations on a backend every value of the decoder is float32: the backend's results, with the bounds
that its operations promise, and the results of formulas, rounded once. So the logits differ in their last digits from
those of the formulas, and where two tokens are almost equally likely, another one may be chosen.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from lowbit.arrays import F32
from lowbit.attention.attention import KeyValueCache
from lowbit.backend.base import Backend
from lowbit.errors import NotDeclaredError
from lowbit.model.block import check_scores
from lowbit.model.caches import CACHES, Float32Cache, Keys
from lowbit.model.config import Activation, LlamaConfig, Routing
from lowbit.model.elementwise import ElementwiseOps, Numbers
from lowbit.model.program import FORMS
from lowbit.model.step import GATES
from lowbit.moe.routing import Ids

ROUTING = ("routing.gate", "routing.top_k", "routing.weights")
GATED: Mapping[Activation, str] = MappingProxyType({name: str(FORMS[kind].operation) for name, kind in GATES.items()})
OPERATIONS = (
    "attention.attend",
    "attention.attend_shaped",
    "blocks.clamped_swiglu",
    "blocks.geglu",
    "blocks.rms_norm",
    "blocks.soft_cap",
    "blocks.swiglu",
    "rope.rotate",
    *ROUTING,
)
"""The elementwise operations of a decoder that a backend may compute."""


def needed(config: LlamaConfig) -> tuple[str, ...]:
    """The elementwise operations of a model's step."""
    attention = "attention.attend_shaped" if config.shaped else "attention.attend"
    own = [attention, GATED[config.activation], *([] if config.logit_cap is None else ["blocks.soft_cap"])]
    return (*own, "blocks.rms_norm", "rope.rotate", *([] if config.routing is None else ROUTING))


def check_all(backend: Backend, config: LlamaConfig, names: Collection[str]) -> None:
    """Refuse to compile a step if the backend does not compute all of its operations.

    Raises:
        NotDeclaredError: one is missing.
    """
    if missing := [name for name in needed(config) if name not in names]:
        raise NotDeclaredError(backend.name, f"compiled steps without {', '.join(missing)}")


@dataclass(frozen=True)
class Steps:
    """Elementwise operations, some of them on a backend.

    Attributes:
        ops: for a decoder.
        names: the operations that the backend computes, sorted.
    """

    ops: ElementwiseOps
    names: tuple[str, ...]


def on_backend(
    backend: Backend,
    config: LlamaConfig,
    otherwise: ElementwiseOps,
    names: Collection[str] = OPERATIONS,
    keys: Keys | None = None,
) -> Steps:
    """The operations that the backend declares for this model, and `otherwise` for the others.

    Args:
        backend: one that is usable.
        config: of the model; its heads and windows decide what the backend declares.
        otherwise: computes the operations that the backend does not declare or is not asked for.
        names: the operations of `OPERATIONS` to run on the backend.
        keys: the number format of keys and values; None for the format in which attention computes.

    Raises:
        UnavailableError: raised by the backend if it cannot prepare an operation, for example by compiling it.
    """
    windows = sorted({"none" if config.layer_window(n) is None else "sliding" for n in range(config.layers)})
    heads: list[Mapping[str, object]] = [{"head_dim": config.head_dim, "window": window} for window in windows]
    shape = {"cap": "none" if config.score_cap is None else "soft", "sinks": "per-head" if config.sinks else "none"}
    asked: dict[str, list[Mapping[str, object]]] = {
        "blocks.rms_norm": [{}],
        **{name: [{}] for name in GATED.values()},
        "rope.rotate": [{"head_dim": config.head_dim}],
        "attention.attend": heads,
        "attention.attend_shaped": [{**each, **shape} for each in heads],
        "blocks.soft_cap": [{}],
    }
    if config.routing is not None:
        softmax: Mapping[str, object] = {"softmax": config.routing.softmax}
        kind = "logits" if config.routing.softmax == "after" else "probabilities"
        asked |= {"routing.gate": [{"scores": kind}], "routing.top_k": [{}], "routing.weights": [softmax]}
    calls: dict[str, Callable[..., Any]] = {}
    for name in (name for name in names if name in asked and name in needed(config)):
        try:
            calls[name] = backend.unchecked(name, *asked[name])
        except NotDeclaredError:
            continue
        backend.warm_up(name)
    if any(name not in calls for name in ROUTING):
        calls = {name: call for name, call in calls.items() if name not in ROUTING}
    if not calls:
        return Steps(otherwise if keys is None else replace(otherwise, cache=CACHES[keys]), ())
    made = in_float32(otherwise)
    if call := calls.get("blocks.rms_norm"):
        made = replace(made, norm=_norm(call))
    if call := calls.get("blocks.swiglu"):
        made = replace(made, swiglu=call)
    if call := calls.get("blocks.geglu"):
        made = replace(made, geglu=call)
    if call := calls.get("blocks.clamped_swiglu"):
        made = replace(made, clamped_swiglu=call)
    if call := calls.get("blocks.soft_cap"):
        made = replace(made, soft_cap=call)
    if call := calls.get("rope.rotate"):
        made = replace(made, rotate=call)
    if "routing.gate" in calls:
        made = replace(made, gate=_gate(calls["routing.gate"], config), route=_route(calls))
    if call := calls.get("attention.attend"):
        made = replace(made, attend=_attend(call))
    if call := calls.get("attention.attend_shaped"):
        made = replace(made, attend_shaped=_attend_shaped(call))
    if calls.keys() & {"attention.attend", "attention.attend_shaped"}:
        made = replace(made, cache=CACHES[keys or "float32"])
    elif keys is not None:
        made = replace(made, cache=_of_formulas(CACHES[keys]))
    return Steps(made, tuple(sorted(calls)))


def _of_formulas(cache: type[KeyValueCache]) -> Callable[[int, int, int], KeyValueCache]:
    """A factory of caches whose attention runs by formula. It is not the class itself, by which a backend recognises a
    cache with its own attention operation."""
    return lambda kv_heads, head_dim, capacity: cache(kv_heads, head_dim, capacity)


def in_float32(ops: ElementwiseOps) -> ElementwiseOps:
    """The same operations on float32 values: computed in float64 and rounded once."""

    def narrow(function: Callable[..., Numbers], wide: int) -> Callable[..., Numbers]:
        """The function with its first `wide` arguments in float64, and its result in float32."""
        return lambda *given: function(*(x.astype(np.float64) for x in given[:wide]), *given[wide:]).astype(np.float32)

    return replace(
        ops,
        dtype=np.dtype(np.float32),
        norm=lambda gain, epsilon: narrow(ops.norm(gain, epsilon), 1),
        swiglu=narrow(ops.swiglu, 2),
        geglu=narrow(ops.geglu, 2),
        clamped_swiglu=narrow(ops.clamped_swiglu, 2),
        rotate=narrow(ops.rotate, 1),
        gate=narrow(ops.gate, 1),
        attend=narrow(ops.attend, 1),
        attend_shaped=narrow(ops.attend_shaped, 1),
        soft_cap=narrow(ops.soft_cap, 1),
        cache=_of_formulas(Float32Cache) if ops.cache is KeyValueCache else ops.cache,
    )


def _norm(call: Callable[..., F32]) -> Callable[[F32, float], Callable[[Numbers], Numbers]]:
    return lambda gain, epsilon: lambda x: call(x, gain, epsilon)


def _gate(call: Callable[..., F32], config: LlamaConfig) -> Callable[[Numbers, F32], F32]:
    """Scores for `_route`: probabilities if the softmax comes before the choice."""
    before = config.routing is not None and config.routing.softmax == "before"
    return lambda x, router: call(x, router, "probabilities" if before else "logits")


def _route(calls: Mapping[str, Callable[..., Any]]) -> Callable[[F32, Routing], tuple[Ids, Numbers]]:
    choose, weigh = calls["routing.top_k"], calls["routing.weights"]

    def route(scores: F32, routing: Routing) -> tuple[Ids, Numbers]:
        check_scores(scores)
        chosen = choose(scores, routing.top_k)
        return chosen, weigh(scores, chosen, routing.softmax)

    return route


def _attend(call: Callable[..., F32]) -> Callable[[Numbers, KeyValueCache, int | None], Numbers]:
    return lambda queries, cache, window: _by_heads(queries, cache, lambda own, *rows: call(*rows, window))


def _attend_shaped(
    call: Callable[..., F32],
) -> Callable[[Numbers, KeyValueCache, int | None, float | None, float | None, F32 | None], Numbers]:
    def attend(
        queries: Numbers,
        cache: KeyValueCache,
        window: int | None,
        scale: float | None,
        cap: float | None,
        sinks: F32 | None,
    ) -> Numbers:
        def of_group(own: slice, *rows: F32) -> F32:
            return call(*rows, window, scale, cap, None if sinks is None else np.ascontiguousarray(sinks[own]))

        return _by_heads(queries, cache, of_group)

    return attend


def _by_heads(queries: Numbers, cache: KeyValueCache, attend: Callable[..., F32]) -> Numbers:
    """Attention to each key-value head of a cache by its query heads; `attend` takes which heads these are."""
    keys: Any = cache.keys
    values: Any = cache.values
    group = queries.shape[1] // len(keys)
    mixed = np.empty(queries.shape, np.float32)
    for j in range(len(keys)):
        own = slice(j * group, (j + 1) * group)
        mixed[:, own] = attend(own, np.ascontiguousarray(queries[:, own]), keys[j : j + 1], values[j : j + 1])
    return mixed
