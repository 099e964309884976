"""Attention over stored tokens and new ones: against attention over all of them, and over the cache of KIVI."""

import numpy as np
import pytest

from lowbit.arrays import F16, F32, Array
from lowbit.attention.attention import attend_to
from lowbit.attention.kivi_cache import cache
from lowbit.attention.residual import attend_residual, attend_residual_bound
from lowbit.attention.stored import attend_stored
from lowbit.contract.rounding import Arithmetic, any_order
from lowbit.errors import ArgumentError
from lowbit.tensor_formats.stored import Stored, quantize

HEAD_DIM, KV_HEADS = 32, 2


def tokens(count: int, seed: int) -> F32:
    """Tokens × G × d_h, in numbers that float16 holds."""
    numbers = np.random.default_rng(seed).normal(size=(count, KV_HEADS, HEAD_DIM))
    return numbers.astype(np.float16).astype(np.float32)


def stored(part: Array, name: str = "float16", **options: int) -> Stored:
    return quantize(part.reshape(len(part), -1), name, tuple(options.items()))


def in_heads(part: F32) -> F32:
    return np.ascontiguousarray(part.swapaxes(0, 1))


@pytest.mark.parametrize(("new_keys", "new_values"), [(1, 1), (3, 8), (8, 3), (11, 11)])
def test_it_is_attention_over_all_tokens(new_keys: int, new_values: int) -> None:
    """Where the stored numbers are float16 as they are, wherever the parts meet."""
    keys, values = tokens(12, 0), tokens(12, 1)
    queries = np.random.default_rng(2).normal(size=(3, 4, HEAD_DIM)).astype(np.float32)
    old = stored(keys[:-new_keys]), stored(values[:-new_values])
    given = attend_residual(queries, *old, keys[-new_keys:], values[-new_values:])
    np.testing.assert_array_equal(given, attend_to(queries, in_heads(keys), in_heads(values)))
    np.testing.assert_array_equal(given, attend_stored(queries, stored(keys), stored(values)))


@pytest.mark.parametrize("length", [33, 63, 70])
def test_the_parts_of_a_cache_of_kivi(length: int) -> None:
    """The tokens that `kvcache.kivi` keeps and stores give what attention over its answer gives, within the bound."""
    residual = 32
    keys, values = (tokens(length, seed).astype(np.float16) for seed in (0, 1))
    opened = cache(KV_HEADS, HEAD_DIM, 4, 32, residual)
    read, wanted = opened.step(keys, values)
    new_keys, new_values = length % residual, residual
    assert len(opened.keys.newest) == new_keys
    assert len(opened.values.newest) == new_values
    queries: F16 = np.random.default_rng(2).normal(size=(1, 4, HEAD_DIM)).astype(np.float16)
    call = (
        queries,
        stored(keys[:-new_keys], "kivi-keys", bits=4, tokens=32),
        stored(values[:-new_values], "kivi-values", bits=4, group_size=32),
        keys[-new_keys:],
        values[-new_values:],
    )
    exact = attend_residual(*call)
    arithmetic = Arithmetic("dequantised", "float32", any_order, weights="float32")
    over_all = attend_to(queries.astype(np.float32), read, wanted)
    assert (np.abs(over_all - exact) <= attend_residual_bound(*call, arithmetic, exact).limit).all()


def test_refusals() -> None:
    """Sizes that do not belong together, in words."""
    old, new = stored(tokens(3, 0)), tokens(2, 1)
    queries = np.zeros((1, 4, HEAD_DIM), np.float32)
    wrong: dict[str, tuple[F32, Stored, Stored, F32, Array]] = {
        "tokens of keys and values": (queries, old, old, new, new[:1]),
        "rows of keys": (queries, stored(tokens(3, 0)[:, :1].copy()), old, new, new),
        "query heads": (queries[:, :3].copy(), old, old, new, new),
        "query tokens": (np.zeros((6, 4, HEAD_DIM), np.float32), old, old, new, new),
        "dtype of newest_values": (queries, old, old, new, new.astype(np.float16)),
    }
    for words, call in wrong.items():
        with pytest.raises(ArgumentError, match=words):
            attend_residual(*call)
