r"""Checks of stored matrices whose scales are far from 1, or belong to blocks of columns.

A scale of 8 bits without a significand, of bfloat16 or of float32 may lie far beyond float16 (*wide scales*): a kernel
that converts scales to float16 is right in every case whose scales are of usual sizes. The least scale of MX, the byte
0, is :math:`2^{-127}`, a subnormal number of float32, which a shift of the byte into the exponent does not give. Where
a scale belongs to a block of columns, a matrix needs several blocks across for a wrong one to be seen (*squares*).

**How far.** A wide scale multiplies the weights by :math:`2^f`. With all wide scales 1 the largest weight is below
:math:`2^c`; activations are below :math:`2^p`, K is at most :math:`2^n`, and numbers of a type T lie from
:math:`2^{e_T}` to :math:`2^{E_T}`. Whatever a kernel computes first stays within its types if

.. math:: f + c < E_V, \qquad p + c + n < E_A, \qquad p + f + c + n < \min(E_A, E_R)

for weights in V (float32 where no weight is formed, as scales are), the accumulator A and the result R. And something
is left to be seen if :math:`f + c \ge e_V` and :math:`p + f + c \ge e_R`. The largest and the least *f* follow, with
the least and the largest activations of their type; activations then bring products as near to 1 as they can.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations
from math import ceil, log2

import numpy as np

from lowbit.arrays import F64
from lowbit.contract.rounding import Arithmetic
from lowbit.numbers.floats import FLOATS
from lowbit.tensor_formats.stored import FORMATS, RESULTS, Stored
from lowbit.tensor_formats.table import Format
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.suite.bounded import arithmetic
from lowbit_conformance.suite.clauses.test_formats import (
    CAST,
    assert_bounded,
    assert_numbers,
    cast_case,
    cast_of,
    fitted,
    in_types,
    share_used,
)
from lowbit_conformance.suite.clauses.test_formats_extremes import common_options
from lowbit_conformance.suite.format_inputs import Codes, FormatCase, activations, allows, drawn, wide_scales
from lowbit_conformance.suite.marking import Record, Settings, checks

BLOCKS = 3
"""The numbers of blocks of columns and of rows of a matrix."""
STEPS = 3
"""Scales of one matrix: the extreme power of two and those next to it."""


# **Squares.**


def width_of_blocks(table: Format) -> int:
    """The number of columns that share a scale: 128 if the shape of a field of scales has ``N//128``, else 1."""
    sizes = [str(size) for row in table.fields if row.role == "scale" for size in row.shape]
    return max((int(found[1]) for size in sizes if (found := re.fullmatch(r"N//?(\d+)", size))), default=1)


def squares(clause: str, settings: Settings) -> Iterator[FormatCase]:
    """Formats with scales for blocks of columns, with several blocks in both directions, the last one smaller."""
    for table in FORMATS.values():
        width, options = width_of_blocks(table), common_options(table)
        if width > 1:
            sizes = (BLOCKS * width - 64, BLOCKS * width - 19)
            yield from in_types(clause, "random", "squares", table, *sizes, options, 5)


@checks(("linear.gemv/C2", "linear.gemm/C2"), squares)
def test_products_take_the_scale_of_their_columns(backend: Remote, case: FormatCase, record_property: Record) -> None:
    """With several blocks of columns, each column uses the scales of its own block, in each type."""
    assert_bounded(backend, case, record_property)


# **Wide scales.**


@dataclass(frozen=True)
class Reach:
    """The exponents of the numbers of a type: normal ones lie from 2^least to 2^(largest + 1)."""

    least: int
    largest: int


def reach(name: str) -> Reach:
    """The reach of a float type."""
    if name == "float64":
        return Reach(-1022, 1023)
    kind = FLOATS[name]
    return Reach(1 - kind.bias if kind.signed else -kind.bias, int(log2(kind.largest)))


def wide(clause: str, settings: Settings) -> Iterator[FormatCase]:
    """Each field of scales with a wider range than float16, in each type."""
    for table in FORMATS.values():
        for case in wide_fields(clause, table):
            for own in RESULTS:
                yield replace(case, activations=own, result=own)


def wide_fields(clause: str, table: Format) -> Iterator[FormatCase]:
    """A case for each set of fields that scales all weights; its variant names the fields if there are several sets."""
    options = common_options(table)
    shape = fitted(table, 2 * (table.block or 64), 128, options)
    vectors = 1 if clause.startswith("linear.gemv") else 3
    for names in together(table.name):
        variant = "wide-scales" if len(wide_scales(table)) == 1 else "-".join(("wide", *names))
        yield FormatCase(clause, "edge", variant, table.name, *shape, vectors, options=options)


@lru_cache(maxsize=1024)
def together(name: str) -> tuple[tuple[str, ...], ...]:
    """The smallest sets of wide fields of a format for which doubling the fields doubles or halves every weight.

    A scale that is itself the sum of two fields takes both.
    """
    table = FORMATS[name]
    rows = [row.name for row in wide_scales(table)]
    for size in range(1, len(rows) + 1):
        found = tuple(each for each in combinations(rows, size) if sign_of(name, each))
        if found:
            return found
    return ()


@lru_cache(maxsize=1024)
def sign_of(name: str, fields: tuple[str, ...]) -> int:
    """1 if doubling these fields doubles every weight, -1 if it halves every weight, else 0."""
    table = FORMATS[name]
    options = common_options(table)
    shape = fitted(table, table.block or 64, 32, options)
    case = FormatCase("formats.dequantize/C1", "edge", "wide", name, *shape, options=options)
    plain, double = (drawn(case, powers=True, scales=dict.fromkeys(fields, (e,))).values for e in (0, 1))
    return 1 if np.array_equal(double, 2 * plain) else -1 if np.array_equal(2 * double, plain) else 0


def fields_of(case: FormatCase, table: Format) -> tuple[str, ...]:
    """The fields of a case."""
    sets = together(table.name)
    return next((each for each in sets if case.variant == "-".join(("wide", *each))), sets[0])


def reach_of(case: FormatCase) -> Reach:
    """The reach of the type of these fields, in which powers of two are normal."""
    first = fields_of(case, case.table)[0]
    return reach(next(row.dtype for row in case.table.fields if row.name == first))


@checks(("linear.gemv/C2", "linear.gemm/C2"), wide)
def test_products_with_scales_far_from_1(backend: Remote, case: FormatCase, record_property: Record) -> None:
    """The least and the largest scales whose products the types hold, with activations that compensate for them."""
    record_property("share", max(assert_wide(backend, case, end) for end in (0, 1)))


def assert_wide(backend: Remote, case: FormatCase, end: int) -> float:
    """One product with the least (end 0) or largest scales is within its bound; returns the fraction that was used."""
    __tracebackhide__ = True
    weights, power = extreme(case, end, arithmetic(backend, case))
    return share_used(backend, case, activations(case, balanced(case, power)), weights)


def extreme(case: FormatCase, end: int, declared: Arithmetic) -> tuple[Stored, int]:
    """A matrix with the least (0) or the largest (1) scales, and the exponent of the activations."""
    own = reach(case.activations)
    factor, power = factors(case, case, Reach(own.least + 1, own.largest), declared)[end]
    return with_factor(case, factor, end), power


def factors(case: FormatCase, of: FormatCase, x: Reach, declared: Arithmetic) -> tuple[tuple[int, int], ...]:
    """The least and the largest f of the matrix of `of`, each with its p.

    Args:
        case: gives the types and K.
        of: a case of the matrix that has the wide scales: of the weights, or of stored activations.
        x: the least and the largest p of the other numbers.
        declared: the backend's arithmetic.
    """
    c, n = magnitude(with_factor(of, None, 0)), ceil(log2(case.rows))
    total, result = reach(declared.accumulator), reach(case.result)
    kept = reach("float32" if declared.weights == "exact" else declared.weights)
    scale = reach_of(of)
    most = min(x.largest, total.largest - 1 - c - n)
    low = max(kept.least - c, result.least - most - c, scale.least)
    high = min(kept.largest - 1 - c, min(total.largest, result.largest) - 1 - x.least - c - n, scale.largest)
    return tuple((f, min(max(-f - c, x.least), most)) for f in (low, high))


def magnitude(matrix: Stored) -> int:
    """c: the exponent of the power of two at or above the largest weight."""
    return ceil(log2(float(matrix.terms.magnitudes.max())))


def with_factor(case: FormatCase, factor: int | None, end: int, codes: Codes = "usual") -> Stored:
    """The matrix with wide scales of 2^factor and the next powers of two towards 1; without a factor all 1.

    Scales that divide get the inverse.
    """
    names, sign = fields_of(case, case.table), sign_of(case.format, fields_of(case, case.table))
    inwards = (1, -1)[end]
    exponents = [0] if factor is None else [sign * (factor + inwards * step) for step in range(STEPS)]
    return drawn(case, powers=True, codes=codes, scales=dict.fromkeys(names, tuple(exponents)))


def balanced(case: FormatCase, power: int) -> F64:
    """T × K numbers of magnitudes from 1/2 to 1, times a power of two."""
    rng, shape = case.generator(), (case.vectors, case.rows)
    numbers: F64 = rng.choice((-1.0, 1.0), shape) * rng.uniform(0.5, 1, shape) * 2.0**power
    return numbers


# **The same scales in other operations.** Dequantising is exact, so only the numbers must be representable.


def wide_numbers(clause: str, settings: Settings) -> Iterator[FormatCase]:
    for table in FORMATS.values():
        yield from wide_fields(clause, table)


@checks("formats.dequantize/C1", wide_numbers)
def test_numbers_with_scales_far_from_1(backend: Remote, case: FormatCase) -> None:
    """The least scales of their type, and the largest ones whose numbers float32 holds, give the numbers of the
    table."""
    scale, largest = reach_of(case), reach("float32").largest
    c = magnitude(with_factor(case, None, 0))
    for end, factor in enumerate((scale.least, min(scale.largest, largest - 1 - c))):
        assert_numbers(backend, case, with_factor(case, factor, end))


def wide_casts(clause: str, settings: Settings) -> Iterator[FormatCase]:
    """Each field of weights with the first format of activations that fits; each field of activations with the first
    format of weights that fits."""
    for table in FORMATS.values():
        for case in wide_fields(clause, table):
            fitting = [name for name in CAST if case.rows % (FORMATS[name].block or 1) == 0]
            yield replace(case, activations=fitting[0])
    for name in CAST:
        for case in wide_fields(clause, FORMATS[name]):
            others = (table for table in FORMATS.values() if not wide_scales(table) and fits(table, case))
            table = next(others)
            options = common_options(table)
            yield replace(case, variant="wide-activations", format=table.name, options=options, activations=name)


def fits(table: Format, case: FormatCase) -> bool:
    """Whether a format of weights has a matrix of the case's sizes."""
    return allows(table, case.rows, case.columns, common_options(table))


@checks("linear.gemm_cast/C2", wide_casts)
def test_cast_products_with_scales_far_from_1(backend: Remote, case: FormatCase, record_property: Record) -> None:
    """The least and the largest scales of weights, or of activations, whose products the types hold."""
    record_property("share", max(assert_wide_cast(backend, case, end) for end in (0, 1)))


def assert_wide_cast(backend: Remote, case: FormatCase, end: int) -> float:
    """One product of stored activations is within its bound; returns the fraction that was used."""
    __tracebackhide__ = True
    weights, x = cast_extreme(case, end, arithmetic(backend, case))
    return share_used(backend, case, x, weights)


def cast_extreme(case: FormatCase, end: int, declared: Arithmetic) -> tuple[Stored, Stored]:
    """Weights and activations, one of them with extreme scales."""
    weights, x = drawn(case, powers=True), cast_of(case, powers=True)
    if case.variant == "wide-activations":
        of = cast_case(case)
        power = magnitude(weights)
        factor, _ = factors(case, of, Reach(power, power), declared)[end]
        return weights, with_factor(of, factor, end, "cast")
    power = magnitude(x)
    factor, _ = factors(case, case, Reach(power, power), declared)[end]
    return with_factor(case, factor, end), x
