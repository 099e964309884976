"""Quantisation: what rounding to the nearest of 2^b points must satisfy, and matrices that must be refused."""

from dataclasses import replace
from typing import Any

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from lowbit.arrays import F32
from lowbit.errors import ArgumentError
from lowbit.quantization.affine import CONVENTIONS, Convention, QuantizedMatrix, dequantize, quantize
from lowbit.quantization.packing import BITS, unpack
from lowbit_conformance.suite.clauses.test_affine import assert_same_matrix

WEIGHTS = hnp.arrays(
    np.float32, (32, 3), elements=st.floats(-(2.0**20), 2.0**20, width=32).filter(lambda w: w == 0 or abs(w) > 2**-60)
)


@given(WEIGHTS, st.sampled_from(BITS), st.sampled_from((1, 3, 8, 31, 32)), st.sampled_from(CONVENTIONS))
def test_error_is_half_a_step(weights: F32, bits: int, group_size: int, convention: Convention) -> None:
    """No weight moves by more than half a scale, or a whole one under zero_point, and the roundings of float32.

    Under zero_point the zero is rounded too, so a weight at an end of the range may clamp up to half a step away.
    """
    matrix = quantize(weights, bits=bits, group_size=group_size, convention=convention)
    scale = np.repeat(matrix.scales, group_size, axis=0)[:32].astype(np.float64)
    steps = 0.5 if convention == "minimum" else 1.0
    error = np.abs(dequantize(matrix).astype(np.float64) - weights)
    rounding = 2.0**-22 * (scale * 2**bits + np.abs(weights))
    assert (error <= steps * scale + rounding).all()


@given(WEIGHTS, st.sampled_from(BITS), st.sampled_from((1, 5, 32)))
def test_zero_is_a_code_under_zero_point(weights: F32, bits: int, group_size: int) -> None:
    """A weight of zero comes back as exactly zero: zero_point extends every range to contain it."""
    weights[::4] = 0
    matrix = quantize(weights, bits=bits, group_size=group_size, convention="zero_point")
    assert (dequantize(matrix)[::4] == 0).all()


def test_codes_are_best_for_the_stored_scale() -> None:
    """float16 rounds this scale; a weight's code is the nearest multiple of the stored scale, not of the real one."""
    weights = np.zeros((4, 1), np.float32)
    weights[:, 0] = [0, 255 * 1.0004883, 128, 64]
    matrix = quantize(weights, bits=8, group_size=4, scale_dtype="float16")
    stored = matrix.scales[0, 0].astype(np.float32)
    nearest = np.rint(weights[:, 0] / stored)
    np.testing.assert_array_equal(unpack(matrix.words, 8)[:, 0], np.clip(nearest, 0, 255))


def test_every_mistake_in_a_matrix_is_refused() -> None:
    """Each field that does not fit the others is named by the error."""
    good = quantize(np.linspace(-1, 1, 64, dtype=np.float32).reshape(32, 2), bits=4, group_size=16)
    infinite, negative = good.zeros.copy(), good.scales.copy()
    infinite[0, 1], negative[1, 0] = np.inf, -1
    mistakes: list[tuple[str, dict[str, Any]]] = [
        ("bits", {"bits": 5}),
        ("rows", {"rows": 30}),
        ("group_size", {"group_size": 0}),
        ("group_size", {"group_size": 33}),
        ("convention", {"convention": "symmetric"}),
        ("words", {"words": good.words[:-1]}),
        ("words", {"words": good.words.astype(np.int32)}),
        ("scales", {"scales": good.scales[:1]}),
        ("scales", {"scales": good.scales.astype(np.float64)}),
        ("scales", {"scales": negative}),
        ("zeros", {"zeros": infinite}),
        ("zeros", {"zeros": good.zeros.astype(np.float16)}),
        ("zeros", {"convention": "zero_point"}),
        ("zeros", {"convention": "zero_point", "zeros": np.full((2, 2), 16, np.uint8)}),
    ]
    for name, change in mistakes:
        with pytest.raises(ArgumentError, match=name):
            replace(good, **change)


def test_bytes_are_those_of_the_paper() -> None:
    """Column-wise with float32 scales and b-bit zeros: bNM + 32M + bM bits, QIGen §3."""
    matrix = quantize(np.ones((64, 10), np.float32), bits=4, group_size=64, convention="zero_point")
    assert isinstance(matrix, QuantizedMatrix)
    assert matrix.nbytes * 8 == 4 * 64 * 10 + 32 * 10 + 4 * 10


def test_a_minimum_of_both_zeros_may_be_either() -> None:
    """The suite takes either zero for the least of both, and no other zero for one of −0 or of +0 alone."""
    mixed = np.array([[0.0, -0.0, 0.0], [-0.0, -0.0, 0.0], *[[1.0, 1.0, 1.0]] * 6], np.float32)
    right = quantize(mixed, bits=4, group_size=8)
    for column, free in enumerate((True, False, False)):
        zeros = right.zeros.copy()
        zeros[0, column] *= -1
        other = replace(right, zeros=zeros)
        assert dequantize(other).tobytes() == dequantize(right).tobytes()
        if free:
            assert_same_matrix(other, right, mixed)
            continue
        with pytest.raises(AssertionError, match="WRONG: zeros"):
            assert_same_matrix(other, right, mixed)
