"""The products' own C++: within the declared bound, and the same bits by every way through the kernel.

A launch for one token and one for eight, codes taken for floats and codes turned into them, words that are on their way
while others are multiplied and words that are not: what comes out must not tell.
"""

from typing import Any

import numpy as np
import pytest
from cuda_cases import floats
from cuda_cases_linear import ordinary, spans
from cuda_tools import needs_compiler

from lowbit.arrays import F32
from lowbit.linear.bounds import linear_bound
from lowbit.linear.linear import qgemv
from lowbit.quantization.affine import QuantizedMatrix
from lowbit.quantization.packing import BITS, CODES_PER_UNIT
from lowbit_cuda.arithmetic import PRODUCTS
from lowbit_cuda.kernels.layouts import MatrixLayout
from lowbit_cuda.kernels.table import kernel
from lowbit_gpusim.shim import build
from lowbit_gpusim.shim.launching import Launch
from lowbit_gpusim.shim.runner import Watched

pytestmark = needs_compiler


@pytest.fixture(scope="module")
def watched() -> Watched:
    """The products with float16 scales."""
    return Watched([build.KERNELS / f"linear_b{bits}_f16.cuh" for bits in BITS])


def product(watched: Watched, matrix: QuantizedMatrix, x: F32, tokens: int) -> F32:
    """x W by the kernel for so many tokens at once."""
    described = kernel("gemm", bits=matrix.bits, tokens=tokens)
    y = np.zeros(len(x) * matrix.columns, np.float32)
    numbers = {"tokens": len(x), **MatrixLayout.of(matrix).numbers}
    watched.run(Launch(described, {"y": y, "x": x.ravel(), **spans(matrix)}, numbers))
    return y.reshape(len(x), -1)


def matrices(bits: int) -> list[QuantizedMatrix]:
    """Groups of each kind: several in a segment, one, one and a half, and a whole column; of each convention."""
    unit = CODES_PER_UNIT[bits]
    kinds: list[tuple[int, int, Any]] = [(256, 32, "minimum"), (256, 128, "zero_point"), (96 * 5, 96, "minimum")]
    kinds += [(224 + unit, 224 + unit, "zero_point"), (3 * unit, unit, "minimum")]
    return [ordinary(bits, rows, 33, group, convention, "float16") for rows, group, convention in kinds]


@pytest.mark.parametrize("bits", BITS)
def test_the_declared_bound_is_kept(watched: Watched, bits: int) -> None:
    """Every element, with the arithmetic that the backend declares; and the bound is one that means something: the
    result with one code of the first column changed by one is outside it."""
    for matrix in matrices(bits):
        x = floats(bits, 1, matrix.rows)
        exact = qgemv(x[0], matrix)
        limit = linear_bound(x[0], matrix, PRODUCTS, exact).limit
        given = product(watched, matrix, x, 1)[0]
        assert (np.abs(given - exact) <= limit).all(), MatrixLayout.of(matrix)
        changed = matrix.words.copy()
        changed[0, 0] ^= 1
        other = QuantizedMatrix(
            changed, matrix.scales, matrix.zeros, bits, matrix.rows, matrix.group_size, matrix.convention
        )
        assert np.abs(qgemv(x[0], other)[0] - given[0]) > limit[0]


@pytest.mark.parametrize("bits", BITS)
def test_eight_tokens_at_once_have_the_bits_of_one(watched: Watched, bits: int) -> None:
    """Also where they are not all there, and where there are more."""
    for matrix in matrices(bits):
        x = floats(bits, 11, matrix.rows)
        alone = np.concatenate([product(watched, matrix, x[t : t + 1], 1) for t in range(len(x))])
        assert (product(watched, matrix, x, 1) == alone).all()
        for count in (1, 3, 5, 11):
            assert (product(watched, matrix, x[:count], 8) == alone[:count]).all()


@pytest.mark.parametrize("bits", BITS)
def test_codes_taken_for_floats_have_the_bits_of_codes_turned_into_them(watched: Watched, bits: int) -> None:
    """A number too large or too small for the quick way changes no bit of what it does not enter, and what it does
    enter is within the bound. The two ways are taken: the product of one token alone is the quick one."""
    for matrix in matrices(bits):
        x = floats(bits, 2, matrix.rows)
        quick = product(watched, matrix, x[:1], 1)
        for power in (-60, 60, -140):
            x[1] = floats(bits + 1, matrix.rows)
            x[1, ::3] *= np.float32(2.0**power)
            both = product(watched, matrix, x, 8)
            assert (both[0] == quick[0]).all()
            exact = qgemv(x[1], matrix)
            assert (np.abs(both[1] - exact) <= linear_bound(x[1], matrix, PRODUCTS, exact).limit).all()
            assert (both[1] == product(watched, matrix, x[1:], 1)[0]).all()


@pytest.mark.parametrize("bits", BITS)
def test_powers_of_two_scale_every_bit(watched: Watched, bits: int) -> None:
    """Activations times a power of two give results times it, at both ends of the quick way and beyond them: neither
    way has a rounding that the other has not."""
    matrix = matrices(bits)[1]
    x = np.copysign(1 + np.abs(floats(bits, 1, matrix.rows)) % 1, floats(9, 1, matrix.rows))  # from 1 to 2
    plain = product(watched, matrix, x, 1)
    for power in (-60, -53, -52, -51, 51, 52, 53, 60):
        scaled = product(watched, matrix, np.ldexp(x, power).astype(np.float32), 1)
        assert (scaled == np.ldexp(plain, power).astype(np.float32)).all(), power


@pytest.mark.parametrize("tokens", [1, 8])
def test_what_is_not_finite_is_not_hidden(watched: Watched, tokens: int) -> None:
    """NaN or an infinity in a token leaves no finite number in its row, and changes no other."""
    matrix = matrices(4)[1]
    x = floats(1, 3, matrix.rows)
    plain = product(watched, matrix, x, tokens)
    for bad in (np.nan, np.inf, -np.inf):
        x[1, 17] = bad
        given = product(watched, matrix, x, tokens)
        assert not np.isfinite(given[1]).any()
        assert (given[[0, 2]] == plain[[0, 2]]).all()
