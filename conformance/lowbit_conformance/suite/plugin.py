"""The pytest plugin: ``pytest -p lowbit_conformance.suite.plugin --pyargs lowbit_conformance --backend NAME``.

It is loaded by ``-p`` and by nothing else, so that installing lowbit does not slow every other use of pytest.

A case that the backend does not declare is not run and is counted as *not declared*. A backend that is unavailable is
an error, and so is a run in which no case was executed.
"""

import gc
import sys
from collections.abc import Generator, Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from lowbit.backend import Declaration
from lowbit.contract.operation import HABITS, RETIRED
from lowbit.errors import LowbitError, NotDeclaredError
from lowbit.operations import OPERATIONS
from lowbit.profiles import PROFILES, SUCCESSORS
from lowbit.quantization.affine import QuantizedMatrix
from lowbit_conformance.isolation.calls import Call
from lowbit_conformance.isolation.events import EventPipe
from lowbit_conformance.isolation.methods import ADVISORY, ISOLATION
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.isolation.targets import BANK, check_target
from lowbit_conformance.isolation.verdicts import BrokenPromiseError
from lowbit_conformance.suite.cases import CONCURRENT, HABIT, LOADING, Case
from lowbit_conformance.suite.certify import LEAST_SEEDS, certify, selects
from lowbit_conformance.suite.clauses import load_suite, module_names
from lowbit_conformance.suite.deadlines import DEADLINE, LOADING_DEADLINE
from lowbit_conformance.suite.explaining import Explainer, asked_of
from lowbit_conformance.suite.fitting import moved, why_none
from lowbit_conformance.suite.marking import MARKS, Mark, Settings
from lowbit_conformance.suite.model_cases import model_cases, model_matrices_of
from lowbit_conformance.suite.tally import NO_CASE, Outcome, Tally, Verdict, claims_of, plain

NOT_DECLARED: Outcome = "not declared"
DEFAULT_SEEDS = 5
DEADLINE_HELP = f"seconds for one call, and for loading (default {DEADLINE:g}, and {LOADING_DEADLINE:g} for loading)"
MADE_BY = "lowbit_conformance.defects.bank:backend"
QUICK_CASES = 4  # of each test
SLOW_TIERS = (HABIT, "exhaustive")
COMMON = ("clause", "tier", "variant", "seed")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("lowbit", "conformance with the lowbit specification")
    group.addoption("--backend", help="the backend under test: a name that `lowbit backends` lists, or module:Class")
    group.addoption("--library", help="instead, a shared library that implements lowbit.h")
    group.addoption("--command", help="instead, a program that answers by the line protocol")
    group.addoption("--function", help="instead, the description of a plain function (lowbit.backend.function)")
    group.addoption("--quick", action="store_true", help="a few cases of each clause, and all of --model")
    group.addoption("--deadline", type=float, help=DEADLINE_HELP)
    group.addoption("--op", action="append", default=[], help="only this operation or clause; repeatable")
    group.addoption(
        "--profile", action="append", default=[], help="only the cases of this profile, and certify it; repeatable"
    )
    group.addoption("--seeds", type=int, default=DEFAULT_SEEDS, help="seeds of the random tier (default %(default)s)")
    group.addoption("--first-seed", type=int, default=0, help="the first of them (default 0)")
    group.addoption("--case", help="only the case of this id")
    group.addoption("--model", help="a GGUF file whose own shapes and weights are tested too")


def pytest_configure(config: pytest.Config) -> None:
    option = config.option
    named = (option.backend, option.library, option.command, option.function)
    if any(part is not None for part in named) and not config.option.collectonly:
        config.pluginmanager.register(Run(config), "lowbit-run")


@dataclass(frozen=True)
class Planned:
    """The cases of one mark: all for these seeds, and those of this run."""

    every: list[Case]
    wanted: list[Case]


class Run:
    """One run of the suite against one backend."""

    def __init__(self, config: pytest.Config) -> None:
        option = config.option
        self.events = next((each for each in config.pluginmanager.get_plugins() if isinstance(each, EventPipe)), None)
        self.loaded = True
        clauses = [clause for specified in OPERATIONS.values() for clause in specified.clauses]
        clauses += [f"{name}/{habit}" for name in OPERATIONS for habit in HABITS]
        option.op = [RETIRED.get(name, name) for name in option.op]
        _check_known("--op", option.op, [*OPERATIONS, *clauses])
        for name in option.profile:
            if name in SUCCESSORS:
                reason = f"which this version does not certify; allowed: its successor {SUCCESSORS[name]}"
                raise pytest.UsageError(f"--profile is {name}, {reason}")
        _check_known("--profile", option.profile, list(PROFILES))
        self.case_id: str | None = option.case
        self.successor = "" if option.case is None else RETIRED.get("/".join(option.case.split("/")[:2]), "")
        self.calls: list[Call] = []
        self.explainer = Explainer()
        self.quick: bool = option.quick and not option.case
        self.profiles = [PROFILES[name] for name in option.profile]
        self.operations: list[str] = option.op
        try:
            self.backend = under_test(option)  # before tens of thousands of cases are made
            self.model = model_matrices_of(option.model) if option.model else {}
            self.settings = Settings(_seeds(option), tuple(model_cases(self.model)))
            self.plan = self._planned()
            if self.events:
                self.events.start_beating()
            if not self.quick:  # before any code of the backend has run
                self._announce()
            self._load()
            self.capabilities = self.backend.capabilities()
            added = self._move_cases()
            self.unmet = self._unmet_operations()
            if added and not self.quick:
                self._tell("added", ids=added)
            if self.quick:  # which certifies nothing: it takes a few of the declared cases
                self.plan = {mark: self._quick(planned) for mark, planned in self.plan.items()}
                self._announce()
        except LowbitError as error:
            raise pytest.UsageError(str(error)) from None
        whole = not (option.case or option.op or option.profile or option.quick) and option.seeds >= LEAST_SEEDS
        self.certified = [PROFILES[name] for name in self.capabilities.profiles] if whole else self.profiles
        self.certified_cases: list[Case] = []
        claims, details = claims_of(self.capabilities), plain(self.capabilities.details or {})
        self.tally = Tally(self.backend.name, details, claims, isolation=self.backend.isolation)

    def _tell(self, kind: str, **content: object) -> None:
        """Send an event to the command-line process, if there is one."""
        if self.events:
            self.events.send(kind, **content)

    def _planned(self) -> dict[Mark, Planned]:
        """The cases of each mark, determined before a host is started.

        All test modules are imported now, because a backend could replace the file of a module that is imported later.
        """
        pytest.register_assert_rewrite(*(name for name in module_names() if name not in sys.modules))
        load_suite()
        return {mark: self._planned_of(mark) for mark in MARKS if self._may_be_wanted(mark)}

    def _may_be_wanted(self, mark: Mark) -> bool:
        """Whether a mark may have cases in this run; the cases of other marks are not generated.

        A profile needs all its cases, in order to report those that were not run.
        """
        operation = mark.clause.partition("/")[0]
        if self.profiles or operation in ("*", LOADING):
            return True
        if self.case_id is not None:
            return operation == self.case_id.partition("/")[0]
        return not self.operations or operation in self.operations or mark.clause in self.operations

    def _planned_of(self, mark: Mark) -> Planned:
        every = {case.id: case for case in mark.generator(mark.clause, self.settings)}
        wanted = [case for case in every.values() if self._wanted(case)]
        return Planned(list(every.values()), wanted)

    def _move_cases(self) -> list[str]:
        """Add cases that satisfy the declared sizes for tests of whose own cases hardly any does (`fitting`).

        Returns:
            The ids of the wanted cases.
        """
        added = []
        known = {case.id for planned in self.plan.values() for case in planned.every}
        for mark, planned in self.plan.items():
            claim = self.capabilities.operations.get(planned.every[0].operation) if planned.every else None
            more = [case for case in moved(planned.every, claim) if case.id not in known]
            known |= {case.id for case in more}
            wanted = [case for case in more if self._wanted(case)]
            self.plan[mark] = Planned([*planned.every, *more], [*planned.wanted, *wanted])
            added += [case.id for case in wanted]
        return added

    def _quick(self, planned: Planned) -> Planned:
        """A few of the cases that the backend declares; if it declares none, a few that report this."""
        claims = self.capabilities.operations
        declared = [case for case in planned.wanted if not not_declared(claims.get(case.operation), case)]
        return Planned(planned.every, few(declared or planned.wanted, tuple(self.model)))

    def _announce(self) -> None:
        """Tell the command-line process which cases need a verdict."""
        self._tell("expected", ids=[case.id for planned in self.plan.values() for case in planned.wanted])

    def _load(self) -> None:
        """Load the backend; if that fails, the loading case reports it, and no other case is run."""
        try:
            self.backend.load()
        except BrokenPromiseError as error:
            self.loaded = False
            verdict, _, text = str(error).partition(": ")
            self.backend.breaches = [(verdict, text)]

    # Cases.

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        plans = [planned for mark, planned in self.plan.items() if mark.test is metafunc.function]
        if not plans:
            return
        every = [case for planned in plans for case in planned.every]
        wanted = [case for planned in plans for case in planned.wanted]
        self.certified_cases += [case for case in every if any(selects(each, case) for each in self.certified)]
        cases = [case for case in wanted if not (self._not_loaded(case) or self._undeclared(case))]
        metafunc.parametrize("case", cases, ids=[case.id for case in cases])

    def _wanted(self, case: Case) -> bool:
        if self.case_id is not None:
            return case.clause == self.successor if self.successor else case.id == self.case_id
        if case.operation == LOADING:
            return True
        if self.profiles and not any(selects(profile, case) for profile in self.profiles):
            return False
        return not self.operations or case.operation in self.operations or case.clause in self.operations

    def _unmet_operations(self) -> dict[str, str]:
        """The declared operations of which no case of this run satisfies the limits, with the reason."""
        cases: dict[str, list[Case]] = {}
        for case in (case for planned in self.plan.values() for case in planned.every if case.tier != HABIT):
            cases.setdefault(case.operation, []).append(case)
        found = {}
        for operation, claim in self.capabilities.operations.items():
            own = cases.get(operation, [])
            if not own:
                found[operation] = f"{operation} with any choice of the suite's cases"
            elif all(not_declared(claim, case) for case in own):
                found[operation] = f"{NO_CASE} {operation}: {why_none(own, claim)}"
        return found

    def _not_loaded(self, case: Case) -> bool:
        """Whether a case cannot be run because the backend could not be loaded; the loading case gives the reason."""
        if self.loaded or case.operation == LOADING:
            return False
        if case.id == self.case_id:  # then this run has no loading case
            self.tally.verdicts.append(Verdict(case.id, "failed", ": ".join(self.backend.breaches[0])))
        return True

    def _undeclared(self, case: Case) -> bool:
        """Whether a case is not declared; it then has its verdict already, and pytest gets no test for it."""
        missing = ""
        if case.operation != LOADING:
            missing = not_declared(self.capabilities.operations.get(case.operation), case)
            if case.operation in self.unmet:
                missing = self.unmet[case.operation]
        if case.variant == CONCURRENT and not self.capabilities.concurrent:
            missing = "calls from several threads"
        if missing:
            self.tally.verdicts.append(Verdict(case.id, NOT_DECLARED, missing, parameters=own_parameters(case)))
        return bool(missing)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if case_of(item) is not None]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if self.case_id is not None and not session.items and not self.tally.verdicts:
            raise pytest.UsageError(f"--case is {self.case_id}; allowed: the id of a case, as a report prints it")
        if self.events:
            gc.collect()
            gc.freeze()  # thousands of cases, which garbage collection should not scan again and again
        tally = self.tally
        self._tell("loaded", details=tally.details, claims=tally.claims, isolation=tally.isolation)
        for verdict in tally.verdicts:
            self._tell("verdict", **vars(verdict))

    # Running.

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        case = case_of(item)
        assert case is not None
        self._tell("start", id=case.id)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        with self.backend.recording() as self.calls:
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[Any]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        case = case_of(item)
        verdict = verdict_of(case.id, report, call.excinfo) if case else None
        if case and verdict:
            verdict = replace(verdict, parameters=own_parameters(case), seconds=round(report.duration, 6))
            self.explainer.note(case.id, asked_of(self.calls), verdict.verdict if verdict.outcome != "passed" else "")
            self.tally.verdicts.append(verdict)
            self._tell("verdict", **vars(verdict))
        return report

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        for id, found in self.explainer.explanations():
            self.tally.explain(id, plain(found.where), found.diagnosis)
            self._tell("explained", id=id, where=plain(found.where), diagnosis=found.diagnosis)
        for profile in self.certified:
            seeds = len(self.settings.seeds)
            certificate = certify(profile, self.certified_cases, self.tally.verdicts, seeds)
            self.tally.certificates.append(certificate)
            self._tell("certificate", **vars(certificate))
        if session.exitstatus != pytest.ExitCode.INTERRUPTED:  # a kernel may interrupt too
            self._tell("finished")
        self.backend.close()
        if self.events:
            self.events.stop_beating()
        if self.tally.verdict != "passed" and session.exitstatus in (
            pytest.ExitCode.OK,
            pytest.ExitCode.NO_TESTS_COLLECTED,
        ):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        write = terminalreporter.write_line
        terminalreporter.section(f"lowbit conformance of {self.tally.backend}: {self.tally.verdict}")
        write(f"isolation: {ISOLATION[self.tally.isolation]}")
        write(f"seal: {ADVISORY}")
        rows = list(self.tally.rows())
        for row in [row for row in rows if row.declared]:
            share = "" if row.worst_share is None else f", at most {row.worst_share:.1%} of the error bound used"
            counts = f"{row.passed} passed / {row.declared} declared / {row.specified} specified"
            write(f"{row.operation}: {counts}{share}")
        if undeclared := [row.operation for row in rows if not row.declared]:
            write(f"not declared, and so not tested: {', '.join(undeclared)}")
        for certificate in self.tally.certificates:
            write("; ".join((str(certificate), *certificate.missing)))
        for failure in self.tally.failures[:20]:
            write(f"reproduce: lowbit conformance {self.tally.backend} --case {failure.id}")


def under_test(option: Any) -> Remote:
    """The backend that the command line names.

    Loading may take longer than a call, unless the user sets the deadline of a call.

    Raises:
        ArgumentError, UnavailableError: there is no such backend, as far as this can be seen without running its code.
    """
    named = {"name": option.backend, "library": option.library, "command": option.command}
    named["function"] = option.function
    given = [(kind, name) for kind, name in named.items() if name is not None]
    if len(given) != 1:
        raise pytest.UsageError("--backend, --library, --command, --function: allowed is one of them")
    kind, name = given[0]
    check_target(kind, name)
    deadline = DEADLINE if option.deadline is None else option.deadline
    loading = LOADING_DEADLINE if option.deadline is None else option.deadline
    if kind == "name" and name.startswith(BANK):
        return Remote(MADE_BY, name.removeprefix(BANK), deadline, loading=loading, sealed=False)
    return Remote(kind, name, deadline, loading=loading)


def few(cases: list[Case], asked_for: tuple[str, ...] = ()) -> list[Case]:
    """Some of a test's cases, evenly spread and without slow ones, and all cases of a given model.

    Args:
        cases: of one test.
        asked_for: the prefixes of the variants of the model's cases.
    """
    own = [case for case in cases if case.variant.startswith(asked_for)]
    left_out = {case.id for case in cases if case.tier in SLOW_TIERS or case.large} | {case.id for case in own}
    quick = [case for case in cases if case.id not in left_out or case.operation == LOADING]
    return quick[:: max(1, -(-len(quick) // QUICK_CASES))] + own


def _check_known(argument: str, given: Iterable[str], known: list[str]) -> None:
    """Refuse a name that does not exist; the message lists the operations, or the clauses of the named operation."""
    for name in given:
        if name not in known:
            own = [each for each in known if each.partition("/")[0] == name.partition("/")[0] and "/" in each]
            allowed = ", ".join(own or sorted(each for each in known if "/" not in each) or known)
            raise pytest.UsageError(f"{argument} is {name}; allowed: {allowed}")


def _seeds(option: Any) -> range:
    """The seeds of the random tier; a single case has its own."""
    if option.case:
        seed = option.case.rpartition("-s")[2]
        if not (seed.isascii() and seed.isdecimal()):
            raise pytest.UsageError(f"--case is {option.case}; allowed: the id of a case, which ends in -sNUMBER")
        return range(int(seed), int(seed) + 1)
    if option.seeds < 0 or option.first_seed < 0:
        raise pytest.UsageError("--seeds and --first-seed: allowed are numbers of at least 0")
    return range(option.first_seed, option.first_seed + option.seeds)


def case_of(item: pytest.Item) -> Case | None:
    """The case that a collected test runs; None for a test of another suite."""
    callspec = getattr(item, "callspec", None)
    case = callspec.params.get("case") if callspec else None
    return case if isinstance(case, Case) else None


def not_declared(declaration: Declaration | None, case: Case) -> str:
    """The parts of the case that the backend does not declare; empty if it declares all of it."""
    if declaration is None:
        return case.operation
    missing = "" if case.tier == HABIT else declaration.lacks(case.parameters())  # a habit has no choices of its own
    return f"{case.operation} with {missing}" if missing else ""


def own_parameters(case: Case) -> dict[str, object]:
    """The choices of a case, without the fields with which its id begins and ends."""
    return {name: value for name, value in case.parameters().items() if name not in COMMON}


def verdict_of(
    case_id: str, report: pytest.TestReport, raised: pytest.ExceptionInfo[BaseException] | None
) -> Verdict | None:
    """The verdict in a report of pytest; None for phases that decide nothing."""
    if report.failed and raised is not None:
        message = str(raised.value).partition("\nassert ")[0]  # pytest appends the expression to a message of its own
        if not isinstance(raised.value, AssertionError):
            message = f"RAISED: {raised.typename}: {message}"
        if isinstance(raised.value, NotDeclaredError):
            message += "; yet the declaration includes this case: narrow its limits"
        return Verdict(case_id, "failed", message)
    if report.skipped:
        return Verdict(case_id, "failed", "skipped by the backend itself, which only a declaration may do")
    if report.when == "call":
        shares = [float(str(value)) for name, value in report.user_properties if name == "share"]
        return Verdict(case_id, "passed", share=max(shares, default=None))
    return None


# Fixtures of the tests.


@pytest.fixture(scope="session")
def backend(request: pytest.FixtureRequest) -> Remote:
    """The backend under test."""
    return _run(request).backend


@pytest.fixture(scope="session")
def model_matrices(request: pytest.FixtureRequest) -> dict[str, QuantizedMatrix]:
    """The matrices of ``--model`` by the variant of their case; empty without ``--model``."""
    return _run(request).model


def _run(request: pytest.FixtureRequest) -> Run:
    run = request.config.pluginmanager.get_plugin("lowbit-run")
    if not isinstance(run, Run):
        raise pytest.UsageError("--backend is missing; it must be a name that `lowbit backends` lists, or module:Class")
    return run
