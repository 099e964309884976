r"""Linear layers on quantised weights: the factored dot product.

A linear layer multiplies an activation vector by a weight matrix. When a model generates one token at a time, every
weight is read once per token and used once, so reading the weights determines the time. Multiplying *codes* reads few
bytes; the question is how to compute the right number from codes without first converting each code to a weight. The
answer is to factor the scale and the zero out of the sum.

**One scale for the whole vector.** With activations :math:`y \in \mathbb{R}^n` and codes :math:`x_q`,

.. math:: \langle y, s\,(x_q - z)\rangle \;=\; s\,\bigl(\langle y, x_q\rangle - z\,\langle y, 1\rangle\bigr).
   \tag{1}

On the left, each code costs a subtraction and a multiplication before it is used. On the right, the loop only
multiplies and adds codes, and :math:`\langle y, 1\rangle`, the sum of the activations, is the same for every column.

**A scale for each group.** With :math:`P` groups, scales :math:`s_i` and zeros :math:`z_i`,

.. math:: \sum_{i=1}^{P} \langle y_i, s_i\,(x_{iq} - z_i)\rangle
   \;=\; \sum_{i=1}^{P} s_i\,\langle y_i, x_{iq}\rangle \;-\; \sum_{i=1}^{P} s_i\,z_i\,\langle y_i, 1\rangle .
   \tag{2}

The copy at hand prints the last sum without :math:`s_i`, which does not hold (errata Q3). Under the convention
``minimum`` the value of a code is :math:`s q + \min`, hence :math:`s_i z_i = -\min_i`, and no division is needed to
find :math:`z_i`. The chapter writes :math:`o_i = -s_i z_i` for the *offset* of a group in both conventions.

From here on the names are those of a layer: ``x`` is the activations, :math:`W` (K × N) the weights, and ``y = x W``.

Source: QIGen §2, equations 1 and 2; §3, Algorithm 1; errata Q1 to Q5.
"""

from typing import Annotated

import numpy as np

from lowbit.arrays import F32, F64
from lowbit.contract.operation import BOUNDED, operation
from lowbit.contract.signature import Shape, checked
from lowbit.quantization.affine import QuantizedMatrix
from lowbit.quantization.packing import Codes, unpack

# **The identities.** Each equation is two functions, its left and its right side. If every partial sum is exactly
# representable, both are equal to the bit in any order of the sum; the tests use such inputs.


def equation_1_left(y: F64, codes: F64, scale: float, zero: float) -> float:
    r""":math:`\langle y, s\,(x_q - z)\rangle`: every code is converted to a weight first.

    Args:
        y: float64, n activations.
        codes: float64, n codes.
        scale: the one scale :math:`s`.
        zero: the one zero :math:`z`.

    Source: QIGen §2, equation 1, left side.
    """
    return float(np.sum(y * (scale * (codes - zero))))


def equation_1_right(y: F64, codes: F64, scale: float, zero: float) -> float:
    r""":math:`s\,(\langle y, x_q\rangle - z\,\langle y, 1\rangle)`: scale and zero are applied once, at the end.

    >>> y, codes = np.array([1.0, -2.0, 3.0]), np.array([7.0, 0.0, 15.0])
    >>> equation_1_left(y, codes, scale=0.5, zero=8.0)
    18.0
    >>> equation_1_right(y, codes, scale=0.5, zero=8.0)
    18.0

    Args: as `equation_1_left`.

    Source: QIGen §2, equation 1, right side.
    """
    return float(scale * (np.sum(y * codes) - zero * np.sum(y)))


def equation_2_left(y: list[F64], codes: list[F64], scales: list[float], zeros: list[float]) -> float:
    r""":math:`\sum_i \langle y_i, s_i\,(x_{iq} - z_i)\rangle`.

    Args:
        y: P groups of float64 activations.
        codes: P groups of float64 codes.
        scales: P scales.
        zeros: P zeros.

    Source: QIGen §2, equation 2, left side.
    """
    return sum(equation_1_left(*group) for group in zip(y, codes, scales, zeros, strict=True))


def equation_2_right(y: list[F64], codes: list[F64], scales: list[float], zeros: list[float]) -> float:
    r""":math:`\sum_i s_i \langle y_i, x_{iq}\rangle - \sum_i s_i z_i \langle y_i, 1\rangle`, errata Q3.

    >>> y = [np.array([1.0, -2.0]), np.array([3.0, 1.0])]
    >>> codes = [np.array([7.0, 0.0]), np.array([15.0, 2.0])]
    >>> equation_2_left(y, codes, scales=[0.5, 2.0], zeros=[8.0, 4.0])
    69.5
    >>> equation_2_right(y, codes, scales=[0.5, 2.0], zeros=[8.0, 4.0])
    69.5

    Args: as `equation_2_left`.

    Source: QIGen §2, equation 2, right side; errata Q3.
    """
    products = sum(s * float(np.sum(yi * qi)) for yi, qi, s in zip(y, codes, scales, strict=True))
    corrections = sum(s * z * float(np.sum(yi)) for yi, s, z in zip(y, scales, zeros, strict=True))
    return products - corrections


# **Algorithm 1, the quantised GEMV.** One vector times one matrix. The lanes of the paper's register hold neighbouring
# *output columns*, so nothing is ever summed across lanes (errata Q5). Here a register is as wide as the matrix: all N
# columns are lanes, and the loop over the rows is the algorithm. It runs in float64, where the product of an activation
# and a code is exact and the error of the sum is far below any float32 bound. It uses no library sum, so that the
# result has the same bits on every machine.


@checked
def qgemv(x: Annotated[F32, Shape("matrix.rows")], matrix: QuantizedMatrix) -> F64:
    """``y = x W`` by equation 2, for one activation vector.

    >>> from lowbit.quantization.affine import quantize
    >>> weights = np.eye(8, dtype=np.float32) * 15
    >>> qgemv(np.arange(8, dtype=np.float32), quantize(weights, bits=4, group_size=8))
    array([  0.,  15.,  30.,  45.,  60.,  75.,  90., 105.])

    Args:
        x: float32, K.
        matrix: K × N.

    Returns:
        float64, N: the value that a backend's float32 result is measured against.

    Raises:
        ArgumentError: `x` is not K contiguous float32 numbers.

    Source: QIGen §3, Algorithm 1; equation 2; errata Q3, Q5.
    """
    return qgemv_codes(x, unpack(matrix.words, matrix.bits), matrix)


def qgemv_codes(x: F32, codes: Codes, matrix: QuantizedMatrix) -> F64:
    """The same for one or several vectors, K or T × K, and unpacked codes: float64, N or T × N."""
    y = np.zeros((*x.shape[:-1], matrix.columns))
    offsets = group_offsets(matrix)
    with np.errstate(invalid="ignore", over="ignore"):  # a non-finite x silently gives a non-finite y (clause C5)
        for group in range(matrix.groups):
            rows = matrix.group_rows(group)
            accumulator, x_sum = np.zeros(y.shape), np.zeros((*x.shape[:-1], 1))
            for row in range(rows.start, rows.stop):
                x_i = x[..., row, None].astype(np.float64)  # broadcast
                accumulator += x_i * codes[row]  # fmadd: one product a lane
                x_sum += x_i
            y += matrix.scales[group] * accumulator + offsets[group] * x_sum
    return y


def group_offsets(matrix: QuantizedMatrix) -> F64:
    r"""The offset :math:`o_i = -s_i z_i` of each group, float64, G × N: the exact value of a code of 0."""
    zeros = matrix.zeros.astype(np.float64)
    return zeros if matrix.convention == "minimum" else -matrix.scales.astype(np.float64) * zeros


# **The quantised GEMM** is the same for several vectors at once, as in the prefill of a prompt: each row of codes is
# read once and multiplied into T accumulators. Each row of the result depends on its own row of activations only.


@checked
def qgemm(x: Annotated[F32, Shape("T", "matrix.rows")], matrix: QuantizedMatrix) -> F64:
    """``Y = X W`` by equation 2, the T accumulators side by side.

    Args:
        x: float32, T × K.
        matrix: K × N.

    Returns:
        float64, T × N; row t equals ``qgemv(x[t], matrix)`` to the bit.

    Raises:
        ArgumentError: `x` is not T × K contiguous float32 numbers.

    Source: QIGen §3.
    """
    return qgemv_codes(x, unpack(matrix.words, matrix.bits), matrix)


# **What a backend promises.** The bound itself is derived in the chapter `bounds`.

operation(
    "linear.qgemv",
    "Vector times quantised matrix",
    qgemv,
    promise=BOUNDED,
    source="QIGen §2 equations 1, 2; §3 Algorithm 1; errata Q3, Q5",
    clauses={
        "C1": "Where every partial sum is exactly representable in the declared accumulator, y equals x W exactly.",
        "C2": "For finite x without overflow, each element of y differs from x W by at most the bound derived from "
        "the declared arithmetic.",
        "C3": "The result is float32, N, and depends on nothing but x and the matrix: the same call gives the same "
        "bits.",
        "C4": "All-zero x gives zeros; a one-hot x gives the row of weights within the bound.",
        "C5": "A NaN or an infinity in x makes every element of y NaN or infinite: an error upstream is not hidden.",
    },
)

operation(
    "linear.qgemm",
    "Matrix times quantised matrix",
    qgemm,
    promise=BOUNDED,
    source="QIGen §2 equations 1, 2; §3",
    clauses={
        "C1": "Where every partial sum is exactly representable in the declared accumulator, Y equals X W exactly.",
        "C2": "For finite X without overflow, each element of Y differs from X W by at most the bound derived from "
        "the declared arithmetic.",
        "C3": "The result is float32, T × N; row t depends on nothing but row t of X and the matrix; the same call "
        "gives the same bits.",
        "C4": "A NaN or an infinity in row t makes every element of row t of Y NaN or infinite, and no other row.",
    },
)
