"""Defects of experts and of the sparse layer: the activation, the order and the weights of the sum."""

from collections.abc import Callable

import numpy as np

from lowbit.arrays import F32, F64, Array
from lowbit.moe.routing import Ids
from lowbit_conformance.defects.defect import MOVES, of
from lowbit_conformance.defects.routes import product

# **Experts and the layer.**


def silu(a: F64) -> F64:
    with np.errstate(over="ignore", invalid="ignore"):
        answer: F64 = a / (1 + np.exp(-a))
    return answer


def gelu(a: F64) -> F64:
    with np.errstate(invalid="ignore", over="ignore"):
        answer: F64 = 0.5 * a * (1 + np.tanh(np.sqrt(2 / np.pi) * (a + 0.044715 * a**3)))
    return answer


def by_exponential(a: F64) -> F64:
    with np.errstate(over="ignore", invalid="ignore"):
        power = np.exp(a.astype(np.float32))
        answer: F64 = (a.astype(np.float32) * power / (1 + power)).astype(np.float64)
    return answer


def expert(x: F32, gate: F32, up: F32, down: F32, activation: Callable[[F64], F64] = silu) -> F64:
    with np.errstate(invalid="ignore", over="ignore"):
        return product(activation(product(x, gate)) * product(x, up), down)


def expert_in_half(x: F32, gate: F32, up: F32, down: F32) -> Array:
    with np.errstate(invalid="ignore", over="ignore"):
        inner = (silu(product(x, gate)) * product(x, up)).astype(np.float16)
    return product(inner, down)


def expert_of_all_rows(x: F32, gate: F32, up: F32, down: F32) -> Array:
    with np.errstate(invalid="ignore"):
        step = np.abs(x).max() * 2.0**-21
        return expert((np.rint(x / step) * step).astype(np.float32) if step > 0 else x, gate, up, down)


def expert_hides_nan(x: F32, gate: F32, up: F32, down: F32) -> Array:
    return expert(np.nan_to_num(x, nan=0, posinf=0, neginf=0), gate, up, down)


def sparse(
    x: F32,
    gate: F32,
    up: F32,
    down: F32,
    chosen: Ids,
    weights: F32,
    one: Callable[..., F64] = expert,
) -> F64:
    y = np.zeros(x.shape)
    for e in np.unique(chosen):
        tokens, place = np.nonzero(chosen == e)
        with np.errstate(invalid="ignore", over="ignore"):
            y[tokens] += weights[tokens, place, None].astype(np.float64) * one(x[tokens], gate[e], up[e], down[e])
    return y


Layer = tuple[F32, F32, F32, F32, Ids, F32]


def unweighted(x: F32, gate: F32, up: F32, down: F32, chosen: Ids, weights: F32) -> Array:
    return sparse(x, gate, up, down, chosen, np.full_like(weights, 1 / weights.shape[1]))


def sorted_apart(x: F32, gate: F32, up: F32, down: F32, chosen: Ids, weights: F32) -> Array:
    """Ids are sorted, and their weights are not."""
    return sparse(x, gate, up, down, np.sort(chosen, axis=1), weights)


def as_listed(x: F32, gate: F32, up: F32, down: F32, chosen: Ids, weights: F32) -> Array:
    """Adds in float32, in the order in which a token lists its experts."""
    y = np.zeros(x.shape, np.float32)
    for place in range(chosen.shape[1]):
        for e in np.unique(chosen[:, place]):
            tokens = np.flatnonzero(chosen[:, place] == e)
            answer = expert(x[tokens], gate[e], up[e], down[e]).astype(np.float32)
            with np.errstate(invalid="ignore", over="ignore"):
                y[tokens] += weights[tokens, place, None] * answer
    return y


def dense(x: F32, gate: F32, up: F32, down: F32, chosen: Ids, weights: F32) -> Array:
    """Every expert runs for every token; a weight of 0 is to undo it."""
    every = np.zeros((len(x), len(gate)), np.float32)
    np.put_along_axis(every, chosen, weights, axis=1)
    y = np.zeros(x.shape)
    with np.errstate(invalid="ignore", over="ignore"):
        for e in range(len(gate)):
            y += every[:, e, None].astype(np.float64) * expert(x, gate[e], up[e], down[e])
    return y


def last_dropped(x: F32, gate: F32, up: F32, down: F32, chosen: Ids, weights: F32) -> Array:
    k = chosen.shape[1]
    return sparse(x, gate, up, down, chosen[:, : max(1, k - 1)], weights[:, : max(1, k - 1)])


def weighted_inside(x: F32, gate: F32, up: F32, down: F32, chosen: Ids, weights: F32) -> Array:
    """The weight meets the activations on their way in, where silu is not linear."""
    y = np.zeros(x.shape)
    for e in np.unique(chosen):
        tokens, place = np.nonzero(chosen == e)
        y[tokens] += expert(weights[tokens, place, None] * x[tokens], gate[e], up[e], down[e])
    return y


EXPERTS = (
    of(
        "routing.expert",
        "gate-and-up-exchanged",
        "silu is applied to up and not to gate.",
        "C1 C2",
        lambda x, gate, up, down: expert(x, up, gate, down),
        "https://github.com/ml-explore/mlx-lm/pull/767",
    ),
    of(
        "routing.expert",
        "gelu-for-silu",
        "The activation is a GELU.",
        "C2",
        lambda x, gate, up, down: expert(x, gate, up, down, gelu),
    ),
    of(
        "routing.expert",
        "silu-overflows",
        "silu is a e^a / (1 + e^a), infinite over infinite for large a.",
        "C1 C2",
        lambda x, gate, up, down: expert(x, gate, up, down, by_exponential),
        "https://github.com/ggml-org/llama.cpp/pull/7726",
    ),
    of(
        "routing.expert",
        "inner-in-half",
        "What lies between the projections is rounded to float16.",
        "C2",
        expert_in_half,
    ),
    of(
        "routing.expert",
        "expert-one-step-for-all-rows",
        "Tokens are rounded with one step, so each depends on all.",
        "C3",
        expert_of_all_rows,
        verdicts=MOVES,
    ),
    of("routing.expert", "expert-hides-nan", "NaN and infinity become zero on the way.", "C4", expert_hides_nan),
)

LAYERS = (
    of("routing.sparse", "weights-ignored", "Every chosen expert counts 1/k.", "C1 C2", unweighted),
    of(
        "routing.sparse",
        "ids-sorted-without-weights",
        "Ids are sorted, and their weights stay where they were.",
        "C1 C2 C3",
        sorted_apart,
        verdicts=MOVES,
    ),
    of(
        "routing.sparse",
        "added-as-listed",
        "Experts are added in the order in which a token lists them.",
        "C3",
        as_listed,
        verdicts=MOVES,
    ),
    of(
        "routing.sparse",
        "all-experts-run",
        "All experts run, and a weight of 0 is to undo those not chosen.",
        "C4",
        dense,
        verdicts=MOVES,
    ),
    of("routing.sparse", "last-expert-dropped", "The last of a token's experts is left out.", "C1 C2", last_dropped),
    of(
        "routing.sparse",
        "weighted-on-the-way-in",
        "The weight meets the token before the expert does.",
        "C1 C2",
        weighted_inside,
    ),
)

DEFECTS = (*EXPERTS, *LAYERS)
