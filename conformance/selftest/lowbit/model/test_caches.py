"""Key-value caches in fewer bits: the numbers that are kept, and what cannot be."""

from fractions import Fraction

import numpy as np
import pytest

from lowbit.errors import ArgumentError
from lowbit.model.caches import CACHES, KEYS, Bfp12Cache, Float16Cache, Keys, stored_bytes
from lowbit.quantization.bfp import bfp12, cast
from lowbit.quantization.bfp_storage import store

RNG = np.random.default_rng(15)


def nearest_half(x: float) -> Fraction:
    """The float16 nearest to x, of two the even one, by integers."""
    exact = Fraction(x)
    step = Fraction(1, 2**24)
    while abs(exact) >= 2048 * step:
        step *= 2
    return round(exact / step) * step


def test_float16_has_the_nearest_numbers() -> None:
    """Ties, subnormal numbers and the largest included."""
    numbers = [1 + 2.0**-11, 1 + 3 * 2.0**-11, 2.0**-24, 2.0**-25, 3 * 2.0**-25, 65504.0, 65519.0, -0.1]
    numbers += list(RNG.normal(size=56).astype(np.float32))
    rows = np.array(numbers, np.float64).reshape(2, 2, 16)
    cache = Float16Cache(kv_heads=2, head_dim=16, capacity=1)
    cache.append(rows, -rows)
    for kept, given in ((cache.keys, rows), (cache.values, -rows)):
        assert kept.dtype == np.float32
        expected = [float(nearest_half(x)) for x in given.swapaxes(0, 1).ravel()]
        assert kept.ravel().tolist() == expected


def test_bfp12_rounds_blocks_of_a_head() -> None:
    """Each head has blocks of its own, of which the last is short; mantissas are those of the exponent of a block."""
    keys = RNG.normal(size=(3, 2, 40)) * np.exp2(RNG.integers(-20, 20, (3, 2, 40)))
    cache = Bfp12Cache(kv_heads=2, head_dim=40)
    cache.append(keys[:1], keys[:1] / 2**30)
    cache.append(keys[1:], keys[1:] / 2**30)
    for token, head in np.ndindex(3, 2):
        for span in (slice(0, 32), slice(32, 40)):
            given = keys[token, head, span].astype(np.float32)
            step = Fraction(2) ** (int(np.frexp(np.abs(given).max())[1]) - 3)
            mantissas = [max(-7, min(7, round(Fraction(float(x)) / step))) for x in given]
            assert cache.keys[head, token, span].tolist() == [float(m * step) for m in mantissas]
    halves = (keys / 2**30).astype(np.float32).astype(np.float16).swapaxes(0, 1)
    np.testing.assert_array_equal(cache.values, halves)


@pytest.mark.parametrize("keys", KEYS)
def test_attention_reads_what_is_kept_after_more_tokens(keys: Keys) -> None:
    """A token has the same numbers whether it comes alone or with others, and when the cache has grown."""
    tokens = RNG.normal(size=(9, 2, 24)).astype(np.float32).astype(np.float64)
    at_once, one_by_one = (CACHES[keys](2, 24, capacity) for capacity in (16, 1))
    at_once.append(tokens, 2 * tokens)
    for token in tokens:
        one_by_one.append(token[np.newaxis], 2 * token[np.newaxis])
    np.testing.assert_array_equal(at_once.keys, one_by_one.keys)
    np.testing.assert_array_equal(at_once.values, one_by_one.values)
    assert (keys == "float32") == np.array_equal(at_once.keys, tokens.swapaxes(0, 1))


@pytest.mark.parametrize("keys", ("float16", "bfp12"))
def test_what_cannot_be_kept_is_refused(keys: Keys) -> None:
    """And nothing is added: numbers that float16 does not have, and blocks that are not finite."""
    cache = CACHES[keys](1, 2, 4)
    fine, large = np.ones((1, 1, 2)), np.full((1, 1, 2), 65520.0)
    with pytest.raises(ArgumentError, match="values is too large for float16; allowed: numbers up to 65504"):
        cache.append(fine, large)
    if keys == "float16":
        with pytest.raises(ArgumentError, match="keys is too large for float16"):
            cache.append(large, fine)
    else:
        with pytest.raises(ArgumentError, match="keys is infinite or NaN"):
            cache.append(fine * np.inf, fine)
    assert len(cache) == 0


def test_bytes_are_those_of_stored_rows() -> None:
    """Of BFP12 as its chapter stores it."""
    for head_dim in (1, 31, 32, 33, 64, 80):
        row = store(cast(np.ones((1, head_dim), np.float32), bfp12(32)))
        assert stored_bytes("bfp12", head_dim) == (row.nbytes, 2 * head_dim)
        assert stored_bytes("float32", head_dim) == (4 * head_dim, 4 * head_dim)
