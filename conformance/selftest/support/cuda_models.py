"""Small models for the decoder on a device, and devices for them."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lowbit.arrays import F32
from lowbit.model.config import LlamaConfig, Routing
from lowbit.model.decoder import AnyDecoder
from lowbit.model.generation import generate
from lowbit.model.matrices import Matrix
from lowbit.model.weights import GatedWeights, LayerWeights, LlamaWeights, SparseWeights
from lowbit.quantization.affine import quantize

CONFIG = LlamaConfig(
    layers=3,
    hidden=64,
    feed_forward=96,
    heads=4,
    kv_heads=2,
    head_dim=32,
    vocabulary=50,
    context=64,
    rope_base=1000.0,
    rms_epsilon=1e-5,
    routing=Routing(experts=5, top_k=2),
)
DENSE = replace(CONFIG, routing=None, layers=2)
PROMPT = [5, 49, 7, 7, 20, 31, 12, 3, 3, 40, 11]


def model(
    config: LlamaConfig = CONFIG, *, seed: int = 0, attention: int | None = 4, experts: int | None = 3
) -> LlamaWeights:
    """Random weights of so many bits, or plain ones for None; routers large enough that choices are clear."""
    rng = np.random.default_rng(seed)

    def plain(rows: int, columns: int, gain: float = 1.0) -> F32:
        return (gain * rng.standard_normal((rows, columns)) / math.sqrt(rows)).astype(np.float32)

    def stored(rows: int, columns: int, bits: int | None) -> Matrix:
        weights = plain(rows, columns)
        if bits is None:
            return weights.astype(np.float16).astype(np.float32)
        return quantize(weights, bits=bits, group_size=32, scale_dtype="float16")

    def gain() -> F32:
        return rng.uniform(0.5, 1.5, config.hidden).astype(np.float32)

    def gated() -> GatedWeights:
        shape = config.hidden, config.feed_forward
        return GatedWeights(stored(*shape, experts), stored(*shape, experts), stored(*shape[::-1], experts))

    def layer() -> LayerWeights:
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        own = (config.hidden, queries), (config.hidden, keys), (config.hidden, keys), (queries, config.hidden)
        query, key, value, output = (stored(*shape, attention) for shape in own)
        part: GatedWeights | SparseWeights
        if config.routing is None:
            part = gated()
        else:
            router = plain(config.hidden, config.routing.experts, 3.0)
            part = SparseWeights(router, tuple(gated() for _ in range(config.routing.experts)))
        return LayerWeights(gain(), query, key, value, output, gain(), part)

    embedding = rng.standard_normal((config.vocabulary, config.hidden)).astype(np.float32)
    layers = tuple(layer() for _ in range(config.layers))
    return LlamaWeights(config, embedding, layers, gain(), plain(config.hidden, config.vocabulary))


def bits_of(decoder: AnyDecoder, count: int = 6, prompt: Sequence[int] = PROMPT) -> bytes:
    """The logits of a continuation, all their bits."""
    return b"".join(step.logits.tobytes() for step in generate(decoder, prompt, count))
