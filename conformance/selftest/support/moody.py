"""Backends whose results change: with the time, with the place of their arguments, with the call before."""

from typing import Any

import numpy as np
from seal_breakers import Linear, own_codes

from lowbit.backend import Backend, Capabilities, Declaration, PreparedLinear
from lowbit.contract.rounding import Arithmetic


def weights_of(matrix: Any) -> Any:
    codes = own_codes(matrix.words, matrix.bits)
    scale = np.repeat(matrix.scales, matrix.group_size, axis=0)[: matrix.rows].astype(np.float64)
    zero = np.repeat(matrix.zeros, matrix.group_size, axis=0)[: matrix.rows].astype(np.float64)
    return scale * codes + zero if matrix.convention == "minimum" else scale * (codes - zero)


class Moody(Backend):
    """Products that are right until `spoilt` says otherwise."""

    name = "moody"

    def __init__(self) -> None:
        self.calls, self.kept = 0, dict[Any, Any]()

    def capabilities(self) -> Capabilities:
        return Capabilities({"linear.qgemv": Declaration({}, Arithmetic("dequantised"))})

    def _prepare(self, matrix: Any) -> PreparedLinear:
        weights = self.prepared(matrix)
        return Linear(
            matrix, lambda x, codes, given: self.spoilt(x, (x.astype(np.float64) @ weights).astype(np.float32))
        )

    def prepared(self, matrix: Any) -> Any:
        return weights_of(matrix)

    def spoilt(self, x: Any, y: Any) -> Any:
        self.calls += 1
        return y


class ByTime(Moody):
    """Every second call is off."""

    def spoilt(self, x: Any, y: Any) -> Any:
        self.calls += 1
        return y if self.calls % 2 else y + 1


class EveryFifth(Moody):
    """Every fifth call is off, from the second on."""

    def spoilt(self, x: Any, y: Any) -> Any:
        self.calls += 1
        return y + 1 if self.calls % 5 == 2 else y


class ByAddress(Moody):
    """Off where x does not end at a page."""

    def spoilt(self, x: Any, y: Any) -> Any:
        end = x.__array_interface__["data"][0] + x.nbytes
        return y if end % 4096 == 0 else y + 1


class KeepsByShape(Moody):
    """Weights are kept by shape and found again for another matrix of the same shape."""

    def prepared(self, matrix: Any) -> Any:
        key = (matrix.rows, matrix.columns, matrix.bits, matrix.group_size)
        return self.kept.setdefault(key, weights_of(matrix))


class KeepsX(Moody):
    """The first activations are used again for a matrix of the same shape."""

    def _prepare(self, matrix: Any) -> PreparedLinear:
        weights = weights_of(matrix)

        def answer(x: Any, codes: Any, given: Any) -> Any:
            first = self.kept.setdefault(len(x), x.copy())
            return (first.astype(np.float64) @ weights).astype(np.float32)

        return Linear(matrix, answer)
