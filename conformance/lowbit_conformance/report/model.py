"""The data of a report: which suite judged which build on which machine, how it was asked, and every verdict.

A report has an *id*: sixteen hexadecimal digits that follow from the suite, the build, the processor and the results.
Two runs with the same outcome have the same id, whenever and in whatever order they ran; a benchmark row that carries
it says what was proven of the code that it measured.
"""

import hashlib
import json
import shlex
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from lowbit.contract.checks import spoken
from lowbit.theorems import Known
from lowbit_conformance.isolation.methods import ADVISORY, ISOLATION
from lowbit_conformance.report.matrix import matrix
from lowbit_conformance.suite.tally import Tally, Verdict

SCHEMA = "lowbit-report/1"


@dataclass(frozen=True)
class Suite:
    """The suite that judged.

    Attributes:
        version: of lowbit.
        sha256: of the source files of the suite and of the specification.
    """

    version: str
    sha256: str


@dataclass(frozen=True)
class Build:
    """The backend that was judged.

    Attributes:
        name: of the backend.
        target: the command-line arguments that name it: ``("numpy",)``, ``("--library", "libmine.so")``.
        distribution: the installed package that provides it; empty if there is none.
        version: of that package.
        sha256: of the backend's own files; empty if they cannot be found.
        details: what it reports about itself: compiler, instruction set, threads.
        claims: what it declares, as `tally.claims_of` returns it.
    """

    name: str
    target: tuple[str, ...]
    distribution: str = ""
    version: str = ""
    sha256: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)
    claims: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Machine:
    """The machine it ran on.

    Attributes:
        cpu: the processor's name.
        microarchitecture: archspec's name for it; empty if archspec is not installed.
        cores: logical cores that the run may use.
        system: operating system, its version and the instruction set.
        python: implementation and version.
        numpy: version.
    """

    cpu: str
    microarchitecture: str
    cores: int
    system: str
    python: str
    numpy: str


LEAST_COMMON = 5  # least number of failures for a common parameter to be named
MOST_VALUES = 2  # of one parameter


@dataclass(frozen=True)
class FailureGroup:
    """Failures of one clause or habit with one verdict, in the order of the run; the first is shown in full."""

    clause: str
    verdict: str
    failures: tuple[Verdict, ...]
    passed: tuple[Verdict, ...] = ()

    @property
    def common(self) -> str:
        """The parameters shared by all failed cases, where every case with another value passed, in words; or empty.

        >>> cases = [Verdict(f"a.b/C1/t/{n}-s0", "failed", parameters={"bits": 3, "rows": n}) for n in range(5)]
        >>> right = [Verdict("a.b/C1/t/9-s0", "passed", parameters={"bits": 4, "rows": 2})]
        >>> FailureGroup("a.b/C1", "WRONG", tuple(cases), tuple(right)).common
        'all 5 failures have bits 3, and all cases with another passed'
        """
        told = []
        for name in self.failures[0].parameters if len(self.failures) >= LEAST_COMMON else ():
            failing = {str(each.parameters.get(name)) for each in self.failures}
            passing = {str(each.parameters.get(name)) for each in self.passed}
            if len(failing) <= MOST_VALUES and passing - failing:
                told.append(f"{name} {spoken(sorted(failing))}")
        if not told:
            return ""
        return f"all {len(self.failures)} failures have {' and '.join(told)}, and all cases with another passed"


@dataclass(frozen=True)
class Report:
    """One run.

    Attributes:
        suite, build, machine: see these classes.
        settings: the options of the run: seeds, first_seed, ops, profiles, case, quick, model.
        started: when, in UTC, ISO 8601.
        seconds: how long it took.
        tally: the verdicts.
        theorems: what proofs outside this run show about the backend's kernels.
    """

    suite: Suite
    build: Build
    machine: Machine
    settings: Mapping[str, Any]
    started: str
    seconds: float
    tally: Tally
    theorems: tuple[Known, ...] = ()

    @property
    def proved(self) -> str:
        """The number of theorems of each kind that certificates prove, in words; empty if there are none."""
        kinds: dict[str, list[bool]] = {}
        for each in self.theorems:
            kinds.setdefault(each.theorem.partition("/")[0], []).append(each.holds)
        return ", ".join(f"{kind} {sum(holds)} of {len(holds)}" for kind, holds in kinds.items())

    @property
    def id(self) -> str:
        """Sixteen hexadecimal digits that depend only on the suite, the build, the processor and the results."""
        build = asdict(self.build)
        del build["target"]  # a path of one machine
        results = sorted([verdict.id, verdict.outcome, verdict.verdict] for verdict in self.tally.verdicts)
        known = json.dumps([asdict(self.suite), build, self.machine.cpu, results], sort_keys=True, default=str)
        return hashlib.sha256(known.encode()).hexdigest()[:16]

    @property
    def selection(self) -> str:
        """The requested part of the specification, in words; empty if all of it was requested."""
        if self.settings.get("case"):
            return "one case"
        only = [*(self.settings.get("ops") or ()), *(self.settings.get("profiles") or ())]
        said = [f"only {', '.join(only)}"] if only else []
        said += ["quick"] if self.settings.get("quick") else []
        return ", ".join(said)

    @property
    def failure_groups(self) -> list[FailureGroup]:
        groups: dict[tuple[str, str], list[Verdict]] = {}
        for failure in self.tally.failures:
            groups.setdefault((failure.broken, failure.verdict), []).append(failure)
        passed = defaultdict(list)
        for verdict in self.tally.verdicts:
            if verdict.outcome == "passed":
                passed[verdict.clause].append(verdict)
        found = []
        for (broken, word), failures in groups.items():
            clauses = dict.fromkeys(failure.clause for failure in failures)
            others = [verdict for clause in clauses for verdict in passed[clause]]
            found.append(FailureGroup(broken, word, tuple(failures), tuple(others)))
        return found

    def reproduce(self, verdict: Verdict) -> str:
        """The command that runs this case alone, or the whole suite if no case is known."""
        words = ["lowbit", "conformance", *self.build.target]
        if "/" in verdict.id:
            words += ["--case", verdict.id]
            if "/model/" in verdict.id and self.settings.get("model"):
                words += ["--model", str(self.settings["model"])]
        return shlex.join(words)


def as_json(report: Report) -> dict[str, Any]:
    """The report as a document of ``report.schema.json``; every case is in one of its last three lists."""
    tally = report.tally
    total = tally.total()
    return {
        "schema": SCHEMA,
        "id": report.id,
        "backend": report.build.name,
        "verdict": tally.verdict,
        "counts": {"passed": total.passed, "declared": total.declared, "specified": total.specified},
        "selection": report.selection,
        "undecided": tally.undecided,
        "isolation": {"method": tally.isolation, "meaning": ISOLATION[tally.isolation]},
        "seal": ADVISORY,
        "suite": asdict(report.suite),
        "build": asdict(report.build) | {"target": list(report.build.target)},
        "machine": asdict(report.machine),
        "settings": dict(report.settings),
        "started": report.started,
        "seconds": report.seconds,
        "certificates": [asdict(certificate) for certificate in tally.certificates],
        "theorems": [asdict(each) for each in report.theorems],
        "operations": [asdict(row) | {"bound_used": row.shown_share} for row in tally.rows()],
        "matrix": [
            {"operation": line.operation, "groups": line.groups, "bits": bits, **cell.counts()}
            for line in matrix(tally.verdicts)
            for bits, cell in line.cells.items()
        ],
        "failures": [_failure(verdict) | {"reproduce": report.reproduce(verdict)} for verdict in tally.failures],
        "passed": [_decided(verdict) for verdict in tally.verdicts if verdict.outcome == "passed"],
        "not_declared": [
            {"id": verdict.id, "missing": verdict.message, "parameters": verdict.parameters}
            for verdict in tally.verdicts
            if verdict.outcome == "not declared"
        ],
    }


def _decided(verdict: Verdict) -> dict[str, Any]:
    said: dict[str, Any] = {"id": verdict.id, "parameters": verdict.parameters, "seconds": verdict.seconds}
    return said if verdict.share is None else said | {"share": verdict.share}


def _failure(verdict: Verdict) -> dict[str, Any]:
    names = ("verdict", "message", "where", "diagnosis")
    return _decided(verdict) | {name: getattr(verdict, name) for name in names}
