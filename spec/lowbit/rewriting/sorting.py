r"""Sorting a model: K-sort's order of key channels, built into the weights.

The columns of queries and keys move, with their biases and gains, so that the channels of each key head are in
ascending order of size (`lowbit.attention.ksort`). A cache in Block Floating Point then stores keys with smaller
errors, and nothing has to be sorted while the model runs.

**The rotation.** A model file gives the frequency of a *pair* of channels by a number, and the channels of a pair by
convention: in half-split channels, c and :math:`c + d_h/2` with frequency c. K-sort's order keeps neither. So each
block of a sorted model has a vector ``key_order``, by which the rotation finds its pairs (errata B1). The model has a
type of its own, because a tool that ignores the vector would give wrong text without an error.

**Norms of heads.** A norm of each head has one gain for all heads. There the heads of a layer share one order, by the
root mean square of the sizes of a channel in all of them.

Source: K-sort §III, Algorithm 1; errata B1, B3 to B6.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, get_args

import numpy as np

from lowbit.arrays import F32, F64, Array
from lowbit.attention.ksort import (
    LayerOrders,
    Order,
    channel_sizes,
    layer_orders,
    magnitudes,
    sizes_over_queries,
)
from lowbit.contract.checks import check_choice, spoken
from lowbit.errors import ArgumentError
from lowbit.formats.checkpoint.architectures import KEY_ORDER
from lowbit.formats.checkpoint.config import sorted_fields
from lowbit.model.calibration import Seen, Streams
from lowbit.model.config import LlamaConfig
from lowbit.model.layers import rms_norm
from lowbit.model.matrices import to_float
from lowbit.model.weights import LayerWeights
from lowbit.rewriting.changing import Change, Changed
from lowbit.rewriting.source import Source

Key = Literal["norm", "bias", "calibrated", "keys-over-queries"]
KEYS: tuple[Key, ...] = get_args(Key)
READ_A_TEXT: tuple[Key, ...] = ("calibrated", "keys-over-queries")


@dataclass(frozen=True)
class Sorting:
    """How channels are sorted.

    Attributes:
        key: their size: ``norm`` of the weights; with the ``bias`` too; ``calibrated``, the root mean square of the
            keys of a text, before they are rotated; or ``keys-over-queries``, the same divided by that of the queries.
        tokens: of the text, for one of `READ_A_TEXT`; else empty.
        window: tokens of a window of that text.
    """

    key: Key = "norm"
    tokens: tuple[int, ...] = ()
    window: int = 512

    def check(self, source: Source) -> None:
        """Refuse a model whose configuration does not allow this sorting.

        Raises:
            ArgumentError: names the option.
        """
        check_choice("--key", self.key, KEYS)
        if "key_order" in source.architecture.vectors:
            sentence = f"the channels of {source.name} are sorted already; sort the model that it was made from"
            raise ArgumentError("model", source.name, "a model whose channels are not sorted", sentence)
        if self.key == "bias" and "key_bias" not in source.architecture.vectors:
            sentence = f"--key bias applies only to a model with key biases, and {source.name} has none"
            raise ArgumentError("--key", self.key, spoken([key for key in KEYS if key != "bias"]), sentence)
        if (self.key in READ_A_TEXT) != bool(self.tokens):
            given = f"{len(self.tokens)} tokens"
            allowed = f"at least one token with --key {spoken(READ_A_TEXT)}, and none without it"
            raise ArgumentError("--calibration", given, allowed)
        if self.tokens and self.window > source.config.context:
            raise ArgumentError("--window", self.window, f"at most {source.config.context}, the model's context")


def weight_sizes(config: LlamaConfig, layer: LayerWeights, key: Key) -> F64:
    """The sizes of the channels of all key heads from the weights: float64, G × d_h.

    Args:
        config: of the model.
        layer: its block.
        key: ``norm`` or ``bias``.
    """
    heads = (config.kv_heads, config.head_dim)
    columns = to_float(layer.key).reshape(-1, *heads)
    gains = [None] * heads[0] if layer.key_norm is None else np.resize(layer.key_norm, heads)
    biases = [None] * heads[0] if layer.key_bias is None else layer.key_bias.reshape(heads)
    kind: Literal["norm", "norm_and_bias"] = "norm" if key == "norm" else "norm_and_bias"
    sizes = [
        channel_sizes(np.ascontiguousarray(columns[:, head]), kind, bias=biases[head], gain=gains[head])
        for head in range(heads[0])
    ]
    return np.stack(sizes)


def keys_of(config: LlamaConfig, layer: LayerWeights, seen: Seen) -> F32:
    """The keys of the calibration before they are rotated: float32, G × tokens × d_h."""
    heads = (config.kv_heads, config.head_dim)
    return _seen(seen, to_float(layer.key), layer.key_bias, layer.key_norm, heads, config.rms_epsilon)


def queries_of(config: LlamaConfig, layer: LayerWeights, seen: Seen) -> F32:
    """The queries of the calibration before they are rotated: float32, G × tokens of all heads of a group × d_h."""
    heads = (config.heads, config.head_dim)
    found = _seen(seen, to_float(layer.query), layer.query_bias, layer.query_norm, heads, config.rms_epsilon)
    return found.reshape(config.kv_heads, -1, config.head_dim)


def _seen(seen: Seen, weights: F32, bias: F32 | None, norm: F32 | None, heads: tuple[int, int], epsilon: float) -> F32:
    """Heads of the calibration before they are rotated: float32, heads × tokens × d_h."""
    found = []
    for x in seen.parts["query"]:
        numbers = (x @ weights).astype(np.float64)
        if bias is not None:
            numbers = numbers + bias
        if norm is not None:
            runs = numbers.reshape(-1, norm.size)
            numbers = rms_norm(runs, norm.astype(np.float64), epsilon).reshape(numbers.shape)
        found.append(numbers.reshape(-1, *heads))
    return np.ascontiguousarray(np.concatenate(found).transpose(1, 0, 2), np.float32)


def orders_of(config: LlamaConfig, layer: LayerWeights, sizes: F64) -> LayerOrders:
    """The orders of the key heads of a block by the sizes of their channels, float64, G × d_h."""
    if layer.key_norm is not None and not config.heads_normed_together:
        sizes = np.tile(np.sqrt(np.mean(sizes**2, axis=0)), (len(sizes), 1))
    return layer_orders(sizes, config.heads)


class Orders:
    """The orders of all blocks, found one block after another."""

    def __init__(self, source: Source, request: Sorting) -> None:
        self._source, self._request = source, request
        self._seen = self._calibrated() if request.tokens else None

    def __call__(self, number: int, layer: LayerWeights) -> LayerOrders:
        """Those of a block; blocks must be requested in order; with calibration, some may be skipped."""
        config = self._source.config
        if self._seen is None:
            return orders_of(config, layer, weight_sizes(config, layer, self._request.key))
        while (found := next(self._seen))[0] < number:
            pass
        keys = keys_of(config, layer, found[1])
        if self._request.key == "calibrated":
            return orders_of(config, layer, np.stack([magnitudes(head) for head in keys]))
        queries = queries_of(config, layer, found[1])
        return orders_of(config, layer, np.stack(list(map(sizes_over_queries, keys, queries))))

    def _calibrated(self) -> Iterator[tuple[int, Seen]]:
        """The number and the inputs of each block; those of the sorted model are equal up to rounding."""
        source, request = self._source, self._request
        streams = Streams.of(source.config, source.rows(), request.tokens, request.window)
        for number in range(source.config.layers):
            seen, streams = streams.passed(number, source.layer(number))
            yield number, seen


def sorted_source(source: Source, request: Sorting) -> Changed:
    """The model with sorted key channels.

    Raises:
        ArgumentError: as `Sorting.check`.
    """
    request.check(source)
    orders = Orders(source, request)

    def change(number: int, layer: LayerWeights) -> Change:
        return sorted_by(source.config, orders(number, layer))

    architecture = replace(source.architecture, vectors={**source.architecture.vectors, **KEY_ORDER})
    return Changed.of(source, source.config, architecture, change, sorted_fields(source.described()))


def sorted_by(config: LlamaConfig, orders: LayerOrders) -> Change:
    """The change of a block by its orders."""
    queries, keys = orders.query_columns, orders.key_columns
    together = config.heads_normed_together
    gains = (queries, keys) if together else (orders.orders[0], orders.orders[0])
    vectors = {"query_bias": queries, "key_bias": keys, "query_norm": gains[0], "key_norm": gains[1]}
    return Change(
        {"query": partial(_columns, queries), "key": partial(_columns, keys)},
        {name: partial(_columns, order) for name, order in vectors.items()},
        {"key_order": orders.key_order},
    )


def _columns(order: Order, array: Array) -> Array:
    return np.take(array, order, axis=-1)
