"""The directive ``.. traceability::``: for each clause its page, its tests and its defects, from the code itself."""

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from types import ModuleType

import kills
from docutils import nodes
from kills import traceability
from kills.bank import ALL
from kills.traceability import Row
from sphinx.util.docutils import SphinxDirective
from sphinx.util.nodes import make_id

from lowbit.operations import OPERATIONS
from lowbit_conformance import defects
from lowbit_conformance.suite import clauses as suite_clauses
from lowbit_docs.chapter import source_file
from lowbit_docs.tables import Cell, folded, table

HEADS, WIDTHS = ["clause", "checked by", "broken by"], [34, 33, 33]
WATCHED = "every call of every case is watched for it"


class Traceability(SphinxDirective):
    """``.. traceability::``: what there is of each, then a table to open for each operation and for the habits."""

    def run(self) -> list[nodes.Node]:
        rows = traceability.rows()
        self._note_dependencies(rows)
        sections = [self._section(title, list(some)) for title, some in groupby(rows, lambda row: row.operation)]
        return [self._summary(rows), *sections]

    def _note_dependencies(self, rows: list[Row]) -> None:
        modules = {row.page for row in rows} | {
            f"{suite_clauses.__name__}.{test.partition('.')[0]}" for row in rows for test in row.tests
        }
        files = [*map(python_files, (defects, kills)), filter(None, map(source_file, sorted(modules)))]
        for file in (file for some in files for file in some):
            self.env.note_dependency(str(file))

    def _summary(self, rows: list[Row]) -> nodes.paragraph:
        clauses, habits = sum(not row.habit for row in rows), sum(row.habit for row in rows)
        tests, alone = len(traceability.suite_tests()), len(list(traceability.orphans()))
        orphans = "no orphan" if not alone else f"{alone} orphans"
        return nodes.paragraph(
            text=f"{clauses} clauses of {len(OPERATIONS)} operations and {habits} habits, "
            f"{tests} tests, {len(ALL)} defects; {orphans}."
        )

    def _section(self, operation: str, rows: list[Row]) -> nodes.section:
        title = nodes.literal(text=operation) if operation else nodes.Text("Habits, of every operation")
        section = nodes.section(ids=[make_id(self.env, self.state.document, "trace", operation or "habits")])
        section += nodes.title("", "", title)
        page, _ = self.parse_inline(f"Chapter :py:mod:`{rows[0].page}`.")
        section += nodes.paragraph("", "", *page)
        kind = ("habit" if rows[0].habit else "clause") + "s" * (len(rows) > 1)
        counts = f"{len(rows)} {kind}, with tests and defects"
        section += folded(counts, table(HEADS, [self._cells(row) for row in rows], WIDTHS))
        self.state.document.note_implicit_target(section)
        return section

    def _cells(self, row: Row) -> list[Cell]:
        clause: list[nodes.Node] = [nodes.literal(text=row.clause.rpartition("/")[2]), nodes.Text(f" {row.sentence}")]
        tests = _names(row.tests)
        if row.habit:
            tests = [*tests, nodes.Text(f"{', ' if tests else ''}{WATCHED}")]
        return [clause, tests, _names(row.defects)]


def python_files(package: ModuleType) -> Iterator[Path]:
    """The modules of a package."""
    for folder in package.__path__:
        yield from Path(folder).glob("*.py")


def _names(names: tuple[str, ...]) -> list[nodes.Node]:
    """Names as code, with commas between."""
    found: list[nodes.Node] = []
    for name in names:
        found += [nodes.Text(", ")] if found else []
        found.append(nodes.literal(text=name))
    return found
