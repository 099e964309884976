"""What formats allow and kernels seldom meet: every format has it in the suite's cases, or refuses it with a reason."""

import numpy as np
import pytest

from lowbit.errors import ArgumentError
from lowbit.numbers.floats import FLOATS
from lowbit.tensor_formats.stored import FORMATS, Stored, dequantize
from lowbit_conformance.suite.clauses.test_formats_unusual import GROUP, of_scales, unusual, unusual_matrix
from lowbit_conformance.suite.format_inputs import FormatCase
from lowbit_conformance.suite.marking import Settings
from lowbit_numpy.stored import StoredOperations

CASES = {case.format: case for case in unusual("formats.dequantize/C1", Settings(range(0)))}
BOTH_ROWS = (4 * GROUP, 4 * GROUP + 8)


def test_every_format_has_a_case() -> None:
    """The generator goes through the table of formats."""
    assert CASES.keys() == FORMATS.keys()


@pytest.mark.parametrize("name", FORMATS)
def test_a_scale_of_0_is_in_the_case_or_refused(name: str) -> None:
    """Of each type that has a zero; where the format has none, its refusal says why."""
    found = unusual_matrix(CASES[name])
    fields = found.table.fields_of(found.by_name)
    rows = of_scales(found.table)
    for row in rows[:1] + [each for each in rows[1:] if fields[each.name].size > 1]:
        if (fields[row.name].astype(np.float64) == 0).any():
            continue
        changed = fields | {row.name: np.zeros_like(fields[row.name])}
        with pytest.raises(ArgumentError, match="since it is divided by"):
            Stored(found.format, found.rows, found.columns, found.table.tensors_of(changed, found.sizes), found.options)
    for row in found.table.fields:
        if row.role == "scale" and row.dtype in FLOATS and row not in rows:
            assert FLOATS[row.dtype].values.min() > 0 or not FLOATS[row.dtype].signed


@pytest.mark.parametrize(
    "name", [name for name, table in FORMATS.items() if any(r.role == "zero" for r in table.fields)]
)
def test_a_zero_beyond_the_codes_is_in_the_case(name: str) -> None:
    """All ones where zeros are packed, and numbers above 15 where they are floats."""
    found = unusual_matrix(CASES[name])
    fields = found.table.fields_of(found.by_name)
    for row in found.table.fields:
        if row.role == "zero":
            numbers = fields[row.name]
            packed = row.dtype not in FLOATS
            assert (numbers == np.invert(np.zeros((), numbers.dtype)) if packed else numbers > 15).any(), row.name


def test_version_1_of_gptq_has_a_zero_of_16() -> None:
    """A stored 15 in 4 bits."""
    found = unusual_matrix(CASES["gptq-v1"])
    scales = found.by_name["scales"][0].astype(np.float64)
    offsets = np.asarray(found.terms.offsets)[0]
    assert (offsets[scales != 0] == -16 * scales[scales != 0]).any()


SIZED = ("group_size", "tokens", "block_size", "blocksize", "scale_group")


@pytest.mark.parametrize("name", [name for name, table in FORMATS.items() if table.options.keys() & set(SIZED)])
def test_a_short_last_group_is_in_the_case_or_refused(name: str) -> None:
    """Sizes that a group does not divide are drawn, or the table says of what they must be a multiple."""
    case = CASES[name]
    size = next(value for option, value in case.options if option in SIZED)
    if case.rows % size:
        return
    rows = case.rows - case.rows % size + size // 2
    with pytest.raises(ArgumentError, match="allowed: a multiple of"):
        for row in FORMATS[name].tensors:
            row.sizes(FORMATS[name].sizes(rows, case.columns, dict(case.options)))


@pytest.mark.parametrize("name", FORMATS)
def test_the_baseline_decodes_it(name: str) -> None:
    """Finite numbers, the same from the reference and from lowbit_numpy."""
    case: FormatCase = CASES[name]
    found = unusual_matrix(case)
    expected = dequantize(found, case.result)
    assert np.isfinite(expected.astype(np.float64)).all()
    assert np.array_equal(StoredOperations()._formats_dequantize(found, case.result), expected)
