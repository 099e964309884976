"""Checks of groups: an odd number of them, the last short where the table allows that, and groups in order.

Scales, zeros and codes of each line are often packed or counted on their own: a line of three zeros of 4 bits ends in
the middle of a byte, and 72 rows in groups of 32 have three scales. A kernel that packs lines one after the other, or
rounds the number of groups down, is right wherever groups are even in number and whole.

Other cases draw an index of groups at random, as act-order gives it. Many kernels have a way of their own for rows in
the order of their groups, which needs no index and counts the rows of a group instead.
"""

from collections.abc import Iterator

import numpy as np

from lowbit.tensor_formats.stored import FORMATS, Stored
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.suite.clauses.test_formats import assert_bounded, assert_numbers, in_types, options_of
from lowbit_conformance.suite.format_inputs import FormatCase, drawn
from lowbit_conformance.suite.marking import Record, Settings, checks

GROUP = 32
REST = 8
"""Rows of the last group, if a table allows a short one."""
LARGE = 128
"""The largest group size of formats that have no option for it."""
COLUMNS = 6
ORDERED = (32, 64)
"""Group sizes for rows in the order of their groups; both cannot equal a size that is fixed in a kernel."""


def of_three_groups(clause: str, settings: Settings) -> Iterator[FormatCase]:
    """One small matrix of each format in each number of bits and each type to which a kernel may be limited."""
    for table in FORMATS.values():
        sizes = [name for name, allowed in table.options.items() if allowed is None]
        for bits in table.options.get("bits") or (0,):
            first = dict(options_of(table, 0)) | dict.fromkeys(sizes, GROUP) | ({"bits": bits} if bits else {})
            options = tuple(first.items())
            group = table.block or next((first[name] for name in first if name != "bits"), LARGE)
            yield from in_types(clause, "edge", "three-groups", table, 2 * group + REST, COLUMNS, options, 3)


@checks("formats.dequantize/C1", of_three_groups)
def test_numbers_of_three_groups(backend: Remote, case: FormatCase) -> None:
    """An odd number of groups, the last of them short, gives the numbers of the table."""
    assert_numbers(backend, case, drawn(case, powers=False))


@checks(("linear.gemv/C2", "linear.gemm/C2"), of_three_groups)
def test_products_with_three_groups(backend: Remote, case: FormatCase, record_property: Record) -> None:
    """An odd number of groups, the last of them short: the result stays within its bound."""
    assert_bounded(backend, case, record_property)


def of_groups_in_order(clause: str, settings: Settings) -> Iterator[FormatCase]:
    """Matrices of each format with an index of groups, in each number of bits and each type."""
    for table in FORMATS.values():
        if not any(row.role == "index" for row in table.fields):
            continue
        sizes = [name for name, allowed in table.options.items() if allowed is None]
        for bits in table.options.get("bits") or (0,):
            for size in ORDERED:
                first = dict(options_of(table, 0)) | dict.fromkeys(sizes, size) | ({"bits": bits} if bits else {})
                yield from in_types(clause, "edge", "in-order", table, 4 * size, 32, tuple(first.items()), 3)


def in_order(case: FormatCase) -> Stored:
    """A matrix of the case whose rows are in the order of their groups."""
    found = drawn(case, powers=False)
    at = found.sizes
    ordered = {
        row.name: at.group_of_row().astype(row.numpy_dtype).reshape(row.sizes(at))
        for row in found.table.fields
        if row.role == "index"
    }
    fields = {**found.table.fields_of(found.by_name), **ordered}
    tensors = tuple(np.ascontiguousarray(each) for each in found.table.tensors_of(fields, at))
    return Stored(found.format, found.rows, found.columns, tensors, found.options)


@checks("formats.dequantize/C1", of_groups_in_order)
def test_numbers_of_groups_in_order(backend: Remote, case: FormatCase) -> None:
    """Rows in the order of their groups give the numbers of the table."""
    assert_numbers(backend, case, in_order(case))


@checks(("linear.gemv/C2", "linear.gemm/C2"), of_groups_in_order)
def test_products_with_groups_in_order(backend: Remote, case: FormatCase, record_property: Record) -> None:
    """Rows in the order of their groups: the result stays within its bound."""
    assert_bounded(backend, case, record_property, weights=in_order(case))
