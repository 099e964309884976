"""The interface of a backend: what it refuses before a kernel sees it, and how backends are found."""

import numpy as np
import pytest
from numpy.lib.array_utils import byte_bounds

from lowbit.arrays import F32
from lowbit.backend import Backend, Capabilities, Declaration, PreparedLinear
from lowbit.contract.rounding import Arithmetic
from lowbit.errors import ArgumentError, LowbitError, NotDeclaredError, UnavailableError
from lowbit.quantization.affine import QuantizedMatrix, quantize


class FourBits(Backend):
    """Declares a corner of one operation and notes whether a hook was reached."""

    name = "four"
    reached = False

    def capabilities(self) -> Capabilities:
        limits = {"bits": (4,), "convention": ("minimum",), "group_size": (16,), "scale_dtype": ("float32",)}
        declared = Declaration(limits, Arithmetic("dequantised"))
        return Capabilities({"linear.qgemv": declared, "packing.pack": Declaration({"bits": (4,)})})

    def _prepare(self, matrix: QuantizedMatrix) -> PreparedLinear:
        self.reached = True
        return PreparedLinear(self.name, matrix.rows, matrix.columns, matrix.nbytes)


def matrix(**change: object) -> QuantizedMatrix:
    arguments = {"bits": 4, "group_size": 16, "convention": "minimum", "scale_dtype": "float32"} | change
    return quantize(np.ones((32, 3), np.float32), **arguments)  # type: ignore[arg-type]  # valid by construction


class Demanding(FourBits):
    """A right backend that stores whole pages and reads past the end: it keeps every `out` that it is given."""

    given: list[F32]

    def capabilities(self) -> Capabilities:
        declared = Declaration(arithmetic=Arithmetic("dequantised"))
        return Capabilities({"linear.qgemv": declared, "linear.qgemm": declared}, alignment=4096, overread=100)

    def _prepare(self, matrix: QuantizedMatrix) -> PreparedLinear:
        kept = self.given = []

        class Product(PreparedLinear):
            def _qgemv(self, x: F32, out: F32) -> None:
                kept.append(out)

            _qgemm = _qgemv

        return Product(self.name, matrix.rows, matrix.columns, matrix.nbytes)


def test_a_result_that_is_made_for_a_backend_is_as_it_declares() -> None:
    """Without an out of the caller's, the kernel is given one that is aligned and may be read past, as declared."""
    backend = Demanding()
    prepared = backend.prepare(matrix())
    for _ in range(5):
        prepared.qgemv(np.ones(32, np.float32))
        prepared.qgemm(np.ones((2, 32), np.float32))
    for out in backend.given:
        assert out.ctypes.data % 4096 == 0
        assert out.base is not None
        whole = byte_bounds(np.asarray(out.base))
        assert byte_bounds(out)[1] + 100 <= whole[1]


@pytest.mark.parametrize(
    "change", [{"bits": 2}, {"group_size": 8}, {"convention": "zero_point"}, {"scale_dtype": "float16"}], ids=str
)
def test_what_is_not_declared_is_refused(change: dict[str, object]) -> None:
    """The refusal names the backend, the operation and the part that is missing, and no hook runs."""
    backend = FourBits()
    with pytest.raises(NotDeclaredError, match=r"backend four does not declare linear.qgemv for"):
        backend.prepare(matrix(**change))
    assert not backend.reached


def test_operations_that_are_not_declared_are_refused() -> None:
    """No other backend answers for it: not the reference, not numpy."""
    backend, ones = FourBits(), np.ones((32, 3), np.uint8)
    with pytest.raises(NotDeclaredError):
        backend.run("affine.dequantize", matrix())
    with pytest.raises(NotDeclaredError, match="bits 2"):
        backend.run("packing.pack", ones, 2)
    with pytest.raises(NotDeclaredError):
        backend.run("packing.unpack", np.ones((4, 3), np.uint32), 4)
    with pytest.raises(NotDeclaredError):
        backend.prepare(matrix()).qgemm(np.ones((2, 32), np.float32))


def test_wrong_arguments_come_before_anything_else() -> None:
    """An argument is checked first, whether or not the operation is declared."""
    with pytest.raises(ArgumentError, match="bits is 5"):
        FourBits().run("packing.unpack", np.ones((4, 3), np.uint32), 5)
    with pytest.raises(ArgumentError, match=r"matrix is an ndarray; allowed: a .*QuantizedMatrix"):
        FourBits().prepare(np.ones((32, 3)))  # type: ignore[arg-type]  # wrong on purpose


def test_every_error_is_one_line() -> None:
    """Each error lowbit raises on purpose fits on a line and is a LowbitError."""
    errors = (
        ArgumentError("bits", 5, "2 or 4"),
        UnavailableError("backend x", "no compiler", "install one"),
        NotDeclaredError("x", "linear.qgemv"),
    )
    assert all(isinstance(error, LowbitError) and "\n" not in str(error) for error in errors)
