"""The rotary embedding against the matrix that is never built, and against what it is for."""

import math
from collections.abc import Callable

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from lowbit.arrays import F64
from lowbit.attention.rope import (
    Frequencies,
    Scaling,
    dynamic_scaling,
    half_split,
    interleaved,
    linear_scaling,
    llama3_scaling,
    long_scaling,
    partial_scaling,
    proportional_scaling,
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


def test_partial_rotation_is_that_of_a_smaller_head() -> None:
    """The first channels rotate as a head of their own, with its scaling; the others are left as they are."""
    rng = np.random.default_rng(4)
    x = rng.normal(size=(3, 2, 16))
    for inner in (None, Scaling((1.0, 2.0, 3.0), 1.5)):
        frequencies = Frequencies(BASE, partial_scaling(16, 6, inner))
        small = rotation(half_split(6), BASE, 5, 3, inner)
        found = rotate(x, frequencies.rotation(16, 5, 3))
        np.testing.assert_array_equal(found[..., :6], rotate(np.ascontiguousarray(x[..., :6]), small))
        np.testing.assert_array_equal(found[..., 6:], x[..., 6:])


def test_proportional_rotation_leaves_the_last_pairs() -> None:
    """The first pairs rotate as they do in the whole head, and both channels of the others are left as they are."""
    whole, part = rotation(half_split(8), BASE, 5, 3), Frequencies(BASE, proportional_scaling(8, 3)).rotation(8, 5, 3)
    np.testing.assert_array_equal(part.cos[:, [0, 1, 2, 4, 5, 6]], whole.cos[:, [0, 1, 2, 4, 5, 6]])
    np.testing.assert_array_equal(part.cos[:, [3, 7]], 1.0)
    np.testing.assert_array_equal(part.sin[:, [3, 7]], 0.0)


def test_dynamic_scaling_raises_the_base() -> None:
    """The factors are those of a base that grows with the length; up to the original length they are 1."""
    base = BASE * (4.0 * 48 / 16 - 3.0) ** (16 / 14)
    raised, plain = Frequencies(BASE, dynamic_scaling(16, 4.0, 16, 48)), Frequencies(base)
    np.testing.assert_allclose(raised.of(np.arange(8), 16), plain.of(np.arange(8), 16), rtol=1e-12)
    assert dynamic_scaling(16, 4.0, 16, 16) == dynamic_scaling(16, 4.0, 16, 3) == Scaling((1.0,) * 8)


PARTS: list[tuple[str, Callable[[], object]]] = [
    ("channels is 3; allowed: an even number", lambda: partial_scaling(8, 3)),
    ("channels is 10; allowed: an integer from 2 to 8", lambda: partial_scaling(8, 10)),
    ("number of factors is 3; allowed: 2", lambda: partial_scaling(8, 4, Scaling((1.0,) * 3))),
    ("channels is 2; allowed: an even number, at least twice the 2 pairs", lambda: Scaling((1.0, 1.0), channels=2)),
    ("scaling of the rotation is inf", lambda: Scaling((math.inf, math.inf))),
    (r"scaling of the rotation is inf; allowed: finite", lambda: Scaling((1.0,), math.inf)),
    ("scaling of the rotation is nan", lambda: Scaling((1.0, math.nan))),
    ("pairs is 5; allowed: an integer from 1 to 4", lambda: proportional_scaling(8, 5)),
    ("factor is inf", lambda: proportional_scaling(8, 1, math.inf)),
    (r"factor is 0\.5; allowed: a finite number of at least 1", lambda: dynamic_scaling(8, 0.5, 16, 32)),
    ("head_dim is 2", lambda: dynamic_scaling(2, 2.0, 16, 32)),
    ("factor is inf; allowed: finite", lambda: long_scaling([1.0, math.inf], 2.0, 16)),
    ("factor is nan; allowed: finite", lambda: long_scaling([1.0], math.nan, 16)),
    ("original is 1; allowed", lambda: long_scaling([1.0], 2.0, 1)),
]


@pytest.mark.parametrize(("message", "make"), PARTS)
def test_parts_and_lengths_that_are_refused(message: str, make: Callable[[], object]) -> None:
    """Numbers out of range are named."""
    with pytest.raises(ArgumentError, match=message):
        make()


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
    for turns in (0.0, -1.0, 1e308, 1e-320, math.nan):
        with pytest.raises(ArgumentError, match=r"slow is .*; allowed: a number from"):
            yarn_scaling(8, BASE, 4.0, 64, slow=turns)
        with pytest.raises(ArgumentError, match=r"fast is .*; allowed: a number from"):
            yarn_scaling(8, BASE, 4.0, 64, fast=turns)
    with pytest.raises(ArgumentError, match=r"base is 1\.0; allowed: a finite number above 1"):
        yarn_scaling(8, 1.0, 4.0, 64)
