"""Checks of operations on stored matrices at the sizes of models, and of products with many vectors.

A kernel often takes another way where K or N is large: it divides a column among several blocks of threads, or walks
over N in tiles. It also takes another way for many vectors than for few. The small shapes of the other modules meet
none of these.

Matrices are deep or wide, and not both, so that a case takes milliseconds. In a deep one x is zero except in some rows
on both sides of every power of two (`lowbit_conformance.suite.inputs.live_rows`), as a sum over the whole column would
not be exact. The shapes of a published profile come first, so that ``--quick`` has one of them.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from lowbit.linear.elementary import product
from lowbit.profiles import PROFILES
from lowbit.tensor_formats.stored import FORMATS, RESULTS
from lowbit.tensor_formats.table import Format
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.suite.bounded import arithmetic
from lowbit_conformance.suite.clauses.test_formats import (
    CAST,
    assert_bounded,
    assert_cast_bounded,
    assert_numbers,
    cast_of,
    exact_of,
    fitted,
    lattice_cast_of,
)
from lowbit_conformance.suite.compare import assert_equal_values
from lowbit_conformance.suite.format_inputs import FormatCase, accumulated, activations, drawn, lattice_numbers
from lowbit_conformance.suite.inputs import live_rows
from lowbit_conformance.suite.marking import Record, Settings, checks

DEPTHS = (4096, 2048, 1280)
WIDTHS = (1040, 2048, 520)
"""K of deep matrices and N of wide ones, which alternate; the other size is small."""
SMALL = 64
MODELS = ((11008, 64), (14336, 64), (28672, 64), (256, 11008))
"""K and N of real layers, cut to a few columns or rows; one profile has all of them."""
VOCABULARY = (32, 131072)
GROUP = 128
"""The group size if a format leaves it open."""
VECTORS = (1, 4, 17)
"""T of deep and wide matrices, which alternate."""

BATCHES = ((2, 6, 7, 16), (24, 33, 48, 64), (96, 127, 128, 129), (255, 256, 257, 512))
"""T of small matrices; each format gets one of each kind."""
SHIPPED_BATCHES = (2, 24, 64, 96, 128, 129, 512)
"""T of the smallest matrix of each profile."""

Options = tuple[tuple[str, int], ...]


def options_in_use(table: Format) -> Iterator[Options]:
    """The first options for each number of bits of a format, 4 bits first; groups have 128 rows."""
    for bits in sorted(table.options.get("bits") or (0,), key=lambda bits: bits != 4):
        yield tuple(
            (name, bits if name == "bits" else GROUP if allowed is None else allowed[0])
            for name, allowed in table.options.items()
        )


def shipped(clause: str, vectors: tuple[int, ...], shapes: tuple[tuple[int, int], ...]) -> Iterator[FormatCase]:
    """Each profile of an operation at each of these shapes, with alternating numbers of vectors."""
    own = [each for each in PROFILES.values() if clause in each.clauses and "format" in each.parameters]
    for turn, one in enumerate(own):
        chosen: dict[str, Any] = {name: next(iter(values)) for name, values in one.parameters.items()}
        options = tuple((name, chosen[name]) for name in FORMATS[chosen["format"]].options)
        case = FormatCase(clause, "lattice", "", chosen["format"], 0, 0, 1, chosen["activations"], chosen["result"])
        for number, (rows, columns) in enumerate(shapes):
            count = vectors[(turn + number) % len(vectors)]
            yield replace(case, rows=rows, columns=columns, vectors=count, options=options)


def vectors_of(clause: str) -> tuple[int, ...]:
    return VECTORS if clause.startswith("linear.gemm") else (1,)


def sized_profiles(clause: str, settings: Settings) -> Iterator[FormatCase]:
    """A deep and a wide matrix of each profile."""
    for case in shipped(clause, vectors_of(clause), ((4096, SMALL), (256, 1024))):
        yield replace(case, variant="deep" if case.rows > case.columns else "wide")


def sized(clause: str, settings: Settings) -> Iterator[FormatCase]:
    """Deep and wide matrices of every profile and format, and layers of models."""
    yield from sized_profiles(clause, settings)
    for turn, shape in enumerate(MODELS):
        for case in list(shipped(clause, vectors_of(clause), (shape,)))[turn : turn + 1]:
            yield replace(case, variant="large-model")
    for turn, table in enumerate(FORMATS.values()):
        vectors = vectors_of(clause)[turn % len(vectors_of(clause))]
        for number, options in enumerate(options_in_use(table)):
            rows, columns = fitted(table, DEPTHS[(turn + number) % 3], SMALL // (1 + 3 * (number > 0)), options)
            yield FormatCase(clause, "lattice", "deep", table.name, rows, columns, vectors, options=options)
        options = next(options_in_use(table))
        rows, columns = fitted(table, table.block or SMALL, WIDTHS[turn % 3], options)
        yield FormatCase(clause, "lattice", "wide", table.name, rows, columns, vectors, options=options)
    yield FormatCase(clause, "lattice", "large-model", "q8_0", *VOCABULARY)


# **Numbers.**


def sized_numbers(clause: str, settings: Settings) -> Iterator[FormatCase]:
    for turn, case in enumerate(sized(clause, settings)):
        yield replace(case, tier="random", result=RESULTS[turn % 3])


@checks("formats.dequantize/C1", sized_numbers)
def test_numbers_of_large_matrices(backend: Remote, case: FormatCase) -> None:
    """A deep or wide matrix gives the numbers of its table."""
    assert_numbers(backend, case, drawn(case, powers=False))


# **Products.**


@checks(("linear.gemv/C1", "linear.gemm/C1"), sized)
def test_products_of_large_matrices(backend: Remote, case: FormatCase) -> None:
    """If every partial sum is exact, the result is bit-identical to the reference's."""
    weights = drawn(case, powers=True)
    numbers, judged = lattice_numbers(case, weights, arithmetic(backend, case), live_rows(case.rows))
    x = activations(case, numbers)
    given = backend.run(case.operation, x, weights, case.result)
    exact = exact_of(case, x, weights)
    assert_equal_values(given, exact, case.result, judged.reshape(exact.shape))


def sized_at_random(clause: str, settings: Settings) -> Iterator[FormatCase]:
    for case in sized_profiles(clause, settings):
        if case.variant == "deep":
            yield replace(case, tier="random")


@checks(("linear.gemv/C2", "linear.gemm/C2"), sized_at_random)
def test_large_products_within_the_bound(backend: Remote, case: FormatCase, record_property: Record) -> None:
    """Random bytes and activations stay within the bound; every row contributes."""
    assert_bounded(backend, case, record_property)


def batches(clause: str, settings: Settings) -> Iterator[FormatCase]:
    """Many vectors and a small matrix, of each profile and each format."""
    for count in SHIPPED_BATCHES:
        for case in shipped(clause, (count,), ((256, SMALL),)):
            yield replace(case, variant="batch")
    for turn, table in enumerate(FORMATS.values()):
        options = next(options_in_use(table))
        rows, columns = fitted(table, table.block or 32, 16, options)
        for number, counts in enumerate(BATCHES):
            count = counts[(turn + number) % len(counts)]
            yield FormatCase(clause, "lattice", "batch", table.name, rows, columns, count, options=options)


@checks("linear.gemm/C1", batches)
def test_products_of_many_vectors(backend: Remote, case: FormatCase) -> None:
    """Any number of vectors gives a right result in every row."""
    test_products_of_large_matrices(backend, case)


# **Stored activations.**


def cast(cases: Iterator[FormatCase]) -> Iterator[FormatCase]:
    """The same cases with stored activations; cases of profiles have them already."""
    for turn, case in enumerate(cases):
        if case.activations in CAST:
            yield case
            continue
        fitting = [name for name in CAST if case.rows % (FORMATS[name].block or 1) == 0]
        yield replace(case, activations=fitting[turn % len(fitting)])


def sized_casts(clause: str, settings: Settings) -> Iterator[FormatCase]:
    yield from cast(sized(clause, settings))


def cast_batches(clause: str, settings: Settings) -> Iterator[FormatCase]:
    yield from cast(batches(clause, settings))


@checks("linear.gemm_cast/C1", sized_casts)
def test_cast_products_of_large_matrices(backend: Remote, case: FormatCase) -> None:
    """If every partial sum is exact, the result equals the reference's."""
    weights = drawn(case, powers=True)
    types = (accumulated(arithmetic(backend, case)), case.result)
    x, judged = lattice_cast_of(case, weights, types, live_rows(case.rows))
    given = backend.run(case.operation, x, weights, case.result)
    assert_equal_values(given, product(x.values.T, weights.values), case.result, judged)


@checks("linear.gemm_cast/C2", sized_at_random)
def test_large_cast_products_within_the_bound(backend: Remote, case: FormatCase, record_property: Record) -> None:
    """Random blocks of activations and weights stay within the bound; every row contributes."""
    assert_cast_bounded(backend, case, record_property, cast_of(case, powers=False))


@checks("linear.gemm_cast/C1", cast_batches)
def test_cast_products_of_many_vectors(backend: Remote, case: FormatCase) -> None:
    """Any number of vectors gives a right result in every row."""
    test_cast_products_of_large_matrices(backend, case)
