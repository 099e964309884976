"""Attention over stored caches: against a loop over codes, and the bound of a kernel that forms numbers in float16."""

import math
from itertools import product

import ml_dtypes
import numpy as np
import pytest

from lowbit.arrays import F32, F64
from lowbit.attention.attention import attend_to
from lowbit.attention.stored import attend_stored, attend_stored_bound, in_heads
from lowbit.contract.rounding import Arithmetic, Weights, any_order
from lowbit.errors import ArgumentError
from lowbit.tensor_formats.stored import Stored, quantize

HEAD_DIM = 32


def cache(name: str, tokens: int, seed: int = 0, **options: int) -> Stored:
    """Two heads of random numbers."""
    x = np.random.default_rng(seed).normal(size=(tokens, 2 * HEAD_DIM)).astype(np.float32)
    return quantize(x, name, tuple(options.items()))


def asked(tokens: int, heads: int = 4) -> F32:
    return np.random.default_rng(9).normal(size=(tokens, heads, HEAD_DIM)).astype(np.float32)


def by_loop(queries: F32, keys: F64, values: F64) -> F64:
    """Softmax of scores, head by head, with Python's own sums; keys and values are channels x tokens."""
    count, heads, _ = queries.shape
    found = np.zeros(queries.shape)
    for t, h in product(range(count), range(heads)):
        first = h // (heads // 2) * HEAD_DIM
        end = keys.shape[1] - count + t + 1
        scores = [
            math.fsum(float(queries[t, h, c]) * keys[first + c, u] for c in range(HEAD_DIM)) / math.sqrt(HEAD_DIM)
            for u in range(end)
        ]
        powers = [math.exp(score - max(scores)) for score in scores]
        for c in range(HEAD_DIM):
            found[t, h, c] = math.fsum(p * values[first + c, u] for u, p in enumerate(powers)) / math.fsum(powers)
    return found


def test_int8_and_kivi_by_a_loop_over_codes() -> None:
    """Codes and scales as the chapters say, and attention over them."""
    keys, values = cache("int8-token", 11), cache("kivi-values", 11, 1, bits=4, group_size=24)
    one, two = keys.by_name, values.by_name
    read = np.array([[float(one["codes"][u, c]) * float(one["scale"][u, 0]) for u in range(11)] for c in range(64)])
    wanted = np.zeros((64, 11))
    for c, u in product(range(64), range(11)):
        code = int(two["codes"][u, c // 8]) >> (4 * (c % 8)) & 15
        wanted[c, u] = code * float(two["scale"][u, c // 24]) + float(two["minimum"][u, c // 24])
    queries = asked(3)
    # Of float64: a score and its power are off by a rounding for each product of a head, and the sums by one a token.
    unit, largest = 2.0**-53, np.abs(queries).max() * np.abs(read).max() * math.sqrt(HEAD_DIM)
    allowed = 2 * (2 * (HEAD_DIM + 4) * unit * largest + 2 * (11 + 4) * unit) * np.abs(wanted).max()
    np.testing.assert_allclose(
        attend_stored(queries, keys, values), by_loop(queries, read, wanted), rtol=0, atol=allowed
    )


def test_a_float16_cache_is_attention() -> None:
    """Over 16-bit numbers as they are it is the operation of the chapter `attention`."""
    queries, keys, values = asked(2), cache("float16", 9), cache("float16", 9, 1)
    k, v = (np.ascontiguousarray(in_heads(each.values, HEAD_DIM), np.float32) for each in (keys, values))
    for window in (None, 4):
        np.testing.assert_array_equal(attend_stored(queries, keys, values, window), attend_to(queries, k, v, window))


@pytest.mark.parametrize("weights", ["bfloat16", "exact"])
def test_numbers_formed_in_a_narrow_type_are_declared(weights: Weights) -> None:
    """A kernel that turns the cache into bfloat16 keeps to the bound only if it says so."""
    queries, keys, values = asked(3), cache("q8_0", 40), cache("q8_0", 40, 1)
    exact = attend_stored(queries, keys, values)
    bound = attend_stored_bound(
        queries, keys, values, Arithmetic("dequantised", "float32", any_order, weights=weights), exact
    )
    k, v = (np.ascontiguousarray(in_heads(each.values, HEAD_DIM).astype(ml_dtypes.bfloat16)) for each in (keys, values))
    given = attend_to(queries, k.astype(np.float32), v.astype(np.float32)).astype(np.float32)
    inside = (np.abs(given - exact) <= bound.limit).all()
    assert inside == (weights == "bfloat16")


@pytest.mark.parametrize(
    ("queries", "keys", "values", "words"),
    [
        (asked(1), cache("float16", 3), cache("float16", 4), "keys and values"),
        (asked(1, 3), cache("float16", 3), cache("float16", 3), "query heads"),
        (asked(5), cache("float16", 3), cache("float16", 3), "query tokens"),
        (asked(1)[..., :24].copy(), cache("float16", 3), cache("float16", 3), "rows of keys"),
        (asked(1).astype(np.float64), cache("float16", 3), cache("float16", 3), "dtype"),
    ],
)
def test_refusals(queries: F32, keys: Stored, values: Stored, words: str) -> None:
    """Sizes that do not belong together, in words."""
    with pytest.raises(ArgumentError, match=words):
        attend_stored(queries, keys, values)
