"""Linear layers on a backend: which matrices it takes, and that none is multiplied by otherwise than is said."""

import numpy as np
import pytest

from lowbit.backend.registry import load
from lowbit.runtime.linears import CONTRACTS, BackendLinears, Contract
from lowbit.tensor_formats.stored import Stored

LIMITS: dict[Contract, float] = {"float32": 1e-5, "integer": 0.05}
"""Of the largest number of a product; activations of 8 bits lose about a hundredth of it."""
FLOATS = {"stored as floats": 1}


@pytest.mark.toolchain
@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("rows", [64, 48])
def test_floats_are_multiplied_by_the_backend(rows: int, contract: Contract) -> None:
    """One row and three. 48 activations are no whole number of blocks of 32, so numpy multiplies what would be cast."""
    weights = np.random.default_rng(rows).normal(size=(8, rows)).astype(np.float16)
    x = np.random.default_rng(1).normal(size=(3, rows)).astype(np.float32)
    with load("cppyy") as backend:
        linears = BackendLinears(backend, contract)
        linear = linears(Stored("float16", rows, 8, (weights,)))
        given = np.concatenate([linear(x), linear(x[:1])])
    is_cut = contract == "integer" and rows % 32 != 0
    assert (linears.prepared, dict(linears.float_matrices)) == ((0, FLOATS) if is_cut else (1, {}))
    expected = np.concatenate([x, x[:1]]) @ weights.T.astype(np.float32)
    np.testing.assert_allclose(given, expected, rtol=0, atol=LIMITS[contract] * np.abs(expected).max())
