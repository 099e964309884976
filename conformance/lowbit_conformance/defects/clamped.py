"""Defects of the clamped gated unit and of the soft cap: clamps on a wrong side, a 1 or a slope left out."""

from collections.abc import Callable
from typing import Any

import numpy as np

from lowbit.arrays import F32, F64, Array
from lowbit.linear.elementary import logistic, silu, soft_cap
from lowbit.model.layers import SLOPE, gelu
from lowbit_conformance.defects.defect import MOVES, Defect, Function, of_operation
from lowbit_conformance.defects.roundings import finite, half, in_steps, tensor_float

DEFECTS: list[Defect] = []
of_unit = of_operation(DEFECTS, "blocks.clamped_swiglu")
of_cap = of_operation(DEFECTS, "blocks.soft_cap")

# **The clamped unit**, in which one step at a time can be replaced.

Clamp = Callable[[F64, float], F64]
Activation = Callable[[F64], Array]


def below(a: F64, limit: float) -> F64:
    return np.minimum(a, limit)


def between(a: F64, limit: float) -> F64:
    return np.clip(a, -limit, limit)


def sloped(a: F64) -> F64:
    return np.asarray(a * logistic(SLOPE * a))


def clamped(
    gate: Array,
    up: Array,
    limit: float,
    *,
    of_gate: Clamp = below,
    of_up: Clamp = between,
    activation: Activation = sloped,
    joined: Callable[[Array, F64], Array] = lambda a, b: a * (b + 1),
) -> Array:
    """Right, unless something is replaced."""
    with np.errstate(all="ignore"):
        a, b = of_gate(gate.astype(np.float64), limit), of_up(up.astype(np.float64), limit)
        activated = np.where(a == -np.inf, 0, activation(a))
        return np.asarray(joined(activated, b))


def replacing(**replaced: Any) -> Function:
    return lambda gate, up, limit: clamped(gate, up, limit, **replaced)


for name, cause, numbers, replaced in (
    ("gate-not-clamped", "The gate is not clamped.", "C1 C2 C3", {"of_gate": lambda a, limit: a}),
    ("up-not-clamped", "Up is not clamped.", "C1 C2 C3", {"of_up": lambda b, limit: b}),
    ("gate-clamped-from-below", "The gate is also clamped at minus the limit.", "C1 C2 C3", {"of_gate": between}),
    (
        "gate-clamped-below-only",
        "The gate is clamped at minus the limit instead of the limit.",
        "C1 C2 C3",
        {"of_gate": lambda a, limit: np.maximum(a, -limit)},
    ),
    ("up-clamped-above-only", "Up is clamped at the limit, but not at minus the limit.", "C1 C2 C3", {"of_up": below}),
    (
        "clamps-exchanged",
        "The gate is clamped on both sides, and up only above.",
        "C1 C2 C3",
        {"of_gate": between, "of_up": below},
    ),
    (
        "limit-of-7",
        "The limit is always 7.",
        "C1 C2 C3",
        {"of_gate": lambda a, limit: below(a, 7.0), "of_up": lambda b, limit: between(b, 7.0)},
    ),
    ("clamped-without-plus-1", "1 is not added to up.", "C1 C2", {"joined": lambda a, b: a * b}),
    (
        "clamped-plus-1-to-the-gate",
        "1 is added to the activation instead of to up.",
        "C1 C2",
        {"joined": lambda a, b: (a + 1) * b},
    ),
    ("clamped-plus-1-to-the-product", "1 is added to the product.", "C1 C2", {"joined": lambda a, b: a * b + 1}),
    ("clamped-without-slope", "The slope 1.702 is left out.", "C2", {"activation": silu}),
    ("clamped-slope-rounded", "The slope is 1.7.", "C2", {"activation": lambda a: a * logistic(1.7 * a)}),
    (
        "clamped-slope-outside",
        "The slope multiplies the activation instead of the logit.",
        "C1 C2",
        {"activation": lambda a: SLOPE * silu(a)},
    ),
    (
        "clamped-slope-in-half",
        "The slope is rounded to float16.",
        "C2",
        {"activation": lambda a: a * logistic(float(np.float16(SLOPE)) * a)},
    ),
    ("clamped-by-gelu", "The activation is the tanh approximation of GELU.", "C2", {"activation": gelu}),
    (
        "clamped-not-multiplied",
        "The activation lacks its factor, the gate.",
        "C1 C2",
        {"activation": lambda a: logistic(SLOPE * a)},
    ),
    (
        "clamped-in-half",
        "The activation is rounded to float16 before it is multiplied by up.",
        "C2",
        {"activation": lambda a: half(sloped(a)).astype(np.float64)},
    ),
):
    of_unit.add(name, cause, numbers, replacing(**replaced))


@of_unit("C1 C2 C3")
def clamped_after_the_sum(gate: F32, up: F32, limit: float) -> Array:
    """Up is clamped after 1 has been added."""
    return clamped(gate, up, limit, of_up=lambda b, limit: between(b + 1, limit) - 1)


@of_unit("C2 C3")
def clamped_after_the_activation(gate: F32, up: F32, limit: float) -> Array:
    """The activation is clamped instead of the gate."""
    return clamped(gate, up, limit, of_gate=lambda a, limit: a, activation=lambda a: np.minimum(sloped(a), limit))


@of_unit("C1 C2")
def clamped_exchanged(gate: F32, up: F32, limit: float) -> Array:
    """Gate and up are exchanged."""
    return clamped(up, gate, limit)


@of_unit("C5")
def clamped_hides_nan(gate: F32, up: F32, limit: float) -> Array:
    """The clamp returns the limit for NaN, as minimum and maximum in C do."""
    a, b = (np.where(np.isnan(part), np.float32(limit), part) for part in (gate, up))
    return clamped(a, b, limit)


@of_unit("C4", verdicts=MOVES)
def clamped_one_step_for_all(gate: F32, up: F32, limit: float) -> Array:
    """All gates are rounded with one common step, so each element depends on all."""
    return clamped(in_steps(finite(gate)), up, limit)


@of_unit("C1 C3")
def clamped_overflows(gate: F32, up: F32, limit: float) -> Array:
    """The activation is a e^αa / (1 + e^αa), NaN for large a."""

    def activation(a: F64) -> Array:
        power = np.exp((SLOPE * a).astype(np.float32))
        return np.asarray(a.astype(np.float32) * power / (1 + power), np.float64)

    return clamped(gate, up, limit, activation=activation)


# **The soft cap.**


def capped(squashed: Callable[[F64], Array]) -> Function:
    """The cap times a function of the numbers divided by the cap."""

    def cap_of(x: F32, cap: float) -> Array:
        with np.errstate(all="ignore"):
            return np.asarray(cap * squashed(x.astype(np.float64) / cap))

    return cap_of


of_tanh = of_operation(DEFECTS, "blocks.soft_cap", capped)
of_tanh.add("logits-not-capped", "The numbers are returned unchanged.", "C1 C2 C3", lambda z: z)
of_tanh.add("logits-clipped", "Numbers are clipped at the cap.", "C2", lambda z: np.clip(z, -1, 1))
of_tanh.add("logits-by-a-sigmoid", "The tanh is a sigmoid.", "C1 C2 C3", logistic)
of_tanh.add("logits-by-a-quotient", "The tanh is z / (1 + |z|).", "C1 C2 C3", lambda z: z / (1 + np.abs(z)))
of_tanh.add("logits-in-half", "The tanh is rounded to float16.", "C2", lambda z: half(np.tanh(z)).astype(np.float64))
of_tanh.add(
    "logits-in-11-bits",
    "The tanh comes from an instruction with 11 bits of precision.",
    "C2",
    lambda z: tensor_float(np.tanh(z).astype(np.float32)).astype(np.float64),
)


@of_tanh("C2")
def logits_cancel(z: F64) -> Array:
    """The tanh is 1 - 2 / (e^2z + 1) for all z, which cancels for small z."""
    power = np.exp((2 * z).astype(np.float32))
    return np.asarray(np.float32(1) - np.float32(2) / (power + np.float32(1)), np.float64)


@of_tanh("C1 C3 C5")
def logits_overflow(z: F64) -> Array:
    """The tanh is (e^2z - 1) / (e^2z + 1), NaN for large z."""
    power = np.exp((2 * z).astype(np.float32))
    return np.asarray((power - 1) / (power + 1), np.float64)


of_cap.add("logits-not-divided", "Numbers are not divided by the cap.", "C2", lambda x, cap: cap * np.tanh(x))
of_cap.add(
    "logits-not-multiplied", "The tanh is not multiplied by the cap.", "C1 C2 C3", lambda x, cap: np.tanh(x / cap)
)
of_cap.add("logits-capped-at-30", "The cap is always 30.", "C1 C2 C3", lambda x, cap: soft_cap(x, 30.0))


@of_cap("C4", verdicts=MOVES)
def logits_one_step_for_all(x: F32, cap: float) -> Array:
    """All numbers are rounded with one common step, so each element depends on all."""
    return soft_cap(in_steps(finite(x)), cap)


@of_cap("C5")
def logits_hide_nan(x: F32, cap: float) -> Array:
    """NaN becomes 0 on the way."""
    return soft_cap(np.where(np.isnan(x), 0, x).astype(np.float64), cap)
