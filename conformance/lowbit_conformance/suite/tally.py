"""What came of a run: the verdict of each case, counted by operation.

*Passed / declared / specified* always stand together: a backend that declares little and passes all of it has not
passed all that the specification says.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any, Literal

from lowbit.backend import Capabilities
from lowbit.contract.operation import Promise
from lowbit.operations import OPERATIONS
from lowbit.text import cleaned
from lowbit_conformance.suite.cases import LOADING

Outcome = Literal["passed", "failed", "not declared"]

WORD = re.compile(r"[A-Z][A-Z_]{1,40}(?:\([A-Z0-9]+\))?(?=[: ]|$)")


def plain(value: object) -> Any:
    """A parameter or a place as a JSON value; other types become text."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Integral):  # numpy's integers, too
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {cleaned(str(key)): plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple | range):
        return [plain(part) for part in value]
    return cleaned(str(value))


HABIT_OF: Mapping[str, str] = {
    "OOB_READ": "H1",
    "UNDECLARED_OVERREAD": "H1",
    "OOB_WRITE": "H2",
    "INPUT_MUTATED": "H2",
    "STALE_OUTPUT": "H3",
    "NONDETERMINISTIC": "H4",
    "CRASHED": "H5",
    "HUNG": "H5",
    "STATE_CHANGED": "H6",
    "LEAKED": "H6",
    "WROTE_TO_STDOUT": "H6",
    "FORKED": "H6",
    "SILENT_FALLBACK": "H7",
}
"""The habit that a verdict is about, whichever case it was seen in."""


@dataclass(frozen=True)
class Verdict:
    """The outcome of one case.

    Attributes:
        id: the case.
        outcome: passed, failed, or not declared by the backend and so not run.
        message: for a failure, what was observed; for a case that was not run, what is not declared.
        share: the fraction of the error bound that was used, for a bounded operation.
        verdict: for a failure, the first word of the message, ``WRONG`` or ``CRASHED(SIGSEGV)``; ``FAILED`` if there is
            no such word.
        where: for a failure, the place of the first wrong element, as far as known: index, row, column, group,
            word, bit.
        diagnosis: for a failure, a sentence that names the mistake that explains it; empty if none is known.
        parameters: the choices of the case, by name: bits, group_size …
        seconds: how long the case took.
    """

    id: str
    outcome: Outcome
    message: str = ""
    share: float | None = None
    verdict: str = ""
    where: Mapping[str, object] = field(default_factory=dict)
    diagnosis: str = ""
    parameters: Mapping[str, object] = field(default_factory=dict)
    seconds: float | None = None

    def __post_init__(self) -> None:
        for name in ("message", "diagnosis"):
            object.__setattr__(self, name, cleaned(getattr(self, name)))
        for name in ("where", "parameters"):
            object.__setattr__(self, name, plain(getattr(self, name)))
        if self.outcome == "failed" and not self.verdict:
            found = WORD.match(self.message)
            object.__setattr__(self, "verdict", found[0] if found else "FAILED")

    @property
    def operation(self) -> str:
        return self.id.partition("/")[0]

    @property
    def clause(self) -> str:
        """``linear.qgemv/C1``; the whole id if it is not the id of a case."""
        return "/".join(self.id.split("/")[:2])

    @property
    def broken(self) -> str:
        """The broken clause or habit: the clause of the case, or the habit that the verdict is about.

        >>> Verdict("packing.pack/C1/lattice/b4-s0", "failed", "SILENT_FALLBACK: it called packing.pack").broken
        'packing.pack/H7'
        """
        habit = HABIT_OF.get(self.verdict.partition("(")[0])
        if self.operation == LOADING and not habit:
            return LOADING
        return f"{self.operation}/{habit}" if habit and "/" in self.id else self.clause


@dataclass(frozen=True)
class Certificate:
    """The result of a run for one profile (`lowbit.profiles`).

    Attributes:
        profile: its id.
        certified: whether every case of every clause has run and passed.
        missing: if not, the reasons, one line for each clause or habit.
        cases: how many cases the profile has in this suite.
    """

    profile: str
    certified: bool
    missing: tuple[str, ...]
    cases: int

    def __str__(self) -> str:
        return f"{self.profile}: {f'certified, {self.cases} cases' if self.certified else 'not certified'}"


PRODUCT_SIZES: Mapping[str, tuple[str, str]] = {
    "rows": ("rows", "K"),
    "columns": ("columns", "N"),
    "batch": ("batch", "batch"),
    "vectors": ("batch", "batch"),
}
"""The parameters of product cases that are sizes, with the name of each in the report and in text for people."""


NO_CASE = "no case lies within the limits of"
"""The beginning of the text of a case that is not declared and whose operation has no declared case."""


@dataclass
class Row:
    """One operation's line of the report: the three counts, which are always shown together, and the error budget.

    Attributes:
        worst_share: the largest fraction of the bound that a case used; None if all cases are exact.
        worst_case: the id of that case.
        sizes: for a product, the largest rows (K), columns (N) and batch of a passed case; empty for operations whose
            cases do not name all their sizes.
    """

    operation: str
    passed: int = 0
    declared: int = 0
    specified: int = 0
    worst_share: float | None = None
    worst_case: str | None = None
    sizes: dict[str, int] = field(default_factory=dict)

    @property
    def shown_sizes(self) -> str:
        """The sizes as text for people; empty if there are none.

        >>> Row("linear.gemm", sizes={"rows": 4096, "columns": 11008, "batch": 512}).shown_sizes
        'linear.gemm: K ≤ 4096, N ≤ 11008, batch ≤ 512'
        """
        words = dict(PRODUCT_SIZES.values())
        said = ", ".join(f"{words[name]} ≤ {most}" for name, most in self.sizes.items())
        return f"{self.operation}: {said}" if said else ""

    @property
    def shown_share(self) -> str:
        """The fraction of the error bound that was used, as text for a table; a dash if no case with a bound has
        passed."""
        if not self.declared:
            return "not declared"
        if self.worst_share is not None:
            return f"{self.worst_share:.1%}"
        exact = self.operation in OPERATIONS and OPERATIONS[self.operation].promise is not Promise.BOUNDED
        return "exact" if exact else "–"

    def count(self, verdict: Verdict) -> None:
        self.specified += 1
        self.declared += verdict.outcome != "not declared"
        self.passed += verdict.outcome == "passed"
        if verdict.share is not None and verdict.share >= (self.worst_share or 0.0):
            self.worst_share, self.worst_case = verdict.share, verdict.id
        if verdict.outcome == "passed" and self.operation.startswith("linear."):
            for parameter, (name, _) in PRODUCT_SIZES.items():
                size = verdict.parameters.get(parameter)
                if isinstance(size, int) and size > 0:  # a product with one vector has 0 of several
                    self.sizes[name] = max(size, self.sizes.get(name, 0))


@dataclass
class Tally:
    """All verdicts of one run on one backend.

    Attributes:
        backend: its name.
        details: what it reports about itself.
        claims: what it declares, as `claims_of` returns it.
        collected: the number of cases to decide; 0 until it is known. A run that was stopped decided fewer.
        isolation: how the backend was isolated from the judging process, a key of `isolation.ISOLATION`.
        verdicts: in the order of the run.
        certificates: of the requested profiles, granted or not.
    """

    backend: str
    details: dict[str, str] = field(default_factory=dict)
    claims: dict[str, Any] = field(default_factory=dict)
    collected: int = 0
    verdicts: list[Verdict] = field(default_factory=list)
    certificates: list[Certificate] = field(default_factory=list)
    isolation: str = ""

    def rows(self) -> Iterator[Row]:
        """The lines of the report, by operation."""
        rows: dict[str, Row] = {}
        for verdict in self.verdicts:
            rows.setdefault(verdict.operation, Row(verdict.operation)).count(verdict)
        yield from (rows[operation] for operation in sorted(rows))

    def total(self) -> Row:
        """All operations together, without a fraction of the bound, because budgets of operations are not
        comparable."""
        rows = list(self.rows())
        counts = (sum(getattr(row, name) for row in rows) for name in ("passed", "declared", "specified"))
        return Row("all", *counts)

    def explain(self, id: str, where: Mapping[str, object], diagnosis: str) -> None:
        """Add to a failure what was found out about it at the end of the run."""
        for number, verdict in enumerate(self.verdicts):
            if verdict.id == id and verdict.outcome == "failed":
                self.verdicts[number] = replace(verdict, where=where, diagnosis=diagnosis)

    @property
    def failures(self) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if verdict.outcome == "failed"]

    @property
    def executed(self) -> int:
        """Executed cases of operations; the loading case counts only if it failed."""
        return sum(
            verdict.outcome == "failed" or (verdict.outcome == "passed" and verdict.operation != LOADING)
            for verdict in self.verdicts
        )

    @property
    def undecided(self) -> int:
        """The number of cases without a verdict; a verdict on the run as a whole belongs to no case."""
        return max(0, self.collected - sum("/" in verdict.id for verdict in self.verdicts))

    @property
    def verdict(self) -> str:
        """``passed``, ``failed`` or ``nothing executed``; a run with undecided cases has not passed."""
        if not self.executed:
            return "nothing executed"
        certified = all(certificate.certified for certificate in self.certificates)
        return "passed" if certified and not self.failures and not self.undecided else "failed"


def claims_of(capabilities: Capabilities) -> dict[str, Any]:
    """What a backend declares, as JSON: for each operation its limits and, if it is bounded, its arithmetic."""
    operations = {}
    for operation, declaration in sorted(capabilities.operations.items()):
        arithmetic = declaration.arithmetic
        said = {"form": arithmetic.form, "accumulator": arithmetic.accumulator} if arithmetic else None
        operations[operation] = {"limits": plain(declaration.told_limits), "arithmetic": said}
    others = {name: plain(getattr(capabilities, name)) for name in ("concurrent", "alignment", "overread", "profiles")}
    return {"operations": operations, **others}
