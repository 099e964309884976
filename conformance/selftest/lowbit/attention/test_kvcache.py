"""The cache in Block Floating Point: what comes back, what it weighs, and that nothing is cast twice."""

import numpy as np
import pytest

from lowbit.attention.attention import KeyValueCache, attend
from lowbit.attention.kvcache import BfpKeyValueCache
from lowbit.attention.rope import half_split, rotate, rotation
from lowbit.errors import ArgumentError
from lowbit.quantization.bfp import Format, bfp12, bfp16, cast, decode


def filled(*parts: int, block: int = 32) -> tuple[BfpKeyValueCache, KeyValueCache]:
    """The same tokens, a few at a time, in a cache of blocks and in one of floats."""
    rng = np.random.default_rng(0)
    blocks, floats = BfpKeyValueCache(2, 64, bfp12(block), bfp16(64)), KeyValueCache(2, 64)
    for count in parts:
        keys, values = rng.normal(size=(2, count, 2, 64))
        blocks.append(keys, values)
        floats.append(keys, values)
    return blocks, floats


def test_what_comes_back_is_the_cast() -> None:
    """Keys and values are those of one cast of float32, however the tokens arrived."""
    blocks, floats = filled(3, 1, 1)
    for head in range(2):
        keys = np.ascontiguousarray(floats.keys[head], np.float32)
        np.testing.assert_array_equal(blocks.keys[head], decode(cast(keys, bfp12(32))))
        values = np.ascontiguousarray(floats.values[head], np.float32)
        np.testing.assert_array_equal(blocks.values[head], decode(cast(values, bfp16(64))))
    np.testing.assert_array_equal(blocks.key_blocks[1].mantissas, cast(keys, bfp12(32)).mantissas)


def test_bytes_are_counted() -> None:
    """BFP12 with blocks of 32 takes 4.25 bits a channel, BFP16 with blocks of 64 takes 8.125."""
    blocks, floats = filled(5)
    assert blocks.nbytes * 8 == 5 * 2 * 64 * (4.25 + 8.125)
    assert floats.nbytes == 2 * 5 * 2 * 64 * 8


def test_attention_reads_either_cache() -> None:
    """With wide mantissas the outputs agree closely; with narrow ones they differ, and less with smaller blocks."""
    queries = np.random.default_rng(1).normal(size=(1, 4, 64))

    def error(key_format: Format) -> float:
        rng = np.random.default_rng(0)
        keys, values = rng.normal(size=(2, 9, 2, 64))
        cache = BfpKeyValueCache(2, 64, key_format, bfp16(64))
        cache.append(keys, values)
        exact = attend(queries, keys.swapaxes(0, 1), values.swapaxes(0, 1))
        return float(np.abs(attend(queries, cache.keys, cache.values) - exact).max())

    assert error(Format(64, 20)) < 0.05 < error(bfp12(64))
    assert error(bfp12(8)) < error(bfp12(64))


def test_the_paper_rotates_what_it_reads() -> None:
    """Keys stored before the rotation and turned on the way out are not the keys stored after it."""
    keys = np.random.default_rng(2).normal(size=(4, 2, 64))
    turn = rotation(half_split(64), 10000.0, 0, 4)
    before, after = (BfpKeyValueCache(2, 64, bfp12(32), bfp16(64)) for _ in range(2))
    before.append(keys, keys)
    after.append(rotate(keys, turn), keys)
    turned = rotate(before.keys.swapaxes(0, 1), turn).swapaxes(0, 1)
    assert 0 < np.abs(turned - after.keys).max() < 1


def test_wrong_arguments_are_refused() -> None:
    """Shapes that are not the cache's, and formats that cannot be stored."""
    cache = BfpKeyValueCache(2, 64, bfp12(32), bfp16(64))
    with pytest.raises(ArgumentError, match="shapes of keys and values"):
        cache.append(np.ones((1, 3, 64)), np.ones((1, 3, 64)))
    with pytest.raises(ArgumentError, match="kv_heads"):
        BfpKeyValueCache(0, 64, bfp12(32), bfp16(64))
    wide = BfpKeyValueCache(2, 64, Format(32, 4, 10), bfp16(64))
    with pytest.raises(ArgumentError, match="bits of a stored exponent"):
        wide.append(np.ones((1, 2, 64)), np.ones((1, 2, 64)))
