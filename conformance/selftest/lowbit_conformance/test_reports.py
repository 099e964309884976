"""Reports say what happened, in every form, and what a backend says of itself cannot do anything there."""

import json
import os
import random
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema
import pytest
from absence import ABSENCE
from paths import ROOT
from rich.console import Console

from lowbit.errors import ArgumentError
from lowbit.system.storage import write_whole
from lowbit.theorems import Known
from lowbit_conformance.report import Report, as_json, report_of, show, text_of, write_html, write_json, write_junit
from lowbit_conformance.report.document import SCHEMA_FILE
from lowbit_conformance.report.files import check_writable
from lowbit_conformance.report.gather import build_of, suite
from lowbit_conformance.report.html import as_html
from lowbit_conformance.report.junit import as_xml
from lowbit_conformance.report.matrix import matrix
from lowbit_conformance.report.model import Build, Machine, Suite
from lowbit_conformance.report.words import VERDICTS, verdict_meaning
from lowbit_conformance.suite.tally import Certificate, Tally, Verdict

HOSTILE = "<script>alert('x')</script> \x1b[31mred \x00 \u202e \ud800 ]]> {{ 7 * 7 }} γ " + "long" * 5000


def shape(bits: int, group_size: int, rows: int = 128) -> dict[str, object]:
    return {"bits": bits, "group_size": group_size, "rows": rows, "columns": 19}


VERDICTS_OF_A_RUN = [
    Verdict("linear.qgemv/C1/lattice/b4-128x19-g32-s0", "passed", parameters=shape(4, 32), seconds=0.01),
    Verdict("linear.qgemv/C2/random/b4-128x19-g32-s0", "passed", share=0.25, parameters=shape(4, 32)),
    Verdict("linear.qgemv/C2/random/b4-128x19-g64-s0", "passed", share=0.5, parameters=shape(4, 64)),
    Verdict("linear.qgemv/C2/random/b2-128x19-g128-s0", "not declared", "bits 2", parameters=shape(2, 128)),
    Verdict("linear.qgemv/C2/random/b4-128x19-g9-s0", "not declared", "group_size 9", parameters=shape(4, 9)),
    Verdict(
        "linear.qgemv/C1/lattice/b4-128x19-g9-s0",
        "failed",
        f"WRONG on the lattice: 3 of 19 elements differ {HOSTILE}",
        where={"column": 3, "group": 1},
        diagnosis="equals the specification with the nibble order swapped",
        parameters=shape(4, 9),
    ),
    Verdict("linear.qgemv/H5/lattice/b4-128x19-g9-s0", "failed", "CRASHED(SIGSEGV): at 0x10", parameters=shape(4, 9)),
    Verdict("linear.qgemv/H5/lattice/b4-128x19-g64-s0", "failed", "it just failed", parameters=shape(4, 64)),
    Verdict("rope.rotate/C1/edge/tokens=3-s0", "passed", share=0.9, parameters={"tokens": 3}),
    Verdict("model/model/attn_q-s0", "failed", "HUNG: longer than 1 s"),
]


def sample(verdicts: list[Verdict] = VERDICTS_OF_A_RUN) -> Report:
    """The report of a made-up run, as the machinery would gather it, with hostile texts of the backend's."""
    arithmetic = {"form": "factored", "accumulator": "float32"}
    claims = {"operations": {"linear.qgemv": {"limits": {"bits": [4]}, "arithmetic": arithmetic}}, "concurrent": False}
    build = Build("<b>mine</b>", ("m:Mine",), "mine", "1.2", "ab" * 32, {"isa": "<img src=http://x/>"}, claims)
    machine = Machine("A CPU", "zen9", 2, "Linux 6 x86_64", "CPython 3.11.2", "2.4")
    settings = {"seeds": 1, "first_seed": 0, "ops": ["linear.qgemv"], "case": None, "model": "m.gguf"}
    tally = Tally("<b>mine</b>", {}, claims, len(verdicts) + 2, verdicts)
    return Report(Suite("0.1", "cd" * 32), build, machine, settings, "2026-01-02T03:04:05+00:00", 1.5, tally)


def terminal(report: Report) -> str:
    stream = StringIO()
    show(report, Console(file=stream, width=80))
    return stream.getvalue()


# The data.


def test_a_verdict_is_named_by_its_message() -> None:
    """The word before the colon, with its signal; a failure without one is still a named failure."""
    words = {verdict.message[:12]: verdict.verdict for verdict in VERDICTS_OF_A_RUN if verdict.outcome == "failed"}
    assert list(words.values()) == ["WRONG", "CRASHED(SIGSEGV)", "FAILED", "HUNG"]
    assert all(verdict_meaning(word) for word in [*VERDICTS, *words.values()])


def test_every_verdict_is_explained() -> None:
    """Each word with which the suite begins a message has a meaning, which the page on judging shows too."""
    begins = re.compile(r"""f?"([A-Z]{3,}(?:_[A-Z]+)*)(?::|\()""")
    suite = ROOT / "conformance/lowbit_conformance"
    words = {word for path in suite.rglob("*.py") for word in begins.findall(path.read_text("utf-8"))}
    assert {"WRONG", "HUNG", "NOT_RUN"} <= words
    assert not words - set(VERDICTS) - {"ERROR"}  # the last is pytest's


def test_a_verdict_survives_the_pipe() -> None:
    """What the suite's process sends as JSON is the same verdict on the other side, numpy's numbers included."""
    import numpy as np

    verdict = Verdict("a/C1/edge/x-s0", "failed", "WRONG: \x07", where={"row": np.int64(3)}, parameters={"p": (1, 2.5)})
    assert Verdict(**json.loads(json.dumps(vars(verdict)))) == verdict
    assert (verdict.where, verdict.message) == ({"row": 3}, "WRONG: \\x07")


def test_the_id_follows_from_the_results_and_not_from_order_or_time() -> None:
    """Equal results in another order and at another time: the same id; one other outcome, verdict, build, suite or
    processor: another."""
    report = sample()
    shuffled = random.Random(1).sample(VERDICTS_OF_A_RUN, len(VERDICTS_OF_A_RUN))
    later = replace(sample([replace(verdict, seconds=9.0) for verdict in shuffled]), started="2027", seconds=2.0)
    assert report.id == later.id
    assert re.fullmatch("[0-9a-f]{16}", report.id)
    first, *rest = VERDICTS_OF_A_RUN
    others = [
        sample([replace(first, outcome="not declared"), *rest]),
        sample([*VERDICTS_OF_A_RUN[:-1], replace(VERDICTS_OF_A_RUN[-1], verdict="WRONG")]),
        sample(rest),
        replace(report, build=replace(report.build, sha256="0" * 64)),
        replace(report, suite=replace(report.suite, sha256="0" * 64)),
        replace(report, machine=replace(report.machine, cpu="Another")),
    ]
    assert len({report.id, *(other.id for other in others)}) == 1 + len(others)


def test_counts_stand_together() -> None:
    """Passed, declared and specified, in all and by operation, with the worst share and the case that has it."""
    document = as_json(sample())
    assert document["counts"] == {"passed": 4, "declared": 8, "specified": 10}
    row = next(row for row in document["operations"] if row["operation"] == "linear.qgemv")
    assert (row["passed"], row["declared"], row["specified"], row["worst_share"]) == (3, 6, 8, 0.5)
    assert row["worst_case"] == "linear.qgemv/C2/random/b4-128x19-g64-s0"
    ids = [case["id"] for kind in ("failures", "passed", "not_declared") for case in document[kind]]
    assert sorted(ids) == sorted(verdict.id for verdict in VERDICTS_OF_A_RUN)


def test_sizes_are_those_of_products_that_passed() -> None:
    """The largest of each, whatever the case; a case that failed or that is no product says nothing."""
    sizes = ({"rows": 64, "columns": 9, "vectors": 0}, {"rows": 32, "columns": 11, "batch": 3}, {"rows": 99})
    verdicts = [Verdict(f"linear.gemm/C1/t/{n}-s0", "passed", parameters=each) for n, each in enumerate(sizes[:2])]
    verdicts.append(Verdict("linear.gemm/C1/t/2-s0", "failed", "WRONG", parameters=sizes[2]))
    verdicts.append(Verdict("packing.pack/C1/t/0-s0", "passed", parameters=sizes[0]))
    rows = {row["operation"]: row["sizes"] for row in as_json(sample(verdicts))["operations"]}
    assert rows == {"linear.gemm": {"rows": 64, "columns": 11, "batch": 3}, "packing.pack": {}}
    assert "sizes that passed: linear.gemm: K ≤ 64, N ≤ 11, batch ≤ 3" in terminal(sample(verdicts))


def test_the_matrix_counts_every_case_once() -> None:
    """Cells of an operation add up to its row; a group of all rows counts as a column, an unusual size as other."""
    lines = matrix(VERDICTS_OF_A_RUN)
    cells = {(line.operation, line.groups, bits): cell for line in lines for bits, cell in line.cells.items()}
    assert sum(cell.specified for cell in cells.values()) == len(VERDICTS_OF_A_RUN)
    assert [cells["linear.qgemv", groups, 4].state for groups in ("32", "64", "other")] == [
        "passed",
        "failed",
        "failed",
    ]
    assert cells["linear.qgemv", "column", 2].state == "not declared"
    assert cells["rope.rotate", "", None].passed == 1


def test_a_reproduction_names_the_case_and_what_it_needs() -> None:
    """The line quotes what a shell would take apart, and gives a model's case its model."""
    report = sample()
    assert report.reproduce(VERDICTS_OF_A_RUN[5]) == f"lowbit conformance m:Mine --case {VERDICTS_OF_A_RUN[5].id}"
    assert report.reproduce(VERDICTS_OF_A_RUN[-1]).endswith("--case model/model/attn_q-s0 --model m.gguf")
    command = replace(report, build=replace(report.build, target=("--command", "./mine --fast")))
    assert "--command './mine --fast' --case " in command.reproduce(VERDICTS_OF_A_RUN[5])
    assert report.reproduce(Verdict("the suite", "failed", "CRASHED: x")) == "lowbit conformance m:Mine"


def test_a_build_is_known_by_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend of this distribution has its package and version; a module in the folder, a library and a program have
    sums that change with their files; what is not found has none."""
    known = build_of(Tally("numpy"), ["numpy"])
    assert (known.distribution, len(known.sha256)) == ("lowbit", 64)
    assert known.sha256 != build_of(Tally("reference"), ["reference"]).sha256
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ownkernels.py").write_text("one")
    target = str(tmp_path / "ownkernels.py")
    targets = (["ownkernels:Mine"], ["--library", target], ["--command", f"{target} --fast"])
    before = [build_of(Tally("mine"), each).sha256 for each in targets]
    (tmp_path / "ownkernels.py").write_text("two")
    after = [build_of(Tally("mine"), each).sha256 for each in targets]
    assert all(before) and all(after) and not set(before) & set(after)
    assert build_of(Tally("x"), ["nowhere_to_be_found:Mine"]).sha256 == ""


def test_the_suite_knows_itself() -> None:
    """The same files give the same sum each time."""
    assert suite() == suite()
    assert len(suite().sha256) == 64


# JSON.


def schema() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(SCHEMA_FILE.read_text())
    return content


def test_the_document_keeps_to_its_schema() -> None:
    """The schema is one, the document of a run with every outcome satisfies it, and has no key that it leaves out."""
    jsonschema.Draft202012Validator.check_schema(schema())
    validator = jsonschema.Draft202012Validator(closed(schema()))
    for report in (sample(), sample([]), gathered()):
        validator.validate(json.loads(text_of(report)))


def closed(part: Any) -> Any:
    """A schema in which keys that are not described are errors, so that a test finds what the schema forgot."""
    if isinstance(part, list):
        return [closed(each) for each in part]
    if not isinstance(part, dict):
        return part
    inner = {name: closed(each) for name, each in part.items()}
    if "properties" in part and "additionalProperties" not in part:
        inner["additionalProperties"] = False
    return inner


@pytest.mark.parametrize(
    ("key", "value"),
    [("id", "XYZ"), ("verdict", "maybe"), ("counts", {"passed": 1}), ("passed", [{}]), ("schema", "lowbit-report/2")],
)
def test_the_schema_refuses_another_document(key: str, value: object) -> None:
    """The schema says something: a wrong value of each kind is refused."""
    document = json.loads(text_of(sample())) | {key: value}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, schema())


def gathered() -> Report:
    """A report with what is found out about this machine."""
    from datetime import UTC, datetime

    settings = {"seeds": 5, "first_seed": 0, "ops": [], "case": None, "model": None}
    return report_of(
        Tally("numpy", {"numpy": "2"}, {}, 1, VERDICTS_OF_A_RUN[:1]), ["numpy"], settings, datetime.now(UTC)
    )


def test_theorems_are_counted_and_listed_and_change_no_id() -> None:
    """They are known from elsewhere, and are no verdict of the run."""
    proofs = [
        Known("memory/a", "inside", "7 steps"),
        Known("products/a", "right", "7 steps"),
        Known("products/b", "", ""),
    ]
    report = replace(sample(), theorems=tuple(proofs))
    assert report.proved == "memory 1 of 1, products 1 of 2" and report.id == sample().id and not sample().proved
    jsonschema.validate(json.loads(text_of(report)), schema())
    text = StringIO()
    show(report, Console(file=text, width=80))
    assert f"theorems by certificates: {report.proved}" in text.getvalue() and report.proved in as_html(report)


def test_json_has_a_line_for_each_case(tmp_path: Path) -> None:
    """The file is what `as_json` says, and lists cases line by line, so that two reports can be compared by lines."""
    write_json(sample(), tmp_path / "r.json")
    text = (tmp_path / "r.json").read_text()
    assert json.loads(text) == as_json(sample())
    for verdict in VERDICTS_OF_A_RUN:
        assert sum(f'{{"id": "{verdict.id}"' in line for line in text.splitlines()) == 1


# JUnit XML.


def test_junit_is_read_back(tmp_path: Path) -> None:
    """A suite an operation, a class a clause, a test a case; what is not declared is skipped; no control character."""
    write_junit(sample(), tmp_path / "r.xml")
    root = ElementTree.parse(tmp_path / "r.xml").getroot()
    assert root.tag == "testsuites"
    assert (root.get("tests"), root.get("failures"), root.get("errors")) == ("10", "4", "0")
    linear = next(suite for suite in root if suite.get("name") == "linear.qgemv")
    assert (linear.get("tests"), linear.get("failures"), linear.get("skipped")) == ("8", "3", "2")
    counts = {each.get("name"): each.get("value") for each in linear.iter("property")}
    assert (counts["passed"], counts["declared"], counts["specified"]) == ("3", "6", "8")
    assert len(list(linear.iter("testcase"))) == 8
    failed = next(case for case in linear.iter("testcase") if case.get("name") == VERDICTS_OF_A_RUN[5].id)
    assert failed.get("classname") == "linear.qgemv/C1"
    (failure,) = failed
    assert (failure.get("type"), failure.tag) == ("WRONG", "failure")
    assert failure.text and "nibble order swapped" in failure.text and "--case linear.qgemv/C1" in failure.text
    assert [each.get("message") for each in linear.iter("skipped")] == [
        "not declared: bits 2",
        "not declared: group_size 9",
    ]
    assert re.search("[\x00-\x08\x0b-\x1f]", ElementTree.tostring(as_xml(sample()), "unicode")) is None


# HTML.


class Page(HTMLParser):
    """What a page refers to and what it contains."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.references: list[str] = []
        self.open: list[str] = []
        self.headers_without_scope = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        given = dict(attributes)
        self.references += [str(given[name]) for name in ("src", "href", "action", "srcset", "data") if name in given]
        self.headers_without_scope += tag == "th" and "scope" not in given
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_needs_nothing_and_obeys_nobody(tmp_path: Path) -> None:
    """No script, image or reference but to the page itself; a backend's text stands there as text; tags are balanced,
    table headers say what they head."""
    write_html(sample(), tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    page = Page(text)
    assert not {"script", "img", "iframe", "object", "embed", "form"} & set(page.tags)
    assert set(page.references) <= {"data:,", "#failures"}
    assert "&lt;script&gt;alert(" in text and "{{ 7 * 7 }}" in text
    assert "<b>mine</b>" not in text and "@import" not in text and "url(" not in text
    assert page.open == [] and page.headers_without_scope == 0


def test_the_page_says_all() -> None:
    """Every failure with its verdict, diagnosis and line; the counts; the id; the machine; what is not declared."""
    text, report = as_html(sample()), sample()
    for failure in report.tally.failures:
        assert f"<code>{failure.id}</code>" in text
        assert report.reproduce(failure) in text
    for said in ("nibble order swapped", report.id, "4 passed / 8 declared / 10 specified", "A CPU", "group_size 9"):
        assert said in text
    assert 'width="50.0"' in text  # the bar of linear.qgemv
    assert "Σ s|x|(q + |z|)" in text  # the bound of the form that is declared


def test_every_report_says_that_the_seal_is_advisory(tmp_path: Path) -> None:
    """A backend that opens the seal passes, so a report does not let it stand for more than it is."""
    report = sample()
    write_junit(report, tmp_path / "r.xml")
    texts = (text_of(report), as_html(report), terminal(report), (tmp_path / "r.xml").read_text("utf-8"))
    assert ["advisory; it shows a backend" in " ".join(text.split()) for text in texts] == [True] * 4


def test_a_page_without_failures_has_none() -> None:
    """A passed run says so and has no list of failures."""
    text = as_html(sample(VERDICTS_OF_A_RUN[:3]))
    assert "✓ passed" in text and 'id="failures"' not in text


# The terminal.


def test_the_terminal_keeps_to_80_columns() -> None:
    """Every line but those to be copied, which stay whole; and no control character reaches it."""
    text = terminal(sample())
    lines = [line for line in text.splitlines() if not line.startswith("  lowbit conformance ")]
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in text and "\x00" not in text


def test_operations_with_many_widths_are_listed() -> None:
    """As those on formats of tensors: a line for each width, with all kinds of groups in it, and no number is cut."""
    verdicts = [
        replace(VERDICTS_OF_A_RUN[0], id=f"linear.gemm/C1/lattice/b{bits}-s{group}", parameters=parameters)
        for bits in (1, 2, 3, 4, 5, 6, 8)
        for group in (32, 128)
        for parameters in [{"bits": bits, "group_size": group, "rows": 256}]
    ]
    lines = terminal(sample(verdicts)).splitlines()
    assert max(map(len, lines)) <= 80
    shown = [line.split() for line in lines if " bit" in line]
    assert shown[0][:5] == ["linear.gemm", "1", "bit", "✓", "2"]
    assert [each[-4:] for each in shown[1:]] == [[str(bits), "bits", "✓", "2"] for bits in (2, 3, 4, 5, 6, 8)]


def test_the_terminal_says_what_failed() -> None:
    """Marks that need no colour, a failure of each kind with verdict, diagnosis and line, the counts and the id."""
    text, report = terminal(sample()), sample()
    for said in ("✗ 1/1", "✓ 2", "✗ WRONG linear.qgemv/C1", "✗ CRASHED(SIGSEGV) linear.qgemv/H5", "where: column 3"):
        assert said in text
    assert "diagnosis: equals the specification with the nibble order swapped" in text
    assert report.reproduce(VERDICTS_OF_A_RUN[5]) in text
    assert "passed 4 / declared 8 / specified 10" in text
    assert f"report {report.id}" in text and "2 of 12 cases have no verdict" in text
    assert text.splitlines()[-1] == "<b>mine</b>: failed"


def test_a_breach_stands_under_its_habit() -> None:
    """Whatever the case was about, a call of the reference breaks H7; all such cases of an operation are one group."""
    message = "SILENT_FALLBACK: it called lowbit.quantization.packing.pack"
    cases = [Verdict(f"packing.pack/C{n}/lattice/b4-s0", "failed", message) for n in (1, 2)]
    text = terminal(sample(cases))
    assert "✗ SILENT_FALLBACK packing.pack/H7" in text and "and 1 more like it" in text
    assert "It computes the result itself" in text
    loading = Verdict("backend/H6/habit/loading-s0", "failed", "SILENT_FALLBACK: it imported lowbit_numpy")
    assert loading.broken == "backend/H7"
    assert replace(loading, verdict="DECLARATION_REFUSED").broken == "backend"


def test_what_is_not_declared_is_one_line() -> None:
    """Operations of which nothing is declared have no line of their own, and certificates one for each operation."""
    undeclared = [Verdict(f"{name}/C1/lattice/x-s0", "not declared", name) for name in ("gptq.factor", "hqq.step")]
    missing = tuple(f"packing.pack/C{n}: 2 of 9 cases are not declared (bits 3)" for n in (1, 2, 3))
    report = sample([*VERDICTS_OF_A_RUN, *undeclared])
    report.tally.certificates = [Certificate("lowbit-1.1/packing", False, missing, 27)]
    text = terminal(report)
    (line,) = [line for line in " ".join(text.split()).split("✗") if "not declared, and so not tested" in line]
    assert text.count("gptq.factor") == text.count("hqq.step") == 1
    assert "gptq.factor, hqq.step" in line
    assert text.count("not declared (bits 3)") == 1
    assert "packing.pack: 6 cases are not declared (bits 3)" in text


# Files.


def test_a_file_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that fails leaves the old file and nothing beside it."""
    path = tmp_path / "r.json"
    write_whole(path, b"old")
    monkeypatch.setattr("os.replace", lambda source, target: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_path_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    """A folder that is not there, and a folder in place of a file."""
    for path in (tmp_path / "absent" / "r.json", tmp_path):
        with pytest.raises(ArgumentError, match=r"--html is .*; allowed: a plain file in a folder"):
            check_writable("--html", path)


def test_a_page_that_cannot_be_made_is_refused_before_the_run(tmp_path: Path) -> None:
    """Without jinja2, the command says so at once: no backend is loaded, and none of the name exists."""
    (tmp_path / "sitecustomize.py").write_text(ABSENCE.format(absent=("jinja2",)))
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    page = tmp_path / "report.html"
    done = subprocess.run(
        [sys.executable, "-m", "lowbit", "conformance", "no-backend", "--html", str(page)],
        env=os.environ | {"PYTHONPATH": path, "COLUMNS": "200"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "the HTML report is unavailable: jinja2 is not installed" in done.stderr
    assert not page.exists()
