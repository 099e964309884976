"""The directive ``.. kill-matrix::``: which clauses of the suite found which defect, from the run that was kept."""

import json
from pathlib import Path
from typing import Any

from docutils import nodes
from kills.bank import ALL
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective

from lowbit_docs.tables import Cell, folded, table

FILE = "data/kill-matrix.json"
HEADS, WIDTHS = ["defect", "operations", "found by", "verdict", "first kill"], [40, 18, 20, 14, 8]


class KillMatrix(SphinxDirective):
    """``.. kill-matrix::``: a line on the run, then a table for each family of operations, one row a defect."""

    def run(self) -> list[nodes.Node]:
        relative, file = self.env.relfn2path(FILE)
        self.env.note_dependency(relative)
        try:
            matrix = json.loads(Path(file).read_text("utf-8"))
        except OSError as error:
            raise ExtensionError(f"no {relative}: run nox -s soak") from error
        shown: list[nodes.Node] = [summary(matrix)]
        for family, defects in families(matrix["defects"]).items():
            found = sum(bool(defect["killed"]) for defect in defects)
            rows = [[*map(cell, columns_of(defect))] for defect in defects]
            shown += folded(f"{family}: {found} of {len(defects)} found", table(HEADS, rows, WIDTHS))
        return shown


def families(defects: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The defects by the family of the first operation that they break: ``linear`` of ``linear.qgemv``."""
    found: dict[str, list[dict[str, Any]]] = {}
    for defect in defects:
        found.setdefault(defect["operations"][0].partition(".")[0], []).append(defect)
    return found


def summary(matrix: dict[str, Any]) -> nodes.Node:
    """How many were found, when, by which suite and on what."""
    defects, control = matrix["defects"], matrix["control"]
    found = sum(bool(defect["killed"]) for defect in defects)
    cases = sum(sum(clause["executed"] for clause in entry["clauses"].values()) for entry in control.values())
    alarms = sum(bool(entry["killed"]) for entry in control.values())
    untried = len(ALL.keys() - {defect["name"] for defect in defects})
    rest = f", {untried} others not tried in this run" if untried else ""
    text = (
        f"{found} of {len(defects)} defects found{rest}; {cases} cases of {len(control)} operations over the control, "
        f"{alarms or 'no'} false alarm{'s' if alarms > 1 else ''}. {matrix['date']}, {matrix['seeds']} seeds, "
        f"lowbit {matrix['version']}, suite {matrix['suite'][:12]}, {matrix['machine']['cpu']}."
    )
    return nodes.paragraph(text=text)


def columns_of(defect: dict[str, Any]) -> list[list[nodes.Node]]:
    """The cells of one defect."""
    name: list[nodes.Node] = [nodes.literal(text=defect["name"]), nodes.Text(f" {defect['cause']} ")]
    if defect["seen"].startswith("https://"):
        shown = "/".join(defect["seen"].split("/")[3:5]) + " " + defect["seen"].rpartition("/")[2]
        name += [nodes.reference("", f"Seen in {shown}.", refuri=defect["seen"], internal=False)]
    elif defect["seen"] != "common":
        name += [nodes.Text(f"Seen in {defect['seen']}.")]
    killed = [clause for clause, found in defect["clauses"].items() if found["killed"]]
    seconds = f"{defect['first_kill']:.1f} s" if defect["killed"] else "survived"
    return [
        name,
        names(defect["operations"]),
        names(killed),
        [nodes.literal(text=defect["verdict"])],
        [nodes.Text(seconds)],
    ]


def names(words: list[str], most: int = 8) -> list[nodes.Node]:
    """Literals with commas between; of many the first, and how many more."""
    shown: list[nodes.Node] = []
    for word in words[:most]:
        shown += [nodes.Text(", ")] if shown else []
        shown.append(nodes.literal(text=word))
    return [*shown, nodes.Text(f" and {len(words) - most} more")] if len(words) > most else shown


def cell(content: list[nodes.Node]) -> Cell:
    """As tables take it."""
    return content
