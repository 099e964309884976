"""Variants of routing: gates, choices, weights and experts."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from lowbit.arrays import F32, Array
from lowbit.linear.elementary import logistic, silu, softmax
from lowbit.model.layers import gelu
from lowbit.moe import routing
from lowbit_conformance.defects import experts, routes
from lowbit_conformance.defects.activations import by_exponential, relu
from lowbit_conformance.defects.defect import Function
from lowbit_conformance.defects.narrow import Change
from lowbit_conformance.defects.roundings import exactly
from lowbit_conformance.defects.variants_roundings import SIZES, SMALL, Variants, narrowed, of_float32

# **Routing.**


def gate_variants() -> Variants:
    def one_largest(logits: Array) -> Array:
        with np.errstate(all="ignore"):
            powers = np.exp(logits.astype(np.float32) - logits.astype(np.float32).max())
            return np.asarray(powers / powers.sum(axis=1, keepdims=True))

    def of_inputs(change: Callable[[F32, F32], tuple[Array, Array]]) -> Function:
        return routes.from_logits(lambda x, router: routes.product(*change(x, router)))

    for format, words, way in narrowed():
        run = partial(_logits, of_float32(way))
        yield f"logits-in-{format}", f"Logits: {words}.", routes.from_logits(run)
    yield (
        "largest-logit-of-all-tokens",
        "The largest logit of all tokens is subtracted from each.",
        routes.by(one_largest),
    )
    for most in (10.0, 20.0, 30.0, 50.0, 60.0, 64.0, 80.0, 87.0, 88.0):
        yield "logits-clamped", "Logits are clamped before the softmax.", routes.by(partial(_clipped, most))
    for size in SIZES:
        yield f"channels-past-{size}-left-out", f"Channels past {size} are left out.", of_inputs(_first_channels(size))
        yield f"experts-wrap-at-{size}", f"The number of an expert wraps at {size}.", of_inputs(_experts_modulo(size))
    without = of_inputs(lambda x, router: (np.where(np.isnan(x), np.float32(0), x), router))
    finite = of_inputs(lambda x, router: (np.nan_to_num(x), router))
    yield "nan-replaced", "NaN becomes 0 on the way.", without
    yield "nan-replaced", "NaN becomes 0 and infinity the largest float32 on the way.", finite


def _logits(change: Change, x: F32, router: F32) -> Array:
    return change(routes.product(x, router))


def _clipped(most: float, logits: Array) -> Array:
    return softmax(np.clip(logits, -most, most))


def _first_channels(most: int) -> Callable[[F32, F32], tuple[Array, Array]]:
    return lambda x, router: (x[:, :most], router[:most])


def _experts_modulo(most: int) -> Callable[[F32, F32], tuple[Array, Array]]:
    return lambda x, router: (x, router[:, np.arange(router.shape[1]) % most])


def choice_variants() -> Variants:
    def by_bits(scores: F32, k: int) -> Array:
        return np.argsort(-scores.view(np.int32).astype(np.int64), axis=1, kind="stable")[:, :k].astype(np.int64)

    def by_negated_bits(scores: F32, k: int) -> Array:
        """Scores are sorted by negated 32-bit patterns, of which the least is its own negative."""
        return np.argsort(-scores.view(np.int32), axis=1, kind="stable")[:, :k].astype(np.int64)

    for way in (by_bits, by_negated_bits):
        cause = "The bits of scores are compared, which reverses negative ones."
        yield "scores-compared-as-integers", cause, way


def weight_variants() -> Variants:
    def as_listed(scores: F32, chosen: Array, softmax: Any = "after") -> Array:
        return routing.weights(scores, np.sort(chosen, axis=1), softmax)

    def of_all(scores: F32, chosen: Array, softmax: Any = "after") -> Any:
        every = scores.astype(np.float64).sum(axis=1, keepdims=True)
        return routes.weighed(before=lambda own: own / every)(scores, chosen, softmax)

    def padded(small: float, own: Array) -> Array:
        short = own.astype(np.float32)
        return np.asarray(short / (short.sum(axis=1, keepdims=True) + np.float32(small)))

    yield "weights-by-id", "Weights are in the order of expert ids instead of the order of the choice.", as_listed
    cause = "Probabilities of the chosen are divided by the sum of all."
    yield "divided-by-sum-of-all", cause, of_all
    for small in SMALL:
        yield (
            "sum-plus-small-number",
            "A small number is added to the sum to avoid division by zero.",
            routes.weighed(before=partial(padded, small)),
        )


STAGES = {
    "gate-product": "The product with gate",
    "up-product": "The product with up",
    "activation": "The activation",
    "inner": "The input of down",
    "answer": "The output of an expert",
}


def expert(
    x: F32,
    gate: F32,
    up: F32,
    down: F32,
    *,
    function: Callable[[Array], Array] = silu,
    **stages: Change,
) -> Array:
    """An expert with the numbers between its steps changed."""
    at = dict.fromkeys(STAGES, exactly) | stages
    with np.errstate(all="ignore"):
        first, second = at["gate-product"](routes.product(x, gate)), at["up-product"](routes.product(x, up))
        inner = at["inner"](at["activation"](function(first)) * second)
        return at["answer"](routes.product(inner, down))


def expert_variants() -> Variants:
    """One expert, with one step done differently."""
    for name, activation, words in (
        ("gelu-for-silu", gelu, "a GELU by tanh"),
        ("gelu-for-silu", lambda a: a * logistic(1.702 * a), "a GELU by a sigmoid"),
        ("relu-for-silu", relu, "a ReLU"),
        ("silu-overflows", by_exponential, "a e^a / (1 + e^a), infinite over infinite for large a"),
    ):
        yield name, f"The activation is {words}.", partial(expert, function=activation)
    yield "gate-and-up-exchanged", "silu is applied to up and not to gate.", lambda x, g, u, d: expert(x, u, g, d)
    for stage, words in STAGES.items():
        for format, rounded, way in narrowed():
            change: dict[str, Any] = {stage: of_float32(way)}
            yield f"{stage}-in-{format}", f"{words}: {rounded}.", partial(expert, **change)
    for format, rounded, way in narrowed():

        def of_gate(x: F32, gate: F32, up: F32, down: F32, way: Change = way) -> Array:
            with np.errstate(all="ignore"):
                inner = silu(routes.product(way(x), gate)) * routes.product(x, up)
            return routes.product(inner, down)

        yield f"x-of-gate-in-{format}", f"Activations that meet gate: {rounded}.", of_gate
    for most in (10.0, 20.0, 30.0, 50.0, 80.0, 87.0, 88.0):

        def clamped(a: Array, most: float = most) -> Array:
            return np.asarray(a * logistic(np.clip(a, -most, most)))

        cause = "The exponent of silu is clamped."
        yield "exponent-of-silu-clamped", cause, partial(expert, function=clamped)
    for width in (4, 8, 16, 32):

        def tail(numbers: Array, width: int = width) -> Array:
            changed = numbers.copy()
            changed[..., numbers.shape[-1] // width * width or numbers.shape[-1] :] = 0
            return changed

        cause = f"Inner channels past the last whole {width} are left out."
        yield f"inner-past-whole-{width}-dropped", cause, partial(expert, inner=tail)


def sparse_variants() -> Variants:
    for name, cause, one in expert_variants():
        yield name, cause, partial(experts.sparse, one=one)

    def again(chosen: Array, weights: F32) -> tuple[Array, Array]:
        with np.errstate(all="ignore"):
            total = weights.astype(np.float64).sum(axis=1, keepdims=True)
        return chosen, weights / np.where(total == 0, 1, total)

    def first(most: int, chosen: Array, weights: F32) -> tuple[Array, Array]:
        return chosen[:, :most], weights[:, :most]

    def lowest(most: int, chosen: Array, weights: F32) -> tuple[Array, Array]:
        order = np.argsort(chosen, axis=1)[:, :most]
        return np.take_along_axis(chosen, order, axis=1), np.take_along_axis(weights, order, axis=1)

    cause = "Weights are divided by their sum once more."
    yield "weights-normalized-again", cause, experts.with_choice(again)
    for most in (1, 2, 4, 6, 8, 16, 32):
        for words, change in ((f"the first {most}", first), (f"the {most} lowest", lowest)):
            cause = f"Of the experts of a token only {words} run."
            yield f"only-{most}-experts-run", cause, experts.with_choice(partial(change, most))
    for size in SIZES:

        def modulo(*given: Any, size: int = size) -> Array:
            x, gate, up, down, chosen, weights = given
            number = np.arange(len(gate)) % size
            return experts.sparse(x, gate[number], up[number], down[number], chosen, weights)

        yield f"experts-wrap-at-{size}", f"The number of an expert wraps at {size}.", modulo
