"""Plain functions as backends: arguments by name, claims, and what is refused."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lowbit.backend import Range
from lowbit.backend.function import Claim, FunctionBackend, described
from lowbit.contract.rounding import Arithmetic
from lowbit.errors import ArgumentError, NotDeclaredError
from lowbit.linear.integer import ACTIVATIONS
from lowbit.quantization.affine import dequantize, quantize
from lowbit.tensor_formats.stored import Stored

WEIGHTS = Stored("q8_0", 32, 2, (np.arange(68, dtype=np.uint8).reshape(2, 34),))
X = np.ones(32, np.float32)


def product(x: Any, blocks: Any, rows: int, columns: int) -> Any:
    """A product with Q8_0, in numpy."""
    records = blocks.reshape(columns, rows // 32, 34)
    d = np.ascontiguousarray(records[..., :2]).view(np.float16).astype(np.float32)
    return x @ (d * records[..., 2:].view(np.int8)).reshape(columns, rows).T


def backend_of(function: Callable[..., Any], **limits: object) -> FunctionBackend:
    return FunctionBackend.of(function, Claim("linear.gemv", {"format": "q8_0", **limits}))


def test_arguments_go_by_name() -> None:
    """A function gets what its parameters name, and one with ** gets all there is."""
    np.testing.assert_allclose(backend_of(product).run("linear.gemv", X, WEIGHTS), X @ WEIGHTS.values, rtol=1e-5)
    seen: dict[str, Any] = {}

    def takes_all(**given: Any) -> Any:
        seen.update(given)
        return np.zeros(2, np.float32)

    backend_of(takes_all).run("linear.gemv", X, WEIGHTS)
    assert sorted(seen) == ["blocks", "columns", "result", "rows", "weights", "x"]


def test_an_unknown_parameter_is_named() -> None:
    """The message lists what there is."""
    with pytest.raises(ArgumentError, match="parameter of the function is 'qweight'; allowed: blocks, columns"):
        backend_of(lambda x, qweight: x).run("linear.gemv", X, WEIGHTS)
    with pytest.raises(ArgumentError, match="parameters of the function"):
        backend_of(lambda *both: both).run("linear.gemv", X, WEIGHTS)


EYE = quantize(np.eye(16, dtype=np.float32) * 15, bits=4, group_size=8)


def test_a_function_of_own_matrices_is_prepared() -> None:
    """It gets the fields of a copy of the matrix, as they are, and its result goes to the array of the caller."""
    seen: dict[str, Any] = {}

    def takes_all(x: Any, **given: Any) -> Any:
        seen.update(given)
        return x @ dequantize(given["matrix"])

    backend = FunctionBackend.of(takes_all, Claim("linear.qgemv", {"bits": 4}))
    matrix = quantize(np.eye(16, dtype=np.float32) * 15, bits=4, group_size=8)
    prepared = backend.prepare(matrix)
    assert prepared.nbytes == matrix.words.nbytes + matrix.scales.nbytes + matrix.zeros.nbytes
    matrix.words[...] = 0
    x, out = np.arange(16, dtype=np.float32), np.zeros(16, np.float32)
    assert prepared.qgemv(x, out) is out
    np.testing.assert_array_equal(out, 15 * x)
    np.testing.assert_array_equal(backend.run("linear.qgemv", x, EYE), 15 * x)
    fields = ["bits", "columns", "convention", "group_size", "matrix", "rows", "scales", "words", "zeros"]
    assert sorted(seen) == fields and not np.may_share_memory(seen["words"], matrix.words)
    with pytest.raises(NotDeclaredError, match=r"linear\.qgemm"):
        prepared.qgemm(np.ones((2, 16), np.float32))


def test_blocks_go_by_their_fields() -> None:
    """Those of x begin with ``x_``."""

    def product(x_mantissas: Any, x_exponents: Any, x_format: Any, x_rows: int, rows: int) -> Any:
        assert (x_mantissas.shape, x_exponents.shape, x_format, rows) == ((x_rows, 16), (x_rows, 1), ACTIVATIONS, 16)
        return np.zeros((x_rows, 16), np.float32)

    backend = FunctionBackend.of(product, Claim("linear.qgemm_bfp"))
    arithmetic = backend.capabilities().operations["linear.qgemm_bfp"].arithmetic
    assert arithmetic is not None and arithmetic.form == "integer"
    assert not backend.prepare(EYE).qgemm_cast(np.ones((3, 16), np.float32)).any()


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (np.zeros(16), r"result of the function is float64 \(16,\); allowed: float32 \(16,\)"),
        (np.zeros((1, 16), np.float32), r"result of the function is float32 \(1, 16\); allowed: float32 \(16,\)"),
        ([0.0] * 16, "result of the function is a list; allowed: a numpy.ndarray"),
    ],
)
def test_a_result_that_is_no_product_is_refused(result: Any, message: str) -> None:
    """Writing it to the array of the caller would hide that."""
    prepared = FunctionBackend.of(lambda x: result, Claim("linear.qgemv")).prepare(EYE)
    with pytest.raises(ArgumentError, match=message):
        prepared.qgemv(np.ones(16, np.float32))


def test_what_is_not_claimed_is_not_declared() -> None:
    """Limits of shapes and types."""
    narrow = backend_of(product, columns=Range(8), activations="float32")
    with pytest.raises(NotDeclaredError, match="columns 2"):
        narrow.run("linear.gemv", X, WEIGHTS)
    with pytest.raises(NotDeclaredError, match="activations float16"):
        backend_of(product, activations="float32").run("linear.gemv", X.astype(np.float16), WEIGHTS)


def test_a_description_makes_the_same_backend() -> None:
    """By name for a function of a module; serialised for one that has none."""
    claim = Claim("linear.gemv", {"format": "q8_0", "rows": Range(32, most=4096)}, Arithmetic("factored", "float32"))
    scale = np.float32(2.0)

    def doubled(x: Any, blocks: Any, rows: int, columns: int) -> Any:
        return scale * product(x, blocks, rows, columns)

    again = FunctionBackend(described(doubled, claim))
    assert again.capabilities() == FunctionBackend.of(doubled, claim).capabilities()
    np.testing.assert_allclose(again.run("linear.gemv", X, WEIGHTS), 2 * (X @ WEIGHTS.values), rtol=1e-5)
    assert FunctionBackend(described(np.linalg.norm, claim)).load()[0] is np.linalg.norm


def test_the_usual_arithmetic_follows_the_activations() -> None:
    """Weights in the type of the activations, sums in float32."""
    claim = Claim("linear.gemm", {"format": "q8_0", "activations": ("float32", "bfloat16")})
    arithmetic = claim.declaration.arithmetic
    assert arithmetic is not None
    assert (arithmetic.form, arithmetic.accumulator, arithmetic.weights) == ("dequantised", "float32", "bfloat16")


def test_what_cannot_be_described_is_refused() -> None:
    """A function that holds what cannot be serialised, an operation that does not exist, another library."""
    lock = __import__("threading").Lock()
    with pytest.raises(ArgumentError, match="which cannot be serialised"):
        described(lambda x: lock, Claim("linear.gemv"))
    with pytest.raises(ArgumentError, match=r"operation is 'linear\.product'"):
        Claim("linear.product")
    with pytest.raises(ArgumentError, match="arrays is 'cupy'"):
        Claim("linear.gemv", arrays="cupy")  # type: ignore[arg-type]  # wrong on purpose
