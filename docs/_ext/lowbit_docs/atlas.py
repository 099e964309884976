"""The directive ``.. atlas::``: kernels of other projects, from what ``bench/run_atlas.py`` keeps in docs/data/atlas.

First a table of all projects, then a section for each version of each: its kernels, its failures, and what was found
out about them, which ``docs/data/atlas-findings.json`` says.
"""

import json
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from lowbit_docs.tables import Cell, folded, table

COLUMNS = ("decode", "encode", "× float32", "× float16", "× bfloat16", "× integers")
WHOSE = {"defect": "A defect", "choice": "A choice", "limit": "A limit"}


class Atlas(SphinxDirective):
    """``.. atlas::``: the table, then the sections."""

    def run(self) -> list[nodes.Node]:
        _, folder = self.env.relfn2path("data/atlas")
        files = sorted(Path(folder).glob("*.json"))
        said = self.env.relfn2path("data/atlas-findings.json")[1]
        for file in (*files, Path(said)):
            self.env.note_dependency(str(file))
        reports = sorted((json.loads(file.read_text("utf-8")) for file in files), key=place)
        causes: list[dict[str, Any]] = json.loads(Path(said).read_text("utf-8"))
        scripts = Path(self.env.relfn2path("examples/adapters")[1])
        shown: list[nodes.Node] = [table(["project", "format", *COLUMNS], matrix(reports, causes), [18, 22, *[10] * 6])]
        return shown + [
            section(report, [each for each in causes if concerns(each, report)], scripts) for report in reports
        ]


def place(report: dict[str, Any]) -> tuple[str, list[int]]:
    """Projects by name, the newest version of each first."""
    return report["project"].lower(), [-int(each) for each in version_of(report).split(".") if each.isdigit()]


def version_of(report: dict[str, Any]) -> str:
    return str(next(iter(report["versions"].values()))).partition("+")[0]


def anchor(report: dict[str, Any]) -> str:
    return nodes.make_id(f"atlas-{report['module']}-{version_of(report)}")


def concerns(cause: dict[str, Any], report: dict[str, Any]) -> bool:
    """Whether a cause is said of this version of this project."""
    return bool(cause["module"] == report["module"] and version_of(report) in cause["versions"])


def explains(cause: dict[str, Any], row: dict[str, Any]) -> bool:
    """Whether a cause is said of a row: its function, and its operation and one of its types, or all of them."""
    return any(
        row["function"] == name and where in (row["operation"], "*") and kind in (*row["types"], "*")
        for name, where, kind in cause["rows"]
    )


# **The table.**


def matrix(reports: list[dict[str, Any]], causes: list[dict[str, Any]]) -> list[list[Cell]]:
    """A row for each project and format; a mark for each kernel, with the clauses that fail."""
    shown: list[list[Cell]] = []
    for report in reports:
        project = nodes.reference("", f"{report['project']} {version_of(report)}", refid=anchor(report), internal=True)
        said = [each for each in causes if concerns(each, report)]
        for format, alike in by_format(report["rows"]).items():
            own = [row | {"findings": [each for each in row["findings"] if meets(each, format)]} for row in alike]
            at = {column: [row for row in own if column in columns_of(row)] for column in COLUMNS}
            cells = [marks(rows, said, anchor(report)) for rows in at.values()]
            shown.append([[project.deepcopy()], [nodes.literal("", format)], *cells])
    return shown


def by_format(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The rows of each format, in the order in which the formats are met."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        for format in row["formats"]:
            found.setdefault(format, []).append(row)
    return found


def meets(found: dict[str, Any], format: str) -> bool:
    """Whether a failure was seen with a format: those of a row of one format do not name it."""
    return format in found["parameters"].get("format", [format])


def columns_of(row: dict[str, Any]) -> tuple[str, ...]:
    """The columns of the table in which a row has a mark.

    >>> columns_of({"operation": "linear.gemv", "types": ["float16", "bfloat16"]})
    ('× float16', '× bfloat16')
    >>> columns_of({"operation": "formats.quantize", "types": ["float32"]})
    ('encode',)
    """
    kind = row["operation"].rpartition(".")[2]
    if kind in ("dequantize", "quantize"):
        return ("decode" if kind == "dequantize" else "encode",)
    if kind == "gemm_cast":
        return (COLUMNS[-1],)
    return tuple(f"× {each}" for each in row["types"])


def marks(rows: list[dict[str, Any]], causes: list[dict[str, Any]], place: str) -> list[nodes.Node]:
    """A mark for each kernel: its clauses that fail, or that none does; see `mark_of`."""
    kernels: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        kernels.setdefault(row["kernel"], []).append(row)
    shown: list[nodes.Node] = []
    for alike in kernels.values():
        failed = sorted({each["clause"] for row in alike for each in row["findings"]})
        mark, kind = mark_of(alike, causes)
        shown += [nodes.Text(" ")] if shown else []
        if failed:
            text = f"{mark} {', '.join(failed)}"
            shown.append(nodes.reference("", text, refid=place, internal=True, classes=[kind]))
        else:
            shown.append(nodes.inline("", mark, classes=[kind]))
    return shown


def mark_of(rows: list[dict[str, Any]], causes: list[dict[str, Any]]) -> tuple[str, str]:
    """The mark of a kernel's rows and its class: a failure that nothing explains is not called a choice.

    >>> row = {"function": "f", "operation": "linear.gemv", "types": ["float32"], "findings": [{"clause": "C1"}]}
    >>> cause = {"rows": [["f", "*", "float32"]], "whose": "choice"}
    >>> mark_of([row], []), mark_of([row], [cause]), mark_of([row | {"findings": []}], [])
    (('?', 'atlas-grey'), ('○', 'atlas-amber'), ('✓', 'atlas-green'))
    """
    failing = [row for row in rows if row["findings"]]
    whose = [[cause["whose"] for cause in causes if explains(cause, row)] for row in failing]
    if any("defect" in each for each in whose):
        return "✗", "atlas-red"
    if not all(whose):
        return "?", "atlas-grey"
    return ("○", "atlas-amber") if failing else ("✓", "atlas-green")


# **A section.**


def section(report: dict[str, Any], causes: list[dict[str, Any]], scripts: Path) -> nodes.section:
    """What ran, its kernels, its causes, and its failures below a line that opens them."""
    made = nodes.section(ids=[anchor(report)], names=[anchor(report)])
    made += nodes.title("", f"{report['project']} {version_of(report)}")
    machine = report["machine"]
    versions = ", ".join(f"{name} {value}" for name, value in report["versions"].items())
    where = f"{machine['cpu']}, {machine['python']}, numpy {machine['numpy']}"
    made += nodes.paragraph("", f"{versions}. Suite {report['suite']}, {report['started'][:10]}, {where}.")
    heads = ["kernel", "operation", "format, types", "declared", "passed", "bound used"]
    made += table(heads, [kernel_row(row) for row in report["rows"]], [22, 16, 24, 22, 8, 8])
    for cause in causes:
        made += cause_of(cause, scripts)
    for row in report["rows"]:
        for each in row["findings"]:
            made += finding(each, row, report)
    return made


def kernel_row(row: dict[str, Any]) -> list[Cell]:
    """One kernel with one operation."""
    limits = "; ".join(f"{name} {value}" for name, value in row["limits"].items())
    declared = "; ".join(each for each in (row["arithmetic"], limits) if each)
    what = ", ".join([*row["formats"], *row["types"]])
    counts = f"{row['passed']} of {row['declared']}"
    return [row["kernel"], [nodes.literal("", row["operation"])], what, declared, counts, row["bound_used"]]


def cause_of(cause: dict[str, Any], scripts: Path) -> list[nodes.Node]:
    """What was found out about failures: whose they are, whether the project knows, and a script without lowbit."""
    text = nodes.paragraph("", "", nodes.strong("", f"{WHOSE[cause['whose']]}: {cause['title']}"))
    text += nodes.Text(f" {cause['what']}")
    for each in cause["known"]:
        shown = "/".join(each.split("/")[3:5]) + " " + each.rpartition("/")[2]
        text += [nodes.Text(" See "), nodes.reference("", shown, refuri=each, internal=False), nodes.Text(".")]
    if not cause["known"]:
        text += nodes.Text(" No thread of the project on it was found.")
    if not cause["script"]:
        return [text]
    code = (scripts / cause["script"]).read_text("utf-8")
    return [text, *folded(cause["script"], nodes.literal_block(code, code, language="python", force=True))]


def finding(found: dict[str, Any], row: dict[str, Any], report: dict[str, Any]) -> list[nodes.Node]:
    """One kind of failure: the verdict, what was seen, what explains it, and the line that shows it again."""
    choices = "; ".join(f"{name} {', '.join(map(str, values))}" for name, values in found["parameters"].items())
    cases = f"{found['cases']} case{'s' if found['cases'] > 1 else ''}"
    what = f"{found['verdict']}: {row['function']}, {row['operation']}/{found['clause']}, {cases}"
    shown: list[nodes.Node] = [nodes.paragraph("", f"{choices}.")] if choices else []
    shown.append(block(found["message"]))
    if found["diagnosis"]:
        shown.append(nodes.paragraph("", f"Diagnosis: {found['diagnosis']}"))
    again = f"python bench/run_atlas.py {report['module']} --function {row['function']} --case {found['case']}"
    return folded(what, *shown, block(again))


def block(text: str) -> nodes.literal_block:
    """Lines as a terminal shows them."""
    return nodes.literal_block(text, text, language="text", force=True, classes=["wrapped"])
