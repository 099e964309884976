"""The interface of a backend: what it refuses before a kernel sees it, and how backends are found."""

from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest
from numpy.lib.array_utils import byte_bounds

from lowbit.arrays import F32
from lowbit.backend import Availability, Backend, Capabilities, Declaration, PreparedLinear
from lowbit.backend import base as registry
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
    with pytest.raises(ArgumentError, match="matrix is a ndarray; allowed: a QuantizedMatrix"):
        FourBits().prepare(np.ones((32, 3)))  # type: ignore[arg-type]  # wrong on purpose


def test_the_backends_of_this_distribution_are_found() -> None:
    """Entry points make them known; nothing lists them."""
    assert {"cppyy", "numpy", "reference"} <= set(registry.names())
    assert registry.find("lowbit_numpy:NumpyBackend").name == "numpy"


def test_a_broken_package_is_unavailable_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that cannot be imported, or that offers something else, is an error in words, not a traceback."""
    entries = [EntryPoint("gone", "no_such_module:Thing", "lowbit.backends")]
    entries += [EntryPoint("other", "fractions:Fraction", "lowbit.backends")]
    monkeypatch.setattr(registry, "entries", lambda group: entries)
    with pytest.raises(UnavailableError, match="ModuleNotFoundError"):
        registry.find("gone")
    with pytest.raises(UnavailableError, match=r"is not a lowbit.backend.Backend"):
        registry.find("other")
    with pytest.raises(ArgumentError, match="'third'; allowed: gone or other"):
        registry.find("third")


def test_an_unusable_backend_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """load refuses with the backend's own reason and remedy; find still gives it, for a listing."""
    monkeypatch.setattr(FourBits, "availability", lambda self: Availability(False, "no such CPU", "buy one"))
    name = f"{FourBits.__module__}:FourBits"
    assert registry.find(name).name == "four"
    with pytest.raises(UnavailableError, match="is unavailable: no such CPU; buy one"):
        registry.load(name)


def test_every_error_is_one_line() -> None:
    """Each error lowbit raises on purpose fits on a line and is a LowbitError."""
    errors = (
        ArgumentError("bits", 5, "2 or 4"),
        UnavailableError("backend x", "no compiler", "install one"),
        NotDeclaredError("x", "linear.qgemv"),
    )
    assert all(isinstance(error, LowbitError) and "\n" not in str(error) for error in errors)


# **Names that do not exist.**


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("numpi", "'numpi'; allowed: .*; the nearest name is numpy"),
        (
            "lowbit_nunpy:Numpy",
            "there is no module 'lowbit_nunpy' in this folder .*; the nearest name is lowbit_numpy",
        ),
        (
            "lowbit_numpy.groops:X",
            "there is no module 'lowbit_numpy.groops' .*; the nearest name is groups",
        ),
        ("lowbit_numpy:NumpyBackent", "lowbit_numpy has no class 'NumpyBackent'; the nearest name is NumpyBackend"),
    ],
)
def test_a_misspelt_name_is_called_that(name: str, words: str) -> None:
    """A module or class that does not exist is an argument, and the message has the nearest name."""
    with pytest.raises(ArgumentError, match=words):
        registry.find(name)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import numppy", "imports numppy, which is not installed or misspelt; install numppy, or mend the import"),
        ("1 / 0", "fails with ZeroDivisionError: division by zero; mend the module"),
    ],
)
def test_a_module_that_fails_is_told_apart(
    text: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that exists and cannot be imported is unavailable, and the message says what in it fails."""
    name = f"failing_{len(text)}"
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UnavailableError, match=words):
        registry.find(f"{name}:Mine")
