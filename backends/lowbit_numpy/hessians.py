"""The parts of GPTQ in float32, by BLAS and LAPACK."""

from typing import Any, ClassVar

import numpy as np

from lowbit.arrays import F32, F64
from lowbit.backend import Declaration
from lowbit.contract.rounding import Arithmetic, any_order
from lowbit.errors import ArgumentError

# A target is a weight plus at most K − 1 products in any order; each product has a quotient and a difference.
DECLARED = {
    "gptq.hessian": Declaration(arithmetic=Arithmetic("direct", "float32", any_order)),
    "gptq.factor": Declaration(arithmetic=Arithmetic("direct", "float64", any_order)),
    "gptq.targets": Declaration(arithmetic=Arithmetic("direct", "float32", lambda rows, _: rows + 3)),
}


class GptqOperations:
    """The hooks of `gptq.hessian`, `gptq.factor` and `gptq.targets`."""

    declared: ClassVar[dict[str, Declaration]] = DECLARED

    def _gptq_hessian(self, x: F32) -> F32:
        return x.T @ x

    def _gptq_factor(self, hessian: F32 | F64) -> F32:
        backwards: Any = hessian[::-1, ::-1].astype(np.float64)  # reversed, an upper factor is LAPACK's lower one
        try:
            lower = np.linalg.cholesky(backwards)
        except np.linalg.LinAlgError:
            raise ArgumentError("hessian", "not positive definite", "a positive definite matrix (damp)") from None
        return np.ascontiguousarray(lower[::-1, ::-1], np.float32)

    def _gptq_targets(self, weights: F32, factor: F32, values: F32) -> F32:
        ratios = np.triu(factor / factor.diagonal(), 1)
        result: F32 = weights + ratios.T @ (weights - values)
        return result
