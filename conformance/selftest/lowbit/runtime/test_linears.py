"""Linear layers on a backend: which matrices it takes, and that none is multiplied by otherwise than is said."""

import numpy as np
import pytest

from lowbit.arrays import F32
from lowbit.backend.registry import load
from lowbit.model.matrices import Matrix, in_bytes
from lowbit.runtime.linears import CONTRACTS, BackendLinears, Contract
from lowbit.tensor_formats.stored import Stored

LIMITS: dict[Contract, float] = {"float32": 1e-5, "integer": 0.05}
"""Of the largest number of a product; activations of 8 bits lose about a hundredth of it."""
FLOATS = {"stored as floats": 1}


def floats(kind: str, rows: int) -> Matrix:
    """A matrix whose numbers every type holds."""
    numbers: F32 = (np.random.default_rng(rows).integers(-64, 65, (rows, 8)) / 64).astype(np.float32)
    if kind == "float16":
        return Stored(kind, rows, 8, (np.ascontiguousarray(numbers.T, np.float16),))
    return in_bytes(numbers) if kind == "stored" else numbers


@pytest.mark.toolchain
@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("rows", [64, 48])
@pytest.mark.parametrize("kind", ["float16", "stored", "float32"])
def test_floats_are_multiplied_by_the_backend(kind: str, rows: int, contract: Contract) -> None:
    """One row and three. 48 activations are no whole number of blocks of 32, so numpy multiplies what would be cast."""
    x, wanted = np.random.default_rng(1).normal(size=(3, rows)).astype(np.float32), floats("float32", rows)
    assert isinstance(wanted, np.ndarray)
    with load("cppyy") as backend:
        linears = BackendLinears(backend, contract)
        linear = linears(floats(kind, rows))
        given = np.concatenate([linear(x), linear(x[:1])])
    is_cut = contract == "integer" and rows % 32 != 0
    assert (linears.prepared, dict(linears.float_matrices)) == ((0, FLOATS) if is_cut else (1, {}))
    expected = np.concatenate([x, x[:1]]) @ wanted
    np.testing.assert_allclose(given, expected, rtol=0, atol=LIMITS[contract] * np.abs(expected).max())


@pytest.mark.parametrize("name", ["reference", "numpy"])
@pytest.mark.parametrize("kind", ["float16", "stored", "float32"])
def test_floats_are_left_to_numpy(kind: str, name: str) -> None:
    """By backends that prepare no stored matrices."""
    linears, x = BackendLinears(load(name)), np.eye(64, dtype=np.float32)
    np.testing.assert_array_equal(linears(floats(kind, 64))(x), floats("float32", 64))
    assert (linears.prepared, dict(linears.float_matrices)) == (0, FLOATS)
