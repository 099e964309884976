r"""Norm and activations: what a decoder computes between its linear layers, one vector or number at a time.

**Norm** (RMSNorm, gain :math:`g`, a small :math:`\varepsilon` from the file) scales a vector of n channels to a root
mean square of 1:

.. math:: \mathrm{norm}(x) = g \otimes \frac{x}{\sqrt{\frac1n \sum_c x_c^2 + \varepsilon}}.

**Activations** stand between the matrices of a gated linear unit, :math:`\mathrm{act}(a) \otimes b`: silu
(`lowbit.linear.elementary`) makes it SwiGLU, gelu makes it GeGLU. GPT-OSS clamps both sides of its unit
(`clamped_swiglu`).

**A soft cap** :math:`c` of the logits, :math:`c \tanh(a / c)`, keeps them between :math:`-c` and :math:`c` in Gemma 2
(`lowbit.linear.elementary.soft_cap`).

Source: RMSNorm (arXiv 1910.07467) equation 4, with ε as in Llama (arXiv 2302.13971) §2.2; SwiGLU and GeGLU
(arXiv 2002.05202) equation 6; the clamped unit as in the reference implementation of GPT-OSS; the soft cap as in
Gemma 2 (arXiv 2408.00118) §2.
"""

from collections.abc import Callable
from typing import Annotated

import numpy as np

from lowbit.arrays import F64, Activations
from lowbit.contract.operation import BOUNDED, operation
from lowbit.contract.signature import ONE_TYPE, In, Shape, checked
from lowbit.linear.elementary import silu, soft_cap


def rms_norm(x: F64, gain: F64, epsilon: float) -> F64:
    """Scale each vector to a root mean square of 1, then each channel by its gain.

    >>> rms_norm(np.array([[3.0, 4.0]]), np.ones(2), epsilon=0.0).round(4)
    array([[0.8485, 1.1314]])
    """
    mean_square: F64 = np.mean(x * x, axis=-1, keepdims=True)
    return gain * (x / np.sqrt(mean_square + epsilon))


def gelu(a: F64) -> F64:
    r"""Approximately :math:`a\,\Phi(a)`: near a for large a, near 0 for very negative a.

    :math:`\Phi`, the distribution function of the normal distribution, is replaced by an approximation; models are
    trained with the approximation, so they need it:

    .. math:: \mathrm{gelu}(a) = a\,\frac{1 + \tanh z}2 = \frac a{1 + e^{-2z}}, \qquad
       z = \sqrt{2/\pi}\,(a + 0.044715\,a^3).

    The code computes the second form, which is accurate for negative a, where :math:`1 + \tanh z` cancels.

    >>> gelu(np.array([-100.0, 0.0, 1.0, 100.0])).round(4)
    array([ -0.    ,   0.    ,   0.8412, 100.    ])

    Source: GELU (arXiv 1606.08415) §2.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # e^-2z may be infinite, and a / ∞ is the wanted 0
        return a / (1.0 + np.exp(-gelu_exponent(a)))


def gelu_exponent(a: F64) -> F64:
    """2z of `gelu`: the logit of the approximation to Φ(a)."""
    logit: F64 = 2 * np.sqrt(2 / np.pi) * (a + 0.044715 * a * a * a)
    return logit


SLOPE = 1.702
"""α of `clamped_swiglu`."""


def clamped_swiglu(a: F64, b: F64, limit: float) -> F64:
    r"""The gated unit of GPT-OSS, for a limit :math:`c`:

    .. math:: a'\,\sigma(\alpha a')\,(b' + 1), \qquad a' = \min(a, c), \quad b' = \mathrm{clip}(b, -c, c),

    with :math:`\alpha = 1.702`, for which :math:`a\,\sigma(\alpha a)` is near the GELU. Neither side exceeds the limit,
    and b = 0 leaves the activation as it is.

    >>> clamped_swiglu(np.array([1.0, 100.0, -100.0]), np.array([0.0, 2.0, 100.0]), limit=7.0).round(4)
    array([ 0.8458, 20.9999, -0.    ])

    Source: the reference implementation of GPT-OSS; GELU (arXiv 1606.08415) §2 for α.
    """
    gate, up = np.minimum(a, limit), np.clip(b, -limit, limit)
    with np.errstate(over="ignore", invalid="ignore"):  # e^-αa may be infinite, and a / ∞ is the wanted 0
        return gate / (1.0 + np.exp(-SLOPE * gate)) * (up + 1)


# **What a backend promises.** A backend takes float32, float16 or bfloat16, all arrays in one type, and returns that
# type. Its result is compared with the functions above, applied to the exact values of its inputs. The bounds are
# derived in the chapter `lowbit.model.bounds`. A zero ε is refused, because a row of zeros would be divided by 0.

LEAST_EPSILON, LARGEST = 2.0**-126, float(np.finfo(np.float32).max)


@checked
def rms_norm_of(
    x: Annotated[Activations, Shape("T", "n"), ONE_TYPE],
    gain: Annotated[Activations, Shape("n"), ONE_TYPE],
    epsilon: Annotated[float, In(LEAST_EPSILON, LARGEST)],
) -> F64:
    """`rms_norm` of rows of one type, in float64: the reference of `blocks.rms_norm`.

    >>> rms_norm_of(np.array([[1, -1, 1, 1]], np.float32), np.array([1, 2, 3, 4], np.float32), 3.0)
    array([[ 0.5, -1. ,  1.5,  2. ]])

    Args:
        x: float32, float16 or bfloat16, T × n.
        gain: of the same type, n.
        epsilon: above 0.

    Returns:
        float64, T × n.

    Raises:
        ArgumentError: wrong dtype, shape or layout; an ε that is not a number from 2^-126 to the largest float32.

    Source: RMSNorm (arXiv 1910.07467) equation 4; ε as in Llama.
    """
    with np.errstate(invalid="ignore"):
        return rms_norm(x.astype(np.float64), gain.astype(np.float64), epsilon)


@checked
def swiglu_of(
    gate: Annotated[Activations, Shape("T", "m"), ONE_TYPE], up: Annotated[Activations, Shape("T", "m"), ONE_TYPE]
) -> F64:
    """silu(gate) ⊗ up for inputs of one type, in float64: the reference of `blocks.swiglu`.

    >>> swiglu_of(np.array([[2, -1000]], np.float32), np.array([[2, 5]], np.float32)).round(4)
    array([[ 3.5232, -0.    ]])

    Args:
        gate: float32, float16 or bfloat16, T × m: the output of the gate's linear layer.
        up: of the same type, T × m: the output of the other one.

    Returns:
        float64, T × m.

    Raises:
        ArgumentError: wrong dtype, shape or layout.

    Source: arXiv 2002.05202, equation 6.
    """
    with np.errstate(invalid="ignore"):
        return silu(gate.astype(np.float64)) * up.astype(np.float64)


@checked
def geglu_of(
    gate: Annotated[Activations, Shape("T", "m"), ONE_TYPE], up: Annotated[Activations, Shape("T", "m"), ONE_TYPE]
) -> F64:
    """gelu(gate) ⊗ up for inputs of one type, in float64: the reference of `blocks.geglu`.

    >>> geglu_of(np.array([[2, -1000]], np.float32), np.array([[2, 5]], np.float32)).round(4)
    array([[ 3.9092, -0.    ]])

    Arguments, result and errors are those of `swiglu_of`.

    Source: arXiv 2002.05202, equation 6, with the approximation of `gelu`.
    """
    with np.errstate(invalid="ignore"):
        return gelu(gate.astype(np.float64)) * up.astype(np.float64)


MOST = 2.0**32
"""The largest limit of a clamped unit or cap, and the inverse of the least; beyond the numbers of any model."""


@checked
def clamped_swiglu_of(
    gate: Annotated[Activations, Shape("T", "m"), ONE_TYPE],
    up: Annotated[Activations, Shape("T", "m"), ONE_TYPE],
    limit: Annotated[float, In(1 / MOST, MOST)],
) -> F64:
    """`clamped_swiglu` for inputs of one type, in float64: the reference of `blocks.clamped_swiglu`.

    >>> clamped_swiglu_of(np.array([[2, 100]], np.float32), np.array([[2, -100]], np.float32), 7.0).round(4)
    array([[  5.807 , -41.9997]])

    Args:
        gate: float32, float16 or bfloat16, T × m.
        up: of the same type, T × m.
        limit: of gate, and of up on both sides.

    Returns:
        float64, T × m.

    Raises:
        ArgumentError: wrong dtype, shape or layout; a limit that is not a number from 2^-32 to 2^32.

    Source: the reference implementation of GPT-OSS.
    """
    with np.errstate(invalid="ignore"):
        return clamped_swiglu(gate.astype(np.float64), up.astype(np.float64), limit)


@checked
def soft_cap_of(x: Annotated[Activations, Shape("T", "n"), ONE_TYPE], cap: Annotated[float, In(1 / MOST, MOST)]) -> F64:
    """`lowbit.linear.elementary.soft_cap` of rows, in float64: the reference of `blocks.soft_cap`.

    >>> soft_cap_of(np.array([[0.5, -1e9]], np.float32), 30.0).round(4)
    array([[  0.5, -30. ]])

    Args:
        x: float32, float16 or bfloat16, T × n.
        cap: c; results lie between −c and c.

    Returns:
        float64, T × n.

    Raises:
        ArgumentError: wrong dtype, shape or layout; a cap that is not a number from 2^-32 to 2^32.

    Source: Gemma 2 (arXiv 2408.00118) §2.
    """
    return soft_cap(x.astype(np.float64), cap)


operation(
    "blocks.rms_norm",
    "Rows scaled to a root mean square of 1",
    rms_norm_of,
    promise=BOUNDED,
    source="arXiv 1910.07467 equation 4; arXiv 2302.13971 §2.2",
    clauses={
        "C1": "Where n is a power of two, the squares have an exactly representable sum in any order, and their mean "
        "plus ε is a power of four, the result equals the formula's.",
        "C2": "Where only the sum of the squares is exact, in any order, each element differs from the formula by at "
        "most the bound of the single roundings that follow it.",
        "C3": "For finite inputs without overflow, each element differs from the formula by at most the bound derived "
        "from the declared arithmetic.",
        "C4": "A row of zeros gives zeros.",
        "C5": "The result has the type of x, T × n; row t depends on nothing but row t of x, the gain and ε; the same "
        "call gives the same bits.",
        "C6": "A NaN in row t leaves no finite element in row t; an infinity leaves none at its place, and nothing "
        "but zeros and NaN beside it; neither changes another row. What is not finite in the gain leaves no finite "
        "element in its column, unless x is 0 there, and changes no other.",
        "C7": "Where the squares of finite numbers sum to more than float32 holds, the row is within the bound of C3, "
        "or has no finite element: the overflow is not passed off as zeros.",
    },
)


def gated_unit(name: str, title: str, compute: Callable[..., F64], activation: str, source: str) -> None:
    """Register the product of an activated gate and up; all such units have the same clauses."""
    operation(
        name,
        title,
        compute,
        promise=BOUNDED,
        source=source,
        clauses={
            "C1": f"Where {activation}(gate) is gate or 0 to the bit, that is from 40 upwards, from −760 downwards and "
            "at 0, and gate · up is exact, the result equals the formula's.",
            "C2": "For finite inputs whose product gate · up does not overflow, each element differs from the formula "
            "by at most the bound derived from the declared arithmetic.",
            "C3": "There the result is finite, however large the gate is: an exponential that overflows is not seen.",
            "C4": "The result has the type of the gate, T × m; an element depends on nothing but gate and up at its "
            "own place; the same call gives the same bits.",
            "C5": "What is not finite in gate or up leaves an element that is not finite at its place, and changes no "
            "other.",
        },
    )


SHAZEER = "arXiv 2002.05202 equation 6"
gated_unit("blocks.swiglu", "The activation of a gated linear unit", swiglu_of, "silu", SHAZEER)
gated_unit(
    "blocks.geglu",
    "The activation of a gated linear unit with a GELU",
    geglu_of,
    "gelu",
    f"{SHAZEER}; arXiv 1606.08415 §2",
)

operation(
    "blocks.clamped_swiglu",
    "The clamped activation of a gated linear unit",
    clamped_swiglu_of,
    promise=BOUNDED,
    source="GPT-OSS; arXiv 1606.08415 §2 for the slope 1.702",
    clauses={
        "C1": "Where gate and limit are 24 and more, or the gate is −450 and less or 0, and the product of the clamped "
        "gate and the clamped up plus 1 is exact, the result equals the formula's.",
        "C2": "For finite inputs, each element differs from the formula by at most the bound derived from the declared "
        "arithmetic.",
        "C3": "There the result is finite, however large gate and up are: an exponential that overflows is not seen.",
        "C4": "The result has the type of the gate, T × m; an element depends on nothing but the limit, and gate and "
        "up at its own place; the same call gives the same bits.",
        "C5": "A NaN in gate or up leaves a NaN at its place. An infinity beyond the limit counts as the limit, to the "
        "bit; a gate of −∞ leaves 0 or NaN. None of them changes another element.",
    },
)

operation(
    "blocks.soft_cap",
    "Numbers kept between a cap and its negative",
    soft_cap_of,
    promise=BOUNDED,
    source="Gemma 2 (arXiv 2408.00118) §2",
    clauses={
        "C1": "A number of 20 caps and more gives the cap with its sign, exactly where the type of the result holds "
        "it; 0 gives 0.",
        "C2": "For finite inputs, each element differs from the formula by at most the bound derived from the declared "
        "arithmetic, relative to the element itself: small numbers lose nothing to a cap that is far above them.",
        "C3": "There the result is finite, however large the number, and however large or small the cap is.",
        "C4": "The result has the type and shape of x; an element depends on nothing but the cap and x at its own "
        "place; the same call gives the same bits.",
        "C5": "A NaN leaves a NaN at its place, and ±∞ the cap with its sign; neither changes another element.",
    },
)
