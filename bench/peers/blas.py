"""numpy's product of float32 matrices: the BLAS that it was built with, on weights that were never quantised."""

from typing import Any

import numpy as np

from lowbit.arrays import F32
from peers.base import Contestant, Plan, Rotation, Weights


class BlasContestant(Contestant):
    """``x @ W`` in float32; its threads are those that ``OPENBLAS_NUM_THREADS`` allows."""

    def __init__(self, weights: Weights, plan: Plan) -> None:
        first = weights.spread(weights.tile, 1)
        self.nbytes = first.nbytes
        self.products, self.bursts = plan.products(first.nbytes), plan.bursts(first.nbytes)
        self._rotation = Rotation([first, *(first.copy() for _ in range(self.products * self.bursts - 1))])
        self._weights = weights

    def prepare(self, x: F32) -> None:
        self._x, self._out = x, np.empty((len(x), self._weights.columns), np.float32)

    def run(self) -> None:
        for _ in range(self.products):
            np.matmul(self._x, self._rotation.next(), out=self._out)

    def result(self) -> F32:
        return self._out.copy()

    def held(self) -> F32:
        return self._weights.tile


def details() -> dict[str, Any]:
    """The BLAS and its version."""
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    return {"numpy": np.__version__, "BLAS": f"{blas['name']} {blas['version']}"}
