"""Checks of what formats allow and kernels seldom meet: it is valid, so a kernel that reads the format reads it.

One matrix of each format has all of these that its table allows: scales of 0, zeros beyond the codes (of all ones where
they are packed, which is 16 in version 1 of GPTQ with 4 bits; above the largest code where they are floats), and a last
group that is shorter than the others. What a format refuses is left as it is: a power of two is never 0, and a scale
that divides must not be.
"""

from collections.abc import Iterator

import numpy as np

from lowbit.arrays import Array
from lowbit.contract.checks import check_choice
from lowbit.errors import ArgumentError
from lowbit.numbers.floats import FLOATS, NAMES, rounded
from lowbit.tensor_formats.stored import FORMATS, RESULTS, Stored
from lowbit.tensor_formats.table import Field, Format
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.suite.clauses.test_formats import (
    assert_bounded,
    assert_numbers,
    fitted,
)
from lowbit_conformance.suite.clauses.test_formats_extremes import common_options
from lowbit_conformance.suite.format_inputs import FormatCase, drawn
from lowbit_conformance.suite.marking import Record, Settings, checks

GROUP = 64
ROWS = GROUP + 8
"""A whole group, and a short one if a table allows that."""
COLUMNS = 19
BEYOND = (16.0, 20.5, 300.0)
"""Float zeros: above 4-bit codes, and the last one above 8-bit codes."""


def unusual(clause: str, settings: Settings) -> Iterator[FormatCase]:
    """One matrix of each format with alternating types, beginning with a different one for each format."""
    for table in FORMATS.values():
        sizes = {name for name, allowed in table.options.items() if allowed is None}
        options = tuple((name, GROUP if name in sizes else value) for name, value in common_options(table))
        rows, columns = fitted(table, max(ROWS, table.block or 0), COLUMNS, options)
        own = RESULTS[len(table.name) % len(RESULTS)]
        vectors = 3 if clause.startswith("linear.gemm") else 1
        yield FormatCase(clause, "edge", "unusual", table.name, rows, columns, vectors, own, own, options)


def unusual_matrix(case: FormatCase) -> Stored:
    """A matrix of the case with every unusual property that the table of its format allows."""
    found, rng = drawn(case, powers=False), case.generator()
    for row in case.table.fields:
        fields = {name: np.array(each) for name, each in case.table.fields_of(found.by_name).items()}
        changed = with_zeros(row, fields[row.name], rng)
        hides_others = row in of_scales(case.table)[1:] and fields[row.name].size == 1
        if changed is not None and not hides_others:
            found = if_allowed(found, fields | {row.name: changed})
    return found


def of_scales(table: Format) -> list[Field]:
    """The fields of scales that can be 0. If several of them have a single number, only the first is set to 0, because
    that makes all weights 0."""
    return [row for row in table.fields if row.role == "scale" and can_be_zero(row)]


def can_be_zero(row: Field) -> bool:
    """Whether the type of a field is a float type with a zero."""
    return row.dtype in FLOATS and FLOATS[row.dtype].signed


def with_zeros(row: Field, array: Array, rng: np.random.Generator) -> Array | None:
    """A field with scales of 0 or zeros beyond the codes; `None` for fields that have neither."""
    chosen = rng.random(array.shape) < 0.25
    chosen.reshape(-1)[0] = True
    if row.role == "scale" and can_be_zero(row):
        return np.where(chosen, np.zeros((), array.dtype), array)
    if row.role == "zero" and row.dtype in FLOATS:
        beyond = rng.choice(BEYOND, array.shape)
        return np.where(chosen, rounded(beyond, check_choice("dtype", row.dtype, NAMES)), array)
    if row.role == "zero":
        return np.where(chosen, np.invert(np.zeros((), array.dtype)), array)
    return None


def if_allowed(before: Stored, fields: dict[str, Array]) -> Stored:
    """The matrix with these fields, or unchanged if its format refuses them."""
    table, at = before.table, before.sizes
    if table.complete is not None:
        fields = table.complete(fields, at)
    try:
        return Stored(before.format, at.K, at.N, table.tensors_of(fields, at), before.options)
    except ArgumentError:
        return before


@checks("formats.dequantize/C1", unusual)
def test_numbers_of_unusual_matrices(backend: Remote, case: FormatCase) -> None:
    """Scales of 0, zeros beyond the codes and a short last group give the numbers of the table."""
    assert_numbers(backend, case, unusual_matrix(case))


@checks(("linear.gemv/C2", "linear.gemm/C2"), unusual)
def test_products_with_unusual_matrices(backend: Remote, case: FormatCase, record_property: Record) -> None:
    """Scales of 0, zeros beyond the codes and a short last group: the result stays within its bound."""
    assert_bounded(backend, case, record_property, weights=unusual_matrix(case))
