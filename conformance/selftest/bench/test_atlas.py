"""The atlas of other projects' kernels, without them: its modules, its data, its causes and its page."""

import ast
import json
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import run_atlas
from atlas import record
from atlas.entry import Entry, Missing, Project, library
from docutils import nodes
from paths import ROOT

from lowbit.backend import registry
from lowbit.backend.function import FunctionBackend, described
from lowbit.errors import UnavailableError

DATA = ROOT / "docs/data/atlas"
FILES = sorted(DATA.glob("*.json"))
CAUSES: list[dict[str, Any]] = json.loads((ROOT / "docs/data/atlas-findings.json").read_text("utf-8"))
SCRIPTS = ROOT / "docs/examples/adapters"
OWN = ("lowbit", "numpy", "ml_dtypes", "gguf")


def report_of(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text("utf-8"))
    return found


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The extension that makes the page."""
    monkeypatch.syspath_prepend(str(ROOT / "docs/_ext"))
    return import_module("lowbit_docs.atlas")


# Modules.


@pytest.mark.parametrize("name", run_atlas.modules())
def test_a_module_needs_no_project(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any library it can be imported, its entries can be told to the suite, and each names what is missing."""
    monkeypatch.setattr("atlas.entry.import_module", absent)
    monkeypatch.delitem(sys.modules, f"atlas.{name}", raising=False)
    module = import_module(f"atlas.{name}")
    project: Project = module.PROJECT
    assert project.packages and project.entries
    for entry in project.entries:
        assert entry.formats, entry
        if entry.backend:
            assert entry.backend in registry.names()
            continue
        backend = FunctionBackend(described(f"atlas.{name}:{entry.function}", entry.claim))
        assert backend.capabilities().operations.keys() == {entry.operation}
        assert callable(getattr(module, entry.function))
    assert any(isinstance(each, Missing) for each in vars(module).values()) or all(
        entry.backend for entry in project.entries
    )
    monkeypatch.delitem(sys.modules, f"atlas.{name}", raising=False)


def absent(name: str) -> Any:
    raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_a_missing_library_is_named() -> None:
    with pytest.raises(UnavailableError, match=r"no_such_module is unavailable: No module named .*; install"):
        library("no_such_module").anything()


def test_an_absent_project_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    project = Project("none", ("no-such-package",), ())
    monkeypatch.setattr(run_atlas, "project_of", lambda name: project)
    assert run_atlas.run_project("none", None, None, Path()) == 1
    assert capsys.readouterr().out == "none: no-such-package is not installed\n"


# What is kept of a run.


def failure(id: str, verdict: str, message: str, **parameters: Any) -> dict[str, Any]:
    return {"id": id, "verdict": verdict, "message": message, "diagnosis": "", "parameters": parameters}


def test_failures_of_one_kind_are_shown_by_the_smallest() -> None:
    """One clause and verdict, whatever the numbers; of what was raised also the words."""
    failures = [
        failure("linear.gemv/C1/lattice/a", "WRONG", "WRONG: 3 of 9", rows=64, columns=8, blocksize=64),
        failure("linear.gemv/C1/lattice/b", "WRONG", "WRONG: 1 of 2", rows=32, columns=1, blocksize=32),
        failure("linear.gemv/C2/random/c", "RAISED", "RAISED: no 5 bits", rows=32, columns=1),
        failure("linear.gemv/C2/random/d", "RAISED", "RAISED: odd", rows=32, columns=1),
    ]
    first, *others = record.findings(failures)
    assert (first["clause"], first["cases"], first["case"]) == ("C1", 2, "linear.gemv/C1/lattice/b")
    assert first["parameters"] == {"blocksize": [32, 64]}
    assert [each["message"] for each in others] == ["RAISED: no 5 bits", "RAISED: odd"]


def test_an_entry_says_its_types_and_limits() -> None:
    entry = Entry("k", "f", "linear.gemv", {"format": "nf4", "activations": "float16", "blocksize": (32, 64)})
    assert (record.types_of(entry), record.arithmetic_of(entry)) == (
        ["float16"],
        "dequantised, weights float16, sums float32",
    )
    assert record.shown(entry.limits["blocksize"]) == "32, 64"


# Data.


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_file_keeps_its_schema_and_names_a_module(file: Path) -> None:
    schema, report = json.loads((ROOT / "bench/schema/atlas.schema.json").read_text("utf-8")), report_of(file)
    jsonschema.validate(report, schema)
    assert report["module"] in run_atlas.modules()
    assert file.stem == f"{report['module']}-{next(iter(report['versions'].values())).partition('+')[0]}"
    for row in report["rows"]:
        assert (row["verdict"] == "passed") == (not row["findings"]), row["function"]
        assert row["passed"] + sum(each["cases"] for each in row["findings"]) <= row["declared"] + 1


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_failure_has_a_cause(file: Path, page: Any) -> None:
    """A row that failed is explained, and what is explained has failed."""
    report = report_of(file)
    causes = [each for each in CAUSES if page.concerns(each, report)]
    for row in report["rows"]:
        said = [each["title"] for each in causes if page.explains(each, row)]
        assert bool(said) == bool(row["findings"]), (row["function"], row["operation"], said)


def test_causes_are_whole() -> None:
    """Each is of a version that is kept; a defect has a script, and a script reads without lowbit."""
    kept = {
        (report["module"], next(iter(report["versions"].values())).partition("+")[0])
        for report in map(report_of, FILES)
    }
    for cause in CAUSES:
        assert cause.keys() == {"module", "versions", "rows", "whose", "title", "what", "script", "known"}
        assert {(cause["module"], version) for version in cause["versions"]} <= kept, cause["title"]
        assert cause["whose"] in ("defect", "choice", "limit")
        assert cause["script"] or cause["whose"] != "defect", cause["title"]
        assert all(re.fullmatch(r"https://github\.com/\S+/(issues|pull)/\d+", each) for each in cause["known"])
    for name in {cause["script"] for cause in CAUSES} - {""}:
        tree = ast.parse((SCRIPTS / name).read_text("utf-8"))
        imported = {each.module or "" for each in ast.walk(tree) if isinstance(each, ast.ImportFrom)}
        imported |= {alias.name for each in ast.walk(tree) if isinstance(each, ast.Import) for alias in each.names}
        assert not any(module.partition(".")[0].startswith("lowbit") for module in imported), name


# The page.


def test_the_page_has_every_project_and_every_mark(page: Any) -> None:
    """A row for each project and format; a defect is red, what nobody explained grey; sections have all rows."""
    reports = [report_of(file) for file in FILES]
    rows = page.matrix(reports, CAUSES)
    assert len(rows) == sum(len(page.by_format(report["rows"])) for report in reports)
    for report in reports:
        causes = [each for each in CAUSES if page.concerns(each, report)]
        text = page.section(report, causes, SCRIPTS).astext()
        assert all(row["kernel"] in text for row in report["rows"])
        assert all(each["case"] in text for row in report["rows"] for each in row["findings"])
        assert all(cause["title"] in text for cause in causes)
    row = {"kernel": "k", "function": "f", "operation": "linear.gemv", "types": [], "findings": [{"clause": "C1"}]}
    cause = {"rows": [["f", "*", "*"]], "whose": "defect"}
    assert [each["classes"] for each in page.marks([row], [cause], "x")] == [["atlas-red"]]
    assert [each["classes"] for each in page.marks([row], [cause | {"whose": "choice"}], "x")] == [["atlas-amber"]]
    assert [each["classes"] for each in page.marks([row], [], "x")] == [["atlas-grey"]]
    (green,) = page.marks([row | {"findings": []}], [cause], "x")
    assert isinstance(green, nodes.inline) and green.astext() == "✓"
