r"""Bounds of GPTQ: of its Hessian, its factor and its targets.

**The Hessian** is a sum of T products in one form, so its bound is :math:`\gamma_D` times the gauge
:math:`|X|^T |X|`.

**The factor.** However the sums of Cholesky's algorithm are ordered, what it computes is the exact factor of a matrix
near :math:`H` (Higham, Theorem 10.3):

.. math:: |\hat M \hat M^T - H| \;\le\; \gamma_D\, |\hat M|\,|\hat M|^T, \qquad D = K + 1.

The distance of :math:`\hat M` from :math:`M` depends on the condition of :math:`H`; that of the product does not, so
the contract bounds the product. A factor that was computed in float64 and stored in float32 has each element moved once
more, which multiplies each product by :math:`(1 + \delta)^2`.

**The targets** are sums of :math:`w_k` and of at most :math:`K - 1` products
:math:`(M_{jk}/M_{kk})\,(w_j - \hat w_j)`; a difference and a quotient of given numbers have one rounding each, so the
gauge is the sum of the magnitudes of the exact terms.

Source: Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., §3.1 and Theorem 10.3.
"""

import numpy as np

from lowbit.arrays import F32, F64
from lowbit.contract.rounding import (
    HALF_LEAST_SUBNORMAL,
    UNIT_ROUNDOFF,
    Arithmetic,
    Bound,
    checked_gamma,
    direct_bound,
    gamma,
    one_loop,
)


def hessian_bound(x: F32, arithmetic: Arithmetic, exact: F64) -> Bound:
    """The bound of `gptq.hessian/C2`.

    Args:
        x: float32, T × K, finite.
        arithmetic: what the backend declares; its roundings are taken at T.
        exact: float64, K × K.
    """
    magnitudes = np.abs(x.astype(np.float64))
    return direct_bound(magnitudes.T @ magnitudes, len(x), arithmetic, exact, underflows=2 * len(x))


def factor_bound(hessian: F32 | F64, arithmetic: Arithmetic, given: F32) -> Bound:
    """The bound of `gptq.factor/C2` on ``given @ given.T - hessian``.

    Args:
        hessian: K × K.
        arithmetic: what the backend declares; its roundings are taken at K.
        given: float32, K × K: the factor that the backend computed.
    """
    size, magnitudes = len(hessian), np.abs(given.astype(np.float64))
    relative = checked_gamma(arithmetic, size, size)
    terms = magnitudes @ magnitudes.T
    limit = relative * terms
    derivation = f"γ_{arithmetic.roundings(size, size)}({arithmetic.accumulator}) = {relative:.3g} times |M||M|^T"
    if UNIT_ROUNDOFF[arithmetic.accumulator] < UNIT_ROUNDOFF["float32"]:
        limit = limit + (1 + relative) * gamma(3, UNIT_ROUNDOFF["float32"]) * terms  # (1 + u)² / (1 − u)² − 1 and less
        derivation += " + rounding of M"
    limit = limit + HALF_LEAST_SUBNORMAL * (2 * size + 2 * float(magnitudes.max()))
    measuring = gamma(one_loop(size, size), UNIT_ROUNDOFF["float64"]) * terms  # the product itself is a sum in float64
    return Bound(limit + measuring, terms, derivation)


def targets_bound(weights: F32, factor: F32, values: F32, arithmetic: Arithmetic, exact: F64) -> Bound:
    """The bound of `gptq.targets/C2`.

    Args:
        weights, factor, values: as `gptq.targets`.
        arithmetic: what the backend declares; its roundings are taken at K.
        exact: float64, K × N.
    """
    wide = weights.astype(np.float64)
    errors = np.abs(wide - values)
    ratios = np.triu(np.abs(factor.astype(np.float64)) / np.diagonal(factor).astype(np.float64), 1)
    terms = np.abs(wide) + ratios.T @ errors
    underflows = 2 * len(weights) + errors.sum(axis=0)  # a product loses one; a quotient one, times the error
    return direct_bound(terms, len(weights), arithmetic, exact, underflows)
