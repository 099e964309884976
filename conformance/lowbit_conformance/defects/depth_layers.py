"""Defects of precision in deep layers of routing and in attention over long contexts."""

from collections.abc import Callable
from functools import partial

import numpy as np

from lowbit.arrays import F32, F64, Array
from lowbit.linear.elementary import softmax
from lowbit_conformance.defects import experts, routes
from lowbit_conformance.defects.attention import added, replaced, replacing, unshifted
from lowbit_conformance.defects.defect import Defect, Function, of_operation
from lowbit_conformance.defects.roundings import DEEP, Rounding, bfloat16, exactly, half, tensor_float

DEFECTS: list[Defect] = []

# **Routing.**


def deep_gate(of_x: Rounding, of_router: Rounding) -> Function:
    """A gate that rounds operands of long sums."""

    def logits(x: F32, router: F32) -> Array:
        return routes.product(*((of_x(x), of_router(router)) if len(router) >= DEEP else (x, router)))

    return routes.from_logits(logits)


of_gate = of_operation(DEFECTS, "routing.gate")
of_gate.add("deep-gate-in-tf32", "Deep gates round both operands to TF32.", "C1", deep_gate(tensor_float, tensor_float))
of_gate.add("deep-gate-x-in-bfloat16", "Deep gates round x to bfloat16.", "C1", deep_gate(bfloat16, exactly))
of_gate.add("deep-router-in-half", "Routers of deep gates are kept in float16.", "C1", deep_gate(exactly, half))


def clamped(logits: Array) -> Array:
    return unshifted(np.float64)(np.clip(logits, -88, 88))


of_probabilities = of_operation(DEFECTS, "routing.gate", routes.by)
of_weights = of_operation(DEFECTS, "routing.weights", routes.weighed)
for of_layer, gate, logits, numbers in (
    (of_probabilities, "gate", "logits", "C3"),
    (of_weights, "weights", "chosen logits", "C1"),
):
    of_layer.add(
        f"{gate}-without-max", f"Exponentials of {logits} as they are overflow.", numbers, unshifted(np.float32)
    )
    of_layer.add(
        f"{gate}-without-max-in-float64",
        f"Exponentials of {logits} as they are, in float64.",
        numbers,
        unshifted(np.float64),
    )
    of_layer.add(
        f"{gate}-logits-clamped",
        f"{logits.capitalize()} are clamped to ±88 before their exponentials.",
        numbers,
        clamped,
    )


def expert(of_weights: Rounding, of_inner: Rounding = exactly) -> Callable[..., Array]:
    """An expert with large K that rounds its matrices and the input of the last one."""

    def one(x: F32, gate: F32, up: F32, down: F32) -> Array:
        if max(gate.shape) < DEEP:
            return experts.expert(x, gate, up, down)
        return experts.expert(x, of_weights(gate), of_weights(up), of_weights(down), of_inner=of_inner)

    return one


of_expert = of_operation(DEFECTS, "routing.expert")
of_sparse = of_operation(DEFECTS, "routing.sparse", lambda one: partial(experts.sparse, one=one))
for of_layer, name in ((of_expert, "expert"), (of_sparse, "layer")):
    of_layer.add(
        f"deep-{name}-in-tf32",
        "Matrices of deep experts are rounded to TF32.",
        "C1",
        expert(tensor_float, tensor_float),
    )
    of_layer.add(f"deep-{name}-in-half", "Matrices of deep experts are kept in float16.", "C1", expert(half))
of_expert.add(
    "deep-inner-in-bfloat16",
    "Activations between the products of deep experts are rounded to bfloat16.",
    "C1",
    expert(exactly, bfloat16),
)

# **Softmax.**

of_softmax = of_operation(DEFECTS, "attention.softmax")


@of_softmax("C2")
def softmax_powers_clamped(scores: F32) -> Array:
    """Differences of scores below -80 count as -80."""
    below = scores - scores.max(axis=1, keepdims=True)
    return softmax(np.maximum(below, np.where(np.isneginf(scores), -np.inf, -80.0)))  # −∞ is not clamped


@of_softmax("C2")
def long_shares_in_half(scores: F32) -> Array:
    """Probabilities of long rows are rounded to float16."""
    probabilities = softmax(scores.astype(np.float64))
    return half(probabilities) if scores.shape[1] >= DEEP else probabilities


def largest_from(start: float) -> Callable[[Array], F64]:
    """The search for the largest score starts at a number."""

    def probabilities(scores: Array) -> F64:
        wide = scores.astype(np.float64)
        with np.errstate(all="ignore"):
            powers = np.exp((wide - np.maximum(wide.max(axis=-1, keepdims=True), start)).astype(np.float32))
            return np.asarray(powers / powers.sum(axis=-1, keepdims=True), np.float64)

    return probabilities


for start, words in ((0.0, "0"), (-5e3, "-5000")):
    of_softmax.add(
        f"largest-score-from-{words}".replace("--", "-minus-"),
        f"The search for the largest score begins at {words}.",
        "C1 C2",
        largest_from(start),
    )

# **Attention.**

of_attend = of_operation(DEFECTS, "attention.attend", lambda steps: replacing(**steps))
for number, words, power in ((-1e4, "10000", "10^4"), (-1e9, "1e9", "10^9")):
    of_attend.add(
        f"mask-adds-minus-{words}",
        f"What is hidden loses {power} of its score instead of all.",
        "C2",
        {"masked": added(number)},
    )
    of_attend.add(
        f"mask-is-minus-{words}", f"What is hidden has a score of -{power}.", "C2", {"masked": replaced(number)}
    )
of_attend.add(
    "mask-is-minus-65504", "What is hidden has the least score of float16.", "C2", {"masked": replaced(-65504.0)}
)
of_attend.add(
    "attention-without-max",
    "Exponentials of scores as they are overflow.",
    "C2",
    {"probabilities": unshifted(np.float32)},
)
for start, name, words in ((0.0, "0", "0"), (-1e4, "minus-10000", "-10^4"), (-1e9, "minus-1e9", "-10^9")):
    of_attend.add(
        f"running-max-from-{name}",
        f"The running maximum of scores begins at {words}.",
        "C2",
        {"probabilities": largest_from(start)},
    )
for name, words, numbers, steps in (
    (
        "long-scores-in-tf32",
        "Queries and keys of long contexts are rounded to TF32.",
        "C3",
        {"of_operands": tensor_float},
    ),
    (
        "long-scores-in-bfloat16",
        "Queries and keys of long contexts are rounded to bfloat16.",
        "C3",
        {"of_operands": bfloat16},
    ),
    ("long-values-in-tf32", "Values of long contexts are rounded to TF32.", "C2", {"of_values": tensor_float}),
    ("long-values-in-half", "Values of long contexts are rounded to float16.", "C2", {"of_values": half}),
    (
        "long-probabilities-in-half",
        "Probabilities of long contexts are rounded to float16.",
        "C3",
        {"of_probabilities": half},
    ),
):
    of_attend.add(name, words, numbers, steps)


def last_exchanged(h: int, heads: int) -> int:
    return h if h < heads - 2 or heads < 2 else 2 * heads - 3 - h


of_attend.add(
    "last-heads-exchanged", "The queries of the last two heads are swapped.", "C2 C3", {"query": last_exchanged}
)
