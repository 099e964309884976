"""The directive ``.. benchmarks::``: what the last comparison with other projects came to, as docs/data holds it.

The page opens with a chart (docs/figures/peers.py). What this shows is folded: one line for each problem, and its
table below the line.
"""

import json
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from lowbit_docs.tables import Cell, folded, table

HEADS = ["contestant", "ms", "share", "GB/s", "error", "class", "of float32"]
WIDTHS = [34, 12, 10, 10, 12, 12, 10]


class Benchmarks(SphinxDirective):
    """``.. benchmarks:: peers`` or ``decode``: machine and versions, pictures, and a table for each problem."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        kind = self.arguments[0]
        relative, file = self.env.relfn2path(f"data/{kind}.json")
        self.env.note_dependency(relative)
        if not Path(file).is_file():
            return [nodes.paragraph(text=f"No measurement is kept: run nox -s bench -- --{kind} --keep.")]
        report = json.loads(Path(file).read_text("utf-8"))
        shown = [about(report), *folded("Versions and builds of the projects", projects(report))]
        return shown + (self.decode(report) if kind == "decode" else self.peers(report))

    def peers(self, report: dict[str, Any]) -> list[nodes.Node]:
        """The problems, those on most threads first, then the goals of lowbit itself."""
        found: list[nodes.Node] = []
        for problem in sorted(report["problems"], key=lambda problem: -problem["threads"]):
            found += contest(problem)
        met = sum(goal["met"] for goal in report["goals"])
        return found + folded(f"Goals of lowbit: {met} of {len(report['goals'])} met", goals(report["goals"]))

    def decode(self, report: dict[str, Any]) -> list[nodes.Node]:
        """The picture and one table."""
        heads = ["threads", "generator", "tokens/s", "interval", "first token", "read limit"]
        rows: list[list[Cell]] = []
        for run in report["runs"]:
            for generator in run["generators"]:
                speed, low, high = generator["tokens_per_second"]
                least = generator["read_gbps"] * 1e9 / run["model_bytes"]
                first = f"{1e3 * generator['first_seconds'][0]:.0f} ms"
                spread = f"{low:.1f} to {high:.1f}"
                rows.append([str(run["threads"]), generator["name"], f"{speed:.1f}", spread, first, f"{least:.0f}"])
        caption = "Tokens a second of the whole model, as in Figure 4 of the paper."
        return [self.picture("decode.svg", caption), table(heads, rows, [10, 24, 16, 20, 16, 14])]

    def picture(self, name: str, caption: str) -> nodes.Node:
        """A picture of docs/data under its caption."""
        figure = nodes.figure("", nodes.image(uri=f"data/{name}", alt=caption, classes=["turns"]))
        figure += nodes.caption("", caption)
        return figure


def about(report: dict[str, Any]) -> nodes.Node:
    """When and on what."""
    machine = report["machine"]
    caches = ", ".join(f"{name} {size}" for name, size in machine["caches"].items())
    return nodes.paragraph(
        text=f"{report['started'][:10]}, {machine['cpu']} ({', '.join(machine['flags'])}), {machine['cores']} cores, "
        f"{caches}, {machine['memory_gib']} GiB; {machine['system']}, {machine['python']}, {machine['compiler']}; "
        f"huge pages {machine['huge_pages'] or 'unknown'}."
    )


def projects(report: dict[str, Any]) -> nodes.Node:
    """Versions and builds; who is absent stands here too, with the reason."""
    rows: list[list[Cell]] = []
    for project in report["projects"]:
        versions = ", ".join(f"{name} {version}" for name, version in project["versions"].items())
        said = "; ".join(f"{name}: {value}" for name, value in project.get("details", {}).items())
        rows.append([project["name"], versions, f"absent: {project['absent']}" if "absent" in project else said])
    return table(["project", "versions", "build"], rows, [16, 28, 56])


def goals(judged: list[dict[str, Any]]) -> nodes.Node:
    """Every goal at its place."""
    rows: list[list[Cell]] = [
        [
            goal["goal"],
            goal["where"],
            goal["by"],
            f"{goal['value']:.2f}",
            goal["wanted"],
            "met" if goal["met"] else "missed",
        ]
        for goal in judged
    ]
    return table(["goal", "where", "by", "value", "wanted", ""], rows, [32, 26, 20, 8, 8, 8])


def contest(problem: dict[str, Any]) -> list[nodes.Node]:
    """The table of one problem, the fastest first, and who is absent from it."""
    threads = f"{problem['threads']} thread{'s' if problem['threads'] > 1 else ''}"
    head = f"{problem['contest']}, batch {problem['batch']}, {threads}"
    quiet = (
        f"{problem['free_rounds']} of {problem['rounds']} rounds with free cores; spin {problem['spin_before']:.2f} "
        f"before and {problem['spin_after']:.2f} after."
    )
    rows: list[list[Cell]] = []
    for row in sorted(problem["contestants"], key=lambda row: row["ms"][0]):
        numbers = [f"{row['ms'][0]:.4g}", f"{row['share'][0]:.2f}", f"{row['gbps']:.1f}", f"{row['error']['rms']:.1e}"]
        name: Cell = [nodes.literal("", row["id"])]
        rows.append([name, *numbers, row["accuracy"], f"{row['original']['rms']:.2g}"])
    found: list[nodes.Node] = [nodes.paragraph(text=quiet), table(HEADS, rows, WIDTHS)]
    if problem["absent"]:
        said = "; ".join(f"{each['id']}: {each['reason']}" for each in problem["absent"])
        found.append(nodes.paragraph(text=f"Absent: {said}."))
    return folded(head, *found)
