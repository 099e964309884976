r"""Checks of products with stored matrices whose scales are far from 1, or belong to blocks of columns.

A scale of 8 bits without a significand, of bfloat16 or of float32 may lie far beyond float16 (*wide scales*): a kernel
that converts scales to float16 is right in every case whose scales are of usual sizes. The least scale of MX, the byte
0, is :math:`2^{-127}`, a subnormal number of float32, which a shift of the byte into the exponent does not give. Where
a scale belongs to a block of columns, a matrix needs several blocks across for a wrong one to be seen (*squares*).
"""

import re
from collections.abc import Iterator
from math import frexp

import numpy as np

from lowbit.arrays import F64
from lowbit.contract.rounding import Arithmetic, Bound
from lowbit.linear.stored_bounds import LARGEST, stored_bound
from lowbit.numbers.floats import FLOATS
from lowbit.tensor_formats.stored import FORMATS, RESULTS, Stored
from lowbit.tensor_formats.table import Format
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.suite.bounded import Record, arithmetic, limit_of
from lowbit_conformance.suite.clauses.test_formats import assert_bounded, exact_of, fitted, share_of
from lowbit_conformance.suite.clauses.test_formats_extremes import common_options
from lowbit_conformance.suite.format_inputs import FormatCase, activations, drawn, wide_scales
from lowbit_conformance.suite.marking import Settings, checks

BLOCKS = 3
"""Blocks of columns of a matrix, and of rows."""
STEPS = 3
"""Scales of one matrix: powers of two, the extreme one and those next to it."""
MOST = 100
"""The exponent of the largest numbers: far beyond float16 and bfloat16's precision, with room for sums in float32."""
OF_SCALES = {"float32": (-126, MOST), "bfloat16": (-126, MOST), "float16": (-26, 18)}
"""The least and the largest exponent of a scale by the type of activations: products with them stay in that type."""
OF_ACTIVATIONS = {"float32": (-MOST, MOST), "bfloat16": (-MOST, MOST), "float16": (-20, 14)}
"""The exponents by which activations may be scaled, so that the result is near 1 where it can be."""


# **Squares.**


def width_of_blocks(table: Format) -> int:
    """The columns that share a scale: 128 where the shape of a field of scales has ``N//128``; else 1."""
    sizes = [str(size) for row in table.fields if row.role == "scale" for size in row.shape]
    return max((int(found[1]) for size in sizes if (found := re.fullmatch(r"N//?(\d+)", size))), default=1)


def squares(clause: str, settings: Settings) -> Iterator[FormatCase]:
    """Formats whose scales are of blocks of columns, with several blocks each way, the last one smaller."""
    for table in FORMATS.values():
        width, options = width_of_blocks(table), common_options(table)
        if width > 1:
            rows, columns = fitted(table, BLOCKS * width - 64, BLOCKS * width - 19, options)
            vectors = 1 if clause.startswith("linear.gemv") else 5
            for own in RESULTS:
                yield FormatCase(clause, "random", "squares", table.name, rows, columns, vectors, own, own, options)


@checks("linear.gemv/C2", squares)
def test_gemv_takes_the_scale_of_its_columns(backend: Remote, case: FormatCase, record_property: Record) -> None:
    """With several blocks of columns, each column has the scales of its own block, in each type."""
    assert_bounded(backend, case, record_property)


@checks("linear.gemm/C2", squares)
def test_gemm_takes_the_scale_of_its_columns(backend: Remote, case: FormatCase, record_property: Record) -> None:
    """With several blocks of columns, each column has the scales of its own block, in each type."""
    assert_bounded(backend, case, record_property)


# **Wide scales.**


def wide(clause: str, settings: Settings) -> Iterator[FormatCase]:
    """Formats with one field of scales that reaches beyond float16, in each type."""
    for table in FORMATS.values():
        if len(wide_scales(table)) != 1:
            continue
        options = common_options(table)
        rows, columns = fitted(table, 2 * (table.block or 64), 128, options)
        vectors = 1 if clause.startswith("linear.gemv") else 3
        for own in RESULTS:
            yield FormatCase(clause, "edge", "wide-scales", table.name, rows, columns, vectors, own, own, options)


@checks("linear.gemv/C2", wide)
def test_gemv_with_scales_far_from_1(backend: Remote, case: FormatCase, record_property: Record) -> None:
    """The least and the largest scales whose products the types hold, with activations that make up for them."""
    record_property("share", max(assert_wide(backend, case, end) for end in (0, 1)))


@checks("linear.gemm/C2", wide)
def test_gemm_with_scales_far_from_1(backend: Remote, case: FormatCase, record_property: Record) -> None:
    """The least and the largest scales whose products the types hold, with activations that make up for them."""
    record_property("share", max(assert_wide(backend, case, end) for end in (0, 1)))


def assert_wide(backend: Remote, case: FormatCase, end: int) -> float:
    """One product within its bound, with the least scales (end 0) or the largest; the share of it that was used."""
    __tracebackhide__ = True
    weights = extreme(case, end)
    x, declared = activations(case, balanced(case, weights)), arithmetic(backend, case)
    given = backend.run(case.operation, x, weights, case.result)
    exact, numbers = exact_of(case, x, weights), np.atleast_2d(x).astype(np.float64)
    bound = limit_of(lambda: stored_bound(numbers, weights, case.result, declared, np.atleast_2d(exact)))
    if overflows(numbers, weights, declared):
        bound = Bound(np.full(bound.limit.shape, np.inf), bound.gauge, "numbers that the declared types do not hold")
    return share_of(given, exact, bound, case)


def extreme(case: FormatCase, end: int) -> Stored:
    """A matrix with the least (0) or the largest (1) scales: where a scale divides, as far as numbers stay in range."""
    (row,) = wide_scales(case.table)
    exponent = OF_SCALES[case.activations][end]
    if exponent == -126 and not FLOATS[row.dtype].signed:
        exponent = -127  # the byte 0
    inwards = (1, -1)[end]
    while True:
        weights = drawn(case, powers=True, scales=tuple(exponent + inwards * step for step in range(STEPS)))
        if weights.terms.magnitudes.max() <= 2.0 ** (OF_SCALES[case.activations][1] + 10):
            return weights
        exponent += 4 * inwards


def balanced(case: FormatCase, weights: Stored) -> F64:
    """T × K numbers of magnitudes from 1/2 to 1, times a power of two that brings products near 1 where it can."""
    low, high = OF_ACTIVATIONS[case.activations]
    power = min(max(1 - frexp(float(weights.terms.magnitudes.max()))[1], low), high)
    rng, shape = case.generator(), (case.vectors, case.rows)
    numbers: F64 = rng.choice((-1.0, 1.0), shape) * rng.uniform(0.5, 1, shape) * 2.0**power
    return numbers


def overflows(x: F64, weights: Stored, declared: Arithmetic) -> bool:
    """Whether activations or weights pass what a kernel of these types may hold them in."""
    kind = declared.weights if declared.weights != "exact" else "float32"
    held = float(weights.terms.magnitudes.max()) <= FLOATS[kind].largest
    return not held or float(np.abs(x).max()) * 2.0**10 > LARGEST[declared.accumulator]
