"""Why orders of key channels differ: what BFP12 does to keys, and what it does to attention.

A perplexity says that one order is worse than another, and not why. Here one window of a text is read in floats, and
its keys are stored in BFP12 in each order. A row has, beside the squared error of the keys, the divergence of the
probabilities that attention makes of them, and how much of the queries' energy meets the block with the largest steps.
Some rows change one thing more, to see whether it is the reason: the first token's keys stay floats; the mean of each
channel is kept apart from the block; the order is made of the same text that it is measured on, or for each query head.

    cd bench
    python -m experiments scores

Source: K-sort §II.C; the Kullback-Leibler divergence is in nats, and queries are floats here.
"""

from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import numpy as np

from experiments.keys import (
    BALANCED,
    ORDERS,
    Seen,
    Turn,
    around,
    attention_of,
    calibration,
    mixing,
    permuting,
    products,
    queries_of,
    stored_of,
    turner,
)
from experiments.measuring import DENSE, PUBLISHED, subject
from experiments.running import Experiment, Row
from lowbit.arrays import F64
from lowbit.attention.ksort import channel_sizes, magnitudes
from lowbit.model.matrices import to_float
from lowbit.quantization.bfp import bfp12

CHANGES = {
    "the first token in floats": ("unsorted", "calibrated"),
    "means kept apart": ("unsorted", "calibrated"),
    "calibrated on the same text": ("calibrated",),
    "an order for each query head": (BALANCED,),
}
"""What is changed beside the order, and in which orders; before RoPE, in blocks of half a head."""


def rows(quick: bool) -> list[Row]:
    """The channels as they are; then each order, by place and block; then one change at a time."""
    return list(_rows(quick))


def _rows(quick: bool) -> Iterator[Row]:
    model = DENSE[0] if quick else PUBLISHED
    head = subject(model, quick).weights.config.head_dim
    yield Row({"model": model, "part": "channels"}, partial(channels, model, quick))
    for place, orders in ORDERS.items():
        for block in (head // 2, head // 4) if place == "before RoPE" else (head // 2,):
            for order in orders:
                settings: dict[str, str | int] = {"model": model, "part": f"keys {place}", "block": block}
                yield Row(
                    settings | {"order": order, "change": ""}, partial(measured, model, place, block, order, quick)
                )
    for change, some in CHANGES.items():
        for order in some:
            settings = {"model": model, "part": "keys before RoPE", "block": head // 2, "order": order}
            measure = partial(measured, model, "before RoPE", head // 2, order, quick, change)
            yield Row(settings | {"change": change}, measure)


@cache
def window(model: str, quick: bool) -> list[Seen]:
    """What each layer reads of the first window."""
    it = subject(model, quick)
    return attention_of(it.weights, products(model), it.windows[0])


def channels(model: str, quick: bool) -> dict[str, Any]:
    """For each key head before RoPE: the largest channel over the median, by the norm of its row of W_k and by what it
    held; the part of the keys' energy that is the mean of a channel; and correlations of the logarithms."""
    weights = subject(model, quick).weights
    config, turned = weights.config, turner(weights.config)
    found: dict[str, Any] = {}
    for layer, seen in zip(weights.layers, window(model, quick), strict=True):
        columns = to_float(layer.key).reshape(config.hidden, config.kv_heads, config.head_dim)
        keys = stored_of(seen.keys, turned)
        for head in range(config.kv_heads):
            own = np.ascontiguousarray(keys[:, head])
            norm, held = channel_sizes(np.ascontiguousarray(columns[:, head])), magnitudes(own.astype(np.float32))
            of_logs = np.corrcoef(np.log([norm, held, magnitudes(queries_of(seen, turned, head))]))
            told = {
                "largest by norm": norm.max() / np.median(norm),
                "largest held": held.max() / np.median(held),
                "the same channel": norm.argmax() == held.argmax(),
                "near the largest": np.count_nonzero(held > held.max() / 2),
                "means": np.sum(own.mean(axis=0) ** 2) / np.sum(held**2),
                "norm with held": of_logs[0, 1],
                "norm with queries": of_logs[0, 2],
                "held with queries": of_logs[1, 2],
            }
            for name, value in told.items():
                found.setdefault(name, []).append(round(float(value), 5))
    return found | {"counts": [len(window(model, quick)[0].keys)]}


def measured(model: str, place: str, block: int, order: str, quick: bool, change: str = "") -> dict[str, Any]:
    """The errors of one order: the divergence for each layer; for each key head the squared error of its keys over
    their squares, and the part of the queries' energy that meets the block with the largest steps."""
    config = subject(model, quick).weights.config
    turned = turner(config) if place == "before RoPE" else None
    seen_by_layer, errors, key_errors, coarse = window(model, quick), list[float](), list[float](), list[float]()
    made = by_text(seen_by_layer, turned) if change.startswith("calibrated") else mixing(model, place, order, quick)
    heads = range(config.heads)
    for number, (seen, matrix) in enumerate(zip(seen_by_layer, made, strict=True)):
        group = config.heads // config.kv_heads
        keys = np.repeat(stored_of(seen.keys, turned), group, axis=1)  # T × H × d_h: for each query head its own
        matrices = np.repeat(matrix, group, axis=0)
        if change.startswith("an order"):
            matrices = of_query_heads(calibration(model, quick)[number], turned)
        mean = keys.mean(axis=0) if change.startswith("means") else np.zeros_like(keys[0])
        rest, queries = keys - mean, stored_of(seen.queries, turned)
        back = around(rest, matrices, bfp12(block)) + mean
        if change.startswith("the first"):
            back[0] = keys[0]
        key_errors += (np.sum((back - keys) ** 2, axis=(0, 2)) / np.sum(keys**2, axis=(0, 2))).tolist()
        coarse += [coarse_part(rest[:, head], queries[:, head], matrices[head], block) for head in heads]
        given, rotated = (each if turned is None else turned(each, 0, 1) for each in (keys, back))
        errors.append(
            float(np.mean([divergence(seen.queries[:, head], given[:, head], rotated[:, head]) for head in heads]))
        )
    found = {"errors": errors, "key_errors": key_errors, "coarse": coarse}
    return {name: [round(each, 6) for each in values] for name, values in found.items()} | {"counts": [len(keys)]}


def by_text(layers: list[Seen], turned: Turn | None) -> list[F64]:
    """The calibrated order, of the text itself."""
    held = [np.sqrt(np.mean(stored_of(each.keys, turned) ** 2, axis=0)) for each in layers]
    return [np.stack([permuting(size) for size in sizes]) for sizes in held]


def of_query_heads(seen: Seen, turned: Turn | None) -> F64:
    """The order by keys over queries for each query head by itself, H × d_h × d_h; a cache could not store this."""
    held, read = (np.sqrt(np.mean(stored_of(each, turned) ** 2, axis=0)) for each in (seen.keys, seen.queries))
    return np.stack([permuting(size) for size in np.repeat(held, len(read) // len(held), axis=0) / read])


def coarse_part(keys: F64, queries: F64, matrix: F64, block: int) -> float:
    """The part of the queries' energy in the block whose largest element is the largest on average.

    >>> keys, queries = np.array([[9.0, 1.0, 1.0, 1.0]]), np.array([[1.0, 1.0, 1.0, 1.0]])
    >>> coarse_part(keys, queries, np.eye(4), block=2)
    0.5
    """
    tops = np.abs(keys @ matrix).reshape(len(keys), -1, block).max(axis=-1).mean(axis=0)
    energy = np.sum((queries @ matrix) ** 2, axis=0).reshape(-1, block).sum(axis=-1)
    return float(energy[tops.argmax()] / energy.sum())


def divergence(queries: F64, keys: F64, stored: F64) -> float:
    """The mean over tokens of the divergence of the probabilities by stored keys from those by the keys; one head.

    >>> some = np.array([[1.0, 0.0], [0.0, 2.0]])
    >>> divergence(some, some, some)
    0.0
    """
    own, other = (log_probabilities(queries, each) for each in (keys, stored))
    terms = np.exp(own) * np.subtract(own, other, out=np.zeros_like(own), where=np.isfinite(own))
    return float(np.mean(terms.sum(axis=-1)))


def log_probabilities(queries: F64, keys: F64) -> F64:
    """Of causal attention, T × T: −∞ for tokens that come later."""
    seen = np.tri(len(queries), dtype=bool)
    scores = np.where(seen, queries @ keys.T / np.sqrt(queries.shape[-1]), -np.inf)
    top = scores.max(axis=-1, keepdims=True)
    found: F64 = scores - top - np.log(np.exp(scores - top).sum(axis=-1, keepdims=True))
    return found


EXPERIMENT = Experiment("scores", "What BFP12 does to keys and to attention, by the order of channels (K-sort).", rows)
