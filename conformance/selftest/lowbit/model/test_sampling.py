"""Sampling: the distribution is that of the weights, the filters keep what they say, and every draw is pinned."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowbit.arrays import F32
from lowbit.errors import ArgumentError
from lowbit.model.sampling import (
    GREEDY,
    MOST_TOKENS,
    ONE,
    Sampling,
    choose,
    exponential,
    integer_weights,
    kept,
    random_bits,
)


def some_logits(count: int, seed: int = 0, spread: float = 3.0) -> F32:
    return (spread * np.random.default_rng(seed).standard_normal(count)).astype(np.float32)


FIRST_KNOWN = 0x16554D9ECA36314C
"""The first known answer of Random123 for philox4x64 with 10 rounds."""


@pytest.mark.parametrize(("seed", "position", "sequence"), [(0, 0, 0), (0, 1, 0), (2**64 - 1, 5, 3)])
def test_the_generator_is_philox(seed: int, position: int, sequence: int) -> None:
    """Against the rounds of Philox4x64-10 as they are published, in integers of Python."""
    words, key, mask = [position, sequence, 0, 0], [seed, 0], 2**64 - 1
    for _ in range(10):
        first, second = 0xD2E7470EE14C6C93 * words[0], 0xCA5A826395121157 * words[2]
        words = [
            (second >> 64) ^ words[1] ^ key[0],
            second & mask,
            (first >> 64) ^ words[3] ^ key[1],
            first & mask,
        ]
        key = [(key[0] + 0x9E3779B97F4A7C15) & mask, (key[1] + 0xBB67AE8584CAA73B) & mask]
    assert random_bits(seed, position, sequence) == words[0]
    assert random_bits(0, 0) == FIRST_KNOWN


def test_the_exponential_is_the_exponential() -> None:
    """Two units of the last place at most, against exact fractions of a long series; 1 at 0, 0 far below."""
    for x in (-1e-9, -0.25, -0.34657359, -1.0, -7.7, -30.0, -63.9):
        exact, term, n = Fraction(0), Fraction(1), 1
        while abs(term) > Fraction(1, 10**60):
            exact, term, n = exact + term, term * Fraction(x) / n, n + 1
        found = float(exponential(np.array([x]))[0])
        assert abs(Fraction(found) - exact) <= 2 * Fraction(np.spacing(found))
    assert exponential(np.array([0.0, -64.5, -np.inf])).tolist() == [1.0, 0.0, 0.0]


def test_weights_are_the_same_on_every_host() -> None:
    """Only additions, products and powers of two: a sum that was computed once holds on every machine."""
    logits = (np.arange(4096) * 7919 % 4099 / 128).astype(np.float32)
    weights = integer_weights(logits, 0.7)
    assert weights.max() == ONE
    assert int((weights * np.arange(1, 4097) % 1000003).sum()) == 1158879184


@given(st.integers(2, 40), st.integers(0, 2**32), st.floats(0.1, 3), st.data())
def test_filters_keep_what_they_say(count: int, seed: int, temperature: float, data: st.DataObject) -> None:
    """Against the definitions, token by token, in exact fractions."""
    logits = np.round(some_logits(count, seed), 1)  # with ties
    top_k = data.draw(st.integers(0, count + 2))
    top_p = data.draw(st.floats(0.01, 1))
    min_p = data.draw(st.floats(0, 1))
    weights = integer_weights(logits, temperature)
    order = sorted(range(count), key=lambda token: (-int(weights[token]), token))
    first = order[: top_k or count]
    total, beginning, reached = sum(int(weights[token]) for token in first), [], 0
    for token in first:
        beginning.append(token)
        reached += int(weights[token])
        if reached >= Fraction(top_p) * total:
            break
    wanted = [token for token in beginning if weights[token] > 0 and int(weights[token]) >= Fraction(min_p) * ONE]
    found, own = kept(logits, Sampling(temperature, top_k, top_p, min_p))
    assert found.tolist() == wanted
    assert own.tolist() == weights[wanted].tolist()


@pytest.mark.whole
def test_draws_have_the_probabilities_of_the_weights() -> None:
    """65,536 draws: each count lies within six standard deviations of its expectation."""
    logits, draws = some_logits(8, spread=1.0), 2**16
    tokens, weights = kept(logits, Sampling(1.3, seed=5))
    counts = np.bincount([choose(logits, Sampling(1.3, seed=5), position) for position in range(draws)], minlength=8)
    probabilities = weights / weights.sum()
    deviations = np.abs(counts[tokens] - draws * probabilities) / np.sqrt(draws * probabilities * (1 - probabilities))
    assert deviations.max() < 6


def test_what_decides_a_draw() -> None:
    """Seed, position and sequence each change draws; the greedy choice takes the lowest of the likeliest."""
    logits = some_logits(64)
    drawn = {
        tuple(choose(logits, Sampling(seed=seed), position + shift, sequence) for position in range(32))
        for seed, shift, sequence in ((1, 0, 0), (2, 0, 0), (1, 32, 0), (1, 0, 1))
    }
    assert len(drawn) == 4
    assert choose(np.array([0, 2, 2], np.float32), GREEDY, 9) == 1
    assert choose(np.array([0, 2, 2], np.float32), Sampling(1e-300), 9) in (1, 2)


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_refused(wrong: float) -> None:
    with pytest.raises(ArgumentError, match="logits is infinite or NaN"):
        choose(np.array([0, wrong], np.float32), Sampling(), 0)


def test_too_many_tokens_are_refused() -> None:
    with pytest.raises(ArgumentError, match="number of logits is 524288"):
        choose(np.zeros(MOST_TOKENS + 1, np.float32), Sampling(), 0)
