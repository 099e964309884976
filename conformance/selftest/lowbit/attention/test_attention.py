"""Grouped-query attention against three nested loops, and its cache."""

import math

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from lowbit.arrays import F64
from lowbit.attention.attention import KeyValueCache, attend
from lowbit.errors import ArgumentError
from lowbit.linear.elementary import softmax


def by_loops(queries: F64, keys: F64, values: F64) -> F64:
    """The formula of the chapter, one query at a time; keys and values S × G × d_h."""
    tokens, heads, head_dim = queries.shape
    length, kv_heads, _ = keys.shape
    out = np.zeros_like(queries)
    for t in range(tokens):
        seen = length - tokens + t + 1
        for h in range(heads):
            j = h // (heads // kv_heads)  # errata G1
            scores = [float(queries[t, h] @ keys[u, j]) / math.sqrt(head_dim) for u in range(seen)]
            weights = [math.exp(score) for score in scores]
            for u in range(seen):
                out[t, h] += weights[u] / sum(weights) * values[u, j]
    return out


def random_case(seed: int, tokens: int, length: int, group: int, kv_heads: int) -> tuple[F64, F64, F64]:
    rng, head_dim = np.random.default_rng(seed), 4
    queries = rng.standard_normal((tokens, group * kv_heads, head_dim))
    return queries, rng.standard_normal((length, kv_heads, head_dim)), rng.standard_normal((length, kv_heads, head_dim))


@given(st.integers(0, 99), st.integers(1, 5), st.integers(0, 5), st.integers(1, 3), st.integers(1, 3))
def test_the_formula(seed: int, tokens: int, before: int, group: int, kv_heads: int) -> None:
    """Prefill, decode and what lies between; multi-head (r = 1), multi-query (G = 1) and grouped."""
    queries, keys, values = random_case(seed, tokens, before + tokens, group, kv_heads)
    result = attend(queries, keys.swapaxes(0, 1), values.swapaxes(0, 1))
    np.testing.assert_allclose(result, by_loops(queries, keys, values), rtol=0, atol=1e-12)


def test_groups_are_neighbours() -> None:
    """Errata G1: with values that carry the number of their key-value head, head h reads ⌊h / r⌋."""
    values = np.arange(3.0)[:, np.newaxis, np.newaxis] * np.ones((3, 2, 4))
    result = attend(np.ones((1, 6, 4)), np.ones((3, 2, 4)), values)
    np.testing.assert_array_equal(result[0, :, 0], [0, 0, 1, 1, 2, 2])


def test_prefill_is_decode_step_by_step() -> None:
    """All tokens at once, and one after another through the cache, give the same rows."""
    queries, keys, values = random_case(1, 9, 9, 2, 3)
    cache = KeyValueCache(kv_heads=3, head_dim=4, capacity=1)
    rows = []
    for t in range(9):
        cache.append(keys[t : t + 1], values[t : t + 1])
        rows.append(attend(queries[t : t + 1], cache.keys, cache.values))
    prefill = attend(queries, keys.swapaxes(0, 1), values.swapaxes(0, 1))
    np.testing.assert_allclose(np.concatenate(rows), prefill, rtol=0, atol=1e-13)


def test_nothing_is_seen_ahead() -> None:
    """The first rows do not change when later keys and values do, not even to NaN-free extremes."""
    queries, keys, values = random_case(2, 6, 6, 2, 1)
    first = attend(queries, keys.swapaxes(0, 1), values.swapaxes(0, 1))
    keys[4:], values[4:] = 1e6, -1e6
    second = attend(queries, keys.swapaxes(0, 1), values.swapaxes(0, 1))
    np.testing.assert_array_equal(first[:4], second[:4])
    assert not np.array_equal(first[4:], second[4:])


def test_large_scores_do_not_overflow() -> None:
    """The maximum is taken out first; −∞ is exactly 0."""
    np.testing.assert_array_equal(softmax(np.array([[1e300, 1e300], [-1e300, 1e300]])), [[0.5, 0.5], [0, 1]])
    assert softmax(np.array([0.0, -np.inf]))[1] == 0


def test_the_cache_keeps_everything_while_it_grows() -> None:
    """Tokens added in uneven pieces beyond the capacity come back in order, and growing is by doubling."""
    rng, cache, added = np.random.default_rng(3), KeyValueCache(kv_heads=2, head_dim=4, capacity=2), []
    capacities = set()
    for tokens in (1, 1, 3, 1, 40, 1, 1):
        keys = rng.standard_normal((tokens, 2, 4))
        cache.append(keys, -keys)
        added.append(keys)
        capacities.add(cache.keys.base.shape[1] if cache.keys.base is not None else 0)
    expected = np.concatenate(added).swapaxes(0, 1)
    np.testing.assert_array_equal(cache.keys, expected)
    np.testing.assert_array_equal(cache.values, -expected)
    assert len(cache) == 48
    assert capacities == {2, 5, 10, 46, 92}


def test_shapes_that_do_not_belong_together_are_named() -> None:
    """Heads that do not divide, channels that differ, more queries than keys."""
    keys = np.zeros((2, 3, 4))
    with pytest.raises(ArgumentError, match="query heads is 3; allowed: a multiple of the 2"):
        attend(np.zeros((1, 3, 4)), keys, keys)
    with pytest.raises(ArgumentError, match=r"shape of keys is \(2, 3, 4\); allowed: any x any x 6"):
        attend(np.zeros((1, 2, 6)), keys, keys)
    with pytest.raises(ArgumentError, match=r"shape of values is \(2, 2, 4\); allowed: 2 x 3 x 4"):
        attend(np.zeros((1, 2, 4)), keys, keys[:, :2])
    with pytest.raises(ArgumentError, match="query tokens is 4; allowed: at most the 3"):
        attend(np.zeros((4, 2, 4)), keys, keys)
    with pytest.raises(ArgumentError, match="T x 2 x 4"):
        KeyValueCache(2, 4).append(np.zeros((1, 3, 4)), np.zeros((1, 3, 4)))
    with pytest.raises(ArgumentError, match="capacity is 0"):
        KeyValueCache(2, 4, 0)


@given(st.integers(0, 99), st.integers(1, 5), st.integers(0, 5), st.integers(1, 7))
def test_a_window_is_attention_over_fewer_tokens(seed: int, tokens: int, before: int, window: int) -> None:
    """Each query with a window is the same query without one, over no more than the last w keys up to its own."""
    queries, keys, values = random_case(seed, tokens, before + tokens, 2, 2)
    keys, values = keys.swapaxes(0, 1), values.swapaxes(0, 1)
    result = attend(queries, keys, values, window)
    for t in range(tokens):
        seen = slice(max(0, before + t + 1 - window), before + t + 1)
        alone = attend(queries[t : t + 1], keys[:, seen], values[:, seen])
        np.testing.assert_allclose(result[t], alone[0], rtol=0, atol=1e-13)


def test_scale_and_bias_of_t5() -> None:
    """Without 1/√d and with a bias for each head and distance, by loops; also inside a window (errata G4)."""
    rng = np.random.default_rng(9)
    queries, bias = rng.normal(size=(3, 4, 6)), rng.normal(size=(4, 3, 5))
    keys, values = rng.normal(size=(2, 2, 5, 6))
    for window in (None, 2):
        given = attend(queries, keys, values, window, scale=1.0, bias=bias)
        for t in range(3):
            for h in range(4):
                seen = range(0 if window is None else max(0, t + 3 - window), t + 3)
                scores = np.array([queries[t, h] @ keys[h // 2, u] + bias[h, t, u] for u in seen])
                shares = np.exp(scores) / np.exp(scores).sum()
                np.testing.assert_allclose(given[t, h], shares @ values[h // 2, seen.start : seen.stop], rtol=1e-12)
    with pytest.raises(ArgumentError, match="shape of bias is"):
        attend(queries, keys, values, bias=bias[:, :, :4].copy())
