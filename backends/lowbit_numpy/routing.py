"""Routing, all tokens at once: the weights of each token's experts are gathered and multiplied in one batch."""

import numpy as np

from lowbit.routing import Floats, Ids, Scores, Softmax


def gate_scores(x: Floats, router: Floats, scores: Scores) -> Floats:
    """Float32, T × E, as `lowbit.routing.gate` says."""
    with np.errstate(invalid="ignore", over="ignore"):
        logits = x @ router
    return logits if scores == "logits" else _softmax(logits)


def best_experts(scores: Floats, k: int) -> Ids:
    """int64, T × k, as `lowbit.routing.top_k` says: by score downwards, then by id upwards."""
    ids = np.broadcast_to(np.arange(scores.shape[1]), scores.shape)
    return np.lexsort((ids, -scores), axis=-1)[:, :k].astype(np.int64)


def chosen_weights(scores: Floats, chosen: Ids, softmax: Softmax) -> Floats:
    """Float32, T × k, as `lowbit.routing.weights` says."""
    own: Floats = scores[np.arange(len(scores))[:, None], chosen]
    return _softmax(own) if softmax == "after" else own / own.sum(axis=1, keepdims=True)


def swiglu(x: Floats, gate: Floats, up: Floats, down: Floats) -> Floats:
    """Float32, … × T × hidden, for one expert or a batch of them, as `lowbit.routing.expert` says."""
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        a = x @ gate
        result: Floats = (a / (1 + np.exp(-a)) * (x @ up)) @ down
        return result


def sparse_layer(x: Floats, gate: Floats, up: Floats, down: Floats, chosen: Ids, weights: Floats) -> Floats:
    """Float32, T × hidden, as `lowbit.routing.sparse` says: sorting each token's experts fixes the order of its sum."""
    order = np.argsort(chosen, axis=1)
    experts, shares = np.take_along_axis(chosen, order, axis=1), np.take_along_axis(weights, order, axis=1)
    answers = swiglu(x[:, None, None, :], gate[experts], up[experts], down[experts])  # T × k × 1 × hidden
    y = np.zeros_like(x)
    for place in range(chosen.shape[1]):
        y += shares[:, place, None] * answers[:, place, 0]
    return y


def _softmax(scores: Floats) -> Floats:
    with np.errstate(invalid="ignore", under="ignore"):
        powers: Floats = np.exp(scores - scores.max(axis=1, keepdims=True))
    total: Floats = powers.sum(axis=1, keepdims=True)
    return powers / total
