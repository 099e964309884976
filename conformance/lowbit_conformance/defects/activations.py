"""Defects of the norm and of the activation of a gated unit."""

from collections.abc import Callable

import numpy as np

from lowbit.arrays import F32, F64, Array
from lowbit_conformance.defects.defect import MOVES, WRONG, Defect, Function, of
from lowbit_conformance.defects.experts import by_exponential, gelu, silu

# **The norm.** What differs between defects is nearly always what stands under the root.


def normed(x: F32, gain: F32, root: Array) -> F64:
    """Rows (or all of x) divided by a root and multiplied by the gain."""
    with np.errstate(all="ignore"):
        answer: F64 = gain.astype(np.float64) * (x.astype(np.float64) / root)
    return answer


def mean_square(x: F32) -> F64:
    with np.errstate(all="ignore"):
        answer: F64 = np.mean(np.square(x.astype(np.float64)), axis=1, keepdims=True)
    return answer


def under(root: Callable[[F32, float], Array]) -> Function:
    """A norm that divides by this root of x and ε."""

    def norm(x: F32, gain: F32, epsilon: float) -> Array:
        with np.errstate(all="ignore"):
            return normed(x, gain, root(x, epsilon))

    return norm


def without_mean(x: F32, gain: F32, epsilon: float) -> Array:
    """LayerNorm but for its bias."""
    with np.errstate(all="ignore"):
        centred = x - x.mean(axis=1, keepdims=True, dtype=np.float64)
        return normed(centred, gain, np.sqrt(np.mean(np.square(centred), axis=1, keepdims=True) + epsilon))


def tail_left_out(x: F32, epsilon: float) -> Array:
    """The sum ends at the last whole register of 8."""
    whole = x.shape[1] // 8 * 8
    answer: Array = np.square(x[:, :whole].astype(np.float64)).sum(axis=1, keepdims=True) / x.shape[1] + epsilon
    return np.sqrt(answer)


def carried_over(x: F32, epsilon: float) -> Array:
    """The sum of a row begins with that of the row before."""
    return np.sqrt(np.cumsum(mean_square(x), axis=0) + epsilon)


def of_twelve_bits(x: F32, epsilon: float) -> Array:
    """A reciprocal root as some processors estimate it, its mantissa cut after 12 bits."""
    mantissa, exponent = np.frexp(1 / np.sqrt(mean_square(x) + epsilon))
    return 1 / np.ldexp(np.floor(mantissa * 2**12 - 0.5) / 2**12, exponent)


def cast_before_gain(x: F32, gain: F32, epsilon: float) -> Array:
    with np.errstate(all="ignore"):
        unit = normed(x, np.ones_like(gain), np.sqrt(mean_square(x) + epsilon)).astype(np.float16)
        return unit.astype(np.float64) * gain


def plus_one(x: F32, gain: F32, epsilon: float) -> Array:
    with np.errstate(all="ignore"):
        return normed(x, gain + 1, np.sqrt(mean_square(x) + epsilon))


def rounded_together(x: F32, gain: F32, epsilon: float) -> Array:
    """All rows are rounded with one step, that of the largest number of all."""
    with np.errstate(all="ignore"):
        step = np.abs(x).max() * 2.0**-21
        near = (np.rint(x / step) * step).astype(np.float32) if step > 0 else x
        return normed(near, gain, np.sqrt(mean_square(near) + epsilon))


def hides_nan(x: F32, gain: F32, epsilon: float) -> Array:
    clean = np.nan_to_num(x, nan=0, posinf=0, neginf=0)
    return normed(clean, np.nan_to_num(gain, nan=0, posinf=0, neginf=0), np.sqrt(mean_square(clean) + epsilon))


def overflows_to_zeros(x: F32, epsilon: float) -> Array:
    """Squares are summed in float32, and one over the root of infinity is 0."""
    return np.sqrt(np.mean(np.square(x), axis=1, keepdims=True, dtype=np.float32).astype(np.float64) + epsilon)


def norm(name: str, cause: str, clauses: str, wrong: Function, verdicts: tuple[str, ...] = WRONG) -> Defect:
    return of("blocks.rms_norm", name, cause, clauses, wrong, verdicts=verdicts)


NORMS = (
    norm(
        "epsilon-outside-the-root",
        "ε is added to the root and not under it.",
        "C1 C2 C3",
        under(lambda x, epsilon: np.sqrt(mean_square(x)) + epsilon),
    ),
    norm(
        "epsilon-of-another-model",
        "ε is 1e-5, whatever is given.",
        "C1 C2 C3",
        under(lambda x, epsilon: np.sqrt(mean_square(x) + 1e-5)),
    ),
    norm(
        "epsilon-left-out",
        "There is no ε, and a row of zeros becomes NaN.",
        "C1 C2 C3 C4",
        under(lambda x, epsilon: np.sqrt(mean_square(x))),
    ),
    norm(
        "squares-not-averaged",
        "The squares are summed, and not divided by their number.",
        "C1 C2 C3",
        under(lambda x, epsilon: np.sqrt(mean_square(x) * x.shape[1] + epsilon)),
    ),
    norm(
        "squares-averaged-by-one-less",
        "The sum of the squares is divided by n - 1, as of a sample.",
        "C1 C2 C3",
        under(lambda x, epsilon: np.sqrt(mean_square(x) * x.shape[1] / max(1, x.shape[1] - 1) + epsilon)),
    ),
    norm("layer-norm-for-rms-norm", "The mean is subtracted first, as in LayerNorm.", "C1 C2 C3", without_mean),
    norm(
        "mean-over-tokens",
        "Squares are averaged over the rows and not along them.",
        "C1 C2 C3 C5",
        under(lambda x, epsilon: np.sqrt(np.square(x.astype(np.float64)).mean(axis=0, keepdims=True) + epsilon)),
        verdicts=MOVES,
    ),
    norm(
        "squares-carried-over",
        "The sum is not set back to 0 between rows.",
        "C1 C2 C3 C5",
        under(carried_over),
        verdicts=MOVES,
    ),
    norm("squares-without-tail", "The sum leaves out what fills no register of 8.", "C1 C2 C3", under(tail_left_out)),
    norm(
        "root-of-12-bits",
        "The reciprocal root is an estimate of 12 bits, not refined.",
        "C1 C2 C3",
        under(of_twelve_bits),
    ),
    norm("normed-in-half", "Rows are rounded to float16 before they meet the gain.", "C2 C3", cast_before_gain),
    norm("gain-plus-one", "The gain is taken for one that was stored less 1.", "C1 C2 C3", plus_one),
    norm(
        "norm-one-step-for-all-rows",
        "Rows are rounded with one step, so each depends on all.",
        "C5",
        rounded_together,
        verdicts=MOVES,
    ),
    norm("norm-hides-nan", "NaN and infinity become zero on the way.", "C6", hides_nan),
    norm(
        "norm-overflows-to-zeros",
        "The sum of the squares overflows, and the row becomes zeros.",
        "C7",
        under(overflows_to_zeros),
    ),
)


# **The activation.**


def gated(activation: Callable[[F64], Array]) -> Function:
    """Another activation of the gate, times up."""

    def unit(gate: F32, up: F32) -> Array:
        with np.errstate(all="ignore"):
            answer: Array = activation(gate.astype(np.float64)) * up.astype(np.float64)
        return answer

    return unit


def by_tanh(a: F64) -> Array:
    """A sigmoid that is 1 plus a tanh, of which nothing is left for negative a."""
    half = a.astype(np.float32) / np.float32(2)
    answer: Array = half * (1 + np.tanh(half))
    return answer


def by_exp2(a: F64) -> Array:
    """e^-a is 2 to the power of a product that has been rounded."""
    power = np.exp2(-a.astype(np.float32) * np.float32(np.log2(np.e)))
    answer: Array = a / (1 + power.astype(np.float64))
    return answer


def of_all_elements(activation: Callable[[F64], Array]) -> Function:
    """Gates are rounded with one step, that of the largest of all."""

    def wrong(gate: F32, up: F32) -> Array:
        with np.errstate(all="ignore"):
            step = np.abs(gate).max() * 2.0**-21
            near = np.rint(gate / step) * step if step > 0 else gate
            answer: Array = activation(near.astype(np.float64)) * up
        return answer

    return wrong


def without_nan(activation: Callable[[F64], Array]) -> Function:
    """What is not finite becomes 0 first."""

    def wrong(gate: F32, up: F32) -> Array:
        clean = (np.nan_to_num(part, nan=0, posinf=0, neginf=0) for part in (gate, up))
        answer: Array = gated(activation)(*clean)
        return answer

    return wrong


def activation(name: str, cause: str, clauses: str, wrong: Function, verdicts: tuple[str, ...] = WRONG) -> Defect:
    return of("blocks.swiglu", name, cause, clauses, wrong, verdicts=verdicts)


ACTIVATIONS = (
    activation(
        "swiglu-exchanged", "silu is applied to up and not to gate.", "C1 C2", lambda gate, up: gated(silu)(up, gate)
    ),
    activation("swiglu-without-sigmoid", "Gate and up are multiplied as they are.", "C1 C2", gated(lambda a: a)),
    activation(
        "sigmoid-for-silu", "The sigmoid is not multiplied by the gate.", "C1 C2", gated(lambda a: 1 / (1 + np.exp(-a)))
    ),
    activation("geglu-for-swiglu", "The activation is a GELU.", "C2", gated(gelu)),
    activation(
        "hard-swish-for-silu",
        "The sigmoid is replaced by straight lines.",
        "C2",
        gated(lambda a: a * np.clip(a + 3, 0, 6) / 6),
    ),
    activation("swiglu-overflows", "silu is a e^a / (1 + e^a), NaN for large a.", "C1 C2 C3", gated(by_exponential)),
    activation("sigmoid-by-tanh", "The sigmoid is 1 + tanh, which cancels for negative a.", "C2", gated(by_tanh)),
    activation("power-of-a-rounded-product", "e^a is 2 to a product rounded to float32.", "C2", gated(by_exp2)),
    activation(
        "exponent-clamped",
        "e^-a is kept from overflowing by a clamp, under which silu falls without end.",
        "C1 C3",
        gated(lambda a: a / (1 + np.exp(np.minimum(-a, 88)))),
    ),
    activation(
        "silu-in-half",
        "The activation is rounded to float16 before it meets up.",
        "C2",
        gated(lambda a: silu(a).astype(np.float16).astype(np.float64)),
    ),
    activation(
        "swiglu-one-step-for-all",
        "Gates are rounded with one step, so each element depends on all.",
        "C4",
        of_all_elements(silu),
        verdicts=MOVES,
    ),
    activation("swiglu-hides-nan", "NaN and infinity become zero on the way.", "C5", without_nan(silu)),
)

DEFECTS = (*NORMS, *ACTIVATIONS)
