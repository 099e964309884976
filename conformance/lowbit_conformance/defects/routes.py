"""Defects of routing: the gate, the choice of experts, and their weights."""

import numpy as np
import numpy.typing as npt

from lowbit.arrays import F32, F64, Array
from lowbit.linear.elementary import softmax
from lowbit.moe import routing
from lowbit.moe.routing import Ids
from lowbit_conformance.defects.defect import MOVES, of

# **The gate.**


def product(x: npt.NDArray[np.floating], matrix: F32) -> F64:
    with np.errstate(invalid="ignore", over="ignore"):
        result: F64 = x.astype(np.float64) @ matrix.astype(np.float64)
    return result


def scored(logits: F64, scores: str) -> F64:
    with np.errstate(invalid="ignore"):
        return logits if scores == "logits" else softmax(logits)


def gate_in_half(x: F32, router: F32, scores: str = "logits") -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        logits = (x.astype(np.float16) @ router.astype(np.float16)).astype(np.float64)
    return scored(logits, scores)


def last_channel_dropped(x: F32, router: F32, scores: str = "logits") -> Array:
    return scored(product(x[:, :-1], router[:-1]), scores)


def sigmoid_for_softmax(x: F32, router: F32, scores: str = "logits") -> Array:
    logits = product(x, router)
    with np.errstate(over="ignore"):
        return logits if scores == "logits" else 1 / (1 + np.exp(-logits))


def centered(x: F32, router: F32, scores: str = "logits") -> Array:
    """Rounds every row with one step, that of the largest number of all rows."""
    with np.errstate(invalid="ignore"):
        step = np.abs(x).max() * 2.0**-21
        return scored(product(np.rint(x / step) * step if step > 0 else x, router), scores)


def gate_hides_nan(x: F32, router: F32, scores: str = "logits") -> Array:
    return scored(product(np.nan_to_num(x, nan=0, posinf=0, neginf=0), router), scores)


def softmax_over_tokens(x: F32, router: F32, scores: str = "logits") -> Array:
    logits = product(x, router)
    return logits if scores == "logits" else softmax(logits.T).T


# **The choice.**


def top_k(scores: F32, k: int) -> Ids:
    return np.argsort(-scores, axis=1, kind="stable")[:, :k].astype(np.int64)


def ties_to_highest(scores: F32, k: int) -> Ids:
    turned = np.argsort(-scores[:, ::-1], axis=1, kind="stable")[:, :k]
    answer: Ids = (scores.shape[1] - 1 - turned).astype(np.int64)
    return answer


def signed_zeros(scores: F32, k: int) -> Ids:
    """Sorts the bits, for which -0 is less than +0."""
    bits = scores.view(np.int32).astype(np.int64)
    return np.argsort(-np.where(bits < 0, -(bits & 0x7FFFFFFF) - 1, bits), axis=1, kind="stable")[:, :k].astype(
        np.int64
    )


def in_half_first(scores: F32, k: int) -> Ids:
    with np.errstate(over="ignore"):
        return top_k(scores.astype(np.float16).astype(np.float32), k)


# **The weights.**


def chosen_of(scores: F32, chosen: Ids) -> F64:
    return np.take_along_axis(scores, chosen, axis=1).astype(np.float64)


def not_renormalized(scores: F32, chosen: Ids, softmax: routing.Softmax = "after") -> Array:
    return chosen_of(scores, chosen) if softmax == "before" else routing.weights(scores, chosen, "after")


def softmax_of_all(scores: F32, chosen: Ids, softmax: routing.Softmax = "after") -> Array:
    if softmax == "before":
        return routing.weights(scores, chosen, "before")
    all_of_them = np.exp(scores.astype(np.float64) - scores.max(axis=1, keepdims=True))
    return chosen_of((all_of_them / all_of_them.sum(axis=1, keepdims=True)).astype(np.float32), chosen)


def raw_logits(scores: F32, chosen: Ids, softmax: routing.Softmax = "after") -> Array:
    return chosen_of(scores, chosen) if softmax == "after" else routing.weights(scores, chosen, "before")


def weights_of_first(scores: F32, chosen: Ids, softmax: routing.Softmax = "after") -> Array:
    """The weights of experts 0 … k − 1, whichever were chosen."""
    first = np.broadcast_to(np.arange(chosen.shape[1]), chosen.shape)
    right = routing.weights(scores, chosen, softmax)
    try:
        return routing.weights(scores, np.ascontiguousarray(first), softmax)
    except ValueError:  # none of them has a probability
        return right


def by_two_norm(scores: F32, chosen: Ids, softmax: routing.Softmax = "after") -> Array:
    own = routing.weights(scores, chosen, softmax)
    answer: Array = own / np.sqrt((own**2).sum(axis=1, keepdims=True))
    return answer


def with_epsilon(scores: F32, chosen: Ids, softmax: routing.Softmax = "after") -> Array:
    own = routing.weights(scores, chosen, softmax)
    answer: Array = own / (own.sum(axis=1, keepdims=True) + 1e-3)
    return answer


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
        "C4",
        centered,
        verdicts=MOVES,
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
        "greatest-from-minus-10000",
        "The search for the greatest score begins at -10000, so that lower ones are equals.",
        "C1",
        lambda scores, k: top_k(np.maximum(scores, np.float32(-1e4)), k),
    ),
    of(
        "routing.top_k",
        "greatest-from-minus-1e30",
        "The search for the greatest score begins at -1e30, so that lower ones are equals.",
        "C1",
        lambda scores, k: top_k(np.maximum(scores, np.float32(-1e30)), k),
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
        "C1 C2",
        by_two_norm,
        "https://github.com/databricks/megablocks/pull/87",
    ),
    of(
        "routing.weights", "sum-plus-epsilon", "A number is added to the sum lest it be zero.", "C1 C2 C3", with_epsilon
    ),
)

DEFECTS = (*GATES, *CHOICES, *WEIGHTS)
