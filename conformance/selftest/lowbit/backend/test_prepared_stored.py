"""Stored matrices that are prepared once: what is checked before a hook is called."""

from typing import Any

import numpy as np
import pytest

from lowbit.arrays import Activations, Array
from lowbit.backend import Backend, Capabilities, Declaration
from lowbit.backend.prepared_stored import PreparedStored
from lowbit.contract.rounding import Arithmetic
from lowbit.errors import ArgumentError, NotDeclaredError
from lowbit.tensor_formats.stored import Stored, quantize

WEIGHTS = quantize(np.ones((4, 32), np.float32), "q8_0")
X = np.ones((3, 32), np.float32)


class Sums(PreparedStored):
    """Products by numpy."""

    def __init__(self, weights: Stored) -> None:
        super().__init__("sums", weights, weights.nbytes)
        self._weights = weights.values.copy()

    def _gemm(self, x: Activations, out: Array) -> None:
        out[:] = x.astype(np.float64) @ self._weights


class SumsBackend(Backend):
    """It declares `linear.gemm` of Q8_0 in two types."""

    name = "sums"

    def capabilities(self) -> Capabilities:
        limits = {"format": ("q8_0",), "activations": ("float32", "float16")}
        return Capabilities({"linear.gemm": Declaration(limits, Arithmetic("dequantised"))})

    def _prepare_stored(self, weights: Stored) -> PreparedStored:
        return Sums(weights)


def test_a_product_is_that_of_its_hook() -> None:
    """In the type that is asked for."""
    prepared = SumsBackend().prepare_stored(WEIGHTS)
    given = prepared.gemm(X.astype(np.float16), "float16")
    assert given.dtype == np.float16 and np.array_equal(given, (X @ WEIGHTS.values).astype(np.float16))


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (None, "x is None; allowed: a numpy array of float32, float16 or bfloat16"),
        ([[1.0] * 32], "x is a list; allowed: a numpy array of float32, float16 or bfloat16"),
        (X.astype(np.float64), "dtype of x is 'float64'; allowed: float32, float16 or bfloat16"),
        (X[0], "shape of x is (32,); allowed: 2 dimensions, any x 32"),
        (X[:, :16], "shape of x is (3, 16); allowed: any x 32, each at least 1"),
    ],
)
def test_wrong_activations_are_refused(x: Any, message: str) -> None:
    """By name, before the hook."""
    with pytest.raises(ArgumentError) as refusal:
        SumsBackend().prepare_stored(WEIGHTS).gemm(x)
    assert str(refusal.value) == message


def test_rows_that_are_no_whole_blocks_are_not_cast() -> None:
    """The rest would be left out of the sums."""
    weights = Stored("float16", 48, 4, (np.ones((4, 48), np.float16),))
    with pytest.raises(ArgumentError) as refusal:
        Sums(weights).cast_and_multiply(np.ones((3, 48), np.float32), "q8_0")
    assert str(refusal.value) == "rows is 48; allowed: a multiple of 32, the elements of a block of q8_0"


def test_what_is_not_declared_is_refused() -> None:
    """Another product, other activations, another format, and what is no stored matrix."""
    prepared, wrong = SumsBackend().prepare_stored(WEIGHTS), dict[str, Any](weights=3)
    with pytest.raises(NotDeclaredError, match=r"does not declare linear\.gemv$"):
        prepared.gemv(X[0])
    with pytest.raises(NotDeclaredError, match="activations bfloat16"):
        prepared.gemm(X.astype("bfloat16"))
    with pytest.raises(NotDeclaredError, match=r"does not declare linear\.gemm for format q4_0$"):
        SumsBackend().prepare_stored(quantize(X, "q4_0"))
    with pytest.raises(ArgumentError, match=r"weights is an int; allowed: a .*Stored"):
        SumsBackend().prepare_stored(**wrong)
