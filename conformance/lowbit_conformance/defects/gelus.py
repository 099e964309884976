"""Defects of the gated unit with a GELU: another function in its place, a constant left out, what overflows."""

import math

import numpy as np

from lowbit.arrays import F64, Array
from lowbit.linear.elementary import logistic, silu
from lowbit.model.layers import gelu, gelu_exponent
from lowbit_conformance.defects.activations import gated, joined, of_all_elements, relu, without_nan
from lowbit_conformance.defects.defect import MOVES, Defect, of_operation
from lowbit_conformance.defects.roundings import half

DEFECTS: list[Defect] = []
of_unit = of_operation(DEFECTS, "blocks.geglu")
of_gelu = of_operation(DEFECTS, "blocks.geglu", gated)

of_unit.add("geglu-exchanged", "gelu is applied to up instead of gate.", "C1 C2", joined(lambda gate: gate, gelu))
of_unit.add("gelu-of-both", "The activation is applied to up as well.", "C2", joined(gelu, gelu))
of_unit.add("geglu-without-up", "The result is not multiplied by up.", "C2", joined(gelu, np.ones_like))
of_unit.add(
    "geglu-one-step-for-all",
    "All gates are rounded with one common step, so each element depends on all.",
    "C4",
    of_all_elements(gelu),
    verdicts=MOVES,
)
of_unit.add("geglu-hides-nan", "NaN and infinity become zero on the way.", "C5", without_nan(gelu))

of_gelu.add("geglu-without-activation", "Gate and up are multiplied without an activation.", "C1 C2", lambda a: a)
of_gelu.add("swiglu-for-geglu", "The activation is a silu.", "C2", silu)
of_gelu.add("relu-for-gelu", "The activation is a ReLU.", "C2", relu)
of_gelu.add("tanh-for-gelu", "The activation is a tanh.", "C1 C2", np.tanh)
of_gelu.add(
    "gelu-by-a-sigmoid",
    "The activation is a sigmoid of 1.702 times the gate.",
    "C2",
    lambda a: a * logistic(1.702 * a),
)
of_gelu.add(
    "gelu-not-multiplied",
    "The activation lacks its factor, the gate.",
    "C1 C2",
    lambda a: logistic(gelu_exponent(a)),
)
of_gelu.add("gelu-without-half", "The activation is twice as large.", "C1 C2", lambda a: 2 * gelu(a))
of_gelu.add("gelu-of-minus", "The sigmoid is that of minus the gate.", "C2", lambda a: -gelu(-a))


@of_gelu("C2")
def gelu_by_erf(a: F64) -> Array:
    """The activation is the exact GELU instead of its tanh approximation."""
    return np.asarray(0.5 * a * (1 + np.vectorize(math.erf, otypes=[np.float64])(a / np.sqrt(2))))


@of_gelu("C1 C2 C3")
def geglu_overflows(a: F64) -> Array:
    """gelu is a e^w / (1 + e^w), NaN for large a."""
    power = np.exp(gelu_exponent(a).astype(np.float32))
    return np.asarray(a.astype(np.float32) * power / (1 + power), np.float64)


@of_gelu("C2")
def gelu_in_half(a: F64) -> Array:
    """Gate and activation are rounded to float16, as with a lookup table."""
    return half(gelu(half(a).astype(np.float64))).astype(np.float64)


# **Its constants.**


def by_tanh(a: F64, *, root: float = np.sqrt(2 / np.pi), cubic: float = 0.044715, power: int = 3) -> F64:
    """The activation with these constants in place of the right ones."""
    return np.asarray(0.5 * a * (1 + np.tanh(root * (a + cubic * a**power))))


of_gelu.add("gelu-without-cube", "The cubic term is left out.", "C2", lambda a: by_tanh(a, cubic=0))
of_gelu.add("gelu-with-a-square", "The cubic term is a square.", "C2", lambda a: by_tanh(a, power=2))
of_gelu.add("gelu-cubic-rounded", "The constant 0.044715 is 0.0447.", "C2", lambda a: by_tanh(a, cubic=0.0447))
of_gelu.add("gelu-without-root", "The root of 2/π is left out.", "C2", lambda a: by_tanh(a, root=1.0))
of_gelu.add("gelu-root-rounded", "The root of 2/π is 0.8.", "C2", lambda a: by_tanh(a, root=0.8))
of_gelu.add(
    "gelu-root-of-pi",
    "The root is that of 2π, or of π/2.",
    "C2",
    lambda a: by_tanh(a, root=float(np.sqrt(np.pi / 2))),
)
