"""The smallest backend: dequantise 4-bit weights when they are prepared, and multiply by numpy."""

import numpy as np

from lowbit.affine import Floats, QuantizedMatrix, dequantize
from lowbit.backend import Backend, Capabilities, Declaration, PreparedLinear
from lowbit.bounds import Arithmetic


class MyWeights(PreparedLinear):
    """Weights as this backend keeps them: float32, K × N."""

    def __init__(self, matrix: QuantizedMatrix) -> None:
        self.weights = dequantize(matrix)
        super().__init__("mine", matrix.rows, matrix.columns, self.weights.nbytes)

    def _qgemv(self, x: Floats, out: Floats) -> None:
        with np.errstate(invalid="ignore", over="ignore"):  # infinities pass through in silence
            np.dot(x, self.weights, out=out)


class Mine(Backend):
    """Declares what it does, and how it computes."""

    name = "mine"

    def capabilities(self) -> Capabilities:
        declared = Declaration({"bits": (4,)}, Arithmetic("dequantised"))
        return Capabilities({"linear.qgemv": declared})

    def _prepare(self, matrix: QuantizedMatrix) -> PreparedLinear:
        return MyWeights(matrix)
