"""``lowbit conformance NAME``: the suite as a command, with progress, a table and a verdict.

pytest runs as a separate process, the judge, without the configuration of the user's current folder, and reports
through a pipe (`events`); the backend runs in a third process (`host`). If the judge ends early or is stopped, the
command can still name the case that was running (`watchdog`). Every case that the judge announced before it started the
host needs exactly one verdict. So do those that it adds, once, when it has read a declaration whose sizes hardly any
case meets (`lowbit_conformance.suite.fitting`).

Exit status: 0 all that is declared passed, 1 something failed or nothing was executed, 2 a wrong argument or an
unavailable backend.
"""

import importlib.util
import json
import os
import secrets
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lowbit.backend.function import described
from lowbit.backend.registry import check_function
from lowbit.certification import LEAST_DEADLINE, Certification, Request
from lowbit.errors import ArgumentError, LowbitError, UnavailableError
from lowbit.operations import OPERATIONS
from lowbit.system.interpreters import python_command, python_environment
from lowbit.system.interrupts import deferred
from lowbit.system.memory import check_address_space
from lowbit.text import quoted
from lowbit_conformance.cli.functions import claim_of, claimed, function_target, name_of
from lowbit_conformance.isolation import methods as isolation
from lowbit_conformance.isolation.arena import ARGUMENTS, CONTROL, RESULTS
from lowbit_conformance.isolation.descendants import adopting, end_below
from lowbit_conformance.isolation.events import Event, EventReader
from lowbit_conformance.isolation.targets import check_target
from lowbit_conformance.isolation.watchdog import death, follow
from lowbit_conformance.report import Report, report_of, show, text_of, write_html, write_json, write_junit
from lowbit_conformance.report.files import check_writable
from lowbit_conformance.report.gather import suite
from lowbit_conformance.report.html import check_available
from lowbit_conformance.suite import clauses
from lowbit_conformance.suite.deadlines import DEADLINE, LOADING_DEADLINE
from lowbit_conformance.suite.tally import Certificate, Tally, Verdict

# Plugins of pytest that inspect every test and are not needed here.
UNUSED = ("logging", "unraisableexception", "threadexception", "faulthandler", "stepwise", "doctest", "debugging")
WRONG_USE = 4  # pytest's status for wrong usage
PASSED, FAILED = 0, 1  # the statuses with which it ends otherwise
THE_SUITE = "the suite"  # for a verdict on the run as a whole
ADDRESS_SPACE = CONTROL + ARGUMENTS + RESULTS + 2**30
"""Bytes that each process of the suite needs: the arena (`lowbit_conformance.isolation.arena`), and its imports."""


# The program of the judging process. It ignores signals that a backend may send; the command, which the user
# interrupts, ends it. Other processes of an ordinary user cannot read or trace it. The key comes with this text through
# standard input, so that only these two processes know it. BLAS has one thread here, a number that it reads once, when
# numpy is loaded, because threads for small matrices would take the processors from the backend. The backend's process
# has the variables that the user set.
JUDGE = """
import ctypes, os, signal
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, signal.SIG_IGN)
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
os.environ |= {{"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}}
before = dict(os.environ)
os.environ |= dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
import numpy
os.environ.clear()
os.environ |= before
import pytest
from lowbit_conformance.isolation.events import EventPipe
sys.exit(pytest.main({arguments!r}, [EventPipe({writer!r}, {key!r})]))
"""


def conformance(
    name: Annotated[
        str | None, typer.Argument(help="The backend under test: a name that `lowbit backends` lists, or module:Class.")
    ] = None,
    library: Annotated[str | None, typer.Option(help="Instead of NAME, a library that implements lowbit.h.")] = None,
    command: Annotated[str | None, typer.Option(help="Instead of NAME, a program that answers line by line.")] = None,
    function: Annotated[
        str | None, typer.Option(help="Instead of NAME, a plain function module:function of one --operation.")
    ] = None,
    operation: Annotated[
        str | None, typer.Option(help="What the function computes; without --function the same as --op.")
    ] = None,
    format: Annotated[str | None, typer.Option(help="The format of the weights that the function takes.")] = None,
    activations: Annotated[str | None, typer.Option(help="The type of its activations.")] = None,
    result: Annotated[
        str | None, typer.Option(help="The type of its result; by default that of the activations.")
    ] = None,
    limit: Annotated[
        list[str] | None,
        typer.Option(help="What else it handles: bits=4,8 or columns=*64 or rows=128..4096; repeatable."),
    ] = None,
    arrays: Annotated[str, typer.Option(help="The library whose arrays it takes: numpy, torch or jax.")] = "numpy",
    device: Annotated[
        str,
        typer.Option(help="The device of these arrays, as their library names it: cpu, cuda:0 for torch, gpu for jax."),
    ] = "cpu",
    op: Annotated[
        list[str] | None,
        typer.Option(help="Only this operation or clause; repeatable. For a function also --operation."),
    ] = None,
    profile: Annotated[
        list[str] | None,
        typer.Option(help="Only the cases of this profile, and certify it; `lowbit profiles` lists them; repeatable."),
    ] = None,
    seeds: Annotated[int, typer.Option(help="The number of seeds of the random tier.")] = 5,
    first_seed: Annotated[int, typer.Option(help="The first of these seeds.")] = 0,
    case: Annotated[str | None, typer.Option(help="Only the case of this id.")] = None,
    model: Annotated[str | None, typer.Option(help="A GGUF file whose shapes and weights are tested too.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few cases of each clause, and all of --model.")] = False,
    deadline: Annotated[
        float | None,
        typer.Option(
            min=LEAST_DEADLINE,
            help="The maximum number of seconds for one call, and for loading the backend.",
            show_default=f"{DEADLINE:g} for a call, {LOADING_DEADLINE:g} for loading",
        ),
    ] = None,
    exitfirst: Annotated[bool, typer.Option("--exitfirst", "-x", help="Stop at the first failure.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The report as JSON on standard output.")] = False,
    report_file: Annotated[Path | None, typer.Option("--report", help="Write the report as JSON to a file.")] = None,
    junit: Annotated[Path | None, typer.Option(help="Write the report as JUnit XML to a file.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the report as one HTML page to a file.")] = None,
) -> None:
    """Test a backend against the specification, clause by clause."""
    files = [("--report", report_file, write_json), ("--junit", junit, write_junit), ("--html", html, write_html)]
    for argument, path, _ in files:
        if path:
            check_writable(argument, path)
    if html:
        check_available()
    if function is None and operation is not None:
        op, operation = [*(op or []), operation], None
    elif operation is None and op and not profile:
        operation = op[0] if op[0] in OPERATIONS else None
    settings = {"seeds": seeds, "first_seed": first_seed, "ops": op or [], "profiles": profile or []}
    settings |= {"case": case, "model": model, "quick": quick}
    types = {"format": format, "activations": activations, "result": result}
    target = judged = _target(name, library, command, function)
    if function is not None:
        target, judged = function_target(function, operation, types, limit or [], arrays, device, profile or [])
        settings["ops"] = op or ([] if operation is None else [operation])
        check_function(function)
    elif given := [f"--{key}" for key, each in {"limit": limit, **types}.items() if each]:
        raise ArgumentError(given[0], "given", "only with --function", f"{given[0]} describes a --function; give one")
    report = run(target, settings, deadline, exitfirst, judged)
    with deferred():  # an interrupt leaves each file whole or not written
        for _, path, write in files:
            if path:
                write(report, path)
    if as_json:
        print(text_of(report))
    else:
        show(report, Console())
    raise typer.Exit(0 if report.tally.verdict == "passed" else 1)


def certify(request: Request) -> Certification:
    """Implement `lowbit.certify`.

    Raises:
        LowbitError: the suite refuses an argument, the backend or the function.
    """
    backend, limits, arithmetic = request.backend, request.limits, request.arithmetic
    operations, profiles = list(request.operations), list(request.profiles)
    settings = {"seeds": request.seeds, "first_seed": 0, "ops": operations, "profiles": profiles}
    settings |= {"case": None, "model": request.model, "quick": request.quick}
    target = judged = (backend,) if isinstance(backend, str) else ("--function", name_of(backend))
    if callable(backend):
        promised, asked = claimed(profiles)
        computed = operations or [each for each in (promised,) if each]
        if len(computed) != 1:
            raise ArgumentError("operations", computed, "the one operation that the function computes")
        claim = claim_of(computed[0], arithmetic, request.arrays, request.device, {**asked, **limits})
        judged = ("--function", described(backend, claim))
    elif limits or (arithmetic, request.arrays, request.device) != (None, "numpy", "cpu"):
        others = {"arithmetic": arithmetic, "arrays": request.arrays, "device": request.device}
        given = ", ".join([*limits, *(name for name, each in others.items() if each not in (None, "numpy", "cpu"))])
        raise ArgumentError(given, "given", "only with a function", f"{given}: only a function is described so")
    report = run(target, settings, request.deadline, judged=judged)
    outcomes = Counter(verdict.outcome for verdict in report.tally.verdicts)
    counts = (outcomes["passed"], outcomes["failed"], outcomes["not declared"])
    return Certification(report.tally.verdict, *counts, json.loads(text_of(report)))


def run(
    target: tuple[str, ...],
    settings: dict[str, Any],
    deadline: float | None,
    exitfirst: bool = False,
    judged: tuple[str, ...] = (),
) -> Report:
    """Run the suite on a backend.

    Args:
        target: how the command line names the backend: ``(name,)``, or an option and its value.
        settings: seeds, first_seed, ops, profiles, case, model and quick, as in the report.
        deadline: as of `lowbit.certify`.
        exitfirst: stop at the first failure.
        judged: how the judging process is told of the backend; by default as on the command line.

    Raises:
        LowbitError: the suite refuses an argument or the backend.
    """
    check_target("name" if len(target) == 1 else target[0].removeprefix("--"), target[-1])
    judged = judged or target
    arguments = list(judged if len(judged) == 2 else ("--backend", *judged))
    arguments += [] if deadline is None else ["--deadline", str(deadline)]
    arguments += ["--seeds", str(settings["seeds"]), "--first-seed", str(settings["first_seed"])]
    arguments += [argument for operation in settings["ops"] for argument in ("--op", operation)]
    arguments += [argument for name in settings["profiles"] for argument in ("--profile", name)]
    arguments += [part for name in ("case", "model") if settings[name] for part in (f"--{name}", settings[name])]
    arguments += ["--quick"] * settings["quick"] + ["--exitfirst"] * exitfirst
    started, before = datetime.now(UTC), suite()
    tally = run_suite(
        target[1] if target[0] == "--function" else target[-1], arguments, DEADLINE if deadline is None else deadline
    )
    report = report_of(tally, target, settings, started)
    if report.suite != before:
        text = "FORGED: files of lowbit or of its conformance suite changed while it ran; run it again"
        tally.verdicts.append(Verdict(THE_SUITE, "failed", text))
    return report


def _target(name: str | None, library: str | None, command: str | None, function: str | None) -> tuple[str, ...]:
    """How the command line names the backend; the path of a library is made absolute for other processes."""
    given = [("--library", os.path.abspath(library))] if library is not None else []
    given += [("--command", command)] if command is not None else []
    given += [("--function", function)] if function is not None else []
    named: list[tuple[str, ...]] = [*given, *([(name,)] if name is not None else [])]
    if len(named) != 1:
        raise ArgumentError("NAME, --library, --command and --function", f"{len(named)} of them", "one of them")
    return named[0]


def run_suite(name: str, arguments: list[str], deadline: float) -> Tally:
    """Run pytest on the suite in a process of its own and gather its verdicts.

    However that process ends, the run has passed only if every case has a verdict and the process reported its end.

    Raises:
        UnavailableError: pytest is not installed.
        ArgumentError: the method of isolation that the environment names does not exist.
        LowbitError: pytest refuses the arguments or the backend; the error has pytest's message.
    """
    if importlib.util.find_spec("pytest") is None:
        raise UnavailableError("the conformance suite", "pytest is not installed", "install lowbit[conformance]")
    isolation.methods()
    check_address_space("the conformance suite", ADDRESS_SPACE)
    reader, writer = os.pipe()
    given = ["-p", "lowbit_conformance.suite.plugin", "--pyargs", clauses.__name__]
    # No configuration, cache, bytecode or plugin from the current folder.
    given += ["-c", os.devnull, "-p", "no:cacheprovider", "-p", "no:terminal", "--import-mode=importlib"]
    given += ["--noconftest", "--capture=no", *(part for name in UNUSED for part in ("-p", f"no:{name}")), *arguments]
    key, run = secrets.token_bytes(32), Run(Tally(name))
    with (
        adopting(),
        open(reader, "rb", buffering=0),
        subprocess.Popen(
            python_command("-c", "import sys; exec(sys.stdin.read())"),  # reveals nothing to a backend that looks it up
            env=python_environment(),
            pass_fds=[writer],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as judge,
    ):
        os.close(writer)
        try:
            assert judge.stdin is not None
            judge.stdin.write(JUDGE.format(arguments=given, writer=writer, key=key).encode())
            judge.stdin.close()
            judge.stdin = None
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            terminal = Console(stderr=True)
            with Progress(*columns, console=terminal, transient=True, disable=not terminal.is_interactive) as progress:
                task = progress.add_task(name, total=None)

                def take(event: Event) -> None:
                    run.take(event)
                    progress.update(task, total=run.tally.collected or None, completed=len(run.decided))

                events = EventReader(key)
                ending = follow(judge, reader, events, deadline, take)
        except BaseException:
            end_below(judge.pid)
            judge.kill()
            raise
    if judge.returncode == WRONG_USE and not (run.loaded or events.forged):
        raise LowbitError(ending.output.strip().removeprefix("ERROR: "))
    for case, text in run.problems(events.forged, ending.stopped, judge.returncode, ending.output):
        run.tally.verdicts.append(Verdict(case, "failed", text))
    return run.tally


@dataclass
class Run:
    """The events so far, and whether they contradict each other.

    Attributes:
        tally: the verdicts.
        expected: the ids of all cases to decide, announced before a host was started, and the added ones.
        added: whether cases were added.
        decided: the cases with a verdict.
        running: the last case that ran, if it has no verdict.
        loaded: whether the backend was loaded.
        finished: whether the judge reported its end.
        impossible: the first event that contradicts an earlier one, in words.
    """

    tally: Tally
    expected: frozenset[str] = frozenset()
    added: bool = False
    decided: set[str] = field(default_factory=set)
    running: str | None = None
    loaded: bool = False
    finished: bool = False
    impossible: str = ""

    def take(self, event: Event) -> None:
        """Record an event."""
        kind = event.pop("event")
        if kind == "expected":
            self._expect(event["ids"])
        elif kind == "added":
            self._add(event["ids"])
        elif kind == "loaded":
            vars(self.tally).update(event)
            self.loaded = True
        elif kind == "start":
            self.running = event["id"]
        elif kind == "verdict":
            self.running = None
            self._decide(Verdict(**event))
        elif kind == "explained":
            self.tally.explain(**event)
        elif kind == "certificate":
            self.tally.certificates.append(Certificate(**event | {"missing": tuple(event["missing"])}))
        elif kind == "finished":
            self.finished = True

    def _expect(self, ids: list[str]) -> None:
        if self.expected:
            self._contradict("the cases were announced twice")
        self._announce(ids)

    def _add(self, ids: list[str]) -> None:
        if self.added or self.loaded:
            self._contradict("cases were added twice, or after the backend was loaded")
        self.added = True
        self._announce([*self.expected, *ids])

    def _announce(self, ids: list[str]) -> None:
        self.expected, self.tally.collected = frozenset(ids), len(ids)
        if len(self.expected) < len(ids):
            self._contradict("a case was announced twice")

    def _decide(self, verdict: Verdict) -> None:
        if verdict.id not in self.expected:
            self._contradict(f"there was a verdict on {quoted(verdict.id)}, which is no case of this run")
        elif verdict.id in self.decided:
            self._contradict(f"there were two verdicts on {quoted(verdict.id)}")
        else:
            self.decided.add(verdict.id)
            self.tally.verdicts.append(verdict)

    def _contradict(self, what: str) -> None:
        self.impossible = self.impossible or what

    def problems(self, forged: str, stopped: str, status: int, output: str) -> Iterator[tuple[str, str]]:
        """Reasons why the run has not passed regardless of its verdicts: the case or the suite, and the text of a
        verdict."""
        if forged or self.impossible:
            yield THE_SUITE, f"FORGED: {forged or self.impossible}"
        if stopped or status < 0 or not self.finished or status not in (PASSED, FAILED):
            yield self.running or THE_SUITE, stopped or death(status, output)
        elif self.tally.undecided and not self.tally.failures:
            yield THE_SUITE, f"UNDECIDED: {self.tally.undecided} of {self.tally.collected} cases have no verdict"
        elif status == FAILED and self.tally.verdict == "passed":
            yield THE_SUITE, death(status, output)
