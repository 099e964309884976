"""Cases with scales far from 1: what they reach, and that nothing of them is left unjudged."""

import numpy as np
import pytest

from lowbit.contract.rounding import Arithmetic, any_order
from lowbit.linear.elementary import product
from lowbit.linear.stored_bounds import of_sums, stored_bound
from lowbit.tensor_formats.stored import FORMATS
from lowbit_conformance.suite.clauses.test_formats_scales import (
    balanced,
    cast_extreme,
    extreme,
    fields_of,
    magnitude,
    reach,
    wide,
    wide_casts,
    wide_numbers,
    with_factor,
)
from lowbit_conformance.suite.format_inputs import FormatCase, activations, wide_scales
from lowbit_conformance.suite.marking import Settings

NONE = Settings(range(0))
CASES = [case for case in wide("linear.gemm/C2", NONE) if case.result == "float32"]
NARROW = [case for case in wide("linear.gemm/C2", NONE) if case.result == "float16"][::3]
WAYS = (
    Arithmetic("dequantised", "float64", any_order, weights="exact"),
    Arithmetic("dequantised", "float32", any_order, weights="exact"),
    Arithmetic("dequantised", "float32", any_order, weights="bfloat16"),
    Arithmetic("factored", "float32", any_order, weights="float16"),
)


def named(case: FormatCase) -> str:
    return f"{case.format}-{case.variant}-{case.activations}-{case.result}"


@pytest.mark.parametrize("case", CASES + NARROW, ids=named)
def test_every_element_is_judged(case: FormatCase) -> None:
    """What the types hold has a finite bound, and a result that its type can tell from 0."""
    for declared in WAYS:
        for end in (0, 1):
            weights, power = extreme(case, end, declared)
            x = activations(case, balanced(case, power)).astype(np.float64)
            exact = product(x, weights.values)
            bound = stored_bound(x, weights, case.result, declared, exact)
            assert np.isfinite(bound.limit).all()
            assert np.abs(exact).max() > bound.limit.min()


@pytest.mark.parametrize("case", CASES, ids=named)
def test_scales_lie_beyond_float16(case: FormatCase) -> None:
    """Where weights are not formed in a type of 16 bits: a scale, or the numbers it makes, is none of float16."""
    for end in (0, 1):
        weights, _ = extreme(case, end, WAYS[1])
        scales = weights.table.fields_of(weights.by_name)[fields_of(case, case.table)[0]].astype(np.float64)
        beyond = (scales > 2.0**20) if scales.max() > 1 else (scales < 2.0**-30)
        assert beyond.all()


@pytest.mark.parametrize("case", list(wide_casts("linear.gemm_cast/C2", NONE)), ids=named)
def test_every_element_of_a_cast_product_is_judged(case: FormatCase) -> None:
    """With extreme scales on either side."""
    for end in (0, 1):
        weights, x = cast_extreme(case, end, WAYS[0])
        exact = product(x.values.T, weights.values)
        bound = stored_bound(x.values.T, weights, "float32", WAYS[0], exact, of_sums(x, weights))
        assert np.isfinite(bound.limit).all()
        assert np.abs(exact).max() > bound.limit.min()


def test_every_wide_field_is_dequantised() -> None:
    """Each field of each format is in a case, and its largest numbers are those of float32."""
    cases = list(wide_numbers("formats.dequantize/C1", NONE))
    found = {(case.format, name) for case in cases for name in fields_of(case, case.table)}
    assert found == {(table.name, row.name) for table in FORMATS.values() for row in wide_scales(table)}
    for case in cases:
        c = magnitude(with_factor(case, None, 0))
        assert np.isfinite(with_factor(case, reach("float32").largest - 1 - c, 1).values.astype(np.float32)).all()
