r"""Bounds of integer products: how far a correct result of `integer` may lie from the exact one.

In the chapter `rounding` every product of an activation and a weight is a term that may be rounded. Here a term is a
whole segment: its integers :math:`D` and :math:`S` are exact, and rounding affects only

.. math:: s\,2^{e} D \qquad\text{and}\qquad o\,2^{e} S,

one term of each kind for every segment. Their magnitudes are the gauge,

.. math:: \sum_{i} \Bigl[\, s_i \sum_{\sigma \in i} 2^{e} |D_{\sigma}|
   \;+\; |o_i| \sum_{\sigma \in i} 2^{e} |S_{\sigma}| \Bigr],

which is far smaller than with the magnitudes inside the sums: positive and negative mantissas have cancelled already,
and exactly. So this bound is narrow for two reasons: the gauge has some hundred terms rather than thousands, and a term
meets proportionally fewer roundings.

**The roundings of a loop.** The integer may have to be rounded to the accumulator's format (if it has more than 24
bits; one). The power of two rounds nothing. Then come at most as many additions as the group has segments, the product
with the scale, and two additions for each of the :math:`P` groups. With blocks of :math:`B` rows and groups of
:math:`g` a group has :math:`g / B` segments where B divides g, one where g divides B, and otherwise at most
:math:`\lceil (g - 1) / B \rceil + 1`, because a block may extend past both ends:

.. math:: D = 1 + p + 1 + 2P.

**Underflow.** Let :math:`\eta = 2^{-150}` be what one product may lose. Kernels multiply in different orders. One loses
:math:`\eta` in :math:`2^e D`, which the scale then multiplies; another in :math:`s 2^e`, which the integer then
multiplies; where :math:`2^e` itself is below all numbers of the format, both do. So a segment may lose :math:`\eta\,(s
+ |D| + s|D| + 1)` and the same with :math:`|o|` and :math:`|S|`, and a group two products more. None of this is wide
enough to hide a :math:`2^e` that was treated as zero although float32 can represent it, as it can from :math:`2^{-149}`
on.

Source: N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., §3.1, Lemma 3.1.
"""

import numpy as np

from lowbit.arrays import F64
from lowbit.contract.checks import check_choice, check_integer
from lowbit.contract.rounding import UNIT_ROUNDOFF, Arithmetic, Bound, Roundings, gamma, sum_bound
from lowbit.linear.integer import CodeSums, code_sums
from lowbit.linear.linear import group_offsets
from lowbit.quantization.affine import QuantizedMatrix
from lowbit.quantization.bfp import Blocks


def segments_of_group(block: int, group_size: int) -> int:
    """The most segments that any group can have.

    >>> [segments_of_group(32, group_size) for group_size in (128, 16, 24, 33, 34)]
    [4, 1, 2, 2, 3]
    """
    if group_size % block == 0:
        return group_size // block
    if block % group_size == 0:
        return 1
    return -(-(group_size - 1) // block) + 1


def integer_loop(block: int) -> Roundings:
    """The roundings of equation 2 of `integer` as a plain loop, for blocks of at least `block` elements.

    >>> integer_loop(32)(4096, 128)
    70

    Args:
        block: the smallest declared block; 1 for all block sizes.
    """
    check_integer("block", block, least=1)

    def roundings(rows: int, group_size: int) -> int:
        return 1 + segments_of_group(block, group_size) + 1 + 2 * -(-rows // group_size)

    return roundings


def integer_bound(x: Blocks, matrix: QuantizedMatrix, arithmetic: Arithmetic, exact: F64) -> Bound:
    """The bound of `linear.qgemm_bfp/C2`.

    Args:
        x: T rows of K elements.
        matrix: K × N.
        arithmetic: what the backend declares; its form is ``integer``.
        exact: float64, T × N: ``integer.qgemm_bfp(x, matrix)``.

    Returns:
        Limit and gauge, T × N.

    Raises:
        ArgumentError: another form, or the declared arithmetic would allow more than a tenth of the gauge.
    """
    check_choice("form of an integer product", arithmetic.form, ("integer",))
    sums, sizes = code_sums(x, matrix), (matrix.rows, matrix.group_size)
    terms, underflows = gauge_and_underflows(sums, matrix)
    # The reference adds the same terms in float64, by one loop.
    reference = gamma(len(sums.groups) + 2 + 2 * matrix.groups, UNIT_ROUNDOFF["float64"]) * terms
    return sum_bound(terms, sizes, arithmetic, exact, underflows, reference, "the integer gauge")


def gauge_and_underflows(sums: CodeSums, matrix: QuantizedMatrix) -> tuple[F64, F64]:
    """The gauge, and how many half least subnormals the products of an element may lose: float64, T × N each."""
    shape = (len(sums.products), matrix.columns)
    terms, losses = np.zeros(shape), np.full(shape, 2.0 * matrix.groups)
    scales, offsets = matrix.scales.astype(np.float64), np.abs(group_offsets(matrix))
    for run, group in enumerate(sums.groups):
        e = sums.exponents[:, run, None]
        d, s = np.abs(sums.products[:, run]).astype(np.float64), np.abs(sums.mantissas[:, run, None]).astype(np.float64)
        terms += scales[group] * np.ldexp(d, e) + offsets[group] * np.ldexp(s, e)
        losses += (1 + scales[group]) * (1 + d) + (1 + offsets[group]) * (1 + s)
    return terms, losses
