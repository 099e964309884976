"""The reference backend: the specification itself behind the interface of a backend.

It is slow, but lets the suite, the demo and the benchmarks treat the specification like any other backend. It declares
every operation, and each is the reference function of its chapter.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from lowbit.arrays import F32, Array
from lowbit.backend.base import Backend, Capabilities, Declaration
from lowbit.backend.declarations import LIMITS
from lowbit.backend.prepared import PreparedLinear
from lowbit.contract.operation import Promise
from lowbit.contract.rounding import Arithmetic, one_loop
from lowbit.linear import integer, linear
from lowbit.linear.integer_bounds import integer_loop
from lowbit.numbers.floats import rounded
from lowbit.operations import OPERATIONS
from lowbit.quantization import packing
from lowbit.quantization.affine import QuantizedMatrix
from lowbit.quantization.bfp import Blocks

STORED_PRODUCTS = (
    "linear.gemv",
    "linear.gemm",
    "linear.gemm_cast",
    "attention.attend_stored",
    "attention.attend_residual",
)


def in_type(result: Array, kind: str) -> Array:
    """A result in float64, rounded once to the type of the arrays of its call."""
    with np.errstate(over="ignore"):
        return result.astype(np.float32) if kind == "float32" else rounded(result, kind)  # type: ignore[arg-type]  # one of the three types of arrays


def answered(operation: str, *arguments: Any, **choices: Any) -> Array:
    """The reference's result of a bounded operation, as a backend returns it."""
    specified = OPERATIONS[operation]
    return in_type(specified.compute(*arguments, **choices), specified.result_type(*arguments, **choices))


class ReferenceLinear(PreparedLinear):
    """A matrix with its codes unpacked once; each call is Algorithm 1 in float64, rounded to float32 at the end."""

    def __init__(self, matrix: QuantizedMatrix) -> None:
        super().__init__("reference", matrix.rows, matrix.columns, matrix.nbytes)
        own = {name: getattr(matrix, name).copy() for name in ("words", "scales", "zeros")}  # the caller may reuse them
        self._matrix, self._codes = replace(matrix, **own), packing.unpack(matrix.words, matrix.bits)

    def _qgemv(self, x: F32, out: F32) -> None:
        with np.errstate(over="ignore"):
            out[:] = linear.qgemv_codes(x, self._codes, self._matrix)

    def _qgemm(self, x: F32, out: F32) -> None:
        for row, result in zip(x, out, strict=True):
            self._qgemv(row, result)

    def _qgemm_bfp(self, x: Blocks, out: F32) -> None:
        with np.errstate(over="ignore"):
            out[:] = integer.scaled(integer.sums_of_codes(x, self._codes, self._matrix.group_size), self._matrix)


class ReferenceBackend(Backend):
    """The specification as a backend."""

    name = "reference"

    def capabilities(self) -> Capabilities:
        arithmetic = Arithmetic("factored", "float64", one_loop)
        operations = {
            name: Declaration(arithmetic=arithmetic if specified.promise is Promise.BOUNDED else None)
            for name, specified in OPERATIONS.items()
        }
        operations["linear.qgemm_bfp"] = Declaration(arithmetic=Arithmetic("integer", "float64", integer_loop(1)))
        exact_weights = Declaration(arithmetic=replace(arithmetic, form="dequantised", weights="exact"))
        operations |= dict.fromkeys(STORED_PRODUCTS, exact_weights)
        types = {"inputs": ("float32", "float16", "bfloat16")}
        for name, limits in LIMITS.items():
            if "inputs" in limits:
                operations[name] = replace(operations[name], limits=types)
        return Capabilities(operations, concurrent=True)

    def _prepare(self, matrix: QuantizedMatrix) -> PreparedLinear:
        return ReferenceLinear(matrix)

    def _hook(self, operation: str) -> Callable[..., Any]:
        """The reference function; the float64 result of a bounded operation is rounded to its type."""
        specified = OPERATIONS[operation]
        if specified.promise is Promise.BOUNDED:
            return partial(answered, operation)
        return specified.compute
