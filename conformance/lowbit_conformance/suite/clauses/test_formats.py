"""Checks of operations on stored matrices: dequantising, and products on the bytes of every format.

All cases come from the tables of the formats. Shapes climb from the smallest that a format allows to ones that are
multiples of 128, 256 and 1024, so that a kernel with limits finds some that it handles.
"""

import zlib
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from lowbit.arrays import F64, I64, Array
from lowbit.contract.rounding import Bound
from lowbit.linear.elementary import product
from lowbit.linear.stored_bounds import of_sums, stored_bound
from lowbit.numbers.floats import FLOATS
from lowbit.profiles import PROFILES, Profile
from lowbit.tensor_formats.stored import FORMATS, RESULTS, Result, Stored, dequantized, quantize
from lowbit.tensor_formats.table import Format
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.suite.bounded import arithmetic, limit_of
from lowbit_conformance.suite.compare import (
    assert_array,
    assert_equal_values,
    assert_exact,
    assert_same_bits,
    assert_within,
    unsigned_zeros,
)
from lowbit_conformance.suite.exact_sums import exact_products, of_rows
from lowbit_conformance.suite.format_inputs import (
    Codes,
    FormatCase,
    accumulated,
    activation_options,
    activations,
    allows,
    drawn,
    lattice_numbers,
    random_numbers,
)
from lowbit_conformance.suite.marking import Record, Settings, checks

GROUPS = (32, 64, 128)
SHAPES = ((1, 1), (2, 19), (8, 32), (8, 256), (16, 128))
"""For each case K, in units of the format (a block or 32 rows), and N, before both are fitted to its table."""
MOST_ROWS = 1024
"""The same for formats with large blocks."""


# **Shapes** that a format allows.


def options_of(table: Format, turn: int) -> tuple[tuple[str, int], ...]:
    """One choice of options; successive turns go through all values of each option, and group sizes change together."""
    chosen, size = [], None
    for name, allowed in table.options.items():
        values = allowed or GROUPS
        if allowed is None and size is not None:
            size += 1
            chosen.append((name, GROUPS[size % len(GROUPS)]))
            continue
        chosen.append((name, values[turn % len(values)]))
        size = turn if allowed is None else size
        turn //= len(values)
    return tuple(chosen)


def choices(table: Format) -> int:
    """The number of turns of `options_of`."""
    listed = [len(allowed) for allowed in table.options.values() if allowed is not None]
    return prod(listed) * (len(GROUPS) if len(listed) < len(table.options) else 1)


def shapes(clause: str, tier: str, variant: str = "") -> Iterator[tuple[int, FormatCase]]:
    """Every format with every choice of options in some shape, and in every shape with some choice. Turns are counted
    for each format, so that a new format does not change the cases of another."""
    for table in FORMATS.values():
        for turn in range(max(choices(table), len(SHAPES))):
            options = options_of(table, turn)
            unit = table.block or 32
            units, columns = SHAPES[turn % len(SHAPES)]
            rows, fitting = fitted(table, min(units * unit, MOST_ROWS), columns, options)
            yield turn, FormatCase(clause, tier, variant, table.name, rows, fitting, options=options)


@lru_cache(maxsize=1024)
def fitted(table: Format, rows: int, columns: int, options: tuple[tuple[str, int], ...]) -> tuple[int, int]:
    """The smallest sizes, at least these, that the table of a format allows."""
    for more in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
        for wide in (columns, *(-(-columns // each) * each for each in (2, 4, 8, 16, 32, 64, 128, 256))):
            tall = -(-rows // more) * more
            if allows(table, tall, wide, options):
                return tall, wide
    raise RuntimeError(f"no shape from {rows} x {columns} on fits {table.name} with {options}")


def in_types(
    clause: str,
    tier: str,
    variant: str,
    table: Format,
    rows: int,
    columns: int,
    options: tuple[tuple[str, int], ...],
    vectors: int,
) -> Iterator[FormatCase]:
    """One matrix at the smallest sizes that are at least these, with activations and results of each type.

    Only products with several vectors use `vectors`.
    """
    shape = *fitted(table, rows, columns, options), vectors if clause.startswith("linear.gemm") else 1
    for own in RESULTS:
        yield FormatCase(clause, tier, variant, table.name, *shape, own, own, options)


# **Profiles** of stored weights (`lowbit.profiles.SHIPPED`): their options, types and sizes, for every random seed.

SHIPPED_SHAPES = ((512, 64), (1024, 192))


def shipped(clause: str, tier: str, settings: Settings, most: int = len(SHIPPED_SHAPES)) -> Iterator[FormatCase]:
    """The cases of each profile of an operation: at most `most` fixed shapes, and one drawn from each seed."""
    for one in PROFILES.values():
        if clause not in one.clauses or "format" not in one.parameters:
            continue
        chosen: dict[str, Any] = {name: next(iter(values)) for name, values in one.parameters.items()}
        options = tuple((name, chosen[name]) for name in FORMATS[chosen["format"]].options)
        shapes = [("shipped", rows, columns, 0) for rows, columns in SHIPPED_SHAPES[:most]]
        shapes += [("shipped-drawn", *drawn_shape(one, seed), seed) for seed in settings.seeds]
        for turn, (variant, rows, columns, seed) in enumerate(shapes):
            vectors = 1 if clause.startswith("linear.gemv") else (4, 1, 9)[turn % 3]
            types = (chosen["activations"], chosen["result"])
            shape = (rows, columns, vectors)
            yield FormatCase(clause, tier, variant, chosen["format"], *shape, *types, options, seed=seed)


def drawn_shape(one: Profile, seed: int) -> tuple[int, int]:
    """K and N of a profile, from a seed."""
    rng = np.random.Generator(np.random.PCG64(zlib.crc32(f"{one.id}/{seed}".encode())))
    return 256 * int(rng.integers(1, 5)), 64 * int(rng.integers(1, 4))


# **Dequantising.**


def every_result(clause: str, settings: Settings) -> Iterator[FormatCase]:
    for turn, case in shapes(clause, "random"):
        yield replace(case, result=RESULTS[turn % 3])
    for _, case in shapes(clause, "lattice"):
        yield case
    for table in FORMATS.values():  # more scales than one block of the second level, and a short block
        if any(each.role == "scale" and str(each.shape[0]).count("//") > 1 for each in table.fields if each.shape):
            options = options_of(table, 0)
            yield FormatCase(clause, "edge", "nested", table.name, *fitted(table, 384, 136, options), options=options)


@checks("formats.dequantize/C1", every_result)
def test_each_number_is_that_of_the_table(backend: Remote, case: FormatCase) -> None:
    """Random bytes in every field give the numbers of the table, rounded in one of the allowed ways."""
    assert_numbers(backend, case, drawn(case, powers=case.tier == "lattice"))


def assert_numbers(backend: Remote, case: FormatCase, weights: Stored) -> None:
    """The backend's numbers of a matrix are those of its table."""
    __tracebackhide__ = True
    given = backend.run("formats.dequantize", weights, case.result)
    reference, *others = dequantized(weights, case.result)
    array = assert_array("numbers", given, reference.dtype, reference.shape)
    if not any((array == each).all() for each in others):
        assert_exact("numbers", unsigned_zeros(array), unsigned_zeros(reference))


def one_each(clause: str, settings: Settings) -> Iterator[FormatCase]:
    for table in FORMATS.values():
        options = options_of(table, 0)
        rows, columns = fitted(table, min(8 * (table.block or 32), MOST_ROWS), 256, options)
        for result in RESULTS:
            yield FormatCase(clause, "random", "types", table.name, rows, columns, result=result, options=options)


@checks("formats.dequantize/C2", one_each)
def test_the_result_has_its_type(backend: Remote, case: FormatCase) -> None:
    """For each of the three types the result is an array of that type, K × N."""
    weights = drawn(case, powers=False)
    given = backend.run("formats.dequantize", weights, case.result)
    assert_array("numbers", given, FLOATS[case.result].dtype, (case.rows, case.columns))


# **Products.**

TYPES: tuple[tuple[Result, Result], ...] = (
    ("float32", "float32"),
    ("float16", "float16"),
    ("bfloat16", "bfloat16"),
    ("float16", "float32"),
    ("bfloat16", "float32"),
)
ALL_TYPES = len(SHAPES) - 1
"""The shape in which each format is tried in all types: the largest one, which kernels for multiples of 128 accept."""


def products(clause: str, settings: Settings) -> Iterator[FormatCase]:
    """Every format in every shape with alternating types and numbers of vectors; in one shape with all types."""
    single = clause.startswith("linear.gemv")
    for turn, case in shapes(clause, "random"):
        for step, (x, result) in enumerate(TYPES):
            if turn != ALL_TYPES and step != turn % len(TYPES):
                continue
            vectors = 1 if single else (1, 3, 8, 17)[(turn + step) % 4]
            yield replace(case, vectors=vectors, activations=x, result=result)
    yield from shipped(clause, "random", settings)


def lattice_products(clause: str, settings: Settings) -> Iterator[FormatCase]:
    for case in products(clause, settings):
        yield replace(case, tier="lattice")


@checks(("linear.gemv/C1", "linear.gemm/C1"), lattice_products)
def test_products_on_the_lattice(backend: Remote, case: FormatCase) -> None:
    """If every partial sum is exact, the result is bit-identical to the reference's."""
    weights = drawn(case, powers=True)
    numbers, judged = lattice_numbers(case, weights, arithmetic(backend, case))
    x = activations(case, numbers)
    given = backend.run(case.operation, x, weights, case.result)
    exact = exact_of(case, x, weights)
    assert_equal_values(given, exact, case.result, judged.reshape(exact.shape))


def exact_of(case: FormatCase, x: Array, weights: Stored) -> F64:
    """The reference's result, T × N or N."""
    total = product(np.atleast_2d(x), weights.values)
    return total[0] if case.operation == "linear.gemv" else total


@checks(("linear.gemv/C2", "linear.gemm/C2"), products)
def test_products_within_the_bound(backend: Remote, case: FormatCase, record_property: Record) -> None:
    """Random bytes and activations stay within the bound derived from the declared arithmetic."""
    assert_bounded(backend, case, record_property)


def assert_bounded(
    backend: Remote,
    case: FormatCase,
    record_property: Record,
    numbers: F64 | None = None,
    weights: Stored | None = None,
) -> None:
    """A product of these or of random inputs is within its bound."""
    __tracebackhide__ = True
    weights = drawn(case, powers=False) if weights is None else weights
    x = activations(case, random_numbers(case) if numbers is None else numbers)
    record_property("share", share_used(backend, case, x, weights))


def share_used(backend: Remote, case: FormatCase, x: Array | Stored, weights: Stored) -> float:
    """The fraction of its bound that a product uses; for a cast the activations are stored too."""
    __tracebackhide__ = True
    declared = arithmetic(backend, case)
    given = backend.run(case.operation, x, weights, case.result)
    wide: F64 = x.values.T if isinstance(x, Stored) else np.atleast_2d(x).astype(np.float64)
    sums = of_sums(x, weights) if isinstance(x, Stored) else 0.0
    exact = product(wide, weights.values)
    bound = limit_of(lambda: stored_bound(wide, weights, case.result, declared, exact, sums))
    return share_of(given, exact[0] if case.operation == "linear.gemv" else exact, bound, case)


def share_of(given: object, exact: F64, bound: Bound, case: FormatCase) -> float:
    """The fraction of the bound that was used; elements in which a right kernel may overflow are not judged."""
    __tracebackhide__ = True
    array = assert_array("the result", given, FLOATS[case.result].dtype, exact.shape)
    limit = bound.limit.reshape(exact.shape)
    judged = np.isfinite(limit)
    numbers = np.where(judged, array, np.zeros((), array.dtype))
    return assert_within(numbers, np.where(judged, exact, 0), Bound(limit, bound.gauge, bound.derivation), array.dtype)


def unit_vectors(clause: str, settings: Settings) -> Iterator[FormatCase]:
    """One small matrix of each format in each type and width, multiplied by a unit vector for each row."""
    for table in FORMATS.values():
        for bits in table.options.get("bits") or (0,):
            first = dict(options_of(table, 0))
            options = tuple((first | ({"bits": bits} if bits else {})).items())
            rows, columns = fitted(table, table.block or 64, 16, options)
            for own in RESULTS:
                yield FormatCase(clause, "exhaustive", "unit", table.name, rows, columns, rows, own, own, options)


@checks("linear.gemm/C2", unit_vectors)
def test_a_unit_vector_gives_a_row(backend: Remote, case: FormatCase, record_property: Record) -> None:
    """With X the identity, the result is the matrix itself, row by row, within the rounding of one weight."""
    assert_bounded(backend, case, record_property, np.eye(case.rows))


def few(clause: str, settings: Settings) -> Iterator[FormatCase]:
    """One shape of each format in each type, which kernels for multiples of 128 accept."""
    for table in FORMATS.values():
        yield from in_types(clause, "random", "again", table, 4 * (table.block or 32), 128, options_of(table, 1), 5)
    yield from shipped(clause, "random", Settings(range(0)), most=1)


@checks("linear.gemv/C3", few)
def test_gemv_repeats_itself(backend: Remote, case: FormatCase) -> None:
    """The same call gives the same bits after calls with other activations."""
    assert_repeats(backend, case)


@checks("linear.gemm/C3", few)
def test_gemm_repeats_itself(backend: Remote, case: FormatCase) -> None:
    """The same call gives the same bits, and a row does not depend on its neighbours."""
    first, weights, x = assert_repeats(backend, case)
    changed = x.copy()
    changed[1:] += 1
    alone = backend.run(case.operation, changed, weights, case.result)
    assert_same_bits(first[:1], alone[:1], "row 0 changed when the other rows of x did")


def assert_repeats(backend: Remote, case: FormatCase) -> tuple[Array, Stored, Array]:
    __tracebackhide__ = True
    weights = drawn(case, powers=False)
    x = activations(case, random_numbers(case))
    first = backend.run(case.operation, x, weights, case.result)
    backend.run(case.operation, -x, weights, case.result)
    assert_same_bits(first, backend.run(case.operation, x, weights, case.result), "the same call after another")
    return first, weights, x


@checks(("linear.gemv/C4", "linear.gemm/C4"), few)
def test_non_finite_numbers_keep_to_their_row(backend: Remote, case: FormatCase) -> None:
    """A NaN or an infinity in a row of X reaches every column with a nonzero weight there, and no other row."""
    weights, declared = drawn(case, powers=False), arithmetic(backend, case)
    others = np.atleast_2d(activations(case, random_numbers(case)))[1:].astype(np.float64)
    exact = product(others, weights.values)
    bound = limit_of(lambda: stored_bound(others, weights, case.result, declared, exact)) if len(others) else None
    judged = np.zeros(exact.shape, bool) if bound is None else np.isfinite(bound.limit)  # what cannot overflow
    for value in (np.nan, np.inf, -np.inf):
        for place in (0, case.rows - 1):
            numbers = random_numbers(case)
            numbers[0, place] = value
            x = activations(case, numbers)
            finite = np.isfinite(np.atleast_2d(backend.run(case.operation, x, weights, case.result)).astype(np.float64))
            assert not finite[0].any(), f"WRONG: x[{place}] is {value}, and the result is finite in some columns"
            assert finite[1:][judged].all(), "WRONG: a finite row of X gave a row of the result that is not finite"


# **Stored activations.**

CAST = ("q8_0", "q8_1", "q8_k", "int8-token", "fp8-channel")
"""The formats of activations; each is tried with every format of weights that it can be combined with."""
CASTS = [each for each in PROFILES.values() if "linear.gemm_cast/C1" in each.clauses and "format" in each.parameters]
"""Profiles of one format of weights and one of activations."""


def cast_products(clause: str, settings: Settings) -> Iterator[FormatCase]:
    """Every format in every shape with alternating formats of activations; in one shape with all of them."""
    for turn, case in shapes(clause, "random"):
        fitting = [name for name in CAST if case.rows % (FORMATS[name].block or 1) == 0]
        for step, name in enumerate(fitting):
            if turn == ALL_TYPES or step == turn % len(fitting):
                x, result = name, RESULTS[turn % 3]
                yield replace(case, vectors=(1, 3, 8)[turn % 3], activations=x, result=result)
    yield from shipped(clause, "random", settings)


def lattice_cast(clause: str, settings: Settings) -> Iterator[FormatCase]:
    for case in cast_products(clause, settings):
        yield replace(case, tier="lattice", result="float32")


def cast_of(case: FormatCase, *, powers: bool, codes: Codes = "cast", kept: Array | None = None) -> Stored:
    """The stored activations of a case: K × T."""
    return drawn(cast_case(case), powers=powers, codes=codes, kept=kept)


def cast_case(case: FormatCase) -> FormatCase:
    """The case for the matrix of activations alone."""
    return replace(case, format=case.activations, columns=case.vectors, options=activation_options(case.activations))


@checks("linear.gemm_cast/C1", lattice_cast)
def test_cast_products_on_the_lattice(backend: Remote, case: FormatCase) -> None:
    """With scales that are powers of two, the result equals the reference's where every partial sum is exact."""
    weights = drawn(case, powers=True)
    x, judged = lattice_cast_of(case, weights, (accumulated(arithmetic(backend, case)), case.result))
    given = backend.run(case.operation, x, weights, case.result)
    assert_equal_values(given, product(x.values.T, weights.values), case.result, judged)


def lattice_cast_of(
    case: FormatCase, weights: Stored, types: tuple[str, ...], rows: I64 | None = None
) -> tuple[Stored, Array]:
    """Activations, and a mask of the exact results. Codes are nonzero in all rows (or in these), in half of them, in a
    quarter and so on, whichever has the most judged weights."""
    alive = np.arange(case.rows) if rows is None else rows
    order, terms, found = case.generator().permutation(alive), of_rows(weights.terms, alive), []
    for count in (order.size >> halved for halved in range(order.size.bit_length())):
        x = cast_of(case, powers=True, kept=np.isin(np.arange(case.rows), order[:count]))
        judged = exact_products(x.values.T[:, alive], terms, types) & (np.asarray(of_sums(x, weights)) == 0)
        found.append((count * int(judged.sum()), x, judged))
        if found[-1][0] >= count // 2 * judged.size:
            break  # half of these rows cannot have more judged weights
    return max(found, key=lambda each: each[0])[1:]


@checks("linear.gemm_cast/C2", cast_products)
def test_cast_products_within_the_bound(backend: Remote, case: FormatCase, record_property: Record) -> None:
    """Random blocks of activations and weights stay within the bound derived from the declared arithmetic."""
    assert_cast_bounded(backend, case, record_property, cast_of(case, powers=False))


def assert_cast_bounded(
    backend: Remote, case: FormatCase, record_property: Record, x: Stored, weights: Stored | None = None
) -> None:
    """A product of stored activations and these or random weights is within its bound."""
    __tracebackhide__ = True
    weights = drawn(case, powers=False) if weights is None else weights
    record_property("share", share_used(backend, case, x, weights))


def odd_casts(clause: str, settings: Settings) -> Iterator[FormatCase]:
    """Rows of three blocks of weights or of activations, for loops that take two blocks at a time."""
    for table in FORMATS.values():
        options = options_of(table, 0)
        for name in CAST:
            rows, columns = fitted(table, 3 * max(table.block or 32, FORMATS[name].block or 32), 24, options)
            if rows % (FORMATS[name].block or 1) == 0:
                yield FormatCase(clause, "edge", "three-blocks", table.name, rows, columns, 3, name, options=options)


@checks("linear.gemm_cast/C2", odd_casts)
def test_cast_products_of_three_blocks(backend: Remote, case: FormatCase, record_property: Record) -> None:
    """Products with an odd number of blocks stay within the bound."""
    assert_cast_bounded(backend, case, record_property, cast_of(case, powers=False))


def unit_casts(clause: str, settings: Settings) -> Iterator[FormatCase]:
    """One small matrix of each format, and unit vectors with one scale each and with scales of blocks."""
    ships = {each.parameters["format"]: each.parameters["activations"] for each in CASTS}
    for table in FORMATS.values():
        options = options_of(table, 0)
        of_blocks = ships.get((table.name,), ("q8_k" if table.block == FORMATS["q8_k"].block else "q8_0",))
        for name in ("int8-token", *of_blocks):
            rows, columns = fitted(table, max(table.block or 64, FORMATS[name].block or 1), 16, options)
            yield FormatCase(clause, "exhaustive", "unit", table.name, rows, columns, rows, name, options=options)


@checks("linear.gemm_cast/C2", unit_casts)
def test_a_cast_unit_vector_gives_a_row(backend: Remote, case: FormatCase, record_property: Record) -> None:
    """With X the identity, cast to codes and scales, the result is the matrix itself apart from the rounding of the
    cast."""
    x = quantize(np.eye(case.rows, dtype=np.float32), case.activations, activation_options(case.activations))
    assert_cast_bounded(backend, case, record_property, x)


def few_casts(clause: str, settings: Settings) -> Iterator[FormatCase]:
    """One case of each format with each format of activations, and one of each profile."""
    yield from shipped(clause, "random", Settings(range(0)), most=1)
    seen = set()
    for case in cast_products(clause, settings):
        if (case.format, case.activations) not in seen:
            seen.add((case.format, case.activations))
            yield case


@checks("linear.gemm_cast/C3", few_casts)
def test_cast_products_repeat_themselves(backend: Remote, case: FormatCase) -> None:
    """The same call gives the same bits."""
    weights, x = drawn(case, powers=False), cast_of(case, powers=False)
    first = backend.run(case.operation, x, weights, case.result)
    assert_same_bits(first, backend.run(case.operation, x, weights, case.result), "the same call again")
