"""The lattice of products with stored matrices: exact in every order, and never empty."""

from itertools import islice

import numpy as np
import pytest

from lowbit.contract.rounding import Arithmetic, Weights
from lowbit.numbers.floats import FLOATS
from lowbit.tensor_formats.stored import FORMATS
from lowbit_conformance.suite.clauses.test_formats import SHAPES, in_types, lattice_cast, lattice_cast_of, options_of
from lowbit_conformance.suite.clauses.test_formats_extremes import deep_numbers
from lowbit_conformance.suite.exact_sums import exact_sums, unit_of
from lowbit_conformance.suite.format_inputs import FormatCase, drawn, lattice_numbers
from lowbit_conformance.suite.marking import Settings

KINDS: tuple[tuple[str, Arithmetic], ...] = (
    ("float16", Arithmetic("dequantised", weights="float16", accumulator="float16")),
    ("bfloat16", Arithmetic("dequantised", weights="bfloat16")),
    ("float32", Arithmetic("direct", weights="exact")),
)
FEW = Settings(seeds=range(1))


def cases(name: str, result: str) -> FormatCase:
    """The widest lattice case of a format with this result."""
    table = FORMATS[name]
    found = in_types("linear.gemm/C1", "lattice", "", table, 256, SHAPES[-1][1], options_of(table, 0), 3)
    return next(case for case in found if case.result == result)


@pytest.mark.parametrize("result, arithmetic", KINDS, ids=[result for result, _ in KINDS])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_has_judged_sums(name: str, result: str, arithmetic: Arithmetic) -> None:
    """In each type of results every vector has a number other than 0 and a column that is judged."""
    case = cases(name, result)
    weights = drawn(case, powers=True)
    for numbers, judged in (
        lattice_numbers(case, weights, arithmetic),
        deep_numbers(case, weights, arithmetic),
    ):
        assert numbers.any(axis=1).all(), case.id
        assert judged.any(axis=1).all(), case.id


@pytest.mark.parametrize("kind", ("float16", "bfloat16", "float32"))
@pytest.mark.parametrize("name", ("gptq-v2", "q4_k", "nf4", "mxfp4", "q8_0", "hqq-axis1-meta"))
def test_sums_are_exact_in_every_order(name: str, kind: Weights) -> None:
    """Sums in three orders, of the parts of each weight apart, are those of float64 to the bit."""
    weights, rng = drawn(cases(name, "float32"), powers=True), np.random.default_rng(5)
    x, judged = exact_sums(weights, 3, kind, (kind,), rng, largest=31)
    assert judged.any()
    dtype, parts = FLOATS[kind].dtype, (weights.terms.products, weights.terms.offsets + 0 * weights.terms.products)
    for order in (np.arange(weights.rows), np.arange(weights.rows)[::-1], rng.permutation(weights.rows)):
        total = np.zeros(judged.shape, dtype)
        for k in order:
            for part in parts:
                with np.errstate(over="ignore", invalid="ignore"):  # in columns that are not judged
                    total = total + (x[:, k, np.newaxis] * part[k]).astype(dtype)
        assert (total.astype(np.float64) == x @ weights.values)[judged].all()


def test_products_of_casts_have_judged_sums() -> None:
    """One of eight cases is looked at; single numbers of 24 bits times a code of 7 have none."""
    found = [case for case in lattice_cast("linear.gemm_cast/C1", FEW) if case.possible and case.columns > 1]
    for case in islice(found, 0, None, 8):
        judged = lattice_cast_of(case, drawn(case, powers=True), ("float32", "float32"))[1]
        assert judged.any(), case.id


def test_the_unit_of_a_number_is_its_last_bit() -> None:
    values = np.array([1.0, 12.0, -0.375, 2.0**-1074, 0.0])
    assert unit_of(values).tolist() == [1.0, 4.0, 0.125, 2.0**-1074, np.inf]
