"""Variants of operations: the reference with one step changed, for each operation that has such steps.

`families` rounds inputs and results, and replaces the steps of a product with quantised weights. Here are the steps of
the other operations: what lies between two steps in a narrower format, a limit on a count, another rounding, another
rule for the ends of a range. `VARIANTS` holds them by operation; a name may stand for several ways of one mistake.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from lowbit.arrays import F32, Array
from lowbit.attention import rope
from lowbit.attention.kvcache import BfpKeyValueCache
from lowbit.linear.elementary import softmax as softmax_of
from lowbit.moe.offload import Offload, Request, Staged
from lowbit_conformance.defects import attention, engines, heads
from lowbit_conformance.defects.defect import Function
from lowbit_conformance.defects.narrow import Change
from lowbit_conformance.defects.variants_numbers import (
    cast_variants,
    code_variants,
    decode_variants,
    factor_variants,
    hessian_variants,
    load_variants,
    quantize_variants,
    real_zero_product_variants,
    real_zero_variants,
    step_variants,
    store_variants,
    target_variants,
    total_variants,
)
from lowbit_conformance.defects.variants_roundings import SIZES, Variants, narrowed, of_float32
from lowbit_conformance.defects.variants_routing import (
    choice_variants,
    expert_variants,
    gate_variants,
    sparse_variants,
    weight_variants,
)

# **Heads.**


def rope_variants() -> Variants:
    def limited(axis: int, most: int) -> Function:
        def run(x: F32, rotation: rope.Rotation) -> Array:
            answer = heads.rotate(x, rotation)
            past = (slice(None),) * axis + (slice(most, None),)
            answer[past] = x[past]
            return answer

        return run

    def wrapped(most: int) -> Function:
        def run(x: F32, rotation: rope.Rotation) -> Array:
            token = np.arange(len(x)) % most
            wide, cos, sin = x.astype(np.float64), rotation.cos[token][:, None], rotation.sin[token][:, None]
            return wide * cos + wide[..., rotation.layout.partner] * sin

        return run

    for size in SIZES:
        yield f"tokens-past-{size}-not-turned", f"Tokens past {size} are not rotated.", limited(0, size)
        yield f"heads-past-{size}-not-turned", f"Heads past {size} are not rotated.", limited(1, size)
        yield f"channels-past-{size}-not-turned", f"Channels past {size} are not rotated.", limited(2, size)
        yield f"tokens-wrap-at-{size}", f"The number of a token wraps at {size}.", wrapped(size)
    mirrored = "Channels are always paired from both ends."
    yield "pairs-mirrored", mirrored, lambda x, rotation: heads.rotate(x, rotation, np.arange(x.shape[2])[::-1])


def _masked(way: Change) -> Callable[[Array, Array], Array]:
    return lambda scores, mask: np.where(mask, way(scores), -np.inf)


def _probabilities_in(way: Change) -> Callable[[Array], Array]:
    return lambda scores: way(softmax_of(scores))


def attend_variants() -> Variants:
    for format, words, way in narrowed():
        run = attention.replacing(
            scale=lambda channels, length, w=way: float(w(np.array([1 / np.sqrt(channels)], np.float32))[0])
        )
        yield f"scale-in-{format}", f"The scale of scores: {words}.", run
        yield f"scores-in-{format}", f"Scores: {words}.", attention.replacing(masked=_masked(of_float32(way)))
        yield (
            f"shares-in-{format}",
            f"Probabilities: {words}.",
            attention.replacing(probabilities=_probabilities_in(of_float32(way))),
        )
    for hidden in (-1e4, -65504.0, -1e9, -1e30):
        cause = "A hidden score is a large negative number instead of minus infinity."
        yield "hidden-scores-finite", cause, attention.replacing(masked=attention.replaced(hidden))
    for size in SIZES[3:]:

        def least(channels: int, length: int, size: int = size) -> float:
            return float(1 / np.sqrt(min(channels, size)))

        cause = f"The scale is that of {size} channels where there are more."
        yield f"scale-of-at-most-{size}-channels", cause, attention.replacing(scale=least)


def pool_variants() -> Variants:
    one_less = heads.by(lambda cells: heads.total(cells) / max(cells.shape[2] - 1, 1))
    yield "mean-of-one-head-less", "The sum is divided by the heads of a group minus one.", one_less
    cause = "The sum is multiplied by 1 / heads instead of divided."
    for kind in (np.float32, np.float64):
        yield "mean-by-reciprocal", cause, heads.by(partial(_by_reciprocal, kind))


def _by_reciprocal(kind: type[np.floating[Any]], cells: Array) -> Array:
    return np.asarray(heads.total(cells) * kind(1 / cells.shape[2]))


# **The key-value cache.**


class HeadsReversed(BfpKeyValueCache):
    def step(self, keys: Any, values: Any) -> Any:
        return tuple(np.ascontiguousarray(part[::-1]) for part in super().step(keys, values))


class HeadsOfTokensReversed(BfpKeyValueCache):
    """Heads are stored in reverse order within each token."""

    def step(self, keys: Any, values: Any) -> Any:
        return super().step(*(np.ascontiguousarray(part[:, ::-1]) for part in (keys, values)))


class KeysForValues(BfpKeyValueCache):
    def step(self, keys: Any, values: Any) -> Any:
        return super().step(values, keys)


def cache_variants() -> Variants:
    for machine in (HeadsReversed, HeadsOfTokensReversed):
        yield "heads-in-other-order", "Heads are returned with the last head first.", machine
    yield "keys-and-values-exchanged", "Keys are stored as values, and values as keys.", KeysForValues


# **The offload engine.**


class InOrderOfRequest(Offload):
    """Hits run in the order of the request too."""

    def _run_residents(self, request: Request) -> list[int]:
        missing = []
        for expert in request.needed:
            missing += super()._run_residents(Request(request.layer, (expert,), request.guesses))
        return missing


class DropsBeforeStaging(Offload):
    """Guesses that were not needed are dropped before the next are staged, so that their buffers are free."""

    def _stage(self, request: Request) -> None:
        for guess in [staged for staged in self.staged if staged.layer == request.layer]:
            self._drop(guess, "unused")
        super()._stage(request)


class PlaceOfOwnNumber(Offload):
    """Under swap an evicted expert is kept in the host place with its own number."""

    def _promote(self, newcomer: Staged) -> None:
        layer = newcomer.layer
        if self.arrangement.memory == "swap" and len(self.slots[layer]) == self.arrangement.slots:
            self._host[layer][newcomer.expert] = self.slots[layer][0].expert
        super()._promote(newcomer)


MACHINES = (
    ("experts-in-order-of-request", "Experts run in the order of the request instead of by id.", InOrderOfRequest),
    (
        "unused-dropped-before-staging",
        "Guesses that were not needed are dropped before the next are staged.",
        DropsBeforeStaging,
    ),
    (
        "evicted-to-place-of-own-number",
        "Under swap an evicted expert goes to the place of its number.",
        PlaceOfOwnNumber,
    ),
)


def trace_variants() -> Variants:
    for name, cause, machine in MACHINES:
        yield name, cause, engines.traced(machine)


def engine_variants() -> Variants:
    yield from MACHINES


VARIANTS: Mapping[str, Callable[[], Variants]] = {
    "affine.quantize": quantize_variants,
    "bfp.cast": cast_variants,
    "bfp.decode": decode_variants,
    "bfp.total": total_variants,
    "bfp.store": store_variants,
    "bfp.load": load_variants,
    "hqq.dequantize": real_zero_variants,
    "hqq.qgemv": real_zero_product_variants,
    "hqq.codes": code_variants,
    "hqq.step": step_variants,
    "gptq.hessian": hessian_variants,
    "gptq.factor": factor_variants,
    "gptq.targets": target_variants,
    "rope.rotate": rope_variants,
    "attention.attend": attend_variants,
    "pooling.pool": pool_variants,
    "routing.gate": gate_variants,
    "routing.top_k": choice_variants,
    "routing.weights": weight_variants,
    "routing.expert": expert_variants,
    "routing.sparse": sparse_variants,
    "kvcache.bfp": cache_variants,
    "offload.trace": trace_variants,
    "offload.engine": engine_variants,
}
