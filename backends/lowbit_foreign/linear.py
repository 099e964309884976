"""Products with a matrix that a library or a program has prepared, or that is passed with every call."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from lowbit.arrays import F32
from lowbit.backend import PRODUCTS, Declaration, PreparedLinear
from lowbit.errors import NotDeclaredError
from lowbit.quantization.affine import QuantizedMatrix
from lowbit.quantization.bfp import Blocks

Multiply = Callable[[str, object, dict[str, Any], F32], None]
"""``multiply(operation, handle, arguments, out)``."""


def copied(matrix: QuantizedMatrix) -> QuantizedMatrix:
    """A copy of the matrix, since the caller may reuse its memory."""
    arrays = {name: getattr(matrix, name).copy() for name in ("words", "scales", "zeros")}
    return replace(matrix, **arrays)


def first_product(declared: Mapping[str, Declaration]) -> str:
    """The operation for which a matrix is prepared: the first product that is declared."""
    return next(name for name in PRODUCTS if name in declared)


class ForeignLinear(PreparedLinear):
    """A matrix for products by a library or a program."""

    def __init__(
        self,
        backend: str,
        matrix: QuantizedMatrix,
        declared: Mapping[str, Declaration],
        multiply: Multiply,
        arguments: dict[str, Any],
        handle: object = None,
        nbytes: int | None = None,
    ) -> None:
        """Products are made by `multiply`, with `handle` and, besides x, with `arguments`."""
        super().__init__(backend, matrix.rows, matrix.columns, matrix.nbytes if nbytes is None else nbytes)
        self._declared, self._multiply, self._arguments, self._handle = declared, multiply, arguments, handle

    def _qgemv(self, x: F32, out: F32) -> None:
        self._product("linear.qgemv", x, out)

    def _qgemm(self, x: F32, out: F32) -> None:
        self._product("linear.qgemm", x, out)

    def _qgemm_bfp(self, x: Blocks, out: F32) -> None:
        self._product("linear.qgemm_bfp", x, out)

    def _product(self, operation: str, x: F32 | Blocks, out: F32) -> None:
        if operation not in self._declared:
            raise NotDeclaredError(self.backend, operation)
        self._multiply(operation, self._handle, {"x": x} | self._arguments, out)
