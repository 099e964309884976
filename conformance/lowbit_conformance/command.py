"""``lowbit conformance NAME``: the suite as a command, with progress, a table and a verdict.

pytest runs as a process of its own and reports through a pipe. If the backend takes that process down, the command
is still there to name the case that was running.

Exit status: 0 all that is declared passed, 1 something failed or nothing was executed, 2 a wrong argument or an
unavailable backend.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from lowbit.errors import UnavailableError
from lowbit_conformance.tally import Tally, Verdict

USAGE_ERROR = 2
SHOWN_FAILURES = 10


def conformance(
    name: Annotated[str, typer.Argument(help="The backend under test; `lowbit backends` lists them.")],
    op: Annotated[list[str] | None, typer.Option(help="Only this operation, e.g. linear.qgemv; repeatable.")] = None,
    seeds: Annotated[int, typer.Option(help="How many seeds of the random tier.")] = 5,
    first_seed: Annotated[int, typer.Option(help="The first of them.")] = 0,
    case: Annotated[str | None, typer.Option(help="Only the case of this id.")] = None,
    model: Annotated[str | None, typer.Option(help="A GGUF file whose shapes and weights are tested too.")] = None,
    exitfirst: Annotated[bool, typer.Option("--exitfirst", "-x", help="Stop at the first failure.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Test a backend against the specification, clause by clause."""
    arguments = ["--backend", name, "--seeds", str(seeds), "--first-seed", str(first_seed)]
    arguments += [argument for operation in op or [] for argument in ("--op", operation)]
    arguments += ["--case", case] if case else []
    arguments += ["--model", model] if model else []
    arguments += ["--exitfirst"] if exitfirst else []
    tally = run_suite(name, arguments)
    if as_json:
        print(json.dumps(tally.as_json()))
    else:
        show(tally)
    raise typer.Exit(0 if tally.verdict == "passed" else 1)


def run_suite(name: str, arguments: list[str]) -> Tally:
    """Run pytest on the suite in a process of its own and gather its verdicts.

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
            tally, running = _gather(name, reader)
            output = suite.communicate()[0]
        except BaseException:
            suite.kill()
            raise
    if suite.returncode == 4:  # pytest's code for a wrong use
        typer.echo(output.strip().removeprefix("ERROR: "), err=True)
        raise typer.Exit(USAGE_ERROR)
    if suite.returncode < 0 or suite.returncode > 5:
        tally.verdicts.append(Verdict(running or "the suite", "failed", _death(suite.returncode)))
    elif suite.returncode not in (0, 1, 5):
        typer.echo(output, err=True)
        raise typer.Exit(suite.returncode)
    return tally


def _gather(name: str, reader: int) -> tuple[Tally, str | None]:
    """Read events to their end, with a progress bar on standard error; also returns the case last started."""
    tally, running = Tally(name), None
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with os.fdopen(reader) as events, Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(name, total=None)
        for line in events:
            event: dict[str, Any] = json.loads(line)
            kind = event.pop("event")
            if kind == "collected":
                tally.details = event["details"]
                progress.update(task, total=event["total"])
            elif kind == "start":
                running = event["id"]
            else:
                running = None
                tally.verdicts.append(Verdict(**event))
                progress.advance(task)
    return tally, running


def _death(returncode: int) -> str:
    """How the suite's process ended: by a signal, or by an exit that pytest does not know (cppyy turns a
    segmentation fault into 129 unless faulthandler is enabled)."""
    if returncode < 0:
        return f"CRASHED({signal.Signals(-returncode).name})"
    return f"CRASHED: the process ended with status {returncode}"


def show(tally: Tally) -> None:
    """The verdict for people, within 80 columns."""
    console = Console()
    table = Table(title=f"Conformance of {tally.backend}", title_justify="left")
    table.add_column("operation")
    for column in ("passed", "declared", "specified", "bound used"):
        table.add_column(column, justify="right")
    for row in tally.rows():
        share = row.shown_share
        style = "red" if row.passed < row.declared else None
        table.add_row(row.operation, str(row.passed), str(row.declared), str(row.specified), share, style=style)
    console.print(table)
    for failure in tally.failures[:SHOWN_FAILURES]:
        console.print(f"[red]failed[/red] {failure.id}", soft_wrap=True, highlight=False)
        console.print(f"  {failure.message}", soft_wrap=True, markup=False, highlight=False)
        command = f"lowbit conformance {tally.backend} --case {failure.id}"
        console.print(f"  reproduce: {command}", soft_wrap=True, markup=False, highlight=False)
    if len(tally.failures) > SHOWN_FAILURES:
        console.print(f"… and {len(tally.failures) - SHOWN_FAILURES} more failures (--json lists all)")
    color = "green" if tally.verdict == "passed" else "red"
    console.print(f"{tally.backend}: [bold {color}]{tally.verdict}[/]")
