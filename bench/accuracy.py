r"""How far a product is from float64, and what that says about the activations it was computed with.

Two errors are measured. One is against :math:`x W` in float64 with the weights that the contestant itself *holds*, so
that it shows how activations and sums are kept and nothing else. The other is against the float32 weights before they
were quantised, and shows what the format costs. Both are relative to the result as a whole,

.. math:: \mathrm{rms} = \lVert\hat y - y\rVert / \lVert y\rVert, \qquad
          \max = \max_i |\hat y_i - y_i| / \mathrm{rms}(y),

since single elements of y may be arbitrarily close to zero.

**The classes.** Rounding errors of the activations are independent of each other, so the rms error of a product is that
of the activations. With x normally distributed, rounding to p significant bits costs :math:`2^{1-p} \cdot 0.74 /
\sqrt{12}`: float16 (p = 11) 2.1e-4, bfloat16 (p = 8) 1.7e-3, and √3 times that where scales and result are rounded like
it. Steps of 1/127 of the largest of n values cost :math:`E\max|x| / (127 \sqrt{12})`: 4.7e-3 for n = 16, the shortest
block in use. So the limits between the classes are

- half of what float16 costs, 1.0e-4: no product in float32 comes near it, since a sum of K terms in any usual order is
  off by some :math:`\sqrt K\, 2^{-24}`, 6e-6 for K = 11008;
- the middle, on a logarithmic scale, of bfloat16 in everything and 8 bits at their best, 3.7e-3;
- four times what 8 bits cost when a whole row shares one power of two (at most 1/63 of the largest value a step,
  1.8e-2): beyond that a result is not of this class but wrong, or of fewer bits.
"""

from dataclasses import dataclass
from math import sqrt

import numpy as np

from lowbit.arrays import F32

SPREAD = 0.737
"""The root of E[x² / m²] / E[x²] for normal x of significand m in 1 … 2."""
FLOAT16, BFLOAT16 = (2.0 ** (1 - p) * SPREAD / sqrt(12) for p in (11, 8))
LARGEST_OF_16, LARGEST_OF_ROW = 2.07, 4.0
"""The mean largest magnitude of so many normal values; of 11008."""
BYTE_AT_BEST = LARGEST_OF_16 / (127 * sqrt(12))
BYTE_AT_WORST = LARGEST_OF_ROW / (63 * sqrt(12))

CLASSES = {
    "float32": FLOAT16 / 2,
    "16 bits": sqrt(sqrt(3) * BFLOAT16 * BYTE_AT_BEST),
    "8 bits": 4 * BYTE_AT_WORST,
}
"""Class of activations to the largest rms error that belongs to it."""
COARSER = "coarser"


@dataclass(frozen=True)
class Error:
    """Errors of a product, relative to the result as a whole."""

    rms: float
    max: float


def error(result: F32, exact: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> Error:
    """The error of a result against what it should be; infinite if it is not finite."""
    if not np.isfinite(result).all():
        return Error(float("inf"), float("inf"))
    scale = float(np.sqrt(np.mean(exact**2)))
    apart = np.abs(result.astype(np.float64) - exact)
    return Error(float(np.sqrt(np.mean(apart**2))) / scale, float(apart.max()) / scale)


def class_of(rms: float) -> str:
    """The class of activations that an rms error belongs to.

    >>> class_of(2e-7), class_of(1.7e-3), class_of(6e-3), class_of(0.5)
    ('float32', '16 bits', '8 bits', 'coarser')
    """
    return next((name for name, most in CLASSES.items() if rms <= most), COARSER)
