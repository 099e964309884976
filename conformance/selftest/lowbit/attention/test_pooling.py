"""Pooling: against rational arithmetic, and what the mean does and does not commute with."""

from fractions import Fraction

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from lowbit.arrays import F32, F64
from lowbit.attention.attention import attend
from lowbit.attention.pooling import METHODS, KeyValueProjection, convert, pool
from lowbit.attention.rope import Layout, half_split, interleaved, rotate, rotation
from lowbit.errors import ArgumentError

HEADS, GROUPS, DIM, HIDDEN = 6, 2, 8, 24


def normal(*shape: int, seed: int = 0) -> F32:
    return np.random.Generator(np.random.PCG64(seed)).normal(size=shape).astype(np.float32)


def layer(kind: str = "self", seed: int = 0) -> KeyValueProjection:
    return KeyValueProjection(
        kind,  # type: ignore[arg-type]  # one of the three
        HEADS,
        normal(HIDDEN, HEADS * DIM, seed=seed),
        normal(HIDDEN, HEADS * DIM, seed=seed + 1),
        normal(HEADS * DIM, seed=seed + 2),
        normal(HEADS * DIM, seed=seed + 3),
    )


SMALL = st.floats(-(2.0**20), 2.0**20, width=32, allow_subnormal=False)


@given(hnp.arrays(np.float32, (2, 12), elements=SMALL), st.sampled_from([(2, 1), (6, 2), (6, 3), (12, 4)]))
def test_the_mean_is_the_rational_mean(weights: F32, split: tuple[int, int]) -> None:
    """Each channel is within half a unit in the last place, and a hair, of the mean in rational arithmetic."""
    heads, groups = split
    dim, members = 12 // heads, heads // groups
    given = pool(weights, heads, groups)
    for row in range(2):
        for group in range(groups):
            for channel in range(dim):
                parts = [weights[row, (group * members + i) * dim + channel] for i in range(members)]
                exact = sum((Fraction(float(part)) for part in parts), Fraction()) / members
                error = abs(Fraction(float(given[row, group * dim + channel])) - exact)
                largest = max(abs(float(part)) for part in parts)
                assert error <= Fraction(2.0**-24) * abs(exact) + Fraction(2.0**-48 * largest) + Fraction(2.0**-150)


@pytest.mark.parametrize("method", METHODS)
def test_a_duplicated_checkpoint_converts_without_loss(method: str) -> None:
    """Heads repeated r times, weights and biases, come back to the bit, whatever r; attention stays the same."""
    for members in (1, 2, 3, 5, 7, 12):
        original = KeyValueProjection(
            "self",
            2,
            normal(HIDDEN, 2 * DIM),
            normal(HIDDEN, 2 * DIM, seed=1),
            normal(2 * DIM),
            normal(2 * DIM, seed=3),
        )

        def repeated(array: F32, members: int = members) -> F32:
            heads = array.reshape(*array.shape[:-1], 2, 1, DIM)
            return np.ascontiguousarray(np.repeat(heads, members, axis=-2).reshape(*array.shape[:-1], -1))

        parts = ("key", "value", "key_bias", "value_bias")
        many = KeyValueProjection("self", 2 * members, *(repeated(getattr(original, part)) for part in parts))
        back = convert(many, 2, method)  # type: ignore[arg-type]  # one of the two
        assert back.heads == 2
        for part in parts:
            np.testing.assert_array_equal(getattr(back, part), getattr(original, part))
        queries, tokens = normal(4, 2 * members, DIM).astype(np.float64), normal(4, HIDDEN).astype(np.float64)
        before, after = (attend(queries, *keys_and_values(tokens, each)) for each in (many, back))
        np.testing.assert_allclose(before, after, rtol=1e-12, atol=1e-12)


def keys_and_values(tokens: F64, layer: KeyValueProjection) -> tuple[F64, F64]:
    """heads × T × d_h each."""
    assert layer.key_bias is not None
    assert layer.value_bias is not None
    keys, values = tokens @ layer.key + layer.key_bias, tokens @ layer.value + layer.value_bias
    first, second = (part.reshape(len(tokens), layer.heads, -1).swapaxes(0, 1) for part in (keys, values))
    return first, second


def test_a_sum_in_float32_would_lose() -> None:
    """What the chapter says of float32: from three heads on, the mean of equal numbers can miss them."""
    w = normal(10000)
    for members, share in ((2, 0.0), (3, 0.1), (8, 0.4)):
        total = np.zeros_like(w)
        for _ in range(members):
            total += w
        assert (total / np.float32(members) != w).mean() >= share
        duplicated = np.ascontiguousarray(np.repeat(w[:, None], members, axis=1))
        np.testing.assert_array_equal(pool(duplicated, members, 1)[:, 0], w)


@pytest.mark.parametrize("make", [half_split, interleaved])
def test_the_mean_commutes_with_the_rotation(make: object) -> None:
    """Keys of pooled weights, rotated, are the means of rotated keys, in either layout: to rounding."""
    layout: Layout = make(DIM)  # type: ignore[operator]  # a function
    turn = rotation(layout, base=10000.0, start=3, count=5)
    source, pooled = layer(), convert(layer(), GROUPS)
    tokens = normal(5, HIDDEN, seed=9).astype(np.float64)

    def rotated(of: KeyValueProjection) -> F64:
        return rotate(np.ascontiguousarray(keys_and_values(tokens, of)[0].swapaxes(0, 1)), turn)

    means = rotated(source).reshape(5, GROUPS, HEADS // GROUPS, DIM).mean(axis=2)
    np.testing.assert_allclose(rotated(pooled), means, rtol=1e-5, atol=1e-5)


def test_the_mean_commutes_with_a_change_of_layout() -> None:
    """One permutation of channels in every head, before or after: equal to the bit."""
    weights = layer().key
    order = np.arange(DIM).reshape(2, -1).T.reshape(-1)  # half-split to interleaved

    def relaid(array: F32) -> F32:
        return np.ascontiguousarray(array.reshape(HIDDEN, -1, DIM)[:, :, order].reshape(HIDDEN, -1))

    np.testing.assert_array_equal(pool(relaid(weights), HEADS, GROUPS), relaid(pool(weights, HEADS, GROUPS)))


def test_the_mean_does_not_commute_with_a_permutation_of_each_head() -> None:
    """Heads sorted each by its own norms, as K-sort does, have means that no permutation of the mean gives."""
    weights = layer().key.reshape(HIDDEN, HEADS, DIM)
    order = np.argsort(np.linalg.norm(weights, axis=0), axis=-1)  # heads × d_h
    by_head = np.take_along_axis(weights, order[np.newaxis], axis=2).reshape(HIDDEN, -1)
    sorted_first = pool(np.ascontiguousarray(by_head), HEADS, GROUPS)
    pooled_first = pool(layer().key, HEADS, GROUPS)
    first, second = (sorted(each.T.tolist()) for each in (sorted_first, pooled_first))
    assert first != second  # not even as sets of columns


@pytest.mark.parametrize("kind", ["self", "cross"])
def test_biases_and_kinds(kind: str) -> None:
    """Keys of the converted layer are the means of the old keys, biases included; without biases there are none."""
    source = layer(kind)
    pooled = convert(source, GROUPS)
    tokens = normal(5, HIDDEN, seed=9).astype(np.float64)
    old, _ = keys_and_values(tokens, source)
    new, _ = keys_and_values(tokens, pooled)
    np.testing.assert_allclose(new, old.reshape(GROUPS, -1, 5, DIM).mean(axis=1), rtol=1e-5, atol=1e-5)
    assert convert(KeyValueProjection("self", HEADS, source.key, source.value), 1).key_bias is None


def test_mistakes_are_refused() -> None:
    """An encoder's self-attention, groups that do not divide and parts that do not fit, each by its name."""
    with pytest.raises(ArgumentError, match="kind is 'encoder'"):
        convert(layer("encoder"), GROUPS)
    with pytest.raises(ArgumentError, match="groups is 4"):
        convert(layer(), 4)
    with pytest.raises(ArgumentError, match="kind"):
        layer("decoder")
    with pytest.raises(ArgumentError, match="key_bias"):
        KeyValueProjection("self", HEADS, layer().key, layer().value, normal(3))
    with pytest.raises(ArgumentError, match="columns of key"):
        KeyValueProjection("self", 5, layer().key, layer().value)


@pytest.mark.parametrize("members", [1, 2, 3, 8])
def test_a_mean_of_negative_zeros_is_one(members: int) -> None:
    """−0 + −0 is −0 and so is its quotient; one +0 among them makes the sum +0, wherever it stands."""
    weights = np.full((2, members), -0.0, np.float32)
    assert np.signbit(pool(weights, heads=members, groups=1)).all()
    for place in range(members):
        one = weights.copy()
        one[:, place] = 0.0
        assert not np.signbit(pool(one, heads=members, groups=1)).any()
