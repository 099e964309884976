"""The directive ``.. soak::``: what the last long run of the right backends came to."""

import json
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective

from lowbit_docs.tables import Cell, table

FILE = "data/soak.json"
HEADS, WIDTHS = ["backend", "seeds", "passed / declared / specified", "failed", "seconds"], [20, 20, 34, 12, 14]


class Soak(SphinxDirective):
    """``.. soak::``: one row a backend, summed over its portions, and a line on the run."""

    def run(self) -> list[nodes.Node]:
        relative, file = self.env.relfn2path(FILE)
        self.env.note_dependency(relative)
        try:
            soak = json.loads(Path(file).read_text("utf-8"))
        except OSError as error:
            raise ExtensionError(f"no {relative}: run nox -s soak") from error
        rows = [columns(name, portions) for name, portions in sorted(soak["backends"].items())]
        where = f"{soak['date']}, lowbit {soak['version']}, suite {soak['suite'][:12]}, {soak['machine']['cpu']}."
        return [nodes.paragraph(text=where), table(HEADS, rows, WIDTHS)]


def columns(name: str, portions: dict[str, Any]) -> list[Cell]:
    """What a backend's portions add up to; cases that no seed changes are run in each of them."""
    entries = list(portions.values())
    counts = (sum(entry["counts"].get(word, 0) for entry in entries) for word in ("passed", "declared", "specified"))
    seeds, failed = sum(entry["seeds"] for entry in entries), sum(len(entry["failures"]) for entry in entries)
    seconds = sum(entry["seconds"] for entry in entries)
    return [name, str(seeds), " / ".join(f"{count:,}" for count in counts), str(failed), f"{seconds:,.0f}"]
