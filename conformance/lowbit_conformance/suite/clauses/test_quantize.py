"""Checks of casts to formats: every byte, on numbers at which casts differ.

The kinds of numbers know no format. Ties are half-integers beside a largest number that makes the scale a power of two;
other kinds have blocks of zeros, constant blocks, scales that round to 0 in float16 or come close to its largest.
"""

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from lowbit.arrays import F32, Activations, Array
from lowbit.errors import ArgumentError
from lowbit.tensor_formats.stored import FORMATS, Stored, quantized
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.suite.clauses.test_formats import MOST_ROWS, fitted, options_of
from lowbit_conformance.suite.format_inputs import FormatCase
from lowbit_conformance.suite.marking import Settings, checks

Random = np.random.Generator
UNIT = 32
"""A divisor of the block sizes of all formats."""


# **Kinds of numbers**, each N × K.


def normal(rng: Random, rows: int, columns: int) -> F32:
    """Like activations, with some channels larger than others."""
    numbers = rng.normal(size=(columns, rows)) * np.exp(rng.normal(0, 1, rows))
    return numbers.astype(np.float32)


def ties(rng: Random, rows: int, columns: int) -> F32:
    """Half-integers whose largest magnitude or range is a number of codes, times a power of two."""
    found = np.empty((columns, rows), np.float32)
    for number, row in enumerate(found):
        most, least = ((127, -127), (8, -8), (16, -16), (15, 0), (31, 0))[number % 5]
        row[:] = rng.integers(2 * least + 1, 2 * most, rows) / 2
        starts = np.arange(0, rows, UNIT)
        ends = rng.choice(UNIT // 2, size=(2, len(starts)))
        row[starts + ends[0]] = most if number % 2 else -most if least else most
        row[starts + UNIT // 2 + ends[1]] = least if least == 0 else row[starts + ends[0]]
    return found * np.exp2(rng.integers(-3, 4, (columns, 1))).astype(np.float32)


def zeros(rng: Random, rows: int, columns: int) -> F32:
    """Every second run of numbers is 0, with both signs."""
    numbers = normal(rng, rows, columns)
    runs = numbers.reshape(columns, -1, UNIT)
    runs[:, 1::2] *= 0
    numbers[0] = 0
    return numbers


def constant(rng: Random, rows: int, columns: int) -> F32:
    """One constant for each block of any format."""
    return np.repeat(rng.normal(size=(columns, 1)), rows, axis=1).astype(np.float32)


def huge(rng: Random, rows: int, columns: int) -> F32:
    """Near the largest number of float16, in pairs whose sum is 0."""
    numbers = (normal(rng, rows, columns).clip(-4, 4) * 15000).astype(np.float32)
    numbers[:, 1::2] = -numbers[:, ::2]
    return numbers


def tiny(rng: Random, rows: int, columns: int) -> F32:
    """Numbers with scales that are subnormal in float16, or 0 in float16 and not in float32."""
    return (rng.normal(size=(columns, rows)) * np.exp2(-rng.integers(10, 24, (columns, 1)))).astype(np.float32)


def negative(rng: Random, rows: int, columns: int) -> F32:
    """No positive number, so the largest number is not the one of largest magnitude."""
    return -np.abs(normal(rng, rows, columns))


def spikes(rng: Random, rows: int, columns: int) -> F32:
    """One large number among small ones."""
    numbers = (rng.normal(size=(columns, rows)) / 64).astype(np.float32)
    numbers[:, :: 3 * UNIT] = 7
    return numbers


def ramps(rng: Random, rows: int, columns: int) -> F32:
    """Magnitudes that alternately rise along a row, so that the last number of every block is its largest, or fall."""
    numbers = (np.arange(rows) + rng.uniform(1, 1.5, (columns, rows))) * rng.choice((-1, 1), (columns, rows))
    numbers[1::2] = numbers[1::2, ::-1]
    found: F32 = (numbers / 32).astype(np.float32)
    return found


KINDS: Mapping[str, Callable[[Random, int, int], F32]] = {
    each.__name__: each for each in (normal, ties, zeros, constant, huge, tiny, negative, spikes, ramps)
}


def casts(clause: str, settings: Settings) -> Iterator[FormatCase]:
    """Every kind for every format that defines how numbers become codes, and ordinary numbers in small matrices.

    A format with second-level scales also gets a matrix with several of these.
    """
    for table in FORMATS.values():
        if table.encode:
            for turn, columns in enumerate((1, 3, 17)):
                options = options_of(table, turn)
                rows, fitting = fitted(table, (1 + turn) * (table.block or UNIT), columns, options)
                yield FormatCase(clause, "random", "normal", table.name, rows, fitting, options=options)
            for turn, kind in enumerate(KINDS):
                options = options_of(table, turn)
                rows, columns = fitted(table, min(8 * (table.block or UNIT), MOST_ROWS), 20, options)
                yield FormatCase(clause, "edge", kind, table.name, rows, columns, options=options)
        if table.encode:
            options = options_of(table, 0)
            for turn, (deep, wide) in enumerate(((2048, 5), (table.block or UNIT, 130))):
                rows, columns = fitted(table, deep, wide, options)
                yield FormatCase(clause, "random", ("deep", "wide")[turn], table.name, rows, columns, options=options)
        if table.encode and table.summed:
            options = options_of(table, 1)
            yield FormatCase(clause, "edge", "normal", table.name, 256, 40, options=options)


def few(clause: str, settings: Settings) -> Iterator[FormatCase]:
    """Ordinary numbers for every format in which no scale is shared by several rows of them."""
    for case in casts(clause, settings):
        if case.tier == "edge" and case.variant == "normal" and all("N" in row.shape for row in case.table.tensors):
            yield case


def numbers_of(case: FormatCase) -> F32:
    return np.ascontiguousarray(KINDS.get(case.variant, normal)(case.generator(), case.rows, case.columns))


@checks("formats.quantize/C1", casts)
def test_every_field_is_that_of_a_reference(backend: Remote, case: FormatCase) -> None:
    """All fields equal those of one choice in the format's table; zeros of both signs count as equal."""
    assert_cast(backend, case, numbers_of(case))


def assert_cast(backend: Remote, case: FormatCase, x: Activations) -> None:
    """The backend's cast of these numbers must be one of the table's choices."""
    __tracebackhide__ = True
    given = stored_in(case, backend.run("formats.quantize", x, case.format, case.options))
    choices = [each for choice in case.table.encode if (each := cast_by(choice, x, case, given)) is not None]
    differences = [difference(given, each) for each in choices]
    assert "" in differences, f"WRONG: {differences[0]} (the reference; none of {len(choices)} choices agrees)"


def cast_by(choice: str, x: Activations, case: FormatCase, given: Stored) -> Stored | None:
    """The cast of the numbers by a choice; None if it cannot hold them, which the first choice always can."""
    try:
        return quantized(x, case.format, case.options, choice, given)
    except ArgumentError:
        return None


@checks("formats.quantize/C2", few)
def test_blocks_do_not_depend_on_each_other(backend: Remote, case: FormatCase) -> None:
    """The first row of numbers gives the same bytes beside other rows."""
    x = numbers_of(case)
    first = stored_in(case, backend.run("formats.quantize", x, case.format, case.options))
    changed = x.copy()
    changed[1:] *= 3
    other = stored_in(case, backend.run("formats.quantize", changed, case.format, case.options))
    one = quantized(x[:1], case.format, case.options)
    for row, left, right in zip(case.table.tensors, first.tensors, other.tensors, strict=True):
        axis = row.shape.index("N") if "N" in row.shape else 0
        count = one.by_name[row.name].shape[axis]
        same = np.array_equal(np.take(left, range(count), axis), np.take(right, range(count), axis))
        assert same, f"WRONG: {row.name} of row 0 changed when the other rows did"


def stored_in(case: FormatCase, given: object) -> Stored:
    """The result, which must be a matrix of this format and size."""
    __tracebackhide__ = True
    assert isinstance(given, Stored), f"WRONG: the result is a {type(given).__name__}, and not a Stored"
    expected = (case.format, case.rows, case.columns, case.options)
    found = (given.format, given.rows, given.columns, given.options)
    assert found == expected, f"WRONG: the result is {found}, expected {expected}"
    return given


def difference(given: Stored, expected: Stored) -> str:
    """The first field in which two matrices differ, in words; empty if no difference matters.

    Different codes and packed zeros that give equal numbers are zeros of either sign, have a scale of 0, or are
    padding.
    """
    table = given.table
    found, wanted = (table.fields_of(each.by_name) for each in (given, expected))
    one, other = given.terms, expected.terms
    equal = np.array_equal(one.products, other.products) and np.array_equal(one.offsets, other.offsets)
    for row in table.fields:
        packed = row.role == "codes" or (row.role == "zero" and row.numpy_dtype.kind in "iu")
        if row.role == "sum" or (packed and equal):  # a Stored has been checked for sums
            continue
        left, right = comparable(found[row.name]), comparable(wanted[row.name])
        if wrong := int((left != right).sum()):
            place = [int(i) for i in np.argwhere(left != right)[0]]
            where = f"{wrong} of {left.size} numbers of {row.name} differ, first {row.name}{place}"
            return f"{where}: {found[row.name][tuple(place)]}, expected {wanted[row.name][tuple(place)]}"
    return ""


def comparable(numbers: Array) -> Array:
    """Floats as numbers, so that both zeros are equal; integers unchanged."""
    return numbers if numbers.dtype.kind in "iu" else numbers.astype(np.float64)
