"""``lowbit conformance NAME``: the suite as a command, with progress, a table and a verdict.

pytest runs as a process of its own and reports through a pipe. If the backend takes that process down, the command
is still there to name the case that was running.

Exit status: 0 all that is declared passed, 1 something failed or nothing was executed, 2 a wrong argument or an
unavailable backend.
"""

import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lowbit.errors import UnavailableError
from lowbit_conformance.report import report_of, show, text_of, write_html, write_json, write_junit
from lowbit_conformance.report.files import check_writable
from lowbit_conformance.tally import Certificate, Tally, Verdict

USAGE_ERROR = 2
WRONG_USE = 4  # pytest's status for a wrong use
DEADLINE = 120.0


def conformance(
    name: Annotated[str, typer.Argument(help="The backend under test; `lowbit backends` lists them.")],
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
    deadline: Annotated[float, typer.Option(min=0.1, help="Seconds that one case may take.")] = DEADLINE,
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
    arguments = ["--backend", name, "--seeds", str(seeds), "--first-seed", str(first_seed)]
    arguments += [argument for operation in op or [] for argument in ("--op", operation)]
    arguments += [argument for name in profile or [] for argument in ("--profile", name)]
    arguments += ["--case", case] if case else []
    arguments += ["--model", model] if model else []
    arguments += ["--exitfirst"] if exitfirst else []
    started = datetime.now(UTC)
    tally = run_suite(name, arguments, deadline)
    settings = {"seeds": seeds, "first_seed": first_seed, "ops": op or [], "profiles": profile or []}
    settings |= {"case": case, "model": model}
    report = report_of(tally, [name], settings, started)
    for _, path, write in files:
        if path:
            write(report, path)
    if as_json:
        print(text_of(report))
    else:
        show(report, Console())
    raise typer.Exit(0 if tally.verdict == "passed" else 1)


def run_suite(name: str, arguments: list[str], deadline: float = DEADLINE) -> Tally:
    """Run pytest on the suite in a process of its own and gather its verdicts.

    Whatever ends that process, it has not passed unless it said that it had finished.

    Raises:
        UnavailableError: pytest is not installed.
        typer.Exit: with status 2, after pytest has said what is wrong with the arguments or the backend.
    """
    if importlib.util.find_spec("pytest") is None:
        raise UnavailableError("the conformance suite", "pytest is not installed", "install lowbit[conformance]")
    reader, writer = os.pipe()
    command = [sys.executable, "-m", "pytest", "-p", "lowbit_conformance.plugin", "--pyargs", "lowbit_conformance"]
    # No configuration, cache, bytecode or plugin of the folder in which the user happens to stand.
    command += ["-c", os.devnull, "-p", "no:cacheprovider", "-p", "no:terminal", "--import-mode=importlib"]
    command += [f"--lowbit-events={writer}", *arguments]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
    with subprocess.Popen(
        command, pass_fds=[writer], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as suite:
        os.close(writer)
        try:
            run = _gather(name, reader, deadline)
            if run.hung:
                suite.kill()
            output = suite.communicate()[0]
        except BaseException:
            suite.kill()
            raise
    if suite.returncode == WRONG_USE:
        typer.echo("lowbit: " + output.strip().removeprefix("ERROR: "), err=True)
        raise typer.Exit(USAGE_ERROR)
    if run.hung:
        run.tally.verdicts.append(Verdict(run.running or "the suite", "failed", f"HUNG: longer than {deadline:g} s"))
    elif run.running or not run.finished:
        run.tally.verdicts.append(Verdict(run.running or "the suite", "failed", _death(suite.returncode, output)))
    return run.tally


@dataclass
class _Run:
    """What the events told: the verdicts, the case that was running when they ended, and how they ended."""

    tally: Tally
    running: str | None = None
    finished: bool = False
    hung: bool = False


def _gather(name: str, reader: int, deadline: float) -> _Run:
    """Read events to their end, or until a case takes too long, with a progress bar on standard error."""
    run = _Run(Tally(name))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(name, total=None)
        for event in _events(reader, lambda: deadline if run.running else None):
            if event is None:
                run.hung = True
                break
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


def _events(reader: int, patience: Callable[[], float | None]) -> Iterator[dict[str, Any] | None]:
    """The events of a pipe, one after another; None, and no more, if one is waited for longer than `patience`."""
    pending = b""
    try:
        while select.select([reader], [], [], patience())[0]:
            if not (part := os.read(reader, 65536)):
                return
            *lines, pending = (pending + part).split(b"\n")
            yield from (json.loads(line) for line in lines)
        yield None
    finally:
        os.close(reader)


def _death(returncode: int, output: str) -> str:
    """How the suite's process ended without having finished."""
    if returncode < 0:
        return f"CRASHED({signal.Signals(-returncode).name})"
    last = " ".join(output.split()[-20:])
    return f"CRASHED: the process ended with status {returncode}{': ' + last if last else ''}"
