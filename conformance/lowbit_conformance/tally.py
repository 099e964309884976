"""What came of a run: the verdict of each case, counted by operation.

*Passed / declared / specified* always stand together: a backend that declares little and passes all of it has not
passed all that the specification says.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Outcome = Literal["passed", "failed", "not declared"]


@dataclass(frozen=True)
class Verdict:
    """The outcome of one case.

    Attributes:
        id: the case.
        outcome: passed, failed, or not declared by the backend and so not run.
        message: for a failure what was seen, for a case not run what is not declared.
        share: the part of the error bound that was used, for a bounded operation.
    """

    id: str
    outcome: Outcome
    message: str = ""
    share: float | None = None

    @property
    def operation(self) -> str:
        return self.id.partition("/")[0]


@dataclass
class Row:
    """One operation's line of the report."""

    operation: str
    passed: int = 0
    declared: int = 0
    specified: int = 0
    worst_share: float | None = None

    @property
    def shown_share(self) -> str:
        """How much of the error bound was used, as a table says it."""
        if not self.declared:
            return "not declared"
        return "exact" if self.worst_share is None else f"{self.worst_share:.1%}"


@dataclass
class Tally:
    """All verdicts of one run against one backend."""

    backend: str
    details: dict[str, str] = field(default_factory=dict)
    verdicts: list[Verdict] = field(default_factory=list)

    def rows(self) -> Iterator[Row]:
        """The lines of the report, by operation."""
        for operation in sorted({verdict.operation for verdict in self.verdicts}):
            row = Row(operation)
            for verdict in self.verdicts:
                if verdict.operation == operation:
                    row.specified += 1
                    row.declared += verdict.outcome != "not declared"
                    row.passed += verdict.outcome == "passed"
                    if verdict.share is not None:
                        row.worst_share = max(verdict.share, row.worst_share or 0.0)
            yield row

    @property
    def failures(self) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if verdict.outcome == "failed"]

    @property
    def executed(self) -> int:
        return sum(verdict.outcome != "not declared" for verdict in self.verdicts)

    @property
    def verdict(self) -> str:
        """``passed``, ``failed``, or ``nothing executed``, which is no pass."""
        if not self.executed:
            return "nothing executed"
        return "failed" if self.failures else "passed"

    def as_json(self) -> dict[str, Any]:
        return {
            "backend": self.backend,
            "verdict": self.verdict,
            "details": self.details,
            "operations": [asdict(row) | {"bound_used": row.shown_share} for row in self.rows()],
            "failures": [
                asdict(verdict) | {"reproduce": f"lowbit conformance {self.backend} --case {verdict.id}"}
                for verdict in self.failures
            ],
        }


# **Events.** The command runs pytest as a process of its own and reads one JSON object a line from a pipe, so that it
# can show progress and, should the backend take the process down, name the case that did.


class EventPipe:
    """The writing end: one line an event, written at once."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def send(self, kind: str, **content: object) -> None:
        os.write(self._descriptor, (json.dumps({"event": kind} | content) + "\n").encode())
