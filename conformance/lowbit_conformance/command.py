"""``lowbit conformance NAME``: the suite as a command, with progress, a table and a verdict.

pytest runs as a process of its own, without the configuration of the folder in which the user stands, and reports
through a pipe; the backend runs in a third process (`host`). Should pytest itself end early, the command is still there
to name the case that was running.

Exit status: 0 all that is declared passed, 1 something failed or nothing was executed, 2 a wrong argument or an
unavailable backend.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lowbit.errors import ArgumentError, UnavailableError
from lowbit.host_memory import check_address_space
from lowbit.text import cleaned
from lowbit_conformance.arena import ARGUMENTS, CONTROL, RESULTS
from lowbit_conformance.report import report_of, show, text_of, write_html, write_json, write_junit
from lowbit_conformance.report.files import check_writable
from lowbit_conformance.tally import Certificate, Tally, Verdict

USAGE_ERROR = 2
# Plugins of pytest that look at every test and have nothing to see here.
UNUSED = ("logging", "unraisableexception", "threadexception", "faulthandler", "stepwise", "doctest")
WRONG_USE = 4  # pytest's status for a wrong use
DEADLINE = 30.0
ADDRESS_SPACE = CONTROL + ARGUMENTS + RESULTS + 2**30
"""Bytes that each of its processes needs: the arena (`lowbit_conformance.arena`), and what it imports."""


# What the process that judges runs. Signals that a backend may send to it are not its own to obey: the command, which
# the user interrupts, ends it.
JUDGE = """
import ctypes, os, signal
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, signal.SIG_IGN)
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
os.environ |= {{"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}}
import pytest
sys.exit(pytest.main({arguments!r}))
"""


def conformance(
    name: Annotated[
        str | None, typer.Argument(help="The backend under test: a name that `lowbit backends` lists, or module:Class.")
    ] = None,
    library: Annotated[str | None, typer.Option(help="Instead: a shared library that implements lowbit.h.")] = None,
    command: Annotated[str | None, typer.Option(help="Instead: a program that speaks the line protocol.")] = None,
    op: Annotated[
        list[str] | None,
        typer.Option(help="Only this operation or clause; repeatable."),
    ] = None,
    profile: Annotated[
        list[str] | None,
        typer.Option(help="Only the cases of this profile, and certify it; `lowbit profiles` lists them; repeatable."),
    ] = None,
    seeds: Annotated[int, typer.Option(help="How many seeds of the random tier.")] = 5,
    first_seed: Annotated[int, typer.Option(help="The first of them.")] = 0,
    case: Annotated[str | None, typer.Option(help="Only the case of this id.")] = None,
    model: Annotated[str | None, typer.Option(help="A GGUF file whose shapes and weights are tested too.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few cases of each clause, in seconds.")] = False,
    deadline: Annotated[float, typer.Option(min=0.1, help="Seconds that one call may take.")] = DEADLINE,
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
    target = _target(name, library, command)
    arguments = [*(target if len(target) == 2 else ("--backend", *target)), "--deadline", str(deadline)]
    arguments += ["--seeds", str(seeds), "--first-seed", str(first_seed), *(["--quick"] if quick else [])]
    arguments += [argument for operation in op or [] for argument in ("--op", operation)]
    arguments += [argument for name in profile or [] for argument in ("--profile", name)]
    arguments += ["--case", case] if case else []
    arguments += ["--model", model] if model else []
    arguments += ["--exitfirst"] if exitfirst else []
    started = datetime.now(UTC)
    tally = run_suite(target[-1], arguments)
    settings = {"seeds": seeds, "first_seed": first_seed, "ops": op or [], "profiles": profile or []}
    settings |= {"case": case, "model": model, "quick": quick}
    report = report_of(tally, target, settings, started)
    for _, path, write in files:
        if path:
            write(report, path)
    if as_json:
        print(text_of(report))
    else:
        show(report, Console())
    raise typer.Exit(0 if tally.verdict == "passed" else 1)


def _target(name: str | None, library: str | None, command: str | None) -> tuple[str, ...]:
    """How the command line names the backend; an option that begins a path needs its absolute form elsewhere."""
    given = [("--library", os.path.abspath(library))] if library is not None else []
    given += [("--command", command)] if command is not None else []
    named: list[tuple[str, ...]] = [*given, *([(name,)] if name is not None else [])]
    if len(named) != 1:
        raise ArgumentError("NAME, --library and --command", f"{len(named)} of them", "one of them")
    return named[0]


def run_suite(name: str, arguments: list[str]) -> Tally:
    """Run pytest on the suite in a process of its own and gather its verdicts.

    Whatever ends that process, the run has not passed unless it said that it had finished.

    Raises:
        UnavailableError: pytest is not installed.
        typer.Exit: with status 2, after pytest has said what is wrong with the arguments or the backend.
    """
    if importlib.util.find_spec("pytest") is None:
        raise UnavailableError("the conformance suite", "pytest is not installed", "install lowbit[conformance]")
    check_address_space("the conformance suite", ADDRESS_SPACE)
    reader, writer = os.pipe()
    given = ["-p", "lowbit_conformance.plugin", "--pyargs", "lowbit_conformance"]
    # No configuration, cache, bytecode or plugin of the folder in which the user happens to stand.
    given += ["-c", os.devnull, "-p", "no:cacheprovider", "-p", "no:terminal", "--import-mode=importlib"]
    given += ["--capture=no", *(part for name in UNUSED for part in ("-p", f"no:{name}"))]
    given += [f"--lowbit-events={writer}", *arguments]
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; exec(sys.stdin.read())"],  # says nothing to a backend that looks it up
        pass_fds=[writer],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as suite:
        assert suite.stdin is not None
        suite.stdin.write(JUDGE.format(arguments=given))
        suite.stdin.close()
        suite.stdin = None
        os.close(writer)
        try:
            run = _gather(name, reader)
            output = suite.communicate()[0]
        except BaseException:
            suite.kill()
            raise
    if suite.returncode == WRONG_USE:
        typer.echo(cleaned("lowbit: " + output.strip().removeprefix("ERROR: ")), err=True)
        raise typer.Exit(USAGE_ERROR)
    if run.running or not run.finished:
        run.tally.verdicts.append(Verdict(run.running or "the suite", "failed", _death(suite.returncode, output)))
    return run.tally


@dataclass
class _Run:
    """What the events told: the verdicts, the case that was running when they ended, and how they ended."""

    tally: Tally
    running: str | None = None
    finished: bool = False


def _gather(name: str, reader: int) -> _Run:
    """Read events to their end, with a progress bar on standard error."""
    run = _Run(Tally(name))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(name, total=None)
        for event in _events(reader):
            kind = event.pop("event")
            if kind == "collected":
                vars(run.tally).update(event)
                progress.update(task, total=run.tally.collected)
            elif kind == "start":
                run.running = event["id"]
            elif kind == "verdict":
                run.running = None
                run.tally.verdicts.append(Verdict(**event))
                progress.advance(task)
            elif kind == "certificate":
                run.tally.certificates.append(Certificate(**event | {"missing": tuple(event["missing"])}))
            else:
                run.finished = True
    return run


def _events(reader: int) -> Iterator[dict[str, Any]]:
    """The events of a pipe, one after another."""
    with open(reader, "rb") as pipe:
        for line in pipe:
            if line.endswith(b"\n"):
                yield json.loads(line)


def _death(returncode: int, output: str) -> str:
    """How the suite's process ended without having finished."""
    if returncode < 0:
        return f"CRASHED({signal.Signals(-returncode).name})"
    last = " ".join(output.split()[-20:])
    return f"CRASHED: the process ended with status {returncode}{': ' + last if last else ''}"
