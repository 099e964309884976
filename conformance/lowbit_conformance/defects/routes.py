"""Defects of routing: the gate, the choice of experts, and their weights."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from lowbit.arrays import F32, F64, Array
from lowbit.linear.elementary import logistic, softmax
from lowbit.moe import routing
from lowbit.moe.routing import Ids
from lowbit_conformance.defects.defect import MOVES, Defect, Function, of_operation
from lowbit_conformance.defects.roundings import finite, half, in_steps

DEFECTS: list[Defect] = []

# **The gate.**


def product(x: npt.NDArray[np.floating], matrix: F32) -> F64:
    with np.errstate(invalid="ignore", over="ignore"):
        return np.asarray(x.astype(np.float64) @ matrix.astype(np.float64))


def from_logits(logits: Callable[[F32, F32], Array], probabilities: Callable[[F64], Array] = softmax) -> Function:
    """A gate with this function for logits, and probabilities from them."""

    def gate(x: F32, router: F32, scores: str = "logits") -> Array:
        with np.errstate(all="ignore"):
            found = logits(x, router)
            return found if scores == "logits" else probabilities(found)

    return gate


def by(probabilities: Callable[[F64], Array]) -> Function:
    """A gate with another function in place of the softmax."""
    return from_logits(product, probabilities)


of_logits = of_operation(DEFECTS, "routing.gate", from_logits)
of_probabilities = of_operation(DEFECTS, "routing.gate", by)


@of_logits("C2 C3")
def gate_in_half(x: F32, router: F32) -> Array:
    """Logits are computed in float16."""
    return np.asarray(x.astype(np.float16) @ router.astype(np.float16), np.float64)


@of_logits("C1 C2 C3")
def gate_without_last_channel(x: F32, router: F32) -> Array:
    """The last channel of a token is left out."""
    return product(x[:, :-1], router[:-1])


@of_logits("C4", verdicts=MOVES)
def gate_one_step_for_all_rows(x: F32, router: F32) -> Array:
    """Tokens are rounded with one step, so each depends on all."""
    return product(in_steps(x), router)


@of_logits("C5", "https://github.com/sgl-project/sglang/pull/30079")
def gate_hides_nan(x: F32, router: F32) -> Array:
    """NaN and infinity become zero on the way."""
    return product(finite(x), router)


@of_operation(DEFECTS, "routing.gate")("C2")
def probabilities_for_logits(x: F32, router: F32, scores: str = "logits") -> Array:
    """Logits are requested, but probabilities are returned."""
    return softmax(product(x, router))


of_probabilities.add("sigmoid-for-softmax", "Each probability is a sigmoid of its own logit.", "C3", logistic)
of_probabilities.add(
    "softmax-over-tokens",
    "Probabilities sum to 1 over the tokens and not over the experts.",
    "C3",
    lambda logits: softmax(logits.T).T,
)
of_probabilities.add(
    "logits-for-probabilities",
    "Probabilities are requested, but logits are returned.",
    "C3",
    lambda logits: logits,
)

# **The choice.**


def top_k(scores: F32, k: int, key: Callable[[F32], Array] = np.negative) -> Ids:
    """The experts with the least keys."""
    return np.argsort(key(scores), axis=1, kind="stable")[:, :k].astype(np.int64)


of_top_k = of_operation(DEFECTS, "routing.top_k")
of_key = of_operation(DEFECTS, "routing.top_k", lambda key: lambda scores, k: top_k(scores, k, key))
of_ids = of_operation(DEFECTS, "routing.top_k", lambda change: lambda scores, k: change(top_k(scores, k)))


@of_top_k("C2 C3")
def ties_to_the_highest(scores: F32, k: int) -> Ids:
    """Of equal scores the highest id is chosen."""
    return np.asarray(scores.shape[1] - 1 - top_k(scores[:, ::-1], k), np.int64)


@of_key("C2")
def zeros_told_apart(scores: F32) -> Array:
    """+0 is chosen before -0."""
    # Bits are sorted, for which -0 is less than +0.
    bits = scores.view(np.int32).astype(np.int64)
    return -np.where(bits < 0, -(bits & 0x7FFFFFFF) - 1, bits)


of_key.add("least-chosen", "The experts of the least scores are chosen.", "C1 C2 C3", lambda scores: scores)
of_key.add("chosen-by-magnitude", "Scores are compared without their sign.", "C1", lambda scores: -np.abs(scores))
of_key.add(
    "chosen-in-half",
    "Scores are compared in a narrower format, which makes equals of them.",
    "C3",
    lambda scores: -half(scores),
    "https://github.com/ViperEkura/AstrAI/pull/57",
)
for least, name in ((-1e4, "-10000"), (-1e30, "-1e30")):
    of_key.add(
        f"greatest-from-minus{name}",
        f"The search for the greatest score begins at {name}, so that lower ones are equals.",
        "C1",
        lambda scores, least=least: -np.maximum(scores, np.float32(least)),
    )
of_ids.add(
    "chosen-unordered", "The chosen stand by id and not best first.", "C1 C2 C3", lambda ids: np.sort(ids, axis=1)
)
of_ids.add(
    "chosen-worst-first",
    "The chosen experts are in reverse order.",
    "C1",
    lambda ids: np.ascontiguousarray(ids[:, ::-1]),
)
of_ids.add("ids-from-1", "Experts are counted from 1.", "C1", lambda ids: ids + 1)
of_ids.add("ids-are-int32", "Ids come back as int32.", "C3", lambda ids: ids.astype(np.int32))

# **The weights.**

Weights = Callable[[F64], Array]


def chosen_of(scores: F32, chosen: Ids) -> F64:
    return np.take_along_axis(scores, chosen, axis=1).astype(np.float64)


def divided(own: F64) -> F64:
    return np.asarray(own / own.sum(axis=1, keepdims=True))


def weighed(after: Weights = softmax, before: Weights = divided) -> Function:
    """Weights by another function of the chosen logits, and of the chosen probabilities."""

    def weights(scores: F32, chosen: Ids, softmax: routing.Softmax = "after") -> Array:
        with np.errstate(all="ignore"):
            return (after if softmax == "after" else before)(chosen_of(scores, chosen))

    return weights


def changed(change: Weights) -> Function:
    """Right weights that are then changed."""
    return lambda scores, chosen, softmax="after": change(routing.weights(scores, chosen, softmax))


of_weights = of_operation(DEFECTS, "routing.weights")
of_weights.add(
    "not-renormalized",
    "Probabilities of the chosen are not divided by their sum.",
    "C2 C3",
    weighed(before=lambda own: own),
    "https://github.com/pytorch/torchtitan/issues/1448",
)
of_weights.add(
    "logits-for-weights",
    "Logits are used as weights, without a softmax.",
    "C1 C3",
    weighed(after=lambda own: own),
    "https://github.com/sgl-project/sglang/pull/35160",
)
of_weights.add(
    "softmax-of-probabilities",
    "Probabilities of the chosen go through a softmax again.",
    "C2",
    weighed(before=softmax),
)
of_weights.add(
    "weights-by-two-norm",
    "Weights are divided by the root of their squares.",
    "C1 C2",
    changed(lambda own: own / np.sqrt((own**2).sum(axis=1, keepdims=True))),
    "https://github.com/databricks/megablocks/pull/87",
)
of_weights.add(
    "sum-plus-epsilon",
    "A number is added to the sum lest it be zero.",
    "C1 C2 C3",
    changed(lambda own: own / (own.sum(axis=1, keepdims=True) + 1e-3)),
)


@of_weights("C1 C3", "https://github.com/NVIDIA/Megatron-LM/issues/955")
def softmax_of_all_experts(scores: F32, chosen: Ids, softmax: routing.Softmax = "after") -> Array:
    """The softmax after the choice goes over all experts."""
    if softmax == "before":
        return routing.weights(scores, chosen, "before")
    every = np.exp(scores.astype(np.float64) - scores.max(axis=1, keepdims=True))
    return chosen_of(divided(every).astype(np.float32), chosen)


@of_weights("C1 C2")
def weights_of_first_experts(scores: F32, chosen: Ids, softmax: routing.Softmax = "after") -> Array:
    """The first k experts give the weights, not the chosen ones."""
    first = np.broadcast_to(np.arange(chosen.shape[1]), chosen.shape)
    right = routing.weights(scores, chosen, softmax)
    try:
        return routing.weights(scores, np.ascontiguousarray(first), softmax)
    except ValueError:  # none of them has a probability
        return right
