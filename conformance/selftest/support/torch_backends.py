"""Backends with peculiarities that `lowbit_torch` must respect; loaded by name, as ``torch_backends:Turns``."""

import threading
import time
from typing import Any

import numpy as np

from lowbit.arrays import F32
from lowbit.backend import Backend, Capabilities, Declaration, PreparedLinear
from lowbit.contract.rounding import Arithmetic
from lowbit.quantization.affine import QuantizedMatrix, dequantize

ALIGNMENT, OVERREAD = 256, 64
PRODUCTS = dict.fromkeys(("linear.qgemv", "linear.qgemm"), Declaration(arithmetic=Arithmetic("dequantised")))


class Dense(PreparedLinear):
    """Float32 weights; a subclass looks at what it is given."""

    def __init__(self, matrix: QuantizedMatrix) -> None:
        super().__init__("dense", matrix.rows, matrix.columns, matrix.nbytes)
        self.matrix, self.weights = matrix, dequantize(matrix)  # keeps the arrays, as the reference backend does

    def _qgemv(self, x: F32, out: F32) -> None:
        self._qgemm(x[None], out[None])

    def _qgemm(self, x: F32, out: F32) -> None:
        np.matmul(x, self.weights, out=out)


class InTurn(Dense):
    """Notes whether two calls ran at once."""

    busy = threading.Lock()
    overlaps = 0

    def _qgemm(self, x: F32, out: F32) -> None:
        if not InTurn.busy.acquire(blocking=False):
            InTurn.overlaps += 1
            return
        time.sleep(0.001)
        super()._qgemm(x, out)
        InTurn.busy.release()


class Turns(Backend):
    """Says nothing of several threads, so that only one may call it."""

    name = "turns"
    linear, prepared = InTurn, 0

    def capabilities(self) -> Capabilities:
        return Capabilities(PRODUCTS)

    def _prepare(self, matrix: QuantizedMatrix) -> PreparedLinear:
        Turns.prepared += 1
        time.sleep(0.02)  # in which other threads ask for the same
        return InTurn(matrix)


class Plain(Backend):
    """A backend without wishes."""

    name = "plain"

    def capabilities(self) -> Capabilities:
        return Capabilities(PRODUCTS, concurrent=True)

    def _prepare(self, matrix: QuantizedMatrix) -> PreparedLinear:
        return Dense(matrix)


class Placed(Dense):
    """Fails where an array does not lie as was asked, or has not so many bytes after it."""

    def __init__(self, matrix: QuantizedMatrix) -> None:
        for array in (matrix.words, matrix.scales, matrix.zeros):
            self._look(array)
        super().__init__(matrix)

    def _qgemm(self, x: F32, out: F32) -> None:
        self._look(x)
        self._look(out)
        super()._qgemm(x, out)

    def _look(self, array: np.ndarray[Any, Any]) -> None:
        assert array.ctypes.data % ALIGNMENT == 0
        memory = array
        while isinstance(memory.base, np.ndarray):
            memory = memory.base
        assert memory.ctypes.data + memory.nbytes >= array.ctypes.data + array.nbytes + OVERREAD


class Particular(Backend):
    """Asks for aligned arrays with bytes after them."""

    name = "particular"

    def capabilities(self) -> Capabilities:
        return Capabilities(PRODUCTS, concurrent=True, alignment=ALIGNMENT, overread=OVERREAD)

    def _prepare(self, matrix: QuantizedMatrix) -> PreparedLinear:
        return Placed(matrix)
