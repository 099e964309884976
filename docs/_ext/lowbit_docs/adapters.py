"""Reports on the kernels of other projects, as ``bench/experiments/adapters.py`` keeps them in docs/data/adapters."""

import json
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective

from lowbit_docs.tables import Cell, table


class AdapterReport(SphinxDirective):
    """``.. adapter-report:: torch-2.13.0``: its counts, and each kind of failure with the line that reproduces it."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        relative, file = self.env.relfn2path(f"data/adapters/{self.arguments[0]}.json")
        self.env.note_dependency(relative)
        try:
            report = json.loads(Path(file).read_text("utf-8"))
        except OSError as error:
            raise ExtensionError(f"no report {relative}: run bench/experiments/adapters.py") from error
        return [
            said_of(report),
            counts_of(report),
            *(node for each in report["findings"] for node in finding(each, report)),
        ]


def said_of(report: dict[str, Any]) -> nodes.Node:
    """What ran, when and where, in a line."""
    details = ", ".join(f"{name} {value}" for name, value in report["details"].items() if name != "operator")
    machine = report["machine"]
    where = f"{machine['cpu']}, {machine['python']}, numpy {machine['numpy']}"
    text = f"{details}. Suite {report['suite']}, {report['started'][:10]}, {where}; report {report['id']}."
    return nodes.paragraph("", "", nodes.literal("", report["backend"]), nodes.Text(f": {text}"))


def counts_of(report: dict[str, Any]) -> nodes.Node:
    """Passed, declared and specified of each operation."""
    rows: list[list[Cell]] = []
    for row in report["operations"]:
        counts = [str(row[key]) for key in ("passed", "declared", "specified")]
        rows.append([[nodes.literal("", row["operation"])], *counts, row["bound_used"]])
    return table(["operation", "passed", "declared", "specified", "bound used"], rows, [36, 16, 16, 16, 16])


def finding(found: dict[str, Any], report: dict[str, Any]) -> list[nodes.Node]:
    """One kind of failure: the verdict, what was seen, what explains it, and the line that shows it again."""
    choices = [
        f"{word} {', '.join(map(str, found[key]))}"
        for word, key in (("bits", "bits"), ("groups of", "group_sizes"))
        if found[key]
    ]
    cases = f"{found['cases']} case{'s' if found['cases'] > 1 else ''}"
    head = nodes.paragraph("", "", nodes.strong("", found["verdict"]), nodes.Text(" in "))
    head += [nodes.literal("", found["operation"]), nodes.Text(f", {'; '.join([cases, *choices])}. One says:")]
    shown: list[nodes.Node] = [head, block(found["message"])]
    if found["diagnosis"]:
        shown.append(nodes.paragraph("", f"Diagnosis: {found['diagnosis']}"))
    return [*shown, block(f"lowbit conformance {report['backend']} --case {found['case']}")]


def block(text: str) -> nodes.literal_block:
    """Lines as a terminal shows them."""
    return nodes.literal_block(text, text, language="text", force=True, classes=["wrapped"])
