"""Sorted models: what the decoder computes with them, to the bit where no sum is reordered, and in a BFP12 cache.

The linear layers here add row after row, so the bits of a column do not depend on its place in the matrix.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_checkpoint
import tiny_gguf
from exact_sums import in_sequence

from lowbit.arrays import F32, F64
from lowbit.attention.attention import KeyValueCache, attend
from lowbit.attention.ksort import (
    LayerOrders,
    channel_sizes,
    inverse,
    layer_orders,
    magnitudes,
    permuted_layout,
)
from lowbit.attention.kvcache import BfpKeyValueCache
from lowbit.attention.rope import Rotation, half_split, rotate, rotation
from lowbit.contract.rounding import gamma
from lowbit.model.block import FORMULAS
from lowbit.model.config import LlamaConfig
from lowbit.model.decoder import Decoder
from lowbit.model.elementwise import ElementwiseOps
from lowbit.model.matrices import to_float
from lowbit.model.weights import LayerWeights, LlamaWeights
from lowbit.quantization.bfp import bfp12
from lowbit.rewriting.changing import write_floats
from lowbit.rewriting.sorting import KEYS, READ_A_TEXT, Key, Sorting, sorted_source
from lowbit.rewriting.source import open_source
from lowbit.runtime import open_model

TOKENS = [5, 17, 250, 3, 99, 42, 7, 7, 130, 12, 60, 201]
KIND = {"llama": "norm", "qwen2": "bias", "qwen3": "norm", "olmo2": "norm"}
"""The models here, and a sort key for each: plain, with biases, with norms of heads, with a norm of all heads."""


def source_of(kind: str, folder: Path) -> Path:
    if kind == "olmo2":
        return olmo2(folder / "source")
    model = tiny_gguf.published(architecture=kind, kind=tiny_gguf.GGML_F32, head_kind=tiny_gguf.GGML_F32)
    return tiny_gguf.write(folder / "source", model)


def olmo2(folder: Path) -> Path:
    """A directory of a model that norms all heads together."""
    config = tiny_checkpoint.DENSE | {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}
    del config["sliding_window"]
    model = tiny_checkpoint.published(config)
    rng = np.random.default_rng(1)
    for number in range(2):
        at = f"model.layers.{number}"
        del model.tensors[f"{at}.input_layernorm.weight"]
        for name, size in (("self_attn.q_norm", 32), ("self_attn.k_norm", 16), ("post_feedforward_layernorm", 32)):
            model.tensors[f"{at}.{name}.weight"] = rng.uniform(0.5, 1.5, size).astype(np.float32)
            model.types[f"{at}.{name}.weight"] = "F32"
    return tiny_checkpoint.write(folder, model)


@dataclass
class Pair:
    """A model, and what it is when it is sorted, written and loaded."""

    before: LlamaWeights
    after: LlamaWeights
    orders: list[LayerOrders]

    @property
    def config(self) -> LlamaConfig:
        return self.before.config


@pytest.fixture(scope="module", params=list(KIND))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp(request.param)
    source = source_of(request.param, folder)
    key: Any = KIND[request.param]
    write_floats(sorted_source(open_source(source), Sorting(key)), folder / "new", {"command": "ksort"})
    before, after = open_model(source).weights, open_model(folder / "new").weights
    config = before.config
    orders = [expected_orders(config, layer, key) for layer in before.layers]
    return Pair(before, after, orders)


def expected_orders(config: LlamaConfig, layer: LayerWeights, key: str) -> LayerOrders:
    """By the chapter, head by head."""
    sizes = []
    for head in range(config.kv_heads):
        own = slice(head * config.head_dim, (head + 1) * config.head_dim)
        weights = np.ascontiguousarray(to_float(layer.key)[:, own])
        gain = layer.key_norm
        if gain is not None and config.heads_normed_together:
            gain = gain[own].copy()
        bias = None if layer.key_bias is None else layer.key_bias[own].copy()
        sizes.append(channel_sizes(weights, "norm_and_bias" if key == "bias" else "norm", bias=bias, gain=gain))
    if layer.key_norm is not None and not config.heads_normed_together:
        sizes = [np.sqrt(np.mean(np.square(sizes), axis=0))] * config.kv_heads
    return layer_orders(np.stack(sizes), config.heads)


WITHOUT_NORMS = pytest.mark.parametrize("pair", ["llama", "qwen2"], indirect=True)


# **Weights.**


def test_the_orders_are_those_of_the_chapter(pair: Pair) -> None:
    """Queries, keys and what is added to them move, the order is kept beside them, and all else stays."""
    for old, new, orders in zip(pair.before.layers, pair.after.layers, pair.orders, strict=True):
        assert new.key_order is not None and old.key_order is None
        np.testing.assert_array_equal(new.key_order, np.concatenate(orders.orders))
        for name, columns in (("query", orders.query_columns), ("key", orders.key_columns)):
            expected = to_float(getattr(old, name))[:, columns]
            np.testing.assert_array_equal(to_float(getattr(new, name)), expected, err_msg=name)
            if (bias := getattr(old, f"{name}_bias")) is not None:
                np.testing.assert_array_equal(getattr(new, f"{name}_bias"), bias[columns])
            if (gain := getattr(old, f"{name}_norm")) is not None:
                moved = np.resize(gain, len(columns))[columns]
                np.testing.assert_array_equal(np.resize(getattr(new, f"{name}_norm"), len(columns)), moved)
        for name in ("value", "output", "feed_forward.up"):
            np.testing.assert_array_equal(to_float(new.linears()[name]), to_float(old.linears()[name]))
        assert any((order != np.arange(order.size)).any() for order in orders.orders)


def test_channels_stand_in_ascending_order(pair: Pair) -> None:
    """Where heads have orders of their own, the norms of the columns of each key head ascend."""
    for layer in pair.after.layers:
        if layer.key_bias is None and layer.key_norm is None:
            columns = to_float(layer.key).reshape(-1, pair.config.kv_heads, pair.config.head_dim)
            for head in range(pair.config.kv_heads):
                assert (np.diff(channel_sizes(np.ascontiguousarray(columns[:, head]))) >= 0).all()


# **A cache of floats.** Only the sums of scores, and those of norms of heads, are in another order.


def unsorted(orders: list[LayerOrders], ops: ElementwiseOps) -> ElementwiseOps:
    """Attention that puts channels back before it multiplies, for the layers in turn."""
    turn = cycle(orders)

    def attended(queries: F64, cache: KeyValueCache, window: int | None) -> F64:
        order = next(turn)
        back = [inverse(each) for each in order.orders]
        keys = np.stack([rows[:, own] for rows, own in zip(cache.keys, back, strict=True)])
        columns = inverse(order.query_columns)
        flat = np.take(queries.reshape(len(queries), -1), columns, axis=1)
        return attend(flat.reshape(queries.shape), keys, cache.values, window)

    return replace(ops, attend=attended)


def run(weights: LlamaWeights, ops: ElementwiseOps) -> tuple[F32, list[KeyValueCache]]:
    """The logits of a prompt that is read in two parts, and the caches behind it."""
    decoder = Decoder(weights, in_sequence, ops=ops)
    state = decoder.new_state()
    parts = [decoder.logits(decoder.hidden(part, state)) for part in (TOKENS[:9], TOKENS[9:])]
    return np.concatenate(parts), state


@WITHOUT_NORMS
def test_logits_are_equal_to_the_bit_where_no_sum_is_reordered(pair: Pair) -> None:
    """With channels put back before attention. A norm of heads is a sum too: the next test has models with one."""
    expected, caches = run(pair.before, FORMULAS)
    found, sorted_caches = run(pair.after, unsorted(pair.orders, FORMULAS))
    np.testing.assert_array_equal(found, expected)
    for cache, other, orders in zip(caches, sorted_caches, pair.orders, strict=True):
        np.testing.assert_array_equal(other.values, cache.values)
        for head, order in enumerate(orders.orders):
            np.testing.assert_array_equal(other.keys[head], cache.keys[head][:, order])


def test_scores_are_within_the_bound_of_reordered_sums(pair: Pair) -> None:
    """In the first layer, whose inputs are equal, a score differs by at most the errors of both of its sums.

    Where heads are normed, the sum of squares is reordered too: n terms and 4 roundings behind them, for queries and
    for keys, and 3 roundings of the rotation. A rotated channel may be smaller than the two that it is made of, so
    there the errors are those of products of lengths: at most √2 times as large for each factor.
    """
    config, queries, keys = pair.config, list[F64](), list[F64]()

    def attended(given: F64, cache: KeyValueCache, window: int | None) -> F64:
        queries.append(given)
        keys.append(cache.keys)
        return attend(given, cache.keys, cache.values, window)

    for weights in (pair.before, pair.after):
        first = (weights.layers[0],)
        one = LlamaWeights(replace(config, layers=1), weights.embedding, first, weights.norm, weights.head)
        decoder = Decoder(one, in_sequence, ops=replace(FORMULAS, attend=attended))
        decoder.hidden(TOKENS, decoder.new_state())
    is_normed = pair.before.layers[0].key_norm is not None
    squares = (
        {"query": config.heads, "key": config.kv_heads} if config.heads_normed_together else {"query": 1, "key": 1}
    )
    roundings = config.head_dim + is_normed * sum(config.head_dim * heads + 4 + 3 for heads in squares.values())
    for head in range(config.heads):
        q, k = ([each[:, head] for each in queries], [each[head * config.kv_heads // config.heads] for each in keys])
        gauge = np.abs(q[0]) @ np.abs(k[0]).T
        if is_normed:
            gauge = 2 * np.outer(np.linalg.norm(q[0], axis=1), np.linalg.norm(k[0], axis=1))
        assert (np.abs(q[1] @ k[1].T - q[0] @ k[0].T) <= 2 * gamma(roundings, 2.0**-53) * gauge).all()


# **A cache in BFP12.**


class SortedBfpCache(BfpKeyValueCache):
    """What the specification makes of the source: keys are put in order, cast, and put back when they are read."""

    def __init__(self, orders: LayerOrders, head_dim: int) -> None:
        super().__init__(len(orders.orders), head_dim, bfp12(4), bfp12(4))
        self._orders = orders

    @property
    def keys(self) -> F64:
        return np.stack([rows[:, inverse(own)] for rows, own in zip(super().keys, self._orders.orders, strict=True)])

    def append(self, keys: F64, values: F64) -> None:
        moved = np.take(keys.reshape(len(keys), -1), self._orders.key_columns, axis=1).reshape(keys.shape)
        super().append(moved, values)


def with_caches(make: Callable[[LayerOrders, int], KeyValueCache], orders: list[LayerOrders]) -> ElementwiseOps:
    turn = cycle(orders)
    return replace(FORMULAS, cache=lambda kv_heads, head_dim, capacity: make(next(turn), head_dim))


def plain_cache(orders: LayerOrders, head_dim: int) -> KeyValueCache:
    return BfpKeyValueCache(len(orders.orders), head_dim, bfp12(4), bfp12(4))


@WITHOUT_NORMS
def test_a_bfp12_cache_of_rotated_keys_is_the_sorted_cache_of_the_specification(pair: Pair) -> None:
    """Logits, and so the error, equal those of the source with the chapter's orders around its cache, to the bit; and
    differ from those without an order."""
    expected, _ = run(pair.before, with_caches(SortedBfpCache, pair.orders))
    ops = unsorted(pair.orders, with_caches(plain_cache, pair.orders))
    found, _ = run(pair.after, ops)
    np.testing.assert_array_equal(found, expected)
    without, _ = run(pair.before, with_caches(plain_cache, pair.orders))
    assert (without != expected).any()


def test_a_bfp12_cache_before_the_rotation(pair: Pair) -> None:
    """The paper's cache: keys are cast before they are rotated. The sorted model's are the chapter's, to the bit, and
    rotate by the permuted layout to what the program's rotation gives."""
    for old, new, orders in zip(pair.before.layers, pair.after.layers, pair.orders, strict=True):
        x = np.random.default_rng(2).standard_normal((6, pair.config.hidden)).astype(np.float32)
        caches = [plain_cache(orders, pair.config.head_dim), SortedBfpCache(orders, pair.config.head_dim)]
        for cache, layer in zip(caches, (new, old), strict=True):
            keys = in_sequence(layer.key)(x).astype(np.float64)
            keys = keys if layer.key_bias is None else keys + layer.key_bias
            heads = keys.reshape(6, pair.config.kv_heads, pair.config.head_dim)
            cache.append(heads, heads)
        back = [rows[:, inverse(own)] for rows, own in zip(caches[0].keys, orders.orders, strict=True)]
        np.testing.assert_array_equal(np.stack(back), caches[1].keys)
        layout = half_split(pair.config.head_dim)
        turn = rotation(layout, pair.config.rope_base, 0, 6)
        for head, own in enumerate(orders.orders):
            moved = rotation(permuted_layout(layout, own), pair.config.rope_base, 0, 6)
            stored = caches[0].keys[head][:, np.newaxis]
            expected = rotate(stored[..., inverse(own)], turn)[..., own]
            np.testing.assert_array_equal(rotate(stored, moved), expected)


# **Calibration.**


@pytest.mark.parametrize("key", READ_A_TEXT)
def test_calibrated_orders_are_those_of_the_text(key: Key, tmp_path: Path) -> None:
    """Of the keys and queries that the whole decoder has before it rotates them, in windows."""
    source = source_of("qwen2", tmp_path)
    tokens = tuple(TOKENS * 3)
    request = Sorting(key, tokens, window=10)
    write_floats(sorted_source(open_source(source), request), tmp_path / "new", {"command": "ksort"})
    before, after = open_model(source).weights, open_model(tmp_path / "new").weights
    config, turned_here = before.config, list[F64]()

    def turned(x: F64, place: Rotation) -> F64:
        turned_here.append(x)
        return rotate(x, place)

    decoder = Decoder(before, ops=replace(FORMULAS, rotate=turned), linear=lambda m: lambda x: x @ to_float(m))
    for start in range(0, len(tokens), 10):
        decoder.hidden(tokens[start : start + 10], decoder.new_state())

    def seen(layer: int, heads: int) -> F32:
        """Heads of a layer, heads × tokens × d_h."""
        parts = [x for x in turned_here if x.shape[1] == heads][layer :: config.layers]
        return np.ascontiguousarray(np.concatenate(parts).transpose(1, 0, 2), np.float32)

    for number, layer in enumerate(after.layers):
        keys, queries = seen(number, config.kv_heads), seen(number, config.heads)
        sizes = [magnitudes(head) for head in keys]
        if key == "keys-over-queries":
            groups = queries.reshape(config.kv_heads, -1, config.head_dim)
            sizes = [size / magnitudes(group) for size, group in zip(sizes, groups, strict=True)]
        assert layer.key_order is not None
        np.testing.assert_array_equal(layer.key_order, layer_orders(np.stack(sizes), config.heads).key_order)


def test_all_keys_are_offered() -> None:
    """The names are those of the command line, which outsiders may have stored."""
    assert KEYS == ("norm", "bias", "calibrated", "keys-over-queries")
