"""Routing, all tokens at once: the weights of each token's experts are gathered and multiplied in one batch."""

from typing import ClassVar

import numpy as np

from lowbit.arrays import F32
from lowbit.backend import Declaration
from lowbit.contract.rounding import Arithmetic, any_order
from lowbit.moe.routing import Ids, Scores, Softmax
from lowbit_numpy import caches
from lowbit_numpy.widening import TYPES, widened

BOUNDED = ("routing.gate", "routing.weights", "routing.expert", "routing.sparse")
DIRECT = Declaration(TYPES, Arithmetic("direct", "float32", any_order))


class RoutingOperations:
    """The hooks of the chapter `lowbit.moe.routing`."""

    declared: ClassVar[dict[str, Declaration]] = {
        "routing.top_k": Declaration(TYPES),
        **dict.fromkeys(BOUNDED, DIRECT),
    }

    @widened
    def _routing_gate(self, x: F32, router: F32, scores: Scores = "logits") -> F32:
        with np.errstate(invalid="ignore", over="ignore"):
            logits = x @ router
        return logits if scores == "logits" else caches.softmax(logits)

    @widened
    def _routing_top_k(self, scores: F32, k: int) -> Ids:
        ids = np.broadcast_to(np.arange(scores.shape[1]), scores.shape)
        return np.lexsort((ids, -scores), axis=-1)[:, :k].astype(np.int64)  # by descending score, then by ascending id

    @widened
    def _routing_weights(self, scores: F32, chosen: Ids, softmax: Softmax = "after") -> F32:
        own: F32 = scores[np.arange(len(scores))[:, None], chosen]
        return caches.softmax(own) if softmax == "after" else own / own.sum(axis=1, keepdims=True)

    @widened
    def _routing_expert(self, x: F32, gate: F32, up: F32, down: F32) -> F32:
        return _swiglu(x, gate, up, down)

    @widened
    def _routing_sparse(self, x: F32, gate: F32, up: F32, down: F32, chosen: Ids, weights: F32) -> F32:
        order = np.argsort(chosen, axis=1)  # sorting each token's experts fixes the order of its sum
        experts, factors = np.take_along_axis(chosen, order, axis=1), np.take_along_axis(weights, order, axis=1)
        answers = _swiglu(x[:, None, None, :], gate[experts], up[experts], down[experts])  # T × k × 1 × hidden
        y = np.zeros_like(x)
        for place in range(chosen.shape[1]):
            y += factors[:, place, None] * answers[:, place, 0]
        return y


def _swiglu(x: F32, gate: F32, up: F32, down: F32) -> F32:
    """… × T × hidden, for one expert or a batch of them."""
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        a = x @ gate
        result: F32 = (a / (1 + np.exp(-a)) * (x @ up)) @ down
        return result
