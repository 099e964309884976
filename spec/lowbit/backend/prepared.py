"""Prepared weights: a quantised matrix in the form that one backend uses.

`lowbit.backend.base.Backend.prepare` makes one, once, and may take a long time: change the layout of the codes,
specialise, compile. Then the products are called many times, so their checks are few and cheap. A backend derives from
`PreparedLinear` and overrides its hooks, the methods that begin with an underscore. They get arguments that have been
checked, and write every element of `out`. After `prepare` the arrays of the matrix belong to the caller again, and
after a call so does x: see *Whose memory* in `lowbit.backend.base`.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from lowbit.arrays import F32, Array
from lowbit.contract.checks import check_array, check_finite
from lowbit.errors import ArgumentError, NotDeclaredError
from lowbit.linear.integer import ACTIVATIONS, check_activations
from lowbit.quantization import bfp


class PreparedLinear:
    """A quantised matrix in the form that one backend uses, ready to be multiplied by.

    Attributes:
        backend: the name of the backend, for messages.
        rows: K.
        columns: N.
        nbytes: bytes of weights, scales and zeros that one call reads.
    """

    _lacking: Mapping[str, str] = MappingProxyType({})
    """For each declared product, a description of what is not declared for this matrix; set by `Backend.prepare`."""
    _format_lacks: Callable[[bfp.Format], str] | None = None
    """A description of what is not declared for a format of activations; None if all formats are declared."""

    _alignment, _overread = 0, 0
    """The backend's declared alignment and over-read, set by `Backend.prepare`; an `out` allocated here respects
    both."""

    def __init__(self, backend: str, rows: int, columns: int, nbytes: int) -> None:
        self.backend, self.rows, self.columns, self.nbytes = backend, rows, columns, nbytes

    def qgemv(self, x: F32, out: F32 | None = None) -> F32:
        """``y = x W`` for one vector, operation `linear.qgemv`.

        Args:
            x: float32, K.
            out: float32, N, written and returned; a new array if not given.

        Raises:
            ArgumentError: wrong dtype, shape or layout; `out` read-only or overlapping `x`.
            NotDeclaredError: the backend does not declare the operation.
        """
        check_array("x", x, np.float32, (self.rows,))
        out = self._checked_out(out, (self.columns,), x)
        self._check_declared("linear.qgemv")
        self._qgemv(x, out)
        return out

    def qgemm(self, x: F32, out: F32 | None = None) -> F32:
        """``Y = X W`` for T vectors, operation `linear.qgemm`.

        Args:
            x: float32, T × K.
            out: float32, T × N, written and returned; a new array if not given.

        Raises:
            ArgumentError: wrong dtype, shape or layout; `out` read-only or overlapping `x`.
            NotDeclaredError: the backend does not declare the operation.
        """
        check_array("x", x, np.float32, (None, self.rows))
        out = self._checked_out(out, (x.shape[0], self.columns), x)
        self._check_declared("linear.qgemm")
        self._qgemm(x, out)
        return out

    def qgemm_bfp(self, x: bfp.Blocks, out: F32 | None = None) -> F32:
        """``Y = X W`` for T rows of blocks, operation `linear.qgemm_bfp`; T = 1 is the product with one vector.

        Args:
            x: T rows of K elements.
            out: float32, T × N, written and returned; a new array if not given.

        Raises:
            ArgumentError: `x` is not `lowbit.quantization.bfp.Blocks`, has rows of another length or blocks whose sums
                could reach 2^53; `out` of wrong dtype, shape or layout, read-only or overlapping `x`.
            NotDeclaredError: the backend does not declare the operation, or not for this matrix or format.
        """
        check_activations(x, self.rows)
        out = self._checked_out(out, (x.rows, self.columns), x.mantissas, x.exponents)
        self._check_declared("linear.qgemm_bfp", x.format)
        self._qgemm_bfp(x, out)
        return out

    def qgemm_cast(self, x: F32, out: F32 | None = None) -> F32:
        """``qgemm_bfp(bfp.cast(x, integer.ACTIVATIONS), out)``, to the bit: cast and product in one call.

        It is not an operation of its own. The cast loses accuracy, so it is never called in place of `qgemm`.

        Args:
            x: float32, T × K, finite.
            out: float32, T × N, written and returned; a new array if not given.

        Raises:
            ArgumentError: wrong dtype, shape or layout; `x` not finite; `out` read-only or overlapping `x`.
            NotDeclaredError: the backend does not declare `linear.qgemm_bfp`, or not for this matrix or format.
        """
        check_array("x", x, np.float32, (None, self.rows))
        check_finite("x", x)
        out = self._checked_out(out, (x.shape[0], self.columns), x)
        self._check_declared("linear.qgemm_bfp", ACTIVATIONS)
        self._qgemm_cast(x, out)
        return out

    def _check_declared(self, operation: str, format: bfp.Format | None = None) -> None:
        """Refuse a product that is declared, but not for this matrix or not for this format of activations."""
        missing = self._lacking.get(operation)
        if not missing and format is not None and self._format_lacks is not None:
            missing = self._format_lacks(format)
        if missing:
            raise NotDeclaredError(self.backend, operation, missing)

    def _qgemv(self, x: F32, out: F32) -> None:
        raise NotDeclaredError(self.backend, "linear.qgemv")

    def _qgemm(self, x: F32, out: F32) -> None:
        raise NotDeclaredError(self.backend, "linear.qgemm")

    def _qgemm_bfp(self, x: bfp.Blocks, out: F32) -> None:
        raise NotDeclaredError(self.backend, "linear.qgemm_bfp")

    def _qgemm_cast(self, x: F32, out: F32) -> None:
        """The two steps in sequence; a backend with its own cast overrides this, with the same bits."""
        self._qgemm_bfp(bfp.cast(x, ACTIVATIONS), out)

    def _checked_out(self, out: F32 | None, shape: tuple[int, ...], *inputs: Array) -> F32:
        """The output array: a new one, or the caller's if it can hold the result and does not overlap an input."""
        if out is None:
            return placed(shape, np.float32, self._alignment, self._overread)
        check_array("out", out, np.float32, shape, writeable=True)
        if any(np.may_share_memory(out, array) for array in inputs):
            raise ArgumentError("out", "overlapping x in memory", "an array of its own")
        return out


def placed(shape: Sequence[int], dtype: npt.DTypeLike, alignment: int, overread: int) -> Array:
    """A new array for a backend that declares an alignment or an over-read; its elements are uninitialised.

    >>> placed((2, 3), np.float32, alignment=64, overread=0).ctypes.data % 64
    0

    Args:
        shape: of the array.
        dtype: of its elements.
        alignment: as `lowbit.backend.base.Capabilities.alignment`.
        overread: as `lowbit.backend.base.Capabilities.overread`.
    """
    if not alignment and not overread:
        return np.empty(shape, dtype)
    wanted = np.dtype(dtype)
    nbytes, unit = int(np.prod(shape)) * wanted.itemsize, max(alignment, wanted.itemsize)
    memory = np.empty(nbytes + unit + overread, np.uint8)
    start = -memory.ctypes.data % unit
    return memory[start : start + nbytes].view(wanted).reshape(shape)
