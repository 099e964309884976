"""Routing, all tokens at once: the weights of each token's experts are gathered and multiplied in one batch."""

from typing import ClassVar

import numpy as np

from lowbit.backend import Declaration
from lowbit.contract.rounding import Arithmetic, any_order
from lowbit.moe.routing import Floats, Ids, Scores, Softmax

BOUNDED = ("routing.gate", "routing.weights", "routing.expert", "routing.sparse")
DIRECT = Declaration(arithmetic=Arithmetic("direct", "float32", any_order))


class RoutingOperations:
    """The hooks of the chapter `lowbit.moe.routing`."""

    declared: ClassVar[dict[str, Declaration]] = {"routing.top_k": Declaration()} | dict.fromkeys(BOUNDED, DIRECT)

    def _routing_gate(self, x: Floats, router: Floats, scores: Scores = "logits") -> Floats:
        with np.errstate(invalid="ignore", over="ignore"):
            logits = x @ router
        return logits if scores == "logits" else _softmax(logits)

    def _routing_top_k(self, scores: Floats, k: int) -> Ids:
        ids = np.broadcast_to(np.arange(scores.shape[1]), scores.shape)
        return np.lexsort((ids, -scores), axis=-1)[:, :k].astype(np.int64)  # by score downwards, then by id upwards

    def _routing_weights(self, scores: Floats, chosen: Ids, softmax: Softmax = "after") -> Floats:
        own: Floats = scores[np.arange(len(scores))[:, None], chosen]
        return _softmax(own) if softmax == "after" else own / own.sum(axis=1, keepdims=True)

    def _routing_expert(self, x: Floats, gate: Floats, up: Floats, down: Floats) -> Floats:
        return _swiglu(x, gate, up, down)

    def _routing_sparse(
        self, x: Floats, gate: Floats, up: Floats, down: Floats, chosen: Ids, weights: Floats
    ) -> Floats:
        order = np.argsort(chosen, axis=1)  # sorting each token's experts fixes the order of its sum
        experts, shares = np.take_along_axis(chosen, order, axis=1), np.take_along_axis(weights, order, axis=1)
        answers = _swiglu(x[:, None, None, :], gate[experts], up[experts], down[experts])  # T × k × 1 × hidden
        y = np.zeros_like(x)
        for place in range(chosen.shape[1]):
            y += shares[:, place, None] * answers[:, place, 0]
        return y


def _swiglu(x: Floats, gate: Floats, up: Floats, down: Floats) -> Floats:
    """… × T × hidden, for one expert or a batch of them."""
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        a = x @ gate
        result: Floats = (a / (1 + np.exp(-a)) * (x @ up)) @ down
        return result


def _softmax(scores: Floats) -> Floats:
    with np.errstate(invalid="ignore", under="ignore"):
        powers: Floats = np.exp(scores - scores.max(axis=1, keepdims=True))
    total: Floats = powers.sum(axis=1, keepdims=True)
    return powers / total
