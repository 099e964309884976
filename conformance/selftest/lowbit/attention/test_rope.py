"""The rotary embedding against the matrix that is never built, and against what it is for."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from lowbit.arrays import F64
from lowbit.attention.rope import (
    Scaling,
    half_split,
    interleaved,
    linear_scaling,
    llama3_scaling,
    rotate,
    rotation,
    yarn_scaling,
)
from lowbit.errors import ArgumentError

BASE = 10000.0

even = st.integers(1, 16).map(lambda pairs: 2 * pairs)
positions = st.integers(0, 4096)


def heads(seed: int, head_dim: int, tokens: int = 1) -> F64:
    return np.random.default_rng(seed).standard_normal((tokens, 3, head_dim))


def printed_matrix(head_dim: int, position: int) -> F64:
    """R as K-sort prints it: block-diagonal, a rotation by m·θ_i for each pair of neighbours."""
    matrix = np.zeros((head_dim, head_dim))
    for i in range(head_dim // 2):
        angle = position * BASE ** (-2 * i / head_dim)
        matrix[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
    return matrix


@given(even, positions)
def test_interleaved_is_the_printed_matrix(head_dim: int, position: int) -> None:
    """Equation 4 by channels is the product with the block-diagonal R of K-sort §II.D."""
    x = heads(0, head_dim)
    turned = rotate(x, rotation(interleaved(head_dim), BASE, position, 1))
    np.testing.assert_allclose(turned[0], x[0] @ printed_matrix(head_dim, position).T, rtol=0, atol=1e-12)


@given(even, positions)
def test_half_split_is_interleaved_with_its_channels_moved(head_dim: int, position: int) -> None:
    """Errata B5: gather the even channels and then the odd ones, rotate half-split, and the result is moved alike."""
    x, order = heads(1, head_dim), np.r_[0:head_dim:2, 1:head_dim:2]
    moved = rotate(x[..., order], rotation(half_split(head_dim), BASE, position, 1))
    there = rotate(x, rotation(interleaved(head_dim), BASE, position, 1))[..., order]
    np.testing.assert_array_equal(moved, there)


@given(even, positions, positions, st.integers(0, 4096))
def test_scores_depend_on_the_distance_only(head_dim: int, m: int, n: int, shift: int) -> None:
    """⟨R_m q, R_n k⟩ = ⟨R_{m+t} q, R_{n+t} k⟩: what the embedding is for."""
    layout = half_split(head_dim)
    q, k = heads(2, head_dim), heads(3, head_dim)

    def score(at_q: int, at_k: int) -> F64:
        turned = rotate(q, rotation(layout, BASE, at_q, 1)) * rotate(k, rotation(layout, BASE, at_k, 1))
        return np.asarray(turned.sum(axis=-1))

    np.testing.assert_allclose(score(m, n), score(m + shift, n + shift), rtol=0, atol=1e-9)


def test_a_run_of_positions_is_each_of_them() -> None:
    """Rotating T tokens from a start equals rotating each at its own position; position 0 changes nothing."""
    layout, x = half_split(8), heads(4, 8, tokens=5)
    together = rotate(x, rotation(layout, BASE, 7, 5))
    for t in range(5):
        np.testing.assert_array_equal(together[t : t + 1], rotate(x[t : t + 1], rotation(layout, BASE, 7 + t, 1)))
    np.testing.assert_array_equal(rotate(x[:1], rotation(layout, BASE, 0, 1)), x[:1])


def test_the_printed_cosine_vector_is_no_rotation() -> None:
    """Errata B8: with θ₁ three times, as in the copy at hand, a pair changes its length; as ruled it does not."""
    layout = interleaved(4)
    ruled = rotation(layout, BASE, 100, 1)
    printed = rotation(layout, BASE, 100, 1)
    printed.cos[0, 2] = printed.cos[0, 0]
    x = heads(5, 4)
    length = np.linalg.norm(x[..., 2:], axis=-1)
    np.testing.assert_allclose(np.linalg.norm(rotate(x, ruled)[..., 2:], axis=-1), length, rtol=1e-12)
    assert not np.allclose(np.linalg.norm(rotate(x, printed)[..., 2:], axis=-1), length, rtol=1e-2)


def test_bad_arguments_are_named() -> None:
    """Odd heads, a base that is no base, positions below 0 and shapes of other heads."""
    for make in (half_split, interleaved):
        with pytest.raises(ArgumentError, match="head_dim is 5"):
            make(5)
        with pytest.raises(ArgumentError, match="head_dim is 0"):
            make(0)
    layout = half_split(4)
    for base in (0.0, float("inf"), float("nan")):
        with pytest.raises(ArgumentError, match="base"):
            rotation(layout, base, 0, 1)
    with pytest.raises(ArgumentError, match="start is -1"):
        rotation(layout, BASE, -1, 1)
    with pytest.raises(ArgumentError, match="count is 0"):
        rotation(layout, BASE, 0, 0)
    for shape in ((2, 1, 4), (1, 1, 6), (1, 4)):
        with pytest.raises(ArgumentError, match="shape of x"):
            rotate(np.zeros(shape), rotation(layout, BASE, 0, 1))


# Scaling.


def test_linear_scaling_divides_positions() -> None:
    """Position 8 of a rotation that is scaled by 8 is position 1 of the plain one."""
    layout = half_split(16)
    scaled, plain = rotation(layout, BASE, 8, 1, linear_scaling(16, 8.0)), rotation(layout, BASE, 1, 1)
    np.testing.assert_allclose(scaled.cos, plain.cos, rtol=0, atol=1e-15)
    np.testing.assert_allclose(scaled.sin, plain.sin, rtol=0, atol=1e-15)


def test_llama3_scaling_by_wavelengths() -> None:
    """Pair by pair, by the three cases of the reference implementation; each of them occurs."""
    seen = set()
    for pair, factor in enumerate(llama3_scaling(128, 500000.0, 8.0, 1.0, 4.0, 8192).factors):
        wavelength = 2 * np.pi * 500000.0 ** (2 * pair / 128)
        if wavelength < 8192 / 4:
            case, expected = "fast", 1.0
        elif wavelength > 8192 / 1:
            case, expected = "slow", 8.0
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            case, expected = "between", 1 / ((1 - smooth) / 8.0 + smooth)
        seen.add(case)
        assert factor == pytest.approx(expected, rel=1e-12)
    assert seen == {"fast", "slow", "between"}


def test_a_magnitude_scales_both_cosines_and_sines() -> None:
    """Lengths grow by it, and angles stay."""
    layout = interleaved(4)
    large, plain = rotation(layout, BASE, 3, 2, Scaling((1.0, 1.0), 1.5)), rotation(layout, BASE, 3, 2)
    np.testing.assert_array_equal(large.cos, 1.5 * plain.cos)
    np.testing.assert_array_equal(large.sin, 1.5 * plain.sin)


def test_scalings_that_are_refused() -> None:
    """Numbers out of range, and factors for other heads."""
    with pytest.raises(ArgumentError, match="number of factors is 2; allowed: 4"):
        rotation(half_split(8), BASE, 0, 1, linear_scaling(4, 2.0))
    with pytest.raises(ArgumentError, match=r"scaling of the rotation is 0\.0"):
        linear_scaling(8, 0.0)
    with pytest.raises(ArgumentError, match="high is 1"):
        llama3_scaling(8, BASE, 8.0, 1.0, 1.0, 64)
    with pytest.raises(ArgumentError, match="factor is nan"):
        llama3_scaling(8, BASE, float("nan"), 1.0, 4.0, 64)
    with pytest.raises(ArgumentError, match="original is 0"):
        yarn_scaling(8, BASE, 4.0, 0)
    with pytest.raises(ArgumentError, match=r"base is 1\.0; allowed: a finite number above 1"):
        yarn_scaling(8, 1.0, 4.0, 64)
