"""Defects of the norm and of the activation of a gated unit."""

from collections.abc import Callable

import numpy as np

from lowbit.arrays import F32, F64, Array
from lowbit.linear.elementary import logistic, silu
from lowbit.model.layers import gelu
from lowbit_conformance.defects.defect import MOVES, Defect, Function, of_operation
from lowbit_conformance.defects.roundings import finite, half, in_steps

DEFECTS: list[Defect] = []
of_norm = of_operation(DEFECTS, "blocks.rms_norm")

# **The norm.** Most defects change the number under the root.


def normed(x: F32, gain: F32, root: Array) -> F64:
    """Rows (or all of x) divided by a root and multiplied by the gain."""
    with np.errstate(all="ignore"):
        return np.asarray(gain.astype(np.float64) * (x.astype(np.float64) / root))


def mean_square(x: Array) -> F64:
    with np.errstate(all="ignore"):
        return np.asarray(np.mean(np.square(x.astype(np.float64)), axis=1, keepdims=True))


def right(x: F32, epsilon: float) -> F64:
    """The right root."""
    return np.asarray(np.sqrt(mean_square(x) + epsilon))


def under(root: Callable[[F32, float], Array]) -> Function:
    """A norm that divides by this root of x and ε."""

    def norm(x: F32, gain: F32, epsilon: float) -> Array:
        with np.errstate(all="ignore"):
            return normed(x, gain, root(x, epsilon))

    return norm


of_root = of_operation(DEFECTS, "blocks.rms_norm", under)
of_root.add(
    "epsilon-outside-the-root",
    "ε is added to the root instead of under it.",
    "C1 C2 C3",
    lambda x, epsilon: np.sqrt(mean_square(x)) + epsilon,
)
of_root.add("epsilon-of-another-model", "ε is always 1e-5.", "C1 C2 C3", lambda x, epsilon: right(x, 1e-5))
of_root.add(
    "epsilon-left-out",
    "There is no ε, and a row of zeros becomes NaN.",
    "C1 C2 C3 C4",
    lambda x, epsilon: right(x, 0.0),
)
of_root.add(
    "squares-not-averaged",
    "The sum of the squares is not divided by their number.",
    "C1 C2 C3",
    lambda x, epsilon: np.sqrt(mean_square(x) * x.shape[1] + epsilon),
)
of_root.add(
    "squares-averaged-by-one-less",
    "The sum of the squares is divided by n - 1, as for a sample variance.",
    "C1 C2 C3",
    lambda x, epsilon: np.sqrt(mean_square(x) * x.shape[1] / max(1, x.shape[1] - 1) + epsilon),
)
of_root.add(
    "root-left-out",
    "Rows are divided by the mean square instead of its root.",
    "C2",
    lambda x, epsilon: mean_square(x) + epsilon,
)
of_root.add(
    "mean-over-tokens",
    "Squares are averaged over the rows instead of along each row.",
    "C1 C2 C3 C5",
    lambda x, epsilon: np.sqrt(mean_square(x.T).T + epsilon),
    verdicts=MOVES,
)


@of_root("C1 C2 C3 C5", verdicts=MOVES)
def squares_carried_over(x: F32, epsilon: float) -> Array:
    """The sum is not reset to 0 between rows."""
    return np.sqrt(np.cumsum(mean_square(x), axis=0) + epsilon)


@of_root("C1 C2 C3")
def squares_without_tail(x: F32, epsilon: float) -> Array:
    """The sum leaves out the remainder after the last full register of 8."""
    whole = x.shape[1] // 8 * 8
    sums = np.square(x[:, :whole].astype(np.float64)).sum(axis=1, keepdims=True)
    return np.asarray(np.sqrt(sums / x.shape[1] + epsilon))


@of_root("C1 C2 C3")
def root_of_12_bits(x: F32, epsilon: float) -> Array:
    """The reciprocal root is an estimate of 12 bits, not refined."""
    mantissa, exponent = np.frexp(1 / right(x, epsilon))
    return 1 / np.ldexp(np.floor(mantissa * 2**12 - 0.5) / 2**12, exponent)


@of_root("C7")
def norm_overflows_to_zeros(x: F32, epsilon: float) -> Array:
    """The sum of the squares overflows, and the row becomes zeros."""
    return np.sqrt(np.mean(np.square(x), axis=1, keepdims=True, dtype=np.float32).astype(np.float64) + epsilon)


@of_norm("C1 C2 C3")
def layer_norm_for_rms_norm(x: F32, gain: F32, epsilon: float) -> Array:
    """The mean is subtracted first, as in LayerNorm."""
    with np.errstate(all="ignore"):
        centred = x - x.mean(axis=1, keepdims=True, dtype=np.float64)
        return normed(centred, gain, right(centred, epsilon))


@of_norm("C2 C3")
def normed_in_half(x: F32, gain: F32, epsilon: float) -> Array:
    """Rows are rounded to float16 before they are multiplied by the gain."""
    with np.errstate(all="ignore"):
        return np.asarray(half(normed(x, np.ones_like(gain), right(x, epsilon))).astype(np.float64) * gain)


@of_norm("C2")
def gain_left_out(x: F32, gain: F32, epsilon: float) -> Array:
    """Rows are not multiplied by the gain."""
    return normed(x, np.ones_like(gain), right(x, epsilon))


@of_norm("C1 C2 C3")
def gain_plus_one(x: F32, gain: F32, epsilon: float) -> Array:
    """The gain is read as one that was stored minus 1."""
    return normed(x, gain + 1, right(x, epsilon))


@of_norm("C5", verdicts=MOVES)
def norm_one_step_for_all_rows(x: F32, gain: F32, epsilon: float) -> Array:
    """All rows are rounded with one common step, so each depends on all."""
    return normed(in_steps(x), gain, right(in_steps(x), epsilon))


@of_norm("C6")
def norm_hides_nan(x: F32, gain: F32, epsilon: float) -> Array:
    """NaN and infinity become zero on the way."""
    return normed(finite(x), finite(gain), right(finite(x), epsilon))


# **The activation.**

Activation = Callable[[F64], Array]


def joined(of_gate: Activation, of_up: Activation) -> Function:
    """A gated unit with these functions of gate and of up."""

    def unit(gate: F32, up: F32) -> Array:
        with np.errstate(all="ignore"):
            return np.asarray(of_gate(gate.astype(np.float64)) * of_up(up.astype(np.float64)))

    return unit


def gated(activation: Activation) -> Function:
    """Another activation of the gate, times up."""
    return joined(activation, lambda up: up)


def of_all_elements(activation: Activation) -> Function:
    """Gates are rounded with one common step, from the largest of all."""
    return lambda gate, up: gated(activation)(in_steps(gate), up)


def without_nan(activation: Activation) -> Function:
    """Non-finite numbers become 0 first."""
    return lambda gate, up: gated(activation)(finite(gate), finite(up))


def relu(a: Array) -> Array:
    return np.maximum(a, 0)


def by_exponential(a: F64) -> F64:
    """a e^a / (1 + e^a), in float32."""
    with np.errstate(over="ignore", invalid="ignore"):
        power = np.exp(a.astype(np.float32))
        return np.asarray(a.astype(np.float32) * power / (1 + power), np.float64)


of_unit = of_operation(DEFECTS, "blocks.swiglu")
of_unit.add("swiglu-exchanged", "silu is applied to up and not to gate.", "C1 C2", joined(lambda gate: gate, silu))
of_unit.add("silu-of-both", "The activation is applied to up as well.", "C2", joined(silu, silu))
of_unit.add("up-left-out", "The result is not multiplied by up.", "C2", joined(silu, np.ones_like))
of_unit.add(
    "swiglu-one-step-for-all",
    "All gates are rounded with one common step, so each element depends on all.",
    "C4",
    of_all_elements(silu),
    verdicts=MOVES,
)
of_unit.add("swiglu-hides-nan", "NaN and infinity become zero on the way.", "C5", without_nan(silu))

of_silu = of_operation(DEFECTS, "blocks.swiglu", gated)
of_silu.add("swiglu-without-sigmoid", "Gate and up are multiplied without an activation.", "C1 C2", lambda a: a)
of_silu.add("sigmoid-for-silu", "The sigmoid is not multiplied by the gate.", "C1 C2", logistic)
of_silu.add("sigmoid-of-minus", "The sigmoid is that of minus the gate.", "C2", lambda a: a * logistic(-a))
of_silu.add("relu-for-silu", "The activation is a ReLU.", "C2", relu)
of_silu.add("geglu-for-swiglu", "The activation is a GELU.", "C2", gelu)
of_silu.add(
    "hard-swish-for-silu",
    "The sigmoid is replaced by a piecewise linear function.",
    "C2",
    lambda a: a * np.clip(a + 3, 0, 6) / 6,
)
of_silu.add("swiglu-overflows", "silu is a e^a / (1 + e^a), NaN for large a.", "C1 C2 C3", by_exponential)
of_silu.add(
    "exponent-clamped",
    "e^-a is clamped against overflow, so that silu decreases without limit below the clamp.",
    "C1 C3",
    lambda a: a / (1 + np.exp(np.minimum(-a, 88))),
)
of_silu.add(
    "silu-in-half",
    "The activation is rounded to float16 before it is multiplied by up.",
    "C2",
    lambda a: half(silu(a)).astype(np.float64),
)


@of_silu("C2")
def sigmoid_by_tanh(a: F64) -> Array:
    """The sigmoid is 1 + tanh, which cancels for negative a."""
    share = a.astype(np.float32) / np.float32(2)
    return np.asarray(share * (1 + np.tanh(share)))


@of_silu("C2")
def power_of_a_rounded_product(a: F64) -> Array:
    """e^a is computed as 2 to the power of a product that was rounded to float32."""
    power = np.exp2(-a.astype(np.float32) * np.float32(np.log2(np.e)))
    return np.asarray(a / (1 + power.astype(np.float64)))
