"""Defects of kernels of 16 bits: sums in the narrow type, results that are cut, and inputs read as the other type.

With float32 inputs each of them is right.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from lowbit.arrays import Array
from lowbit.linear.elementary import silu
from lowbit.model.layers import gelu_exponent
from lowbit.numbers.floats import FLOATS, as_numbers, as_patterns, round_to, rounded
from lowbit.operations import OPERATIONS
from lowbit_conformance.defects.defect import Defect, Function, arithmetical

TYPES = ("float32", "float16", "bfloat16")
NARROW = tuple(FLOATS[name].dtype for name in TYPES[1:])


def narrow(wrong: Callable[..., Any], operation: str, *arguments: Any, **choices: Any) -> Any:
    """A mistake for 16-bit inputs; `wrong` takes the operation's name and the arguments."""
    if arguments[0].dtype not in NARROW:
        return OPERATIONS[operation].compute(*arguments, **choices)
    with np.errstate(all="ignore"):
        return wrong(operation, *arguments, **choices)


# **Of any operation.**


def cut(operation: str, *arguments: Any, **choices: Any) -> Array:
    """The lower bits of the result are truncated."""
    exact = OPERATIONS[operation].compute(*arguments, **choices)
    kind: Any = arguments[0].dtype.name
    patterns = round_to(np.ascontiguousarray(exact).reshape(-1), kind, "ieee", "down")
    return as_numbers(patterns, kind).reshape(exact.shape)


def in_other_type(operation: str, *arguments: Any, **choices: Any) -> Any:
    """The inputs are rounded to bfloat16 first; bfloat16 inputs lose a bit."""

    def read(part: Any) -> Any:
        if not isinstance(part, np.ndarray) or part.dtype not in NARROW:
            return part
        if part.dtype == FLOATS["bfloat16"].dtype:
            return as_numbers(as_patterns(part) & np.uint16(0xFFFE), "bfloat16")
        return rounded(part.astype(np.float64), "bfloat16").astype(part.dtype)

    return OPERATIONS[operation].compute(*map(read, arguments), **choices)


# **Sums in the narrow type**, term after term.


def summed(terms: Array, kind: Any) -> Array:
    """The sum along the last axis, rounded to a type after every addition."""
    total = np.zeros(terms.shape[:-1], kind)
    for place in range(terms.shape[-1]):
        total = (total.astype(np.float32) + terms[..., place].astype(np.float32)).astype(kind)
    return total.astype(np.float64)


def norm(operation: str, x: Array, gain: Array, epsilon: float) -> Array:
    squares = np.square(x.astype(np.float32)).astype(x.dtype)
    mean = summed(squares, x.dtype)[:, None] / x.shape[1]
    result: Array = gain.astype(np.float64) * x.astype(np.float64) / np.sqrt(mean + epsilon)
    return result


def probabilities(operation: str, scores: Array) -> Array:
    powers = np.exp(scores.astype(np.float64) - scores.astype(np.float64).max(axis=1, keepdims=True))
    result: Array = powers / summed(powers, scores.dtype)[:, None]
    return result


def logits(operation: str, x: Array, router: Array, scores: str = "logits") -> Array:
    products = x.astype(np.float64)[:, None, :] * router.T.astype(np.float64)[None]
    found = summed(products, x.dtype)
    return found if scores == "logits" else probabilities(operation, found)


def activated(logit: Callable[[Array], Array], operation: str, gate: Array, up: Array) -> Array:
    """The gate times the logistic function of its logit, in the narrow type, operation by operation."""
    kind = gate.dtype
    power = np.exp(-logit(gate.astype(np.float32)).astype(kind).astype(np.float32)).astype(kind)
    denominator = (1 + power.astype(np.float32)).astype(kind)
    inner = (gate.astype(np.float32) / denominator.astype(np.float32)).astype(kind)
    result: Array = inner.astype(np.float64) * up.astype(np.float64)
    return result if np.isfinite(result).all() else OPERATIONS[operation].compute(gate, up)


def expert(operation: str, x: Array, gate: Array, up: Array, down: Array) -> Array:
    """Activations between the projections are rounded to the narrow type."""
    wide, matrices = x.astype(np.float64), [matrix.astype(np.float64) for matrix in (gate, up, down)]
    inner = (silu(wide @ matrices[0]) * (wide @ matrices[1])).astype(x.dtype)
    result: Array = inner.astype(np.float64) @ matrices[2]
    return result


def layer(operation: str, x: Array, gate: Array, up: Array, down: Array, chosen: Array, weights: Array) -> Array:
    """The outputs of experts are added in the narrow type."""
    answers = [
        [OPERATIONS["routing.expert"].compute(x[t : t + 1], gate[e], up[e], down[e])[0] for e in sorted(chosen[t])]
        for t in range(len(x))
    ]
    order = np.argsort(chosen, axis=1)
    factors = np.take_along_axis(weights, order, axis=1).astype(np.float64)
    terms = factors[:, :, None] * np.array(answers)
    return summed(terms.swapaxes(1, 2), x.dtype)


SUMS: dict[str, tuple[str, Callable[..., Any]]] = {
    "blocks.rms_norm": ("C1 C3", norm),
    "attention.softmax": ("C2", probabilities),
    "routing.gate": ("C2 C3", logits),
    "routing.sparse": ("C2", layer),
}
CUT = {
    "blocks.swiglu": "C2",
    "blocks.geglu": "C2",
    "blocks.clamped_swiglu": "C2",
    "blocks.soft_cap": "C2",
    "rope.rotate": "C2",
    "routing.weights": "C1 C2",
    "routing.expert": "C2",
    "routing.sparse": "C2",
}
READ = {"blocks.rms_norm": "C3", "attention.attend": "C3", "attention.attend_shaped": "C3"}


def _defect(name: str, cause: str, clauses: dict[str, str], wrong: dict[str, Function]) -> Defect:
    full = " ".join(f"{operation}/{number}" for operation, numbers in clauses.items() for number in numbers.split())
    return replace(arithmetical(name, cause, full, wrong), inputs=TYPES)


def _each(operations: dict[str, str], wrong: Callable[..., Any]) -> dict[str, Function]:
    return {operation: partial(narrow, wrong, operation) for operation in operations}


DEFECTS = (
    _defect("typed-result-cut", "A 16-bit result is truncated instead of rounded.", CUT, _each(CUT, cut)),
    _defect(
        "typed-inputs-lose-bits", "Inputs of 16 bits lose bits when they are read.", READ, _each(READ, in_other_type)
    ),
    _defect(
        "typed-sums-are-narrow",
        "Sums of 16-bit inputs are kept in 16 bits.",
        {operation: numbers for operation, (numbers, _) in SUMS.items()},
        {operation: partial(narrow, wrong, operation) for operation, (_, wrong) in SUMS.items()},
    ),
    _defect(
        "typed-inner-is-narrow",
        "Activations between the projections of an expert are rounded to its 16-bit input type.",
        {"routing.expert": "C2"},
        {"routing.expert": partial(narrow, expert, "routing.expert")},
    ),
    _defect(
        "typed-silu-is-narrow",
        "silu of 16-bit inputs is computed in 16 bits.",
        {"blocks.swiglu": "C2"},
        {"blocks.swiglu": partial(narrow, partial(activated, lambda a: a), "blocks.swiglu")},
    ),
    _defect(
        "typed-gelu-is-narrow",
        "gelu of 16-bit inputs is computed in 16 bits.",
        {"blocks.geglu": "C2"},
        {"blocks.geglu": partial(narrow, partial(activated, gelu_exponent), "blocks.geglu")},
    ),
)
