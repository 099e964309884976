"""GQA, figures 4 to 6, before any uptraining: heads pooled to 4, 2 and 1 by their mean, by the first, or drawn anew."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import sqrt
from typing import Any

import numpy as np

from experiments.measuring import DENSE, losses, subject
from experiments.running import Experiment, Row
from lowbit.arrays import F32
from lowbit.attention.pooling import Method, pool
from lowbit.model.decoder import Decoder
from lowbit.model.matrices import to_float
from lowbit.model.weights import LlamaWeights

GROUPS = (8, 4, 2, 1)
WAYS = ("mean", "first", "random")


def rows(quick: bool) -> list[Row]:
    """For each model and number of heads every way to make them."""
    return list(_rows(quick))


def _rows(quick: bool) -> Iterator[Row]:
    for model in DENSE[:1] if quick else DENSE:
        for groups in GROUPS[::3] if quick else GROUPS:
            for way in WAYS if groups < 8 else WAYS[:1]:
                settings: dict[str, str | int] = {"model": model, "kv_heads": groups, "way": way}
                yield Row(settings, partial(measured, model, groups, way, quick))


def measured(model: str, groups: int, way: str, quick: bool) -> dict[str, Any]:
    """The losses, and the bytes that a token takes in a float16 cache."""
    it = subject(model, quick)
    config = it.weights.config
    taken = 2 * 2 * config.layers * groups * config.head_dim
    return losses(Decoder(pooled(it.weights, groups, way)), it.windows) | {"cache_bytes": taken}


def pooled(weights: LlamaWeights, groups: int, way: str, seed: int = 0) -> LlamaWeights:
    """The model with `groups` key and value heads."""
    config, rng = weights.config, np.random.default_rng(seed)
    layers = []
    for layer in weights.layers:
        key, value = (
            made_heads(to_float(matrix), config.kv_heads, groups, way, rng) for matrix in (layer.key, layer.value)
        )
        layers.append(replace(layer, key=key, value=value))
    return replace(weights, config=replace(config, kv_heads=groups), layers=tuple(layers))


def made_heads(matrix: F32, heads: int, groups: int, way: str, rng: np.random.Generator) -> F32:
    """The projection (hidden × heads · d_h) with `groups` heads."""
    if way == "random":
        size = (len(matrix), groups * matrix.shape[1] // heads)
        return (rng.standard_normal(size) / sqrt(len(matrix))).astype(np.float32)
    method: Method = "first" if way == "first" else "mean"
    return pool(np.ascontiguousarray(matrix), heads, groups, method)


EXPERIMENT = Experiment("heads", "Perplexity by the number of key and value heads and how they are made (GQA).", rows)
