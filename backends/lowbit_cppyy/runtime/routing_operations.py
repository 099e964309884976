"""The operations that choose the experts of a token (``cpp/routing.h``)."""

from collections.abc import Callable
from typing import ClassVar

import numpy as np

from lowbit.arrays import F32
from lowbit.backend import Declaration
from lowbit.contract.rounding import Arithmetic, any_order
from lowbit.moe.routing import Ids, Scores, Softmax
from lowbit_cppyy.caching import cached_property
from lowbit_cppyy.codegen.isa import InstructionSet
from lowbit_cppyy.runtime.calls import FLOATS, NUMBERS, Calls, done
from lowbit_cppyy.runtime.compiler import Pool

WIDE = Declaration(arithmetic=Arithmetic("direct", "float32", any_order))
"""Sums in float64 have smaller rounding errors than float32 sums in any order."""


class RoutingCalls(Calls):
    """The functions of ``cpp/routing.h``."""

    def __init__(self, table: InstructionSet, pool: Pool) -> None:
        super().__init__("routing.h", table, pool)
        self.gate = self._function("gate", FLOATS, FLOATS, 0, 0, 0, False, FLOATS)
        self.choose = self._function("choose", FLOATS, 0, 0, 0, NUMBERS)
        self.weigh = self._function("weigh", FLOATS, NUMBERS, 0, 0, 0, False, FLOATS)


class RoutingOperations:
    """The hooks of the chapter `lowbit.moe.routing`, except for the experts themselves."""

    declared: ClassVar[dict[str, Declaration]] = {
        "routing.gate": WIDE,
        "routing.top_k": Declaration(),
        "routing.weights": WIDE,
    }
    _table: InstructionSet
    _require_pool: Callable[[], Pool]

    @cached_property
    def _routing(self) -> RoutingCalls:
        return RoutingCalls(self._table, self._require_pool())

    def _routing_gate(self, x: F32, router: F32, scores: Scores = "logits") -> F32:
        out = np.empty((len(x), router.shape[1]), np.float32)
        return done(self._routing.gate(x, router, *x.shape, router.shape[1], scores == "probabilities", out), out)

    def _routing_top_k(self, scores: F32, k: int) -> Ids:
        out = np.empty((len(scores), k), np.int64)
        return done(self._routing.choose(scores, *scores.shape, k, out), out)

    def _routing_weights(self, scores: F32, chosen: Ids, softmax: Softmax = "after") -> F32:
        out = np.empty(chosen.shape, np.float32)
        sizes = *scores.shape, chosen.shape[1]
        return done(self._routing.weigh(scores, chosen, *sizes, softmax == "before", out), out)
