"""Equations 1 and 2 as identities on inputs whose sums are exact, and the products as sums of rational numbers."""

from fractions import Fraction
from typing import Any

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from lowbit.arrays import F64
from lowbit.errors import ArgumentError
from lowbit.linear.linear import equation_1_left, equation_1_right, equation_2_left, equation_2_right, qgemm, qgemv
from lowbit.quantization.affine import CONVENTIONS, Convention, quantize
from lowbit.quantization.packing import BITS, unpack

SCALES = st.sampled_from((0.25, 0.5, 1.0, 2.0))
ZEROS = st.integers(0, 15).map(float)


def vectors(low: int, high: int) -> st.SearchStrategy[F64]:
    return hnp.arrays(np.float64, 16, elements=st.integers(low, high).map(float))


@given(vectors(-99, 99), vectors(0, 15), SCALES, ZEROS)
def test_equation_1(y: F64, codes: F64, scale: float, zero: float) -> None:
    """Both sides of equation 1 are equal to the bit where every partial sum is exact."""
    assert equation_1_left(y, codes, scale, zero) == equation_1_right(y, codes, scale, zero)


@given(st.lists(st.tuples(vectors(-99, 99), vectors(0, 15), SCALES, ZEROS), min_size=1, max_size=5))
def test_equation_2(groups: list[tuple[F64, F64, float, float]]) -> None:
    """Both sides of equation 2, with the scale that errata Q3 restores, are equal to the bit."""
    y, codes, scales, zeros = (list(part) for part in zip(*groups, strict=True))
    assert equation_2_left(y, codes, scales, zeros) == equation_2_right(y, codes, scales, zeros)


def test_equation_2_as_printed_does_not_hold() -> None:
    """Without the scale in the last sum (as printed, errata Q3) one group already gives another number."""
    y, codes, scale, zero = np.array([1.0, 2.0]), np.array([3.0, 4.0]), 0.5, 8.0
    printed = scale * float(y @ codes) - zero * float(y.sum())
    assert printed != equation_2_left([y], [codes], [scale], [zero])


@given(st.sampled_from(BITS), st.sampled_from(CONVENTIONS), st.sampled_from((1, 5, 16, 32)), st.integers(0, 2**32))
def test_qgemv_is_the_product(bits: int, convention: Convention, group_size: int, seed: int) -> None:
    """qgemv agrees with the same sum in rational arithmetic to within float64 rounding of its gauge."""
    rng = np.random.default_rng(seed)
    weights, x = rng.normal(size=(32, 2)).astype(np.float32), rng.normal(size=32).astype(np.float32)
    matrix = quantize(weights, bits=bits, group_size=group_size, convention=convention)
    codes, y = unpack(matrix.words, bits), qgemv(x, matrix)
    for column in range(2):
        total = gauge = Fraction(0)
        for row in range(32):
            group = row // group_size
            s, z = Fraction(float(matrix.scales[group, column])), Fraction(float(matrix.zeros[group, column]))
            q, x_k = Fraction(int(codes[row, column])), Fraction(float(x[row]))
            total += x_k * (s * q + z if convention == "minimum" else s * (q - z))
            gauge += abs(x_k) * (s * q + abs(z) if convention == "minimum" else s * (q + z))
        assert abs(Fraction(float(y[column])) - total) <= gauge * 110 / 2**53


def test_qgemm_is_qgemv_row_by_row() -> None:
    """Each row of the GEMM has the bits of its own GEMV."""
    rng = np.random.default_rng(7)
    matrix = quantize(rng.normal(size=(64, 5)).astype(np.float32), bits=3, group_size=20)
    x = rng.normal(size=(4, 64)).astype(np.float32)
    np.testing.assert_array_equal(qgemm(x, matrix), np.stack([qgemv(row, matrix) for row in x]))


def test_an_array_of_another_library_is_named() -> None:
    """Not its dtype is wrong, which reads like one that is allowed, but whose array it is."""
    from lowbit.linear.stored import gemv
    from lowbit.tensor_formats.stored import quantize

    class Tensor:
        dtype = "torch.float32"

    weights = quantize(np.ones((4, 32), np.float32), "q8_0")
    others: dict[str, Any] = {r"a \w+ Tensor": Tensor(), "a list": [1.0] * 32, "None": None}
    for kind, x in others.items():
        with pytest.raises(ArgumentError, match=rf"^x is {kind}; allowed: a numpy array of float32, float16 or bf"):
            gemv(x, weights)
