"""The report as one HTML page that needs nothing else: no network, no script, no font.

The page is a template (``template.html``); jinja2 escapes every text that it inserts, so that what a backend says of
itself or raises is shown and never obeyed.
"""

import importlib.util
from collections import Counter
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from lowbit.errors import UnavailableError
from lowbit.system.storage import write_whole
from lowbit_conformance.isolation.methods import ADVISORY, ISOLATION
from lowbit_conformance.report import words
from lowbit_conformance.report.matrix import NONE, Line, matrix
from lowbit_conformance.report.model import Report
from lowbit_conformance.suite.tally import Row, Verdict

TEMPLATE = Path(__file__).parent / "template.html"
KINDS = {"column": "a whole column", "other": "other sizes", NONE: "none"}

BUDGETS = {
    "dequantised": "γ_D · Σ|x||w|, and the rounding of the weights to float32",
    "factored": "γ_D · Σ s|x|(q + |z|)",
    "offset": "γ_D · Σ|x|(s|q − c| + |o + s c|), where c is half the number of codes",
    "integer": "γ_D · Σ (s 2^e |D| + |o| 2^e |S|), with the exact integers D and S of each segment",
    "direct": "γ_D · Σ|t|, the sum of the magnitudes of the terms as the specification writes them",
}
"""The formula of the bound of each form, without the terms for underflow and for the reference's own rounding."""


def check_available() -> None:
    """Check, before the run, that the page can be written.

    Raises:
        UnavailableError: jinja2 is not installed.
    """
    if importlib.util.find_spec("jinja2") is None:
        raise UnavailableError("the HTML report", "jinja2 is not installed", "install lowbit[conformance]")


def write_html(report: Report, path: Path) -> None:
    """Write the report as one HTML page, to a complete file or none."""
    write_whole(path, as_html(report).encode())


def as_html(report: Report) -> str:
    """A report as an HTML page.

    Raises:
        UnavailableError: jinja2 is not installed.
    """
    check_available()
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    lines = matrix(report.tally.verdicts)
    rows = list(report.tally.rows())
    return environment.from_string(TEMPLATE.read_text("utf-8")).render(
        report=report,
        total=report.tally.total(),
        rows=rows,
        tables=_by_operation(lines),
        budgets=[Budget.of(report, row) for row in rows if row.worst_share is not None],
        groups=report.failure_groups,
        missing=_missing(report.tally.verdicts),
        words=words,
        isolation=ISOLATION[report.tally.isolation],
        seal=ADVISORY,
        kinds=KINDS,
        flat=_flat,
    )


def _by_operation(lines: list[Line]) -> list[list[Line]]:
    """The lines of each operation that has bit widths."""
    wide = [line for line in lines if set(line.cells) != {None}]
    return [list(group) for _, group in groupby(wide, key=lambda line: line.operation)]


@dataclass(frozen=True)
class Budget:
    """The largest fraction of its error bound that an operation used, and where the bound comes from.

    Attributes:
        row: the operation's counts and largest fraction.
        form: the declared form of the sums and their format; empty if unknown.
        formula: the bound of that form.
    """

    row: Row
    form: str
    formula: str

    @classmethod
    def of(cls, report: Report, row: Row) -> "Budget":
        claimed = report.build.claims.get("operations", {}).get(row.operation, {}).get("arithmetic")
        if not claimed:
            return cls(row, "", "")
        return cls(row, f"{claimed['form']}, {claimed['accumulator']}", BUDGETS.get(claimed["form"], ""))


def _missing(verdicts: list[Verdict]) -> list[tuple[str, int]]:
    """What is not declared, and how many cases that leaves out."""
    return sorted(Counter(verdict.message for verdict in verdicts if verdict.outcome == "not declared").items())


def _flat(value: Any) -> str:
    """A setting or detail on one line."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_flat(part)}" for name, part in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(_flat, value)) or "none"
    return {None: "none", True: "yes", False: "no"}.get(value) or str(value)
