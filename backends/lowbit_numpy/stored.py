"""Stored matrices: their tables say which numbers the bytes mean, and BLAS multiplies by those, in float64.

A matrix is decoded anew at each call, and a format that is added to the specification is implemented here at once.
"""

from typing import ClassVar

import numpy as np

from lowbit.arrays import F64, Activations, Array
from lowbit.backend import Declaration
from lowbit.contract.rounding import Arithmetic, any_order
from lowbit.tensor_formats.stored import FORMATS, Result, Stored
from lowbit_numpy.caches import attended
from lowbit_numpy.numbers import rounded
from lowbit_numpy.widening import TYPES

WIDE = Arithmetic("dequantised", "float64", any_order, weights="exact")
"""BLAS sums in any order; the numbers themselves are exact in float64."""


class StoredOperations:
    """The hooks of `formats`, of products with stored matrices and of attention over stored caches."""

    declared: ClassVar[dict[str, Declaration]] = {
        "formats.dequantize": Declaration(),
        "formats.quantize": Declaration(TYPES),
        **dict.fromkeys(("linear.gemv", "linear.gemm", "linear.gemm_cast"), Declaration(arithmetic=WIDE)),
        **dict.fromkeys(("attention.attend_stored", "attention.attend_residual"), Declaration(TYPES, WIDE)),
    }

    def _formats_dequantize(self, weights: Stored, result: Result = "float32") -> Array:
        return rounded(weights.values, result)

    def _formats_quantize(self, x: Activations, format: str, options: tuple[tuple[str, int], ...] = ()) -> Stored:
        table, (columns, rows) = FORMATS[format], x.shape
        at = table.sizes(rows, columns, dict(options))
        fields = table.encoded(np.ascontiguousarray(x.T, np.float64), at)
        return Stored(format, rows, columns, table.tensors_of(fields, at), options)

    def _linear_gemv(self, x: Activations, weights: Stored, result: Result = "float32") -> Array:
        return _product(x.astype(np.float64), weights, result)

    _linear_gemm = _linear_gemv

    def _linear_gemm_cast(self, x: Stored, weights: Stored, result: Result = "float32") -> Array:
        return _product(x.values.T, weights, result)

    def _attention_attend_stored(
        self, queries: Activations, keys: Stored, values: Stored, window: int | None = None
    ) -> Array:
        head_dim = queries.shape[2]
        result = attended(queries.astype(np.float64), _heads(keys, head_dim), _heads(values, head_dim), window)
        return rounded(result, queries.dtype.name)

    def _attention_attend_residual(
        self, queries: Activations, keys: Stored, values: Stored, newest_keys: Activations, newest_values: Activations
    ) -> Array:
        own_keys, own_values = _with_newest(keys, newest_keys), _with_newest(values, newest_values)
        return rounded(attended(queries.astype(np.float64), own_keys, own_values, None), queries.dtype.name)


def _with_newest(cache: Stored, newest: Activations) -> F64:
    """Stored tokens and the newest: heads × tokens × channels of a head."""
    return np.concatenate([_heads(cache, newest.shape[2]), newest.astype(np.float64).swapaxes(0, 1)], axis=1)


def _heads(cache: Stored, head_dim: int) -> F64:
    """Channels × tokens as heads × tokens × channels of a head."""
    heads: F64 = cache.values.reshape(-1, head_dim, cache.columns).swapaxes(1, 2)
    return heads


def _product(x: F64, weights: Stored, result: Result) -> Array:
    with np.errstate(invalid="ignore", over="ignore"):
        return rounded(x @ weights.values, result)
