"""The report for people at a terminal, within 80 columns; marks say what colours say, for those who see none."""

import textwrap
from collections.abc import Callable, Iterable

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lowbit.quantization.packing import BITS
from lowbit_conformance.isolation.methods import ADVISORY, ISOLATION
from lowbit_conformance.report.matrix import Cell, Line, folded, matrix
from lowbit_conformance.report.model import FailureGroup, Report
from lowbit_conformance.report.words import meaning, place
from lowbit_conformance.suite.certify import folded as folded_lines
from lowbit_conformance.suite.tally import NO_CASE, Row

WIDTH = 80
SHOWN_GROUPS = 10
LEGEND = "✓ passed  ✗ failed/declared  ◐ passed/specified, rest undeclared  – not declared"
STYLES = {"passed": "green", "failed": "bold red", "partly declared": "yellow", "not declared": "dim"}


def show(report: Report, console: Console) -> None:
    """Print the matrix, the first failure of each kind, and the verdict."""
    console.print(Text(_title(report), style="bold"), soft_wrap=True)
    rows = {row.operation: row for row in report.tally.rows()}
    lines = [line for line in folded(matrix(report.tally.verdicts)) if rows[line.operation].declared]
    for made in (_matrix_by_width, _list_of_widths, _matrix_of_others):
        if own := [line for line in lines if _table_of(line) is made]:
            console.print(made(own, rows))
    console.print(Text(LEGEND, style="dim"))
    for text in _wrapped([_undeclared(rows.values())]):
        console.print(Text(text, style="dim"), soft_wrap=True)
    groups = report.failure_groups
    for group in groups[:SHOWN_GROUPS]:
        _show_failures(report, group, console)
    if len(groups) > SHOWN_GROUPS:
        rest = sum(len(group.failures) for group in groups[SHOWN_GROUPS:])
        console.print(f"\n… and {rest} failures of {len(groups) - SHOWN_GROUPS} more kinds; --json or --html lists all")
    _show_verdict(report, console)


def _undeclared(rows: Iterable[Row]) -> str:
    """A sentence that lists the operations without any declaration; empty if there are none."""
    names = [row.operation for row in rows if not row.declared]
    return f"not declared, and so not tested: {', '.join(names)}" if names else ""


def _title(report: Report) -> str:
    build = " ".join(filter(None, (report.build.name, report.build.version)))
    return f"Conformance of {build} with lowbit {report.suite.version}"


# The matrix.


def _table(first: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(first, no_wrap=True)
    return table


def _table_of(line: Line) -> Callable[[list[Line], dict[str, Row]], Table]:
    """The table that a line belongs to, by the widths of its operation."""
    widths = set(line.cells) - {None}
    if not widths:
        return _matrix_of_others
    return _matrix_by_width if widths <= set(BITS) else _list_of_widths


def _matrix_by_width(lines: list[Line], rows: dict[str, Row]) -> Table:
    """Operations with bit widths: a line for each kind of group, a column for each width."""
    widths = sorted({bits for line in lines for bits in line.cells if bits is not None})
    columns: list[int | None] = [*widths, *([None] if any(None in line.cells for line in lines) else [])]
    table = _table("operation")
    table.add_column("groups")
    for bits in columns:
        table.add_column("no width" if bits is None else _bits(bits), justify="right", no_wrap=True)
    table.add_column("of bound", justify="right", no_wrap=True)
    previous = ""
    for line in lines:
        first = line.operation != previous
        cells = [shown(line.cells.get(bits, Cell())) for bits in columns]
        table.add_row(
            line.operation if first else "",
            _kinds(line.groups),
            *cells,
            rows[line.operation].shown_share if first else "",
        )
        previous = line.operation
    return table


def _list_of_widths(lines: list[Line], rows: dict[str, Row]) -> Table:
    """Operations with widths that formats add to the specification's own: a line for each width."""
    table = _table("operation")
    table.add_column("width", justify="right", no_wrap=True)
    table.add_column("cases", justify="right", no_wrap=True)
    table.add_column("of bound", justify="right", no_wrap=True)
    for operation in dict.fromkeys(line.operation for line in lines):
        own = [line.cells for line in lines if line.operation == operation]
        for number, bits in enumerate(own[0]):
            cell = Cell()
            for cells in own:
                cell.add(cells[bits])
            first = (operation, rows[operation].shown_share) if number == 0 else ("", "")
            table.add_row(first[0], "no width" if bits is None else _bits(bits), shown(cell), first[1])
    return table


def _bits(count: int) -> str:
    return f"{count} bit{'' if count == 1 else 's'}"


def _matrix_of_others(lines: list[Line], rows: dict[str, Row]) -> Table:
    """Operations without bit widths, one line each."""
    table = _table("operation")
    table.add_column("cases", justify="right", no_wrap=True)
    table.add_column("of bound", justify="right", no_wrap=True)
    for line in lines:
        table.add_row(line.operation, shown(line.cells[None]), rows[line.operation].shown_share)
    return table


def _kinds(groups: str) -> str:
    """The kinds of group of a line, short enough for the column."""
    return "any" if groups == "32, 64, 128, column, other" else groups or "–"


def shown(cell: Cell) -> Text:
    """A cell as a mark and numbers; empty where nothing is specified.

    >>> [str(shown(Cell(*counts))) for counts in ((12, 12, 12), (9, 12, 12), (8, 8, 12), (0, 0, 12), (0, 0, 0))]
    ['✓ 12', '✗ 3/12', '◐ 8/12', '–', '']
    """
    if not cell.specified:
        return Text("")
    said = {
        "passed": f"✓ {cell.passed}",
        "failed": f"✗ {cell.failed}/{cell.declared}",
        "partly declared": f"◐ {cell.passed}/{cell.specified}",
        "not declared": "–",
    }
    return Text(said[cell.state], style=STYLES[cell.state])


# Failures.


def _show_failures(report: Report, group: FailureGroup, console: Console) -> None:
    """Print the first failure of each kind in full, and how many more there are."""
    first, others = group.failures[0], len(group.failures) - 1
    more = f"  and {others} more like it" if others else ""
    console.print()
    heading = f"✗ [bold red]{group.verdict}[/] [bold]{group.clause}[/]{more}"
    console.print(heading, soft_wrap=True, highlight=False)
    paragraphs = [meaning(group.clause), first.message, place(first.where)]
    paragraphs += [f"diagnosis: {first.diagnosis}"] if first.diagnosis else []
    paragraphs += [group.common]
    for text in _wrapped(paragraphs):
        console.print(Text(text), soft_wrap=True)
    console.print(Text("  " + report.reproduce(first), style="cyan"), soft_wrap=True)  # one line, easy to copy


def _wrapped(paragraphs: Iterable[str]) -> Iterable[str]:
    for paragraph in filter(None, paragraphs):
        for line in paragraph.splitlines():
            yield from textwrap.wrap(line, WIDTH - 2, initial_indent="  ", subsequent_indent="    ")


def _show_verdict(report: Report, console: Console) -> None:
    """Print the three counts, what was left out, the id and the verdict."""
    total, verdict = report.tally.total(), report.tally.verdict
    console.print()
    of = " of what was asked for" if report.selection else ""
    console.print(
        f"passed {total.passed} / declared {total.declared} / specified {total.specified}{of}", highlight=False
    )
    for line in _wrapped([f"asked for: {report.selection}"] if report.selection else []):
        console.print(Text(line), soft_wrap=True)
    for line in _wrapped(f"sizes that passed: {row.shown_sizes}" for row in report.tally.rows() if row.sizes):
        console.print(Text(line), soft_wrap=True)
    messages = dict.fromkeys(each.message for each in report.tally.verdicts if each.message.startswith(NO_CASE))
    for line in _wrapped(messages):
        console.print(Text(line), soft_wrap=True)
    if undecided := report.tally.undecided:
        console.print(f"stopped early: {undecided} of {report.tally.collected} cases have no verdict")
    for line in _wrapped([f"isolation: {ISOLATION[report.tally.isolation]}", f"seal: {ADVISORY}"]):
        console.print(Text(line.strip()), soft_wrap=True)
    for certificate in report.tally.certificates:
        for line in _wrapped([f"{'✓' if certificate.certified else '✗'} {certificate}"]):
            console.print(Text(line, style=STYLES["passed" if certificate.certified else "failed"]), soft_wrap=True)
        for line in folded_lines(certificate.missing):
            console.print(Text(f"    {line}"), soft_wrap=True)
    for line in _wrapped([f"theorems by certificates: {report.proved}"] if report.proved else []):
        console.print(Text(line.strip()), soft_wrap=True)
    color = "green" if verdict == "passed" else "red"
    console.print(f"report {report.id}   {report.seconds:.1f} s", highlight=False)
    console.print(Text.assemble(f"{report.build.name}: ", (verdict, f"bold {color}")), soft_wrap=True)
