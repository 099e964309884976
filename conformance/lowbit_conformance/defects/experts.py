"""Defects of experts and of the sparse layer: the activation, the order and the weights of the sum."""

from collections.abc import Callable
from functools import partial

import numpy as np

from lowbit.arrays import F32, F64, Array
from lowbit.linear.elementary import logistic, silu
from lowbit.model.layers import gelu
from lowbit.moe.routing import Ids
from lowbit_conformance.defects.activations import by_exponential, relu
from lowbit_conformance.defects.defect import MOVES, Defect, Function, of_operation
from lowbit_conformance.defects.roundings import Rounding, exactly, finite, half, in_steps
from lowbit_conformance.defects.routes import product

DEFECTS: list[Defect] = []
of_expert = of_operation(DEFECTS, "routing.expert")
of_sparse = of_operation(DEFECTS, "routing.sparse")

# **Experts.**


def expert(
    x: F32,
    gate: F32,
    up: F32,
    down: F32,
    activation: Callable[[F64], Array] = silu,
    of_inner: Rounding = exactly,
) -> F64:
    """The right result, except for another activation or a rounding before `down`."""
    with np.errstate(invalid="ignore", over="ignore"):
        return product(of_inner(activation(product(x, gate)) * product(x, up)), down)


of_expert.add(
    "gate-and-up-exchanged",
    "silu is applied to up and not to gate.",
    "C1 C2",
    lambda x, gate, up, down: expert(x, up, gate, down),
    "https://github.com/ml-explore/mlx-lm/pull/767",
)
of_expert.add(
    "inner-in-half",
    "What lies between the projections is rounded to float16.",
    "C2",
    partial(expert, of_inner=half),
)


@of_expert("C3", verdicts=MOVES)
def expert_one_step_for_all_rows(x: F32, gate: F32, up: F32, down: F32) -> Array:
    """Tokens are rounded with one step, so each depends on all."""
    return expert(in_steps(x), gate, up, down)


@of_expert("C4")
def expert_hides_nan(x: F32, gate: F32, up: F32, down: F32) -> Array:
    """NaN and infinity become zero on the way."""
    return expert(finite(x), gate, up, down)


of_silu = of_operation(DEFECTS, "routing.expert", lambda activation: partial(expert, activation=activation))
of_silu.add("gelu-for-silu", "The activation is a GELU.", "C2", gelu)
of_silu.add("expert-relu-for-silu", "The activation is a ReLU.", "C2", relu)
of_silu.add("expert-sigmoid-for-silu", "The sigmoid is not multiplied by the gate.", "C2", logistic)
of_silu.add("expert-without-sigmoid", "Gate and up are multiplied without an activation.", "C2", lambda a: a)
of_silu.add(
    "silu-overflows",
    "silu is a e^a / (1 + e^a), infinite over infinite for large a.",
    "C1 C2",
    by_exponential,
    "https://github.com/ggml-org/llama.cpp/pull/7726",
)

# **The layer.**


def sparse(x: F32, gate: F32, up: F32, down: F32, chosen: Ids, weights: F32, one: Callable[..., Array] = expert) -> F64:
    """A sparse layer; right unless an expert is computed differently."""
    y = np.zeros(x.shape)
    for e in np.unique(chosen):
        tokens, place = np.nonzero(chosen == e)
        with np.errstate(invalid="ignore", over="ignore"):
            y[tokens] += weights[tokens, place, None].astype(np.float64) * one(x[tokens], gate[e], up[e], down[e])
    return y


@of_sparse("C3", verdicts=MOVES)
def added_as_listed(x: F32, gate: F32, up: F32, down: F32, chosen: Ids, weights: F32) -> Array:
    """Experts are added in the order in which a token lists them."""
    y = np.zeros(x.shape, np.float32)
    for place in range(chosen.shape[1]):
        for e in np.unique(chosen[:, place]):
            tokens = np.flatnonzero(chosen[:, place] == e)
            answer = expert(x[tokens], gate[e], up[e], down[e]).astype(np.float32)
            with np.errstate(invalid="ignore", over="ignore"):
                y[tokens] += weights[tokens, place, None] * answer
    return y


@of_sparse("C4", verdicts=MOVES)
def all_experts_run(x: F32, gate: F32, up: F32, down: F32, chosen: Ids, weights: F32) -> Array:
    """All experts run, and a weight of 0 is to undo those not chosen."""
    every = np.zeros((len(x), len(gate)), np.float32)
    np.put_along_axis(every, chosen, weights, axis=1)
    y = np.zeros(x.shape)
    with np.errstate(invalid="ignore", over="ignore"):
        for e in range(len(gate)):
            y += every[:, e, None].astype(np.float64) * expert(x, gate[e], up[e], down[e])
    return y


@of_sparse("C1 C2")
def weighted_on_the_way_in(x: F32, gate: F32, up: F32, down: F32, chosen: Ids, weights: F32) -> Array:
    """The weight meets the token before the expert does."""
    # silu is not linear.
    y = np.zeros(x.shape)
    for e in np.unique(chosen):
        tokens, place = np.nonzero(chosen == e)
        y[tokens] += expert(weights[tokens, place, None] * x[tokens], gate[e], up[e], down[e])
    return y


def with_choice(change: Callable[[Ids, F32], tuple[Ids, F32]]) -> Function:
    """The right result for other experts or weights than the chosen ones."""
    return lambda x, gate, up, down, *choice: sparse(x, gate, up, down, *change(*choice))


of_choice = of_operation(DEFECTS, "routing.sparse", with_choice)
of_choice.add(
    "weights-ignored",
    "Every chosen expert counts 1/k.",
    "C1 C2",
    lambda chosen, weights: (chosen, np.full_like(weights, 1 / weights.shape[1])),
)
of_choice.add(
    "weights-left-out",
    "The outputs of experts are added without weights.",
    "C2",
    lambda chosen, weights: (chosen, np.ones_like(weights)),
)
of_choice.add(
    "weights-of-first-token",
    "All tokens have the weights of the first.",
    "C2",
    lambda chosen, weights: (chosen, np.repeat(weights[:1], len(weights), axis=0)),
    verdicts=MOVES,
)
of_choice.add(
    "ids-sorted-without-weights",
    "Ids are sorted, and their weights stay where they were.",
    "C1 C2 C3",
    lambda chosen, weights: (np.sort(chosen, axis=1), weights),
    verdicts=MOVES,
)
of_choice.add(
    "last-expert-dropped",
    "The last of a token's experts is left out.",
    "C1 C2",
    lambda chosen, weights: (chosen[:, : max(1, chosen.shape[1] - 1)], weights[:, : max(1, chosen.shape[1] - 1)]),
)
of_choice.add(
    "last-of-chosen-left-out",
    "The last of a token's experts is left out, even if it is the only one.",
    "C2",
    lambda chosen, weights: (chosen[:, :-1], weights[:, :-1]),
)
