"""One defect against the suite: which cases of which clauses find it, with what verdict, and when.

The cases are those of ``lowbit conformance`` and are judged by the same tests against the same host process; only the
process that judges is this one, so that a defect is tried in the time of its calls.
"""

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from kills.bank import FACTORY, FOLDER, OWN, defect_of, uses_reference
from lowbit.errors import LowbitError
from lowbit.operations import OPERATIONS
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.suite.cases import CONCURRENT, Case
from lowbit_conformance.suite.clauses import load_suite
from lowbit_conformance.suite.marking import MARKS, Mark, Settings
from lowbit_conformance.suite.plugin import not_declared
from lowbit_conformance.suite.tally import WORD

Stop = Literal["defect", "clause", "never"]
"""After the first kill of the defect, after the first of each clause, or not at all."""

DEADLINES = {True: 3.0, False: 120.0}
"""Seconds for one call: of a defect that is to hang, and of any other, which a slow machine must not end."""
LOADING = "backend/H6"
LATER = 5  # rounds of `spread`: a large case takes as long as many small ones


@dataclass
class Finding:
    """What the cases of one clause say of a defect.

    Attributes:
        verdict: the first word of the first kill; empty if there was none.
        case: the case that killed first.
        executed: cases that were run.
        killed: those that failed.
        seconds: from the start of the trial to the first kill.
        message: what the first kill said.
    """

    verdict: str = ""
    case: str = ""
    executed: int = 0
    killed: int = 0
    seconds: float = 0.0
    message: str = ""


@dataclass
class Trial:
    """What came of one defect.

    Attributes:
        defect: its name.
        seeds: of the random tier.
        stop: after what it ended.
        seconds: how long it took.
        findings: by clause.
    """

    defect: str
    seeds: int
    stop: Stop
    seconds: float = 0.0
    findings: dict[str, Finding] = field(default_factory=dict)

    @property
    def killed(self) -> bool:
        """Whether any case failed."""
        return any(finding.killed for finding in self.findings.values())

    @property
    def first(self) -> Finding:
        """The first kill; an empty finding if there was none."""
        kills = [finding for finding in self.findings.values() if finding.killed]
        return min(kills, key=lambda finding: finding.seconds, default=Finding())

    @property
    def verdicts(self) -> list[str]:
        """The words of the first kills of all clauses, each once."""
        return sorted({finding.verdict for finding in self.findings.values() if finding.killed})

    def as_json(self) -> dict[str, Any]:
        """What the kill matrix keeps."""
        return asdict(self)


def cases_of(clauses: tuple[str, ...], operations: tuple[str, ...], seeds: int) -> Iterator[tuple[Mark, Case]]:
    """All cases of some operations, those of the clauses that are named first, each once."""
    load_suite()
    settings = Settings(range(seeds))

    def rank(mark: Mark) -> int:
        own = {mark.clause.replace("*", operation) for operation in operations}
        return next((number for number, clause in enumerate(clauses) if clause in own), len(clauses))

    habits = [mark for mark in MARKS if mark.clause.startswith("*/")]
    own = [mark for mark in MARKS if mark.clause.rpartition("/")[0] in operations]
    for mark in sorted([*own, *habits], key=rank) + [mark for mark in MARKS if mark.clause == LOADING]:
        for case in mark.generator(mark.clause, settings):
            if mark.clause == LOADING or case.operation in operations:
                yield mark, case


def spread(cases: Iterable[tuple[Mark, Case]], first: Sequence[str] = ()) -> list[tuple[Mark, Case]]:
    """The first case of each kind, then the second of each, and so on; a large one comes `LATER` rounds later.

    What fails few cases is met early: those of a rare kind do not wait for the thousands of the others. Cases of the
    clauses that are named come before all others.
    """
    met = Counter[tuple[str, ...]]()
    ranked = []
    for mark, case in cases:
        kind = (
            case.clause,
            case.tier,
            str(case.parameters().get("format")),
            *re.sub(r"\d", "", case.variant).split("-")[:2],
        )
        met[kind] += 1
        ranked.append(((case.clause not in first, met[kind] + LATER * case.large), mark, case))
    return [(mark, case) for _, mark, case in sorted(ranked, key=lambda each: each[0])]


@contextmanager
def started(name: str, deadline: float) -> Iterator[Remote]:
    """The backend of a defect in its host process, which finds this package by ``PYTHONPATH``."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(FOLDER), before]))
    try:
        with closing(Remote(FACTORY, name, deadline, own=OWN, sealed=not uses_reference(name))) as remote:
            remote.load()
            yield remote
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before


def try_out(
    name: str,
    *,
    seeds: int = 1,
    stop: Stop = "defect",
    only: tuple[str, ...] = (),
    operations: tuple[str, ...] = (),
    deadline: float | None = None,
    progress: Callable[[Case], None] | None = None,
) -> Trial:
    """Run the suite against one defect.

    Args:
        name: of a defect, or ``none``.
        seeds: of the random tier.
        stop: when to stop.
        only: these clauses only.
        operations: these operations only.
        deadline: seconds for one call; by default few for a defect that hangs, and many for any other.
        progress: told of each case before it is run.

    Raises:
        ArgumentError: there is no such defect.
    """
    defect, trial, start = defect_of(name), Trial(name, seeds, stop), time.monotonic()
    allowed = DEADLINES["HUNG" in defect.verdicts] if deadline is None else deadline
    clauses = only or defect.clauses
    cases = cases_of(clauses, operations or defect.operations, seeds)
    if stop == "defect":
        cases = iter(spread(cases, clauses))
    with started(name, allowed) as remote:
        for mark, case in cases:
            finding = trial.findings.setdefault(case.clause, Finding())
            done = stop == "clause" and finding.killed
            if done or (only and case.clause not in only) or _missing(remote, case):
                continue
            if progress:
                progress(case)
            message = run(mark, case, remote)
            finding.executed += 1
            if message:
                finding.killed += 1
                if finding.killed == 1:
                    word = WORD.match(message)
                    finding.verdict, finding.case = word[0] if word else "RAISED", case.id
                    finding.message, finding.seconds = message[:400], round(time.monotonic() - start, 3)
                if stop == "defect":
                    break
    trial.findings = {clause: finding for clause, finding in sorted(trial.findings.items()) if finding.executed}
    trial.seconds = round(time.monotonic() - start, 3)
    return trial


def _missing(remote: Remote, case: Case) -> bool:
    """Whether the backend does not declare the case."""
    if case.operation not in OPERATIONS:
        return False
    capabilities = remote.capabilities()
    if case.variant == CONCURRENT and not capabilities.concurrent:
        return True
    return bool(not_declared(capabilities.operations.get(case.operation), case))


def run(mark: Mark, case: Case, remote: Remote) -> str:
    """Run one case; what it says of a failure, empty if it passed."""
    try:
        mark.run(remote, case)
    except AssertionError as error:
        return str(error) or "WRONG"
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # what pytest.raises throws is no Exception
        own = isinstance(error, LowbitError)
        return f"RAISED: {type(error).__name__}: {error}" if own or str(error) else f"RAISED: {type(error).__name__}"
    return ""
