"""Defects of routing and of experts: the gate, the choice, the weights, the sum."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from lowbit import routing
from lowbit.attention import softmax
from lowbit.routing import Doubles, Floats, Ids
from lowbit_conformance.bank.blocks import of
from lowbit_conformance.bank.defect import Array

ROW_BY_ROW = "C4"

# **The gate.**


def product(x: npt.NDArray[np.floating], matrix: Floats) -> Doubles:
    with np.errstate(invalid="ignore", over="ignore"):
        result: Doubles = x.astype(np.float64) @ matrix.astype(np.float64)
    return result


def scored(logits: Doubles, scores: str) -> Doubles:
    with np.errstate(invalid="ignore"):
        return logits if scores == "logits" else softmax(logits)


def gate_in_half(x: Floats, router: Floats, scores: str = "logits") -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        logits = (x.astype(np.float16) @ router.astype(np.float16)).astype(np.float64)
    return scored(logits, scores)


def last_channel_dropped(x: Floats, router: Floats, scores: str = "logits") -> Array:
    return scored(product(x[:, :-1], router[:-1]), scores)


def sigmoid_for_softmax(x: Floats, router: Floats, scores: str = "logits") -> Array:
    logits = product(x, router)
    with np.errstate(over="ignore"):
        return logits if scores == "logits" else 1 / (1 + np.exp(-logits))


def centered(x: Floats, router: Floats, scores: str = "logits") -> Array:
    """Rounds every row with one step, that of the largest number of all rows."""
    with np.errstate(invalid="ignore"):
        step = np.abs(x).max() * 2.0**-21
        return scored(product(np.rint(x / step) * step if step > 0 else x, router), scores)


def gate_hides_nan(x: Floats, router: Floats, scores: str = "logits") -> Array:
    return scored(product(np.nan_to_num(x, nan=0, posinf=0, neginf=0), router), scores)


def softmax_over_tokens(x: Floats, router: Floats, scores: str = "logits") -> Array:
    logits = product(x, router)
    return logits if scores == "logits" else softmax(logits.T).T


# **The choice.**


def top_k(scores: Floats, k: int) -> Ids:
    return np.argsort(-scores, axis=1, kind="stable")[:, :k].astype(np.int64)


def ties_to_highest(scores: Floats, k: int) -> Ids:
    turned = np.argsort(-scores[:, ::-1], axis=1, kind="stable")[:, :k]
    return (scores.shape[1] - 1 - turned).astype(np.int64)


def signed_zeros(scores: Floats, k: int) -> Ids:
    """Sorts the bits, for which -0 is less than +0."""
    bits = scores.view(np.int32).astype(np.int64)
    return np.argsort(-np.where(bits < 0, -(bits & 0x7FFFFFFF) - 1, bits), axis=1, kind="stable")[:, :k].astype(
        np.int64
    )


def in_half_first(scores: Floats, k: int) -> Ids:
    with np.errstate(over="ignore"):
        return top_k(scores.astype(np.float16).astype(np.float32), k)


# **The weights.**


def chosen_of(scores: Floats, chosen: Ids) -> Doubles:
    return np.take_along_axis(scores, chosen, axis=1).astype(np.float64)


def not_renormalized(scores: Floats, chosen: Ids, softmax: str = "after") -> Array:
    return chosen_of(scores, chosen) if softmax == "before" else routing.weights(scores, chosen, "after")


def softmax_of_all(scores: Floats, chosen: Ids, softmax: str = "after") -> Array:
    if softmax == "before":
        return routing.weights(scores, chosen, "before")
    all_of_them = np.exp(scores.astype(np.float64) - scores.max(axis=1, keepdims=True))
    return chosen_of((all_of_them / all_of_them.sum(axis=1, keepdims=True)).astype(np.float32), chosen)


def raw_logits(scores: Floats, chosen: Ids, softmax: str = "after") -> Array:
    return chosen_of(scores, chosen) if softmax == "after" else routing.weights(scores, chosen, "before")


def weights_of_first(scores: Floats, chosen: Ids, softmax: str = "after") -> Array:
    """The weights of experts 0 … k − 1, whichever were chosen."""
    first = np.broadcast_to(np.arange(chosen.shape[1]), chosen.shape)
    right = routing.weights(scores, chosen, softmax)  # type: ignore[arg-type]  # the caller's own choice
    try:
        return routing.weights(scores, np.ascontiguousarray(first), softmax)  # type: ignore[arg-type]  # likewise
    except ValueError:  # none of them has a probability
        return right


def by_two_norm(scores: Floats, chosen: Ids, softmax: str = "after") -> Array:
    own = routing.weights(scores, chosen, softmax)  # type: ignore[arg-type]  # the caller's own choice
    return own / np.sqrt((own**2).sum(axis=1, keepdims=True))


def with_epsilon(scores: Floats, chosen: Ids, softmax: str = "after") -> Array:
    own = routing.weights(scores, chosen, softmax)  # type: ignore[arg-type]  # the caller's own choice
    return own / (own.sum(axis=1, keepdims=True) + 1e-3)


# **Experts and the layer.**


def silu(a: Doubles) -> Doubles:
    with np.errstate(over="ignore", invalid="ignore"):
        return a / (1 + np.exp(-a))


def gelu(a: Doubles) -> Doubles:
    with np.errstate(invalid="ignore", over="ignore"):
        return 0.5 * a * (1 + np.tanh(np.sqrt(2 / np.pi) * (a + 0.044715 * a**3)))


def by_exponential(a: Doubles) -> Doubles:
    with np.errstate(over="ignore", invalid="ignore"):
        power = np.exp(a.astype(np.float32))
        return (a.astype(np.float32) * power / (1 + power)).astype(np.float64)


def expert(
    x: Floats, gate: Floats, up: Floats, down: Floats, activation: Callable[[Doubles], Doubles] = silu
) -> Doubles:
    with np.errstate(invalid="ignore", over="ignore"):
        return product(activation(product(x, gate)) * product(x, up), down)


def expert_in_half(x: Floats, gate: Floats, up: Floats, down: Floats) -> Array:
    with np.errstate(invalid="ignore", over="ignore"):
        inner = (silu(product(x, gate)) * product(x, up)).astype(np.float16)
    return product(inner, down)


def expert_of_all_rows(x: Floats, gate: Floats, up: Floats, down: Floats) -> Array:
    with np.errstate(invalid="ignore"):
        step = np.abs(x).max() * 2.0**-21
        return expert((np.rint(x / step) * step).astype(np.float32) if step > 0 else x, gate, up, down)


def expert_hides_nan(x: Floats, gate: Floats, up: Floats, down: Floats) -> Array:
    return expert(np.nan_to_num(x, nan=0, posinf=0, neginf=0), gate, up, down)


def sparse(
    x: Floats,
    gate: Floats,
    up: Floats,
    down: Floats,
    chosen: Ids,
    weights: Floats,
    one: Callable[..., Doubles] = expert,
) -> Doubles:
    y = np.zeros(x.shape)
    for e in np.unique(chosen):
        tokens, place = np.nonzero(chosen == e)
        with np.errstate(invalid="ignore", over="ignore"):
            y[tokens] += weights[tokens, place, None].astype(np.float64) * one(x[tokens], gate[e], up[e], down[e])
    return y


Layer = tuple[Floats, Floats, Floats, Floats, Ids, Floats]


def unweighted(x: Floats, gate: Floats, up: Floats, down: Floats, chosen: Ids, weights: Floats) -> Array:
    return sparse(x, gate, up, down, chosen, np.full_like(weights, 1 / weights.shape[1]))


def sorted_apart(x: Floats, gate: Floats, up: Floats, down: Floats, chosen: Ids, weights: Floats) -> Array:
    """Ids are sorted, and their weights are not."""
    return sparse(x, gate, up, down, np.sort(chosen, axis=1), weights)


def as_listed(x: Floats, gate: Floats, up: Floats, down: Floats, chosen: Ids, weights: Floats) -> Array:
    """Adds in float32, in the order in which a token lists its experts."""
    y = np.zeros(x.shape, np.float32)
    for place in range(chosen.shape[1]):
        for e in np.unique(chosen[:, place]):
            tokens = np.flatnonzero(chosen[:, place] == e)
            answer = expert(x[tokens], gate[e], up[e], down[e]).astype(np.float32)
            with np.errstate(invalid="ignore", over="ignore"):
                y[tokens] += weights[tokens, place, None] * answer
    return y


def dense(x: Floats, gate: Floats, up: Floats, down: Floats, chosen: Ids, weights: Floats) -> Array:
    """Every expert runs for every token; a weight of 0 is to undo it."""
    every = np.zeros((len(x), len(gate)), np.float32)
    np.put_along_axis(every, chosen, weights, axis=1)
    y = np.zeros(x.shape)
    with np.errstate(invalid="ignore", over="ignore"):
        for e in range(len(gate)):
            y += every[:, e, None].astype(np.float64) * expert(x, gate[e], up[e], down[e])
    return y


def last_dropped(x: Floats, gate: Floats, up: Floats, down: Floats, chosen: Ids, weights: Floats) -> Array:
    k = chosen.shape[1]
    return sparse(x, gate, up, down, chosen[:, : max(1, k - 1)], weights[:, : max(1, k - 1)])


def weighted_inside(x: Floats, gate: Floats, up: Floats, down: Floats, chosen: Ids, weights: Floats) -> Array:
    """The weight meets the activations on their way in, where silu is not linear."""
    y = np.zeros(x.shape)
    for e in np.unique(chosen):
        tokens, place = np.nonzero(chosen == e)
        y[tokens] += expert(weights[tokens, place, None] * x[tokens], gate[e], up[e], down[e])
    return y


GATES = (
    of("routing.gate", "gate-in-half", "Logits are computed in float16.", "C2 C3", gate_in_half),
    of(
        "routing.gate",
        "gate-without-last-channel",
        "The last channel of a token is left out.",
        "C1 C2 C3",
        last_channel_dropped,
    ),
    of(
        "routing.gate",
        "sigmoid-for-softmax",
        "Each probability is a sigmoid of its own logit.",
        "C3",
        sigmoid_for_softmax,
    ),
    of(
        "routing.gate",
        "softmax-over-tokens",
        "Probabilities sum to 1 over the tokens and not over the experts.",
        "C3",
        softmax_over_tokens,
    ),
    of(
        "routing.gate",
        "gate-one-step-for-all-rows",
        "Tokens are rounded with one step, so each depends on all.",
        ROW_BY_ROW,
        centered,
    ),
    of(
        "routing.gate",
        "gate-hides-nan",
        "NaN and infinity become zero on the way.",
        "C5",
        gate_hides_nan,
        "https://github.com/sgl-project/sglang/pull/30079",
    ),
)

CHOICES = (
    of(
        "routing.top_k",
        "least-chosen",
        "The experts of the least scores are chosen.",
        "C1 C2 C3",
        lambda scores, k: np.argsort(scores, axis=1, kind="stable")[:, :k].astype(np.int64),
    ),
    of(
        "routing.top_k",
        "chosen-unordered",
        "The chosen stand by id and not best first.",
        "C1 C2 C3",
        lambda scores, k: np.sort(top_k(scores, k), axis=1),
    ),
    of("routing.top_k", "ties-to-the-highest", "Of equal scores the highest id is chosen.", "C2 C3", ties_to_highest),
    of("routing.top_k", "zeros-told-apart", "+0 is chosen before -0.", "C2", signed_zeros),
    of(
        "routing.top_k",
        "chosen-in-half",
        "Scores are compared in a narrower format, which makes equals of them.",
        "C3",
        in_half_first,
        "https://github.com/ViperEkura/AstrAI/pull/57",
    ),
    of(
        "routing.top_k",
        "ids-are-int32",
        "Ids come back as int32.",
        "C3",
        lambda scores, k: top_k(scores, k).astype(np.int32),
    ),
)

WEIGHTS = (
    of(
        "routing.weights",
        "not-renormalized",
        "Probabilities of the chosen are not divided by their sum.",
        "C2 C3",
        not_renormalized,
        "https://github.com/pytorch/torchtitan/issues/1448",
    ),
    of(
        "routing.weights",
        "softmax-of-all-experts",
        "The softmax after the choice goes over all experts.",
        "C1 C3",
        softmax_of_all,
        "https://github.com/NVIDIA/Megatron-LM/issues/955",
    ),
    of(
        "routing.weights",
        "logits-for-weights",
        "Logits are used as weights, without a softmax.",
        "C1 C3",
        raw_logits,
        "https://github.com/sgl-project/sglang/pull/35160",
    ),
    of(
        "routing.weights",
        "weights-of-first-experts",
        "The first k experts give the weights, not the chosen ones.",
        "C1 C2",
        weights_of_first,
    ),
    of(
        "routing.weights",
        "weights-by-two-norm",
        "Weights are divided by the root of their squares.",
        "C1 C2 C3",
        by_two_norm,
        "https://github.com/databricks/megablocks/pull/87",
    ),
    of(
        "routing.weights", "sum-plus-epsilon", "A number is added to the sum lest it be zero.", "C1 C2 C3", with_epsilon
    ),
)

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
    ),
    of(
        "routing.sparse",
        "added-as-listed",
        "Experts are added in the order in which a token lists them.",
        "C3",
        as_listed,
    ),
    of(
        "routing.sparse",
        "all-experts-run",
        "All experts run, and a weight of 0 is to undo those not chosen.",
        "C4",
        dense,
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

DEFECTS = (*GATES, *CHOICES, *WEIGHTS, *EXPERTS, *LAYERS)
