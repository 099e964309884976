"""What is kept of a run of the suite on one entry: counts, and the failures, those of one kind together."""

import json
import re
from typing import Any

from atlas.entry import Entry
from lowbit.backend.function import described
from lowbit_conformance.cli.conformance import run
from lowbit_conformance.report import text_of

DEADLINE = 120.0
"""Seconds of one call, and of importing the project."""
MOST_TEXT = 700
NUMBER = re.compile(r"[-+]?\d[\d.]*(e[-+]?\d+)?|\b(nan|inf)\b")
SHAPE = ("rows", "columns", "batch")


def recorded(module: str, entry: Entry, case: str | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run the suite on an entry of a module.

    Returns:
        The row that is kept, and the whole report.
    """
    name = f"{module}:{entry.function}"
    settings: dict[str, Any] = {"seeds": 5, "first_seed": 0, "ops": [entry.operation], "profiles": []}
    settings |= {"case": case, "model": None, "quick": False}
    if entry.backend:
        target: tuple[str, ...] = (entry.backend,)
        judged = ("--backend", entry.backend)
    else:
        target, judged = ("--function", name), ("--function", described(name, entry.claim))
    report: dict[str, Any] = json.loads(text_of(run(target, settings, DEADLINE, judged=judged)))
    return row_of(entry, report), report


def row_of(entry: Entry, report: dict[str, Any]) -> dict[str, Any]:
    """What the page shows of an entry."""
    kinds = findings(report["failures"], several=len(entry.formats) > 1)
    rows = [each for each in report["operations"] if each["operation"] == entry.operation]
    return {
        "kernel": entry.kernel,
        "function": entry.function,
        "operation": entry.operation,
        "formats": list(entry.formats),
        "types": types_of(entry),
        "limits": {name: shown(limit) for name, limit in entry.limits.items() if name not in NAMED},
        "arithmetic": arithmetic_of(entry),
        "verdict": report["verdict"],
        "passed": sum(each["passed"] for each in rows),
        "declared": sum(each["declared"] for each in rows),
        "bound_used": next((each["bound_used"] for each in rows), "–"),
        "findings": kinds,
    }


NAMED = ("format", "activations", "result", "inputs")


def types_of(entry: Entry) -> list[str]:
    """The types by which a cell of the page is named: those of the activations, else those of the result."""
    for name in ("activations", "inputs", "result"):
        if told := entry.told(name):
            return [str(each) for each in told]
    return []


def shown(limit: Any) -> str:
    """A limit in words.

    >>> shown((64, 128)), shown(4)
    ('64, 128', '4')
    """
    if not hasattr(limit, "multiple"):
        return ", ".join(map(str, limit)) if isinstance(limit, list | tuple) else str(limit)
    words = [f"multiples of {limit.multiple}"] if limit.multiple > 1 else []
    words += [f"at least {limit.least}"] if limit.least > 1 else []
    return ", ".join([*words, *([f"at most {limit.most}"] if limit.most is not None else [])])


def arithmetic_of(entry: Entry) -> str:
    """What is declared of the roundings; nothing for an exact operation."""
    told = entry.arithmetic if entry.backend else entry.claim.declaration.arithmetic
    if told is None:
        return ""
    promoted = f", promoted after {told.promotion}" if told.promotion else ""
    return f"{told.form}, weights {told.weights}, sums {told.accumulator}{promoted}"


def findings(failures: list[dict[str, Any]], several: bool = False) -> list[dict[str, Any]]:
    """Failures of one kind together: the one of the smallest case, how many there are, and what they have in common.

    Args:
        failures: as the report has them.
        several: whether the entry has several formats, so that those that fail are named.
    """
    kinds: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for failure in failures:
        kinds.setdefault(kind_of(failure), []).append(failure)
    hidden = SHAPE if several else (*SHAPE, "format")
    return [finding(clause, verdict, alike, hidden) for (clause, verdict, _), alike in kinds.items()]


def kind_of(failure: dict[str, Any]) -> tuple[str, str, str]:
    """Clause, verdict, and the message but for its numbers; after a crash it is only what was printed last."""
    said = "" if failure["verdict"].startswith("CRASHED") else NUMBER.sub("#", failure["message"]).partition("\n")[0]
    return clause_of(failure["id"]), failure["verdict"], said if failure["verdict"] == "RAISED" else ""


def clause_of(case: str) -> str:
    """
    >>> clause_of("linear.gemv/C1/lattice/nf4-64x3")
    'C1'
    """
    return case.partition("/")[2].partition("/")[0] or "loading"


def finding(clause: str, verdict: str, alike: list[dict[str, Any]], hidden: tuple[str, ...]) -> dict[str, Any]:
    """Failures of one kind, by the smallest matrix that shows it."""
    smallest = min(alike, key=size_of)
    names = {name for each in alike for name in each["parameters"] if name not in hidden}
    return {
        "clause": clause,
        "verdict": verdict,
        "cases": len(alike),
        "parameters": {name: distinct(alike, name) for name in sorted(names)},
        "case": smallest["id"],
        "message": smallest["message"][:MOST_TEXT],
        "diagnosis": smallest["diagnosis"],
    }


def size_of(failure: dict[str, Any]) -> int:
    """Elements of its matrix; a habit, which has none, last."""
    parameters = failure["parameters"]
    return int(parameters.get("rows", 2**31)) * int(parameters.get("columns", 1))


def distinct(failures: list[dict[str, Any]], parameter: str) -> list[Any]:
    """The values of one parameter among failures, in order."""
    return sorted({failure["parameters"][parameter] for failure in failures if parameter in failure["parameters"]})
