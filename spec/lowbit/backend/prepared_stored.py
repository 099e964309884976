"""Prepared stored matrices: a matrix of any format in the form that one backend uses.

`lowbit.backend.base.Backend.prepare_stored` makes one, as `prepare` does of the specification's own matrices: once,
and however long it takes. A backend derives from `PreparedStored` and overrides its hooks. They get arguments that have
been checked, and write every element of `out`. After `prepare_stored` the arrays of the matrix belong to the caller
again, and after a call so do the activations.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from lowbit.arrays import Activations, Array
from lowbit.backend.prepared import placed
from lowbit.contract.checks import check_array, check_choice, check_dtype, check_finite, check_instance
from lowbit.contract.operation import Parameters
from lowbit.errors import ArgumentError, NotDeclaredError
from lowbit.numbers.floats import FLOATS
from lowbit.tensor_formats.stored import FORMATS, RESULTS, Result, Stored, quantized

NAMES: Mapping[np.dtype[Any], Result] = MappingProxyType({FLOATS[name].dtype: name for name in RESULTS})
"""The types of activations by their dtypes, because numpy takes microseconds to name a dtype."""

CASTS = tuple(name for name, each in FORMATS.items() if each.encode and not each.options)
"""The formats that activations may be cast to."""


class PreparedStored:
    """A stored matrix in the form that one backend uses, ready to be multiplied by.

    Attributes:
        backend: the name of the backend, for messages.
        rows: K.
        columns: N.
        nbytes: bytes of the matrix that one call reads.
    """

    _refuse: Callable[[str, Parameters], None] | None = None
    """Raises `NotDeclaredError` for a product that is not declared, or not for its types; None if all are declared.
    `Backend.prepare_stored` sets it, and the backend's declared alignment and over-read."""
    _alignment, _overread = 0, 0

    def __init__(self, backend: str, weights: Stored, nbytes: int) -> None:
        self.backend, self.rows, self.columns, self.nbytes = backend, weights.rows, weights.columns, nbytes
        self._seen = set[tuple[str, str, str, int]]()

    def gemv(self, x: Activations, result: Result = "float32") -> Array:
        """``y = x W`` for one vector, operation `linear.gemv`.

        Args:
            x: float32, float16 or bfloat16, K.
            result: the type of the result.

        Returns:
            N numbers of that type.

        Raises:
            ArgumentError: wrong dtype, shape or layout; an unknown result.
            NotDeclaredError: the backend does not declare the operation, or not for these types.
        """
        name = self._checked(x, (self.rows,), result)
        self._check_declared("linear.gemv", name, result, 1)
        out = self._out((self.columns,), result)
        self._gemv(x, out)
        return out

    def gemm(self, x: Activations, result: Result = "float32") -> Array:
        """``Y = X W`` for T vectors, operation `linear.gemm`.

        Args:
            x: float32, float16 or bfloat16, T × K.
            result: the type of the result.

        Returns:
            T × N numbers of that type.

        Raises:
            ArgumentError: wrong dtype, shape or layout; an unknown result.
            NotDeclaredError: the backend does not declare the operation, or not for these types.
        """
        name = self._checked(x, (None, self.rows), result)
        self._check_declared("linear.gemm", name, result, len(x))
        out = self._out((len(x), self.columns), result)
        self._gemm(x, out)
        return out

    def gemm_cast(self, x: Stored, result: Result = "float32") -> Array:
        """``Y = X W`` for stored activations, operation `linear.gemm_cast`.

        Args:
            x: K × T, each vector of activations a column.
            result: the type of the result.

        Returns:
            T × N numbers of that type.

        Raises:
            ArgumentError: not a `Stored`, or of another K; an unknown result.
            NotDeclaredError: the backend does not declare the operation, or not for these formats.
        """
        check_instance("x", x, Stored)
        if x.rows != self.rows:
            raise ArgumentError("rows of x", x.rows, f"{self.rows}, the rows of weights")
        check_choice("result", result, RESULTS)
        self._check_declared("linear.gemm_cast", x.format, result, x.columns)
        out = self._out((x.columns, self.columns), result)
        self._gemm_cast(x, out)
        return out

    def cast_and_multiply(self, x: Activations, activations: str, result: Result = "float32") -> Array:
        """``Y = X W`` for activations that are cast first: operations `formats.quantize` and `linear.gemm_cast` in one.

        The backend's cast is one of the choices that its `formats.quantize` may make.

        Args:
            x: float32, float16 or bfloat16, T × K, finite.
            activations: the format of the cast, one without options.
            result: the type of the result.

        Returns:
            T × N numbers of that type.

        Raises:
            ArgumentError: wrong dtype, shape or layout; numbers, or a number of rows, that the format has no cast for;
                an unknown result.
            NotDeclaredError: the backend does not declare `linear.gemm_cast`, or not for these formats.
        """
        self._checked(x, (None, self.rows), result)
        check_choice("activations", activations, CASTS)
        if self.rows % (block := FORMATS[activations].block or 1):
            raise ArgumentError("rows", self.rows, f"a multiple of {block}, the elements of a block of {activations}")
        self._check_declared("linear.gemm_cast", activations, result, len(x))
        out = self._out((len(x), self.columns), result)
        self._cast_and_multiply(x, activations, out)
        return out

    def _checked(self, x: Array, shape: tuple[int | None, ...], result: Result) -> Result:
        """Check the activations and return their type."""
        name = NAMES.get(x.dtype) if isinstance(x, np.ndarray) else None
        if name is None:
            check_dtype("x", x, RESULTS)
        check_array("x", x, x.dtype.type, shape)
        check_choice("result", result, RESULTS)
        return name or RESULTS[0]

    def _check_declared(self, operation: str, activations: str, result: str, batch: int) -> None:
        """Refuse what is not declared for this matrix, these types and this number of vectors."""
        key = operation, activations, result, batch
        if self._refuse is not None and key not in self._seen:
            self._refuse(operation, {"activations": activations, "result": result, "batch": batch})
            self._seen.add(key)  # the answer never changes

    def _out(self, shape: tuple[int, ...], result: Result) -> Array:
        return placed(shape, FLOATS[result].dtype, self._alignment, self._overread)

    def _gemv(self, x: Activations, out: Array) -> None:
        raise NotDeclaredError(self.backend, "linear.gemv")

    def _gemm(self, x: Activations, out: Array) -> None:
        raise NotDeclaredError(self.backend, "linear.gemm")

    def _gemm_cast(self, x: Stored, out: Array) -> None:
        raise NotDeclaredError(self.backend, "linear.gemm_cast")

    def _cast_and_multiply(self, x: Activations, activations: str, out: Array) -> None:
        check_finite("x", x)
        self._gemm_cast(quantized(x, activations), out)
