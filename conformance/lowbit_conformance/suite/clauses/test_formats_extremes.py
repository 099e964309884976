r"""Checks of products with stored matrices at the ends of what their types hold.

Random numbers of middling size leave a kernel that keeps its sums in 16 bits within bounds that allow for the worst
order of a sum. So here sums are as large as they may be while each of them is still exact (*deep*), activations have
one sign, so that their own sums are large (*one-signed*), or lie far from 1 (*scaled*), codes are all patterns that a
format has (*patterns*), and integer sums are the largest (*largest*).
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from lowbit.arrays import F64, Array
from lowbit.contract.rounding import ETA, UNIT_ROUNDOFF, Arithmetic, Bound
from lowbit.numbers.floats import FLOATS
from lowbit.tensor_formats.stored import FORMATS, Stored
from lowbit.tensor_formats.table import Format
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.suite.bounded import arithmetic
from lowbit_conformance.suite.clauses.test_formats import (
    CAST,
    SHAPES,
    cast_of,
    exact_of,
    in_types,
    options_of,
    share_of,
    share_used,
)
from lowbit_conformance.suite.exact_sums import exact_sums
from lowbit_conformance.suite.format_inputs import (
    FormatCase,
    accumulated,
    activations,
    drawn,
    random_numbers,
)
from lowbit_conformance.suite.marking import Record, Settings, checks

SCALES = (2.0**24, 2.0**-40)
"""Magnitudes of activations: beyond the range of float16 at both ends, and far inside that of float32."""
LARGEST_STEP = 31
"""The largest activations on the deep lattice: integers that all types hold."""
UNIT_VECTORS = 32


def common_options(table: Format) -> tuple[tuple[str, int], ...]:
    """Codes of 4 bits if a format has them, and the first value of each other option."""
    first = dict(options_of(table, 0))
    return tuple((name, 4 if name == "bits" and 4 in (table.options[name] or ()) else first[name]) for name in first)


def widest(clause: str, tier: str, variant: str) -> Iterator[FormatCase]:
    """One wide shape of each format in each type, with common options: K of at least 256, N of 128."""
    for table in FORMATS.values():
        sizes = (max(256, 2 * (table.block or 0)), SHAPES[-1][1])
        yield from in_types(clause, tier, variant, table, *sizes, common_options(table), 3)


# **Deep.** All partial sums are exact in the accumulator, and the result is rounded once.


def deep(clause: str, settings: Settings) -> Iterator[FormatCase]:
    yield from widest(clause, "lattice", "deep")
    yield from widest(clause, "lattice", "one-signed")


@checks(("linear.gemv/C2", "linear.gemm/C2"), deep)
def test_products_round_only_their_result(backend: Remote, case: FormatCase, record_property: Record) -> None:
    """Sums that fill the declared accumulator are exact in it, so only the result may be rounded."""
    weights, declared = drawn(case, powers=True), arithmetic(backend, case)
    numbers, judged = deep_numbers(case, weights, declared)
    x = activations(case, numbers)
    given = backend.run(case.operation, x, weights, case.result)
    exact = exact_of(case, x, weights)
    rounds = case.result != declared.accumulator
    limit = UNIT_ROUNDOFF[case.result] * np.abs(exact) + ETA[case.result] if rounds else np.zeros(exact.shape)
    known = judged.reshape(exact.shape) & (np.abs(exact) + limit <= FLOATS[case.result].largest)
    limit = np.where(known, limit, np.inf)
    gauge = np.abs(np.atleast_2d(x).astype(np.float64)) @ weights.terms.magnitudes
    bound = Bound(limit, gauge.reshape(exact.shape), f"exact sums, rounded to {case.result}")
    record_property("share", share_of(given, exact, bound, case))


def deep_numbers(case: FormatCase, weights: Stored, declared: Arithmetic) -> tuple[F64, Array]:
    """T × K integers, as large as partial sums remain exact in the accumulator, of one or both signs; and a mask of
    exact results."""
    types, rng = (accumulated(declared),), case.generator()
    signs = case.variant != "one-signed"
    return exact_sums(weights, case.vectors, declared.weights, types, rng, LARGEST_STEP, signs)


# **Scaled.**


def scaled(clause: str, settings: Settings) -> Iterator[FormatCase]:
    yield from (case for case in widest(clause, "edge", "scaled") if case.activations != "float16")


@checks(("linear.gemv/C2", "linear.gemm/C2"), scaled)
def test_products_of_numbers_far_from_1(backend: Remote, case: FormatCase, record_property: Record) -> None:
    """Activations and results outside the range of float16, large and small; bfloat16 and float32 hold them."""
    weights = drawn(case, powers=False)
    shares = [assert_one(backend, case, weights, factor * random_numbers(case)) for factor in SCALES]
    record_property("share", max(shares))


def assert_one(backend: Remote, case: FormatCase, weights: Stored, numbers: F64) -> float:
    """One product is within its bound; returns the fraction that was used."""
    __tracebackhide__ = True
    return share_used(backend, case, activations(case, numbers), weights)


# **Patterns.** Rows of a matrix with all kinds of codes, including subnormal ones.


def patterns(clause: str, settings: Settings) -> Iterator[FormatCase]:
    for case in widest(clause, "edge", "patterns"):
        yield case if clause.startswith("linear.gemv") else replace(case, vectors=UNIT_VECTORS)


@checks("linear.gemv/C2", patterns)
def test_gemv_gives_rows(backend: Remote, case: FormatCase, record_property: Record) -> None:
    """Unit vectors give rows of the matrix within the rounding of one weight, in each type, whatever the codes are."""
    weights = drawn(case, powers=False, codes="patterns")
    shares = [assert_one(backend, case, weights, unit[np.newaxis]) for unit in unit_vectors(case, UNIT_VECTORS)[::8]]
    record_property("share", max(shares))


@checks("linear.gemm/C2", patterns)
def test_gemm_gives_rows(backend: Remote, case: FormatCase, record_property: Record) -> None:
    """Unit vectors give rows of the matrix within the rounding of one weight, in each type, whatever the codes are."""
    weights = drawn(case, powers=False, codes="patterns")
    record_property("share", assert_one(backend, case, weights, unit_vectors(case, case.vectors)))


def unit_vectors(case: FormatCase, count: int) -> F64:
    """This number of vectors that are 1 in one row each, spread over all rows."""
    rows = np.linspace(0, case.rows - 1, count).astype(np.int64)
    found: F64 = np.eye(case.rows)[rows]
    return found


# **Largest.** The largest integer sums that codes allow.


def largest(clause: str, settings: Settings) -> Iterator[FormatCase]:
    for case in widest(clause, "edge", "largest"):
        for name in CAST:
            if case.result == "float32" and case.rows % (FORMATS[name].block or 1) == 0:
                yield replace(case, activations=name)


@checks("linear.gemm_cast/C2", largest)
def test_the_largest_integer_sums(backend: Remote, case: FormatCase, record_property: Record) -> None:
    """All codes of weights and activations are the largest: no integer sum may wrap."""
    weights, x = drawn(case, powers=False, codes="largest"), cast_of(case, powers=False, codes="largest")
    record_property("share", share_used(backend, case, x, weights))
