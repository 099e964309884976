"""The vectors: what is recorded, how it lies in files, and that a wrong file is found."""

import base64
import inspect
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from typer.testing import CliRunner

from lowbit.backend.reference import in_type
from lowbit.backend.wire import as_json, from_json
from lowbit.contract.operation import Promise
from lowbit.contract.rounding import UNIT_ROUNDOFF
from lowbit.errors import FormatError
from lowbit.operations import OPERATIONS
from lowbit.tensor_formats.stored import Stored
from lowbit_conformance.cli.vectors import app
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.suite.format_inputs import FormatCase
from lowbit_conformance.suite.marking import Mark, Settings
from lowbit_conformance.vectors import checking, files
from lowbit_conformance.vectors import record as recording
from lowbit_conformance.vectors.judging import BOUNDS, STATED
from lowbit_conformance.vectors.record import MOST_TEXT, Recorder, Vectors, record

SMALL = ("packing.pack", "routing.weights", "hqq.dequantize", "gptq.factor", "kvcache.bfp", "offload.engine")


@pytest.fixture(scope="module")
def recorded() -> dict[str, Vectors]:
    """The vectors of a few operations: exact, bounded, with real zeros, a residual, two stateful ones."""
    return {operation: record(operation, Settings(range(1))) for operation in SMALL}


def parsed(document: dict[str, Any]) -> files.Document:
    """What a file that says this is read as."""
    return files.parse("vectors.json", json.dumps(document).encode())


@pytest.fixture(scope="module")
def documents(recorded: dict[str, Vectors]) -> dict[str, dict[str, Any]]:
    """Their files."""
    return {operation: json.loads(files.as_text(vectors, 1)) for operation, vectors in recorded.items()}


def part(document: dict[str, Any], *places: int) -> dict[str, Any]:
    """A copy with the vectors at these places alone: a whole file is megabytes of text."""
    copied: dict[str, Any] = json.loads(
        json.dumps(document | {"vectors": [document["vectors"][place] for place in places]})
    )
    return copied


def test_every_operation_has_vectors() -> None:
    """Every bounded operation has stated arithmetic and a bound, but for the one whose bound is a residual's; and
    reference and check take the same arguments, which is what a vector's arguments are named after."""
    bounded = {name for name, operation in OPERATIONS.items() if operation.promise is Promise.BOUNDED}
    assert set(STATED) == bounded
    assert set(BOUNDS) == bounded - {"gptq.factor"}
    for name, operation in OPERATIONS.items():
        ours, theirs = (inspect.signature(function).parameters for function in (operation.reference, operation.check))
        assert list(ours) == list(theirs), name
        assert [each.default for each in ours.values()] == [each.default for each in theirs.values()], name


def test_every_clause_with_cases_has_a_vector(documents: dict[str, dict[str, Any]]) -> None:
    """No clause of a small operation is missing, nor H8; ids differ, and every vector is of a clause and small."""
    for operation, document in documents.items():
        vectors = document["vectors"]
        promised = {*OPERATIONS[operation].clauses, f"{operation}/H8"}
        assert {vector["clause"] for vector in vectors} == promised, operation
        assert len({vector["id"] for vector in vectors}) == len(vectors)
        for vector in vectors:
            assert vector["id"].startswith(vector["clause"])
            assert len(json.dumps(vector)) <= MOST_TEXT
            assert vector["notes"]


def test_files_keep_the_schema(documents: dict[str, dict[str, Any]]) -> None:
    """Each file is valid, and the schema finds what is wrong with one."""
    schema = json.loads(files.schema_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for document in documents.values():
        short = document | {"vectors": document["vectors"][:8] + document["vectors"][-8:]}
        validator.validate(short)
    wrong: list[Callable[[dict[str, Any]], object]] = [
        lambda vector: vector.pop("id"),
        lambda vector: vector.pop("result"),
        lambda vector: vector.update(flags=["nice"]),
        lambda vector: vector.update(bound=vector["result"]),
        lambda vector: vector["arguments"].update(bits={"number": 4}),
        lambda vector: vector["result"].update(shape=[-1]),
    ]
    for spoil in wrong:
        document = part(documents["packing.pack"], 0)
        spoil(document["vectors"][0])
        assert not validator.is_valid(document)


FEW = ("q4_k", "mxfp4", "gptq-v2", "fp8-channel")
"""Formats of large blocks, of small floats, of options, and of a float16 or bfloat16 scale."""


@pytest.mark.parametrize("operation", ["formats.dequantize", "linear.gemv", "linear.gemm_cast"])
def test_stored_matrices_have_vectors_in_all_types(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each format has vectors in each pair of types that the suite tries, on the lattice and at random, though the
    suite's own cases of some are too large; the file keeps the schema, and this version agrees with it."""

    def of_few(mark: Mark) -> Mark:
        def few(clause: str, settings: Settings) -> Iterator[FormatCase]:
            for case in mark.generator(clause, settings):
                if isinstance(case, FormatCase) and case.format in FEW:
                    yield case

        return replace(mark, generator=few)

    marks = [of_few(mark) for mark in recording.marks_of(operation)]
    monkeypatch.setattr(recording, "marks_of", lambda operation: marks)
    settings = Settings(range(1))
    tiers = ("lattice", "random")
    cases = [case for mark in marks for case in mark.generator(mark.clause, settings) if case.tier in tiers]
    tried = {types_of(case) for case in cases if isinstance(case, FormatCase)}
    document = json.loads(files.as_text(record(operation, settings), 1))
    right = [vector for vector in document["vectors"] if "must-refuse" not in vector["flags"]]
    found = {types_in(vector) for vector in right}
    if operation == "linear.gemm_cast":  # which is small enough in some types of each of the activations
        assert {each[:2] for each in tried} == {each[:2] for each in found if each[1] in tiers}
    else:
        assert found >= tried
    assert len({vector["id"] for vector in document["vectors"]}) == len(document["vectors"])
    schema = jsonschema.Draft202012Validator(json.loads(files.schema_text()))
    schema.validate(document | {"vectors": [each for each in right if "mxfp4" in each["id"]][:4]})
    assert list(checking.disagreements(parsed(document))) == []


def types_of(case: FormatCase) -> tuple[str, str, str, str]:
    return case.format, case.tier, case.activations, case.result


def types_in(vector: dict[str, Any]) -> tuple[str, str, str, str]:
    """The same of a vector."""
    given = {name: from_json(tree) for name, tree in vector["arguments"].items()}
    x, weights = given.get("x"), given["weights"]
    x_type = "float32" if x is None else x.format if isinstance(x, Stored) else x.dtype.name
    return weights.format, vector["tier"], x_type, given["result"]


def test_the_recorder_answers_every_test() -> None:
    """It has each method of a backend that a test of an operation calls; the others are called by tests of habits, and
    by those with several threads, which have no vectors."""
    of_habits = {"close", "forget", "load", "perform", "recording", "repeat", "together"}
    methods = {name for name in dir(Remote) if not name.startswith("_")}
    assert {name for name in methods if not hasattr(Recorder, name)} == of_habits


def test_export_where_text_is_ascii(tmp_path: Path) -> None:
    """The schema and the vectors are UTF-8 in every locale."""
    ascii_only = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    words = ["-P", "-m", "lowbit", "vectors", "export", str(tmp_path), "--op", "packing.unpack", "--seeds", "0"]
    done = subprocess.run([sys.executable, *words], env=ascii_only, capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip()) == (0, "")
    assert (tmp_path / files.SCHEMA_FILE).read_text("utf-8") == files.schema_text()


@pytest.mark.whole
def test_export_is_the_same_twice(recorded: dict[str, Vectors]) -> None:
    """The same cases give the same bytes."""
    for operation in ("packing.pack", "offload.engine"):
        again = record(operation, Settings(range(1)))
        assert files.as_text(again, 1) == files.as_text(recorded[operation], 1)


def test_answers_are_right_without_numpy(documents: dict[str, dict[str, Any]]) -> None:
    """A reader with nothing but base64 and integers finds that words hold the codes, as clause C1 says."""
    checked = 0
    for vector in documents["packing.pack"]["vectors"]:
        if "must-refuse" in vector["flags"]:
            continue
        codes, bits, words = vector["arguments"]["codes"], vector["arguments"]["bits"], vector["result"]
        rows, columns = codes["shape"]
        given = base64.b64decode(codes["data"])
        count = rows * bits // 32 * columns
        expected = struct.unpack(f"<{count}I", base64.b64decode(words["data"]))
        assert words["array"] == "<u4"
        for n in range(columns):
            stream = sum(given[k * columns + n] << bits * k for k in range(rows))
            for word in range(rows * bits // 32):
                assert expected[word * columns + n] == stream >> 32 * word & 0xFFFFFFFF
                checked += 1
    assert checked > 1000


def test_bounded_vectors_state_a_bound(documents: dict[str, dict[str, Any]]) -> None:
    """A rounding of the exact result to the type of the scores is within the bound; lattice vectors are numbers of that
    type; there are vectors with and without a bound, and refusals."""
    flags: set[str] = set()
    for vector in documents["routing.weights"]["vectors"]:
        flags.update(vector["flags"])
        if "bound" in vector:
            exact, bound = from_json(vector["exact"]), from_json(vector["bound"])
            kind = from_json(vector["arguments"]["scores"]).dtype.name
            assert (np.abs(in_type(exact, kind).astype(np.float64) - exact) <= bound).all()
            share = 1e-3 if kind == "float32" else 4 * UNIT_ROUNDOFF[kind]
            assert (bound <= share * np.abs(exact) + 1e-6).all(), "a bound that anything meets"
            if "lattice" in vector["flags"]:
                assert (in_type(exact, kind) == exact).all()
    assert {"must-refuse"} <= flags
    assert all(
        "residual" in vector["flags"] or "must-refuse" in vector["flags"]
        for vector in documents["gptq.factor"]["vectors"]
    )
    assert all("needs-real-zero" in vector["flags"] for vector in documents["hqq.dequantize"]["vectors"])
    steps = [step for vector in documents["offload.engine"]["vectors"] for step in vector.get("steps", [])]
    assert {True, None} == {step.get("refused") for step in steps}


def test_check_agrees_and_finds_changes(documents: dict[str, dict[str, Any]]) -> None:
    """This version answers as the files say; with one bit of an answer changed, a refusal claimed or denied, or an
    argument spoilt, that vector and none of a dozen others is found."""
    for document in documents.values():
        assert list(checking.disagreements(parsed(document))) == []

    def other(tree: dict[str, Any]) -> None:
        array = from_json(tree)
        array.reshape(-1).view(np.uint8)[-1] ^= 64
        tree.update(as_json(array))

    def first(document: dict[str, Any], key: str) -> int:
        return next(place for place, each in enumerate(document["vectors"]) if key in each or key in each["flags"])

    changes: list[tuple[str, str, Callable[[dict[str, Any]], object]]] = [
        ("packing.pack", "result", lambda vector: other(vector["result"])),
        ("packing.pack", "result", lambda vector: vector["flags"].append("must-refuse")),
        ("packing.pack", "result", lambda vector: vector["arguments"].update(bits=5)),
        ("packing.pack", "result", lambda vector: vector["arguments"].pop("bits")),
        ("packing.pack", "result", lambda vector: vector["arguments"]["codes"].update(data="AA==")),
        ("packing.pack", "must-refuse", lambda vector: vector["flags"].remove("must-refuse")),
        ("routing.weights", "bound", lambda vector: other(vector["exact"])),
        ("routing.weights", "bound", lambda vector: other(vector["bound"])),
        ("routing.weights", "bound", lambda vector: vector.pop("bound")),
        ("gptq.factor", "exact", lambda vector: other(vector["exact"])),
        ("offload.engine", "steps", lambda vector: vector["steps"][0].update(result=[])),
        ("offload.engine", "steps", lambda vector: vector["steps"].pop(0)),
    ]
    for operation, key, change in changes:
        place, count = first(documents[operation], key), len(documents[operation]["vectors"])
        others = range(place + count // 13, place + count, count // 13)  # spread over all kinds; the last ones wrap
        document = part(documents[operation], place, *(each % count for each in others if each % count != place))
        vector = document["vectors"][0]
        change(vector)
        assert [id for id, _ in checking.disagreements(parsed(document))] == [vector["id"]], (operation, key)


def test_the_command_writes_and_checks(tmp_path: Path) -> None:
    """Export and check as a user runs them; a spoilt file ends the check with status 1, a foreign one with an error."""
    runner = CliRunner()
    done = runner.invoke(app, ["export", str(tmp_path / "v"), "--op", "packing.unpack", "--seeds", "0", "--json"])
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in (tmp_path / "v").iterdir()) == ["packing.unpack.json", files.SCHEMA_FILE]
    done = runner.invoke(app, ["check", str(tmp_path / "v"), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["disagreements"] == []
    path = tmp_path / "v" / "packing.unpack.json"
    path.write_text(path.read_text().replace('"bits": 4', '"bits": 2'))
    done = runner.invoke(app, ["check", str(tmp_path / "v"), "--json"])
    assert done.exit_code == 1
    assert json.loads(done.stdout)["disagreements"]
    for text in (
        "",
        "[]",
        "{",
        '{"schema": "lowbit-vectors/2"}',
        "[" * 100000,
        path.read_text().replace("unpack", "puck"),
    ):
        path.write_text(text)
        done = runner.invoke(app, ["check", str(tmp_path / "v")])
        assert type(done.exception).__name__ == "FormatError", text[:40]
    done = runner.invoke(app, ["check", str(tmp_path)])
    assert type(done.exception).__name__ == "ArgumentError"
    (tmp_path / "file").write_text("")
    done = runner.invoke(app, ["export", str(tmp_path / "file"), "--op", "packing.unpack"])
    assert type(done.exception).__name__ == "ArgumentError"
    done = runner.invoke(app, ["export", str(tmp_path / "w"), "--op", "packing.puck"])
    assert type(done.exception).__name__ == "ArgumentError"


def test_a_malformed_file_is_refused_by_name(documents: dict[str, dict[str, Any]]) -> None:
    """The file, the vector and the field, what was given and what is allowed, before anything is computed."""
    changes: list[tuple[Callable[[dict[str, Any]], object], str]] = [
        (lambda vector: vector.pop("id"), "v.json: vector 0: id is missing; it must be a string"),
        (lambda vector: vector.update(id=1), "v.json: vector 0: id is 1; allowed: a string"),
        (lambda vector: vector.update(flags=[{}]), "v.json: vector 0: flags is [{}]; allowed: a list of texts"),
        (lambda vector: vector.update(arguments=[]), "v.json: vector 0: arguments is []; allowed: an object"),
        (lambda vector: vector.update(steps=[3]), "v.json: vector 0, step 0: step is 3; allowed: an object"),
        (lambda vector: vector.update(notes="x" * MOST_TEXT), "v.json: vector 0: size is 65537 characters"),
        (lambda vector: vector.update(notes=nested(40)), "v.json: vector 0: size is 65537 characters or nested"),
    ]
    for change, text in changes:
        document = part(documents["packing.pack"], 0, 1, 2)
        change(document["vectors"][0])
        with pytest.raises(FormatError) as caught:
            files.parse("v.json", json.dumps(document).encode())
        assert str(caught.value).startswith(text)
    with pytest.raises(FormatError, match="number of values is 9000000; allowed: at most 8388608"):
        files.parse("v.json", b"," * 9_000_000)
    with pytest.raises(FormatError, match=r"operation is '.*x1b'; allowed"):
        files.parse("v.json", json.dumps({"schema": files.SCHEMA, "operation": "\x1b", "vectors": []}).encode())


def nested(depth: int) -> list[Any]:
    """Lists inside one another."""
    tree: list[Any] = []
    for _ in range(depth):
        tree = [tree]
    return tree


def test_an_argument_that_cannot_be_read_is_named(documents: dict[str, dict[str, Any]]) -> None:
    """Each wrong value is reported with its place in the vector, and the vectors beside it are checked."""
    codes = {"array": "|u1", "shape": [2**20, 2**20], "data": "AAAA"}
    wrong: list[tuple[object, str]] = [
        (codes, "shape of codes is a list of '1048576, 1048576'; allowed: at most 8 integers"),
        (codes | {"shape": [2**31]}, "data of codes is 4 characters; allowed: 2863311532, for uint8"),
        (codes | {"shape": [0, 2**39]}, "shape of codes is a list of '0, 549755813888'"),
        (codes | {"shape": [3], "data": "A==="}, "data of codes is not base64"),
        (codes | {"array": "|O"}, "dtype of codes is '|O'; allowed: a short name"),
        (codes | {"array": "a\u202e"}, r"dtype of codes is 'a\u202e'"),
        (nested(20), "codes" + "[0]" * 16 + " is nested more deeply; allowed: at most 16"),
        ({"scalar": "|u1", "value": 300}, "codes is 300; allowed: a number that fits uint8"),
        ({"scalar": "<f4", "value": "1"}, "codes is a str; allowed: a number that fits float32"),
        (
            {"type": "data.Resource", "fields": {}},
            "type of codes is 'data.Resource'; allowed: a dataclass",
        ),
        ({"type": "bfp.Format", "fields": {"block": 0, "mantissa": 4, "exponent": 8}}, "codes: block is 0; allowed"),
        (
            {"type": "bfp.Format", "fields": {"block": 2**64, "mantissa": 4, "exponent": 8}},
            "codes.block is an integer of 65 bits",
        ),
        ({"list\n": []}, r"codes is an object with 'list\n'; allowed: one of the forms"),
        (as_json(np.zeros((2**14 + 8, 1), np.uint8)), "arguments is arrays of 16392 bytes; allowed: at most 16384"),
    ]
    for tree, text in wrong:
        document = part(documents["packing.pack"], 0, 1, 2)
        document["vectors"][1]["arguments"]["codes"] = tree
        ((id, message),) = checking.disagreements(parsed(document))
        assert id == document["vectors"][1]["id"]
        assert message.startswith(f"its arguments cannot be read: {text}")
