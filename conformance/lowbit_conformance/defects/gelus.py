"""Defects of the gated unit with a GELU: another function in its place, a constant left out, what overflows."""

import math

import numpy as np

from lowbit.arrays import F64, Array
from lowbit_conformance.defects.activations import gated, of_all_elements, without_nan
from lowbit_conformance.defects.common_layers import gated as gated_both
from lowbit_conformance.defects.common_layers import relu, sigmoid
from lowbit_conformance.defects.defect import MOVES, WRONG, Defect, Function, of
from lowbit_conformance.defects.experts import gelu, silu

ROOT = np.sqrt(2 / np.pi)


def by_tanh(a: F64, *, root: float = ROOT, cubic: float = 0.044715, power: int = 3) -> F64:
    """With these constants in place of the right ones."""
    answer: F64 = 0.5 * a * (1 + np.tanh(root * (a + cubic * a**power)))
    return answer


def by_erf(a: F64) -> Array:
    """What the approximation stands for."""
    answer: Array = 0.5 * a * (1 + np.vectorize(math.erf, otypes=[np.float64])(a / np.sqrt(2)))
    return answer


def by_exponential(a: F64) -> Array:
    """a e^w / (1 + e^w), in float32."""
    logit = (2 * ROOT * (a + 0.044715 * a**3)).astype(np.float32)
    power = np.exp(logit)
    answer: Array = (a.astype(np.float32) * power / (1 + power)).astype(np.float64)
    return answer


def in_half(a: F64) -> Array:
    """As a table of all float16 gates gives it."""
    return gelu(a.astype(np.float16).astype(np.float64)).astype(np.float16).astype(np.float64)


def defect(name: str, cause: str, clauses: str, wrong: Function, verdicts: tuple[str, ...] = WRONG) -> Defect:
    return of("blocks.geglu", name, cause, clauses, wrong, verdicts=verdicts)


DEFECTS = (
    defect("geglu-exchanged", "gelu is applied to up and not to gate.", "C1 C2", lambda a, b: gated(gelu)(b, a)),
    defect("geglu-without-activation", "Gate and up are multiplied as they are.", "C1 C2", gated(lambda a: a)),
    defect("swiglu-for-geglu", "The activation is a silu.", "C2", gated(silu)),
    defect("relu-for-gelu", "The activation is a ReLU.", "C2", gated(relu)),
    defect("tanh-for-gelu", "The activation is a tanh.", "C1 C2", gated(np.tanh)),
    defect("gelu-by-erf", "The activation is the GELU itself, and not its approximation.", "C2", gated(by_erf)),
    defect(
        "gelu-by-a-sigmoid",
        "The activation is a sigmoid of 1.702 times the gate.",
        "C2",
        gated(lambda a: a * sigmoid(1.702 * a)),
    ),
    defect(
        "gelu-not-multiplied",
        "The activation lacks its factor, the gate.",
        "C1 C2",
        gated(lambda a: sigmoid(2 * ROOT * (a + 0.044715 * a**3))),
    ),
    defect("gelu-without-half", "The activation is twice as large.", "C1 C2", gated(lambda a: 2 * gelu(a))),
    defect("gelu-without-cube", "The cubic term is left out.", "C2", gated(lambda a: by_tanh(a, cubic=0))),
    defect("gelu-with-a-square", "The cubic term is a square.", "C2", gated(lambda a: by_tanh(a, power=2))),
    defect("gelu-without-root", "The root of 2/π is left out.", "C2", gated(lambda a: by_tanh(a, root=1.0))),
    defect(
        "gelu-root-of-pi",
        "The root is that of 2π, or of π/2.",
        "C2",
        gated(lambda a: by_tanh(a, root=float(np.sqrt(np.pi / 2)))),
    ),
    defect("gelu-cubic-rounded", "The constant 0.044715 is 0.0447.", "C2", gated(lambda a: by_tanh(a, cubic=0.0447))),
    defect("gelu-root-rounded", "The root of 2/π is 0.8.", "C2", gated(lambda a: by_tanh(a, root=0.8))),
    defect("gelu-of-both", "The activation is applied to up as well.", "C2", gated_both(gelu, gelu)),
    defect("geglu-without-up", "The result is not multiplied by up.", "C2", gated_both(gelu, np.ones_like)),
    defect("gelu-of-minus", "The sigmoid is that of minus the gate.", "C2", gated(lambda a: -gelu(-a))),
    defect("geglu-overflows", "gelu is a e^w / (1 + e^w), NaN for large a.", "C1 C2 C3", gated(by_exponential)),
    defect("gelu-in-half", "Gate and activation are rounded to float16, as in a table.", "C2", gated(in_half)),
    defect(
        "geglu-one-step-for-all",
        "Gates are rounded with one step, so each element depends on all.",
        "C4",
        of_all_elements(gelu),
        MOVES,
    ),
    defect("geglu-hides-nan", "NaN and infinity become zero on the way.", "C5", without_nan(gelu)),
)
