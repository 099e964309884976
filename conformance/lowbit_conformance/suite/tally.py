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
    """A parameter or a place as JSON has it; what JSON lacks becomes text."""
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
"""The habit that a verdict is about, in whichever case it was seen."""


@dataclass(frozen=True)
class Verdict:
    """The outcome of one case.

    Attributes:
        id: the case.
        outcome: passed, failed, or not declared by the backend and so not run.
        message: for a failure what was seen, for a case not run what is not declared.
        share: the part of the error bound that was used, for a bounded operation.
        verdict: for a failure the word with which the message begins, ``WRONG`` or ``CRASHED(SIGSEGV)``; ``FAILED`` if
            it begins with none.
        where: for a failure, the place of the first wrong element, as far as it is known: index, row, column, group,
            word, bit.
        diagnosis: for a failure, the mistake that explains it, in a sentence; empty if none is known.
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
        """``linear.qgemv/C1``; the whole of an id that is no case's."""
        return "/".join(self.id.split("/")[:2])

    @property
    def broken(self) -> str:
        """What a failure breaks: the clause of its case, or the habit that its verdict is about.

        >>> Verdict("packing.pack/C1/lattice/b4-s0", "failed", "SILENT_FALLBACK: it called packing.pack").broken
        'packing.pack/H7'
        """
        habit = HABIT_OF.get(self.verdict.partition("(")[0])
        if self.operation == LOADING and not habit:
            return LOADING
        return f"{self.operation}/{habit}" if habit and "/" in self.id else self.clause


@dataclass(frozen=True)
class Certificate:
    """What a run says of one profile (`lowbit.profiles`).

    Attributes:
        profile: its id.
        certified: whether every case of every clause has run and passed.
        missing: if not, why not, a line for each clause or habit concerned.
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
"""The parameters of cases of products that are sizes: what the report calls each, and what people do."""


NO_CASE = "no case lies within the limits of"
"""How the text of a case begins that is not declared, and with it all others of its operation."""


@dataclass
class Row:
    """One operation's line of the report: three counts that always stand together, and the error budget.

    Attributes:
        worst_share: the largest part of its bound that a case used; None where all is exact.
        worst_case: the id of that case.
        sizes: of a product the largest rows (K), columns (N) and batch of a case that passed; empty for operations
            whose cases do not name all their sizes.
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
        """The sizes for people; empty if there are none.

        >>> Row("linear.gemm", sizes={"rows": 4096, "columns": 11008, "batch": 512}).shown_sizes
        'linear.gemm: K ≤ 4096, N ≤ 11008, batch ≤ 512'
        """
        words = dict(PRODUCT_SIZES.values())
        said = ", ".join(f"{words[name]} ≤ {most}" for name, most in self.sizes.items())
        return f"{self.operation}: {said}" if said else ""

    @property
    def shown_share(self) -> str:
        """How much of the error bound was used, as a table says it; a dash where no case with a bound has passed."""
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
    """All verdicts of one run against one backend.

    Attributes:
        backend: its name.
        details: what it says of itself.
        claims: what it declares, as `claims_of` puts it.
        collected: how many cases are to be decided; 0 until that is known. A run that was stopped decided fewer.
        isolation: how the backend was separated from the process that judges, a word of `isolation.ISOLATION`.
        verdicts: in the order of the run.
        certificates: of the profiles that were to be certified, granted or not.
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
        """All operations together, without a share: budgets of different operations do not compare."""
        rows = list(self.rows())
        counts = (sum(getattr(row, name) for row in rows) for name in ("passed", "declared", "specified"))
        return Row("all", *counts)

    def explain(self, id: str, where: Mapping[str, object], diagnosis: str) -> None:
        """Add to a failure what became known of it at the end of the run."""
        for number, verdict in enumerate(self.verdicts):
            if verdict.id == id and verdict.outcome == "failed":
                self.verdicts[number] = replace(verdict, where=where, diagnosis=diagnosis)

    @property
    def failures(self) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if verdict.outcome == "failed"]

    @property
    def executed(self) -> int:
        """Cases of operations that were run; that of loading the backend counts only if it failed."""
        return sum(
            verdict.outcome == "failed" or (verdict.outcome == "passed" and verdict.operation != LOADING)
            for verdict in self.verdicts
        )

    @property
    def undecided(self) -> int:
        """How many cases have no verdict; a verdict on the run as a whole is that of no case."""
        return max(0, self.collected - sum("/" in verdict.id for verdict in self.verdicts))

    @property
    def verdict(self) -> str:
        """``passed``, ``failed``, or ``nothing executed``, which is no pass; nor is a run with undecided cases."""
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
