"""Checks of an odd number of groups, the last of them short where the table of the format allows that.

Scales, zeros and codes of each line are often packed or counted on their own: a line of three zeros of 4 bits ends in
the middle of a byte, and 72 rows in groups of 32 have three scales. A kernel that packs lines one after the other, or
rounds the number of groups down, is right wherever groups are even in number and whole.
"""

from collections.abc import Iterator

from lowbit.tensor_formats.stored import FORMATS
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.suite.clauses.test_formats import assert_bounded, assert_numbers, in_types, options_of
from lowbit_conformance.suite.format_inputs import FormatCase, drawn
from lowbit_conformance.suite.marking import Record, Settings, checks

GROUP = 32
REST = 8
"""Rows of the last group, as far as a table allows a short one."""
LARGE = 128
"""The largest group of formats that have no option for it."""
COLUMNS = 6


def of_three_groups(clause: str, settings: Settings) -> Iterator[FormatCase]:
    """One small matrix of each format, in each number of bits and each type that a kernel may be limited to."""
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
