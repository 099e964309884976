"""Decoders in which no sum over channels of heads depends on their order, so that a sorted model has its source's bits.

Scores, and the squares of norms, are sums of products that are each rounded alike wherever they stand; `math.fsum`
rounds such a sum once. Linear layers add row after row, so the bits of a column do not depend on its place.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import fsum

import numpy as np

from lowbit.arrays import F32, F64
from lowbit.attention.attention import KeyValueCache, attend
from lowbit.model.block import FORMULAS
from lowbit.model.decoder import Decoder
from lowbit.model.elementwise import ElementwiseOps, Numbers
from lowbit.model.matrices import Matrix, to_float
from lowbit.model.weights import LlamaWeights


def in_sequence(matrix: Matrix) -> Callable[[F32], F32]:
    """A linear layer that adds row after row."""
    weights = to_float(matrix)

    def linear(x: F32) -> F32:
        total = np.zeros((len(x), weights.shape[1]), np.float32)
        for row in range(len(weights)):
            total += x[:, row : row + 1] * weights[row]
        return total

    return linear


def attend_in_any_order(queries: Numbers, cache: KeyValueCache, window: int | None) -> Numbers:
    """Attention with scores that are rounded once."""
    tokens, heads, channels = queries.shape
    keys, values = cache.keys.astype(np.float64), cache.values.astype(np.float64)
    products = (
        queries.astype(np.float64).transpose(1, 0, 2)[:, :, None] * np.repeat(keys, heads // len(keys), 0)[:, None]
    )
    scores = np.array([fsum(row) for row in products.reshape(-1, channels).tolist()]) / channels**0.5
    none = np.zeros((tokens, heads, channels))
    found = attend(none, np.zeros_like(keys), values, window, bias=scores.reshape(products.shape[:3]))
    return found.astype(queries.dtype)


def norm_in_any_order(gain: F32, epsilon: float) -> Callable[[Numbers], Numbers]:
    """A norm with a sum of squares that is rounded once."""

    def normed(x: Numbers) -> Numbers:
        rows = x.astype(np.float64)
        means = np.array([fsum(row) / len(row) for row in (rows * rows).tolist()])
        found: F64 = rows / np.sqrt(means + epsilon)[:, None] * gain
        return found.astype(x.dtype)

    return normed


def in_any_order(ops: ElementwiseOps = FORMULAS) -> ElementwiseOps:
    """Operations whose sums over channels are rounded once."""
    return replace(ops, norm=norm_in_any_order, attend=attend_in_any_order)


def logits_in_any_order(weights: LlamaWeights, tokens: Sequence[int], ops: ElementwiseOps = FORMULAS) -> F32:
    """The logits after each token of a text."""
    decoder = Decoder(weights, in_sequence, ops=in_any_order(ops))
    return decoder.logits(decoder.hidden(tokens, decoder.new_state()))
