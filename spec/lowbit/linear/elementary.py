r"""The functions that several layers share: a plain product, softmax and silu.

A router scores experts with a product and a softmax, attention turns scores into probabilities with the same softmax,
and the gated units of experts and of dense layers share one activation. Each function is defined here once, in float64;
`lowbit.linear.propagation` says how an error of its input affects its result.

**Product.** :math:`xW`, summed in the order of the rows of :math:`W`.

**Softmax** is computed as :math:`e^{a_u - \max a} / \sum_v e^{a_v - \max a}`. The maximum cancels in exact arithmetic;
in floating point it keeps the exponential from overflowing, and it makes the largest term exactly 1.

**The logistic function** is :math:`\sigma(a) = 1 / (1 + e^{-a})`, and **silu** is :math:`a\,\sigma(a)`: near :math:`a`
for large :math:`a`, and near 0 for very negative :math:`a`.

**A soft cap** :math:`c` keeps numbers between :math:`-c` and :math:`c`, and small ones nearly unchanged: :math:`c
\tanh(a / c)`.

Source: softmax as in GQA (arXiv 2305.13245) §2.2; silu as Swish-1 in arXiv 2002.05202 §2.
"""

import numpy as np
import numpy.typing as npt

from lowbit.arrays import F32, F64


def product(x: npt.NDArray[np.floating], matrix: F32 | F64) -> F64:
    """``x W`` in float64, one row of the matrix at a time, so that the order of the sum is the same on every host.

    >>> product(np.array([[1.0, 2.0]], np.float32), np.array([[3, 4], [5, 6]], np.float32))
    array([[13., 16.]])

    Args:
        x: T × K.
        matrix: float32 or float64, K × N.

    Returns:
        float64, T × N.
    """
    total = np.zeros((len(x), matrix.shape[1]))
    with np.errstate(invalid="ignore", over="ignore"):  # infinities and NaN pass through without a warning
        for row, weights in enumerate(matrix):
            total += x[:, row : row + 1].astype(np.float64) * weights
    return total


def softmax(scores: F64) -> F64:
    """Exponentials that sum to 1 along the last axis; −∞ gives exactly 0.

    >>> softmax(np.array([1000.0, 1000.0, -np.inf]))
    array([0.5, 0.5, 0. ])
    """
    powers: F64 = np.exp(scores - scores.max(axis=-1, keepdims=True))
    total: F64 = powers.sum(axis=-1, keepdims=True)
    return powers / total


def softmax_beside(scores: F64, beside: F64) -> F64:
    """The softmax over the scores and one extra score, without the probability of the extra one.

    >>> softmax_beside(np.array([1000.0, 1000.0]), np.array([1000.0])).round(4)
    array([0.3333, 0.3333])
    """
    greatest = np.maximum(scores.max(axis=-1, keepdims=True), beside)
    powers: F64 = np.exp(scores - greatest)
    total: F64 = powers.sum(axis=-1, keepdims=True) + np.exp(beside - greatest)
    return powers / total


def soft_cap(a: F64, cap: float) -> F64:
    """c tanh(a / c).

    >>> soft_cap(np.array([0.5, 50.0, 5e9]), 50.0).round(4)
    array([ 0.5   , 38.0797, 50.    ])
    """
    capped: F64 = cap * np.tanh(a / cap)
    return capped


def silu(a: F64) -> F64:
    """a / (1 + e^−a).

    >>> silu(np.array([-1000.0, 0.0, 1000.0]))
    array([  -0.,    0., 1000.])
    """
    with np.errstate(over="ignore", invalid="ignore"):  # e^1000 is infinite, and a / ∞ is the wanted 0
        return a / (1.0 + np.exp(-a))


def logistic(a: F64) -> F64:
    """1 / (1 + e^−a).

    >>> logistic(np.array([-1000.0, 0.0, 1000.0]))
    array([0. , 0.5, 1. ])
    """
    with np.errstate(over="ignore", invalid="ignore"):
        return 1.0 / (1.0 + np.exp(-a))
