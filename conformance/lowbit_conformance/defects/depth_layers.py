"""Defects of precision in deep layers of routing and in attention over long contexts."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit.arrays import F32, F64, Array
from lowbit.linear.elementary import softmax
from lowbit_conformance.defects import experts, routes
from lowbit_conformance.defects.attention import visible
from lowbit_conformance.defects.defect import COMMON, Defect, Function, of
from lowbit_conformance.defects.depth_roundings import (
    DEEP,
    Rounding,
    bfloat16,
    exactly,
    half,
    tensor_float,
)

# **Routing.**


def gate(of_x: Rounding, of_router: Rounding) -> Function:
    def logits(x: F32, router: F32, scores: str = "logits") -> Array:
        if len(router) >= DEEP:
            x, router = of_x(x), of_router(router)
        return routes.scored(routes.product(x, router), scores)

    return logits


def without_largest(kind: type[np.floating[Any]]) -> Callable[[Array], Array]:
    """Exponentials of the scores as they are, in this dtype."""

    def probabilities(logits: Array) -> Array:
        with np.errstate(all="ignore"):
            powers = np.exp(logits.astype(kind))
            answer: Array = powers / powers.sum(axis=-1, keepdims=True)
        return answer

    return probabilities


def clamped(logits: Array) -> Array:
    return without_largest(np.float64)(np.clip(logits, -88, 88))


def gate_scores(probabilities: Callable[[Array], Array]) -> Function:
    def answer(x: F32, router: F32, scores: str = "logits") -> Array:
        logits = routes.product(x, router)
        return logits if scores == "logits" else probabilities(logits)

    return answer


def weighed(probabilities: Callable[[Array], Array]) -> Function:
    def answer(scores: F32, chosen: Array, softmax: str = "after") -> Array:
        own = routes.chosen_of(scores, chosen)
        return probabilities(own) if softmax == "after" else own / own.sum(axis=1, keepdims=True)

    return answer


def expert(of_weights: Rounding, of_inner: Rounding = exactly) -> Callable[..., Array]:
    def one(x: F32, gate: F32, up: F32, down: F32) -> Array:
        if max(gate.shape) < DEEP:
            return experts.expert(x, gate, up, down)
        gate, up, down = (of_weights(part) for part in (gate, up, down))
        with np.errstate(over="ignore", invalid="ignore"):
            inner = experts.silu(routes.product(x, gate)) * routes.product(x, up)
        return routes.product(of_inner(inner), down)

    return one


def layer(one: Callable[..., Array]) -> Function:
    return lambda x, gate, up, down, chosen, weights: experts.sparse(x, gate, up, down, chosen, weights, one)


ROUTES = (
    of(
        "routing.gate",
        "deep-gate-in-tf32",
        "Deep gates round both operands to TF32.",
        "C1",
        gate(tensor_float, tensor_float),
    ),
    of("routing.gate", "deep-gate-x-in-bfloat16", "Deep gates round x to bfloat16.", "C1", gate(bfloat16, exactly)),
    of("routing.gate", "deep-router-in-half", "Routers of deep gates are kept in float16.", "C1", gate(exactly, half)),
    of(
        "routing.gate",
        "gate-without-max",
        "Exponentials of logits as they are overflow.",
        "C3",
        gate_scores(without_largest(np.float32)),
    ),
    of(
        "routing.gate",
        "gate-without-max-in-float64",
        "Exponentials of logits as they are, in float64.",
        "C3",
        gate_scores(without_largest(np.float64)),
    ),
    of(
        "routing.gate",
        "gate-logits-clamped",
        "Logits are clamped to ±88 before their exponentials.",
        "C3",
        gate_scores(clamped),
    ),
    of(
        "routing.weights",
        "weights-without-max",
        "Exponentials of chosen logits as they are overflow.",
        "C1",
        weighed(without_largest(np.float32)),
    ),
    of(
        "routing.weights",
        "weights-without-max-in-float64",
        "Exponentials of chosen logits as they are, in float64.",
        "C1",
        weighed(without_largest(np.float64)),
    ),
    of(
        "routing.weights",
        "weights-logits-clamped",
        "Chosen logits are clamped to ±88 before their exponentials.",
        "C1",
        weighed(clamped),
    ),
    of(
        "routing.expert",
        "deep-expert-in-tf32",
        "Matrices of deep experts are rounded to TF32.",
        "C1",
        expert(tensor_float, tensor_float),
    ),
    of("routing.expert", "deep-expert-in-half", "Matrices of deep experts are kept in float16.", "C1", expert(half)),
    of(
        "routing.expert",
        "deep-inner-in-bfloat16",
        "Activations between the products of deep experts are bfloat16.",
        "C1",
        expert(exactly, bfloat16),
    ),
    of(
        "routing.sparse",
        "deep-layer-in-tf32",
        "Matrices of deep experts are rounded to TF32.",
        "C1",
        layer(expert(tensor_float, tensor_float)),
    ),
    of(
        "routing.sparse",
        "deep-layer-in-half",
        "Matrices of deep experts are kept in float16.",
        "C1",
        layer(expert(half)),
    ),
)

# **Softmax and attention.**


def powers_clamped(scores: F32) -> Array:
    """Differences are clamped to −80, and −∞ is not."""
    return softmax(
        np.maximum(scores - scores.max(axis=1, keepdims=True), np.where(np.isneginf(scores), -np.inf, -80.0))
    )


def largest_from(start: float) -> Function:
    """The search for the largest score begins at a number."""

    def probabilities(scores: F32) -> Array:
        return from_largest(scores.astype(np.float64), start)

    return probabilities


def from_largest(scores: F64, start: float) -> F64:
    with np.errstate(all="ignore"):
        powers = np.exp((scores - np.maximum(scores.max(axis=-1, keepdims=True), start)).astype(np.float32))
        answer: F64 = (powers / powers.sum(axis=-1, keepdims=True)).astype(np.float64)
    return answer


def deep_softmax(narrow: Rounding) -> Function:
    return lambda scores: (
        narrow(softmax(scores.astype(np.float64))) if scores.shape[1] >= DEEP else softmax(scores.astype(np.float64))
    )


def attending(
    masked: Callable[[F64, npt.NDArray[np.bool_]], F64] | None = None,
    probabilities: Callable[[F64], F64] = softmax,
    of_operands: Rounding = exactly,
    of_probabilities: Rounding = exactly,
    of_values: Rounding = exactly,
    head: Callable[[int, int], int] = lambda h, heads: h,
) -> Function:
    """Right, unless something is replaced: how scores are masked, the softmax, and what is rounded in long contexts."""

    def attend(queries: F32, keys: F32, values: F32, window: int | None = None) -> F64:
        tokens, heads, channels = queries.shape
        groups, length, _ = keys.shape
        mask = visible(tokens, length, window)
        if length >= DEEP:
            queries, keys, values = of_operands(queries), of_operands(keys), of_values(values)
        result = np.empty(queries.shape)
        with np.errstate(all="ignore"):
            for h in range(heads):
                j = h * groups // heads
                scores = (
                    queries[:, head(h, heads)].astype(np.float64) @ keys[j].astype(np.float64).T / np.sqrt(channels)
                )
                scores = np.where(mask, scores, -np.inf) if masked is None else masked(scores, mask)
                own = probabilities(scores)
                own = of_probabilities(own) if length >= DEEP else own
                result[:, h] = own.astype(np.float64) @ values[j].astype(np.float64)
        return result

    return attend


def added(number: float) -> Callable[[F64, npt.NDArray[np.bool_]], F64]:
    return lambda scores, mask: np.where(mask, scores, scores + number)


def replaced(number: float) -> Callable[[F64, npt.NDArray[np.bool_]], F64]:
    return lambda scores, mask: np.where(mask, scores, number)


def attention(name: str, cause: str, clauses: str, verdicts: tuple[str, ...] = ("WRONG",), **changed: Any) -> Defect:
    return of("attention.attend", name, cause, clauses, attending(**changed), COMMON, verdicts)


def neighbours_of_group(h: int, heads: int) -> int:
    """The last two heads change places."""
    return h if h < heads - 2 or heads < 2 else 2 * heads - 3 - h


ATTENTION = (
    of(
        "attention.softmax",
        "softmax-powers-clamped",
        "Differences of scores below -80 count as -80.",
        "C2",
        powers_clamped,
    ),
    of(
        "attention.softmax",
        "largest-score-from-0",
        "The search for the largest score begins at 0.",
        "C1 C2",
        largest_from(0.0),
    ),
    of(
        "attention.softmax",
        "largest-score-from-minus-5000",
        "The search for the largest score begins at -5000.",
        "C1 C2",
        largest_from(-5e3),
    ),
    of(
        "attention.softmax",
        "long-shares-in-half",
        "Probabilities of long rows are rounded to float16.",
        "C2",
        deep_softmax(half),
    ),
    attention(
        "mask-adds-minus-10000", "What is hidden loses 10^4 of its score instead of all.", "C2", masked=added(-1e4)
    ),
    attention("mask-is-minus-10000", "What is hidden has a score of -10^4.", "C2", masked=replaced(-1e4)),
    attention("mask-is-minus-65504", "What is hidden has the least score of float16.", "C2", masked=replaced(-65504.0)),
    attention("mask-is-minus-1e9", "What is hidden has a score of -10^9.", "C2", masked=replaced(-1e9)),
    attention(
        "mask-adds-minus-1e9", "What is hidden loses 10^9 of its score instead of all.", "C2", masked=added(-1e9)
    ),
    attention(
        "attention-without-max",
        "Exponentials of scores as they are overflow.",
        "C2",
        probabilities=lambda scores: without_largest(np.float32)(scores),
    ),
    attention(
        "running-max-from-0",
        "The running maximum of scores begins at 0.",
        "C2",
        probabilities=lambda scores: from_largest(scores, 0.0),
    ),
    attention(
        "running-max-from-minus-10000",
        "The running maximum of scores begins at -10^4.",
        "C2",
        probabilities=lambda scores: from_largest(scores, -1e4),
    ),
    attention(
        "running-max-from-minus-1e9",
        "The running maximum of scores begins at -10^9.",
        "C2",
        probabilities=lambda scores: from_largest(scores, -1e9),
    ),
    attention(
        "long-scores-in-tf32", "Queries and keys of long contexts are rounded to TF32.", "C3", of_operands=tensor_float
    ),
    attention(
        "long-scores-in-bfloat16",
        "Queries and keys of long contexts are rounded to bfloat16.",
        "C3",
        of_operands=bfloat16,
    ),
    attention("long-values-in-tf32", "Values of long contexts are rounded to TF32.", "C2", of_values=tensor_float),
    attention("long-values-in-half", "Values of long contexts are rounded to float16.", "C2", of_values=half),
    attention(
        "long-probabilities-in-half",
        "Probabilities of long contexts are rounded to float16.",
        "C3",
        of_probabilities=half,
    ),
    attention(
        "last-heads-exchanged", "The queries of the last two heads change places.", "C2 C3", head=neighbours_of_group
    ),
)
