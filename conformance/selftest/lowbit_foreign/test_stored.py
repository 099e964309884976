"""Stored matrices, and the types that numpy lacks, as they cross to a library; and refusals of declarations."""

import re
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hosting import PATIENCE

from lowbit.arrays import Array
from lowbit.backend.wire import as_json, from_json
from lowbit.errors import ArgumentError
from lowbit.numbers.floats import FLOATS
from lowbit.tensor_formats.stored import FORMATS, Stored
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.isolation.verdicts import BrokenPromiseError
from lowbit_conformance.suite.clauses.test_formats import one_each
from lowbit_conformance.suite.format_inputs import FormatCase, drawn
from lowbit_conformance.suite.marking import Settings
from lowbit_foreign import INCLUDE
from lowbit_foreign.abi import DTYPES, Kind
from lowbit_foreign.flat import Entry, Results, flatten

PARTS = ("format", "rows", "columns", "tensors", "options")


def cases() -> Iterator[FormatCase]:
    """One of each format, in a small shape."""
    found = {case.format: case for case in one_each("formats.dequantize/C2", Settings(range(1)))}
    assert found.keys() == FORMATS.keys()
    yield from found.values()


@pytest.fixture(scope="module")
def matrices() -> dict[str, Stored]:
    """A matrix of each format."""
    return {case.format: drawn(case, powers=False) for case in cases()}


def test_tensors_and_options_have_paths_by_name(matrices: dict[str, Stored]) -> None:
    """Each tensor and option of each format's table, under the name that the table gives it, beside the record's own
    fields; the elements are not copied."""
    for name, weights in matrices.items():
        entries = flatten("weights", weights)
        by_path = {entry.path: entry for entry in entries}
        assert len(by_path) == len(entries), f"{name}: two parts of one path"
        assert by_path["weights"].content == "formats.Stored"
        assert by_path["weights.format"].content == name
        assert (by_path["weights.rows"].content, by_path["weights.columns"].content) == (weights.rows, weights.columns)
        for row, array in weights.by_name.items():
            entry = by_path[f"weights.{row}"]
            assert entry.content is array
            assert DTYPES[entry.dtype] == array.dtype
        for option, value in weights.options:
            assert by_path[f"weights.{option}"][1:] == (Kind.INTEGER, 0, value)
        assert set(weights.by_name).isdisjoint(PARTS)
        assert {option for option, _ in weights.options}.isdisjoint(PARTS)


def written(entries: list[Entry]) -> Results:
    """The results of a library that writes these entries."""
    results, rooms = Results(0), {}
    for path, kind, dtype, content in entries:
        data = np.frombuffer(content.encode(), np.uint8) if isinstance(content, str) else np.asarray(content)
        shape = data.shape if kind in (Kind.ARRAY, Kind.TEXT, Kind.RECORD) else (content,) * (kind is Kind.LIST)
        results.request(path, kind, dtype, shape)
        rooms[path] = data
    for path, (kind, room) in results._parts.items():
        if kind is not Kind.LIST:
            room[...] = rooms[path]
    return results


def assert_equal(given: Stored, expected: Stored) -> None:
    assert (given.format, given.sizes, given.options) == (expected.format, expected.sizes, expected.options)
    for one, other in zip(given.tensors, expected.tensors, strict=True):
        assert one.dtype == other.dtype
        assert one.tobytes() == other.tobytes()


def test_results_are_written_by_number_or_by_name(matrices: dict[str, Stored]) -> None:
    """A library may give the record's own fields, or tensors and options by the names of the table."""
    for weights in matrices.values():
        entries = flatten("result", weights)
        own = re.compile(r"result(\.(format|rows|columns|tensors|options)(\..*)?)?")
        numbered = [entry for entry in entries if own.fullmatch(entry.path)]
        named = [entry for entry in entries if not re.match(r"result\.(tensors|options)", entry.path)]
        for chosen in (numbered, named):
            assert_equal(written(chosen).value(), weights)


def test_a_result_with_a_part_too_many_or_too_few_is_refused(matrices: dict[str, Stored]) -> None:
    """A tensor that the format lacks, and one that is missing."""
    named = [each for each in flatten("result", matrices["q8_0"]) if not re.match(r"result\.(t|o)", each.path)]
    strange = Entry("result.scales", Kind.INTEGER, 0, 3)
    with pytest.raises(ArgumentError, match=r"fields of value is .*scales"):
        written([*named, strange]).value()
    with pytest.raises(ArgumentError, match=r"number of tensors is 0; allowed: 1: blocks"):
        written([each for each in named if each.path != "result.blocks"]).value()


@pytest.mark.parametrize("name", [name for name, kind in FLOATS.items() if not kind.native])
def test_types_that_numpy_lacks_cross(name: str) -> None:
    """All patterns of each, as an argument and as a result."""
    kind = FLOATS[name]
    patterns: Array = np.arange(2**kind.bits).astype(kind.pattern_dtype)
    array = patterns.view(kind.dtype)
    ((path, what, dtype, content),) = flatten("result", array)
    assert content is array
    given = written([Entry(path, what, dtype, content)]).value()
    assert given.dtype == kind.dtype
    assert given.tobytes() == array.tobytes()


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32"])
def test_a_byte_order_that_is_not_the_machines_is_kept(name: str) -> None:
    """What is refused for its byte order here is refused on the other side of a pipe, too."""
    array = np.arange(3).astype(FLOATS[name].dtype)
    swapped = array.astype(array.dtype.newbyteorder())
    given = from_json(as_json(swapped))
    assert given.dtype == swapped.dtype != array.dtype
    assert given.tobytes() == swapped.tobytes() != array.tobytes()


def test_the_header_has_the_numbers_of_all_types() -> None:
    """The enumerators of lowbit.h are the types of `abi.DTYPES`, by name and number."""
    text = (INCLUDE / "lowbit.h").read_text()
    listed = text.partition("LOWBIT_NO_DTYPE = 0,")[2].partition("};")[0]
    header = {int(number): name.lower() for name, number in re.findall(r"LOWBIT_(\w+) = (\d+)", listed)}
    assert header == {number: dtype.name.replace("bool", "bool8") for number, dtype in DTYPES.items()}


REFUSED = {
    "columns": (
        '{"limits": {"columns": {"multiple": 0}}}',
        "multiple of limit columns of linear.gemv in capabilities() is 0; allowed: an integer from 1 to 2147483648",
    ),
    "format": (
        '{"limits": {"format": ["gptq-v3"]}}',
        "a value of limit format of linear.gemv is 'gptq-v3'; allowed: gptq-v2, which is the nearest name",
    ),
    "weights": (
        '{"arithmetic": {"weights": "float8"}}',
        "weights of arithmetic of linear.gemv in capabilities() is 'float8'; "
        "allowed: exact, float16, bfloat16 or float32",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_wrong_declarations_are_refused_by_the_suite(what: str, tmp_path: Path) -> None:
    """The verdict is DECLARATION_REFUSED, and one sentence says where, what was given, and what is allowed."""
    text, sentence = REFUSED[what]
    program = tmp_path / "program.py"
    program.write_text(
        "import json, sys\n"
        "arithmetic = {'form': 'dequantised', 'accumulator': 'float32', 'roundings': 'any_order'}\n"
        f"said = json.loads({text!r})\n"
        "said['arithmetic'] = arithmetic | said.get('arithmetic', {})\n"
        "for line in sys.stdin:\n"
        "    result = {'name': 'wrong', 'operations': {'linear.gemv': said}}\n"
        "    print(json.dumps({'id': json.loads(line)['id'], 'result': result}), flush=True)\n"
    )
    with closing(Remote("command", f"'{sys.executable}' -S '{program}'", PATIENCE)) as remote, closing(remote.arena):
        with pytest.raises(BrokenPromiseError) as caught:
            remote.load()
        assert str(caught.value) == f"DECLARATION_REFUSED: {sentence}"
