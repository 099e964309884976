r"""Bounds of products with quantised weights: the gauge of each form, and the bound of a whole product.

The chapter `lowbit.contract.rounding` derives the largest error of a sum of terms: :math:`\gamma_D` times the *gauge*
:math:`\sum |t_k|`, where :math:`t_k` are the terms that a kernel really forms. A product with quantised weights can
form different terms:

============= ============================================ =======================================================
form          what is summed                               gauge
============= ============================================ =======================================================
dequantised   :math:`x_k w_k`                              :math:`\sum |x_k||w_k|`
factored      :math:`s x_k q_k` and :math:`o\,x_k`         :math:`\sum |x_k|\,(s q_k + |o|)`, where
                                                           :math:`o = -s z`, so :math:`s|x_k|(q_k + |z|)`
offset        :math:`s x_k (q_k - c)` and                  :math:`\sum |x_k|\,(s|q_k - c| + |o + s c|)`,
              :math:`(o + s c)\,x_k`                       with :math:`c = 2^{b-1}`
integer       :math:`s 2^e D` and :math:`o\,2^e S`,        :math:`\sum (s 2^e |D| + |o|\, 2^e |S|)`; see the chapter
              once a segment                               `integer_bounds`
============= ============================================ =======================================================

The dequantised form has one more source of error: its weights are float32 numbers already rounded, by at most
:math:`u|w|` under ``zero_point`` and :math:`u(1+u) s q + u|w|` under ``minimum`` (the chapter `affine` fixes these
roundings), so it adds :math:`\sum |x_k||\hat w_k - w_k|`.

Source: N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., §3.1; the gauges are derived here.
"""

import numpy as np

from lowbit.arrays import F32, F64
from lowbit.contract.checks import check_choice
from lowbit.contract.rounding import (
    FORMS,
    HALF_LEAST_SUBNORMAL,
    UNIT_ROUNDOFF,
    Arithmetic,
    Bound,
    Form,
    gamma,
    one_loop,
    sum_bound,
)
from lowbit.linear.linear import group_offsets
from lowbit.quantization.affine import QuantizedMatrix
from lowbit.quantization.packing import Codes, unpack


def gauge(x: F32, codes: Codes, matrix: QuantizedMatrix, form: Form) -> F64:
    r"""The gauge :math:`\sum_k |t_k|` of each column, for the terms that the form sums.

    Args:
        x: float32, K.
        codes: uint8, K × N, the codes of `matrix`.
        form: ``dequantised``, ``factored`` or ``offset``.

    Returns:
        float64, N.
    """
    check_choice("form of a product with quantised weights", form, FORMS[:3])
    total = np.zeros(matrix.columns)
    offsets = group_offsets(matrix)
    center = 2 ** (matrix.bits - 1)
    for group in range(matrix.groups):
        rows = matrix.group_rows(group)
        s, o = matrix.scales[group].astype(np.float64), offsets[group]
        for x_k, q in zip(np.abs(x[rows].astype(np.float64)), codes[rows].astype(np.float64), strict=True):
            if form == "dequantised":
                total += x_k * np.abs(s * q + o)
            elif form == "factored":
                total += x_k * (s * q + np.abs(o))
            else:
                total += x_k * (s * np.abs(q - center) + np.abs(o + s * center))
    return total


def conversion_error(x: F32, codes: Codes, matrix: QuantizedMatrix) -> F64:
    r""":math:`\sum_k |x_k||\hat w_k - w_k|`: the error that rounding the weights to float32 may add, for each column.

    Args and returns: as `gauge`.
    """
    u = UNIT_ROUNDOFF["float32"]
    rounding = u * gauge(x, codes, matrix, "dequantised")
    if matrix.convention == "minimum":
        products = np.zeros(matrix.columns)
        for group in range(matrix.groups):
            rows = matrix.group_rows(group)
            for x_k, q in zip(np.abs(x[rows].astype(np.float64)), codes[rows], strict=True):
                products += x_k * matrix.scales[group] * q
        rounding += u * (1 + u) * products
    return rounding + 2 * HALF_LEAST_SUBNORMAL * float(np.sum(np.abs(x.astype(np.float64))))


def linear_bound(x: F32, matrix: QuantizedMatrix, arithmetic: Arithmetic, exact: F64) -> Bound:
    """The bound of `linear.qgemv/C2` for one vector of activations.

    Args:
        x: float32, K, finite.
        matrix: K × N.
        arithmetic: what the backend declares.
        exact: float64, N: ``linear.qgemv(x, matrix)``.

    Raises:
        ArgumentError: the declared arithmetic would allow more than a tenth of the gauge.
    """
    codes, form, sizes = unpack(matrix.words, matrix.bits), arithmetic.form, (matrix.rows, matrix.group_size)
    terms = gauge(x, codes, matrix, form)
    conversion = conversion_error(x, codes, matrix) if form == "dequantised" else None
    # Products may underflow: at most two per row, one of which may then be multiplied by a code, as in (s x) q; two per
    # group; and the product in the offset, times the sum of |x|.
    x_sum = float(np.sum(np.abs(x.astype(np.float64))))
    underflows = 2 * matrix.rows * 2**matrix.bits + 2 * matrix.groups + x_sum
    # The reference sums the factored form in float64, by one loop.
    factored = terms if form == "factored" else gauge(x, codes, matrix, "factored")
    reference = gamma(one_loop(*sizes), UNIT_ROUNDOFF["float64"]) * factored
    return sum_bound(terms, sizes, arithmetic, exact, underflows, reference, f"the {form} gauge", conversion)
