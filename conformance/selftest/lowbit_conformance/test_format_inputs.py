"""What the cases of stored matrices are run on."""

import numpy as np
import pytest

from lowbit.numbers.floats import FLOATS, Name
from lowbit_conformance.suite.format_inputs import finite_numbers


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
def test_numbers_by_their_patterns(name: Name) -> None:
    """All are finite; both signs, subnormal numbers and the largest exponents are among them."""
    kind = FLOATS[name]
    found = finite_numbers(kind, (200, 100), np.random.default_rng(1))
    assert found.dtype == kind.dtype
    numbers = found.astype(np.float64)
    sizes = np.abs(numbers)
    assert np.isfinite(numbers).all() and 0.4 < (numbers < 0).mean() < 0.6
    assert sizes.max() > kind.largest / 2 and (sizes < 2.0 ** (1 - kind.bias)).any()
