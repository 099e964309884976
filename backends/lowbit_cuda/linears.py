"""Prepared matrices of the suite: a matrix on a device, and the two kernels that multiply by it.

The suite prepares a matrix once and multiplies by it many times, so it stays on the device. The kernel is the one that
a model would choose: one for a single token, another for several, with the same bits.
"""

import weakref

import numpy as np

from lowbit.arrays import F32, Array
from lowbit.backend.prepared import PreparedLinear
from lowbit.quantization.affine import QuantizedMatrix
from lowbit_cuda.calls import Calls
from lowbit_cuda.kernels.layouts import MatrixLayout
from lowbit_cuda.kernels.table import kernel
from lowbit_cuda.model.matrices import product
from lowbit_cuda.port import Memory, Span


class DeviceLinear(PreparedLinear):
    """A matrix that stays on the device as long as this object exists."""

    def __init__(self, backend: str, calls: Calls, matrix: QuantizedMatrix) -> None:
        self._layout, self._calls = MatrixLayout.of(matrix), calls
        calls.free_released()
        memory = calls.arena.port.allocate(self._layout.nbytes, "a prepared matrix")
        weakref.finalize(self, _release, weakref.ref(calls), memory)
        self._packed: Span = memory.span()
        calls.arena.upload(self._packed, self._layout.apply(matrix))
        super().__init__(backend, matrix.rows, matrix.columns, self._layout.nbytes)

    def _qgemv(self, x: F32, out: F32) -> None:
        layout, tokens = self._layout, 1 if x.ndim == 1 else len(x)
        given: dict[str, Array | Span] = {"y": out, "x": x, **layout.spans(self._packed)}
        self._calls(product(layout, tokens), given, tokens=tokens, **layout.numbers)

    _qgemm = _qgemv


def _release(calls: "weakref.ref[Calls]", memory: Memory) -> None:
    """Called by the garbage collector at any moment, or at interpreter exit: only queues the memory to be freed."""
    if (found := calls()) is not None and not found.closed:
        found.release(memory)


def dequantized(calls: Calls, matrix: QuantizedMatrix) -> F32:
    """The weights of a matrix: float32, K × N."""
    layout = MatrixLayout.of(matrix)
    weights = np.empty((matrix.rows, matrix.columns), np.float32)
    memory = calls.arena.port.allocate(layout.nbytes, "a matrix to dequantise")
    try:
        calls.arena.upload(memory.span(), layout.apply(matrix))
        made = kernel("dequantize", bits=layout.bits, scales=layout.scale_dtype)
        calls(made, {"y": weights, **layout.spans(memory.span())}, **layout.numbers)
    finally:
        calls.arena.port.free(memory)
    return weights
