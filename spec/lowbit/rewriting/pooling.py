"""Pooling a model: fewer key-value heads, by the operation of `lowbit.attention.pooling`.

The cache of a model with G key-value heads takes G/H of that with H. The new model must be trained a little further
before it is of use; such training starts from here.

The gain of a per-head norm is shared by all heads, so it stays. A norm of all heads together has a gain for each
channel of each head, and its mean square is one of all heads: no gain makes the norm of pooled heads the mean of normed
heads, so such a model is refused.

Source: GQA §2.1, §3.3, figure 4; errata G1, G2.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, get_args

import numpy as np

from lowbit.arrays import F32, Array
from lowbit.attention import pooling
from lowbit.contract.checks import check_choice, check_integer
from lowbit.errors import ArgumentError
from lowbit.formats.checkpoint.config import KEYS
from lowbit.formats.checkpoint.random import random_tensor
from lowbit.model.config import LlamaConfig
from lowbit.model.weights import LayerWeights
from lowbit.rewriting.changing import Change, Changed
from lowbit.rewriting.source import Source

Method = Literal["mean", "first", "random"]
METHODS: tuple[Method, ...] = get_args(Method)
PARTS = ("key", "value")
CACHE_TYPE_BYTES = 2
"""The bytes of a number of the cache in float16."""


@dataclass(frozen=True)
class Pooling:
    """How heads are pooled.

    Attributes:
        kv_heads: G, of the new model.
        method: ``mean`` or ``first``, as in `lowbit.attention.pooling.pool`; or ``random``, new heads of normal
            weights with standard deviation ``hidden ** -0.5`` in float16, and biases of 0.
        seed: of random heads.
    """

    kv_heads: int
    method: Method = "mean"
    seed: int = 0

    def check(self, source: Source) -> None:
        """Refuse a model whose configuration does not allow this pooling.

        Raises:
            ArgumentError: names the option.
        """
        config, method = source.config, check_choice("--method", self.method, METHODS)
        check_integer("--seed", self.seed, 0, 2**63 - 1)
        if self.seed and method != "random":
            raise ArgumentError("--seed", self.seed, "only with --method random", "--seed applies only to random heads")
        check_integer("--kv-heads", self.kv_heads, least=1)
        if config.kv_heads % self.kv_heads or self.kv_heads == config.kv_heads:
            allowed = f"a divisor of the {config.kv_heads} key-value heads of {source.name}, and fewer"
            raise ArgumentError("--kv-heads", self.kv_heads, allowed)
        if config.heads_normed_together:
            sentence = (
                f"{source.name} norms all its key heads together, and each channel of each head has a gain of its own; "
                "pooled heads have no norm that corresponds to it"
            )
            raise ArgumentError("model", source.name, "a model without a norm of all heads", sentence)
        if "key_order" in source.architecture.vectors:
            sentence = f"{source.name} has sorted channels, in another order for each head; pool first, and sort after"
            raise ArgumentError("model", source.name, "a model whose channels are not sorted", sentence)

    def matrix(self, heads: int, name: str, weights: F32) -> F32:
        """The projection of keys or values with fewer heads: float32, hidden × G·d_h.

        Args:
            heads: of the source.
            name: of the matrix, for the seed of random heads.
            weights: float32, hidden × heads·d_h.
        """
        if self.method == "random":
            shape = (weights.shape[1] // heads * self.kv_heads, len(weights))
            return np.ascontiguousarray(random_tensor(name, shape, self.seed, layers=1).T.astype(np.float32))
        return pooling.pool(weights, heads, self.kv_heads, self.method)

    def bias(self, heads: int, vector: Array) -> Array:
        """The bias of keys or values: float32, G·d_h."""
        if self.method == "random":
            return np.zeros(len(vector) // heads * self.kv_heads, np.float32)
        row = np.ascontiguousarray(vector[np.newaxis], np.float32)
        return np.ascontiguousarray(pooling.pool(row, heads, self.kv_heads, self.method)[0])


def pooled(source: Source, request: Pooling) -> Changed:
    """The model with fewer key-value heads.

    Raises:
        ArgumentError: as `Pooling.check`.
    """
    request.check(source)
    heads = source.config.kv_heads

    def change(number: int, layer: LayerWeights) -> Change:
        matrices = {name: partial(request.matrix, heads, f"layers[{number}].{name}") for name in PARTS}
        return Change(matrices, {f"{name}_bias": partial(request.bias, heads) for name in PARTS})

    config = replace(source.config, kv_heads=request.kv_heads)
    return Changed.of(source, config, source.architecture, change, {KEYS["kv_heads"]: request.kv_heads})


def cache_bytes(config: LlamaConfig) -> int:
    """Bytes of keys and values of one token in all layers, in float16.

    >>> cache_bytes(LlamaConfig(2, 64, 96, 4, 2, 16, 100, 64, 10000.0, 1e-5))
    256
    """
    return 2 * config.layers * config.kv_heads * config.head_dim * CACHE_TYPE_BYTES
