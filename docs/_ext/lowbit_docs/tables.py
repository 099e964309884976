"""Tables that are written from the code: rulings of the errata, data that can be fetched, habits and verdicts."""

import importlib
import pkgutil
from collections.abc import Iterable
from html import escape

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from lowbit import errata
from lowbit.contract.operation import HABITS
from lowbit.formats import fetch as data
from lowbit_conformance.report.words import VERDICTS
from lowbit_docs.chapter import source_file

Cell = str | Iterable[nodes.Node]

WORKS = {
    "Q": "QIGen",
    "M": "MoE offloading",
    "B": "Block Floating Point and K-sort",
    "G": "GQA",
    "H": "HQQ",
    "P": "GPTQ",
}
LEGEND = ", ".join(f"{letter} for {work}" for letter, work in WORKS.items())


class Errata(SphinxDirective):
    """``.. errata::``: every ruling, what is printed and what is ruled, with a link to its check."""

    def run(self) -> list[nodes.Node]:
        rows: list[list[Cell]] = []
        for module in pkgutil.iter_modules(errata.__path__):
            name = f"{errata.__name__}.{module.name}"
            importlib.import_module(name)
            if file := source_file(name):
                self.env.note_dependency(file)
        for ruling in sorted(errata.RULINGS.values(), key=lambda ruling: order(ruling.id)):
            link, _ = self.parse_inline(f":py:func:`{ruling.id} <{ruling.check.__module__}.{ruling.check.__name__}>`")
            rows.append([link, ruling.printed, ruling.ruled])
        legend = nodes.paragraph(text=f"Letters of the rulings: {LEGEND}.")
        return [legend, table(["ruling", "as printed in the copy at hand", "ruled"], rows, [10, 45, 45])]


class Data(SphinxDirective):
    """``.. data-table::``: every file that can be fetched, its package and its sums."""

    def run(self) -> list[nodes.Node]:
        if file := source_file("lowbit.formats.fetch"):
            self.env.note_dependency(file)
        rows: list[list[Cell]] = []
        for name, resource in data.TABLE.items():
            packages = ", ".join(part.package for part in resource.parts)
            size = f"{resource.nbytes / 1e6:.1f} MB"
            rows.append([name, f"{resource.file}, {size}. {resource.about}.", packages, resource.sha256])
        return [table(["name", "file", "packages", "sha256 of the file"], rows, [14, 36, 25, 25])]


class Habits(SphinxDirective):
    """``.. habits::``: what every operation keeps beside its clauses."""

    def run(self) -> list[nodes.Node]:
        if file := source_file("lowbit.contract.operation"):
            self.env.note_dependency(file)
        rows: list[list[Cell]] = [[[nodes.literal(text=habit)], sentence] for habit, sentence in HABITS.items()]
        return [table(["habit", "what it says"], rows, [10, 90])]


class Verdicts(SphinxDirective):
    """``.. verdicts::``: the words with which failures begin, and what they mean."""

    def run(self) -> list[nodes.Node]:
        if file := source_file("lowbit_conformance.report.words"):
            self.env.note_dependency(file)
        rows: list[list[Cell]] = [[[nodes.literal(text=verdict)], seen] for verdict, seen in VERDICTS.items()]
        return [table(["verdict", "what was seen"], rows, [25, 75])]


def folded(summary: str, *content: nodes.Node) -> list[nodes.Node]:
    """What a reader opens to see: the summary stands on the page, the content below it when it was clicked."""
    opening = f'<details class="fold"><summary>{escape(summary)}</summary>'
    return [nodes.raw("", opening, format="html"), *content, nodes.raw("", "</details>", format="html")]


def order(ruling: str) -> tuple[str, int, str]:
    """Q9 before Q10.

    >>> sorted(["Q10", "Q9", "H", "B1"], key=order)
    ['B1', 'H', 'Q9', 'Q10']
    """
    letters = ruling.rstrip("0123456789")
    number = ruling[len(letters) :]
    return letters, int(number or 0), ruling


def table(heads: list[str], rows: list[list[Cell]], widths: list[int]) -> nodes.table:
    """A table of docutils; it scrolls inside its own box where the page is narrow."""
    group = nodes.tgroup(cols=len(heads))
    group += [nodes.colspec(colwidth=width) for width in widths]
    group += nodes.thead("", _row(heads))
    group += nodes.tbody("", *(_row(row) for row in rows))
    return nodes.table("", group, classes=["wide"])


def _row(cells: Iterable[Cell]) -> nodes.row:
    row = nodes.row()
    for cell in cells:
        content = [nodes.Text(cell)] if isinstance(cell, str) else list(cell)
        row += nodes.entry("", nodes.paragraph("", "", *content))
    return row
