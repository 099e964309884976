"""The kill matrix: every defect against the suite, and the control beside them.

``python -m kills.matrix --out FILE`` runs each arithmetical defect, and each habit of all operations, to its first kill
by every clause that it is said to break, and each other habit to its first kill by any; ``--first-kill`` stops every
defect at its first, and ``--all`` runs every case. What was done before is not done again, as long as the suite and the
settings are the same. A defect that survives, a clause that does not find it, one that is found for another reason than
its own, and a false alarm over the control, which has no defect, make the exit status 1.

``--sample N`` tries one defect in N, and the control on one operation in N, always the same ones. The tests
look for false alarms with right backends, on every operation.
"""

import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kills.bank import ALL
from kills.habits import Habit
from kills.resumed import earlier, not_ours
from kills.trial import Stop, Trial, try_out
from lowbit.cli import answered
from lowbit.operations import OPERATIONS
from lowbit.system.storage import write_whole
from lowbit.text import one_line
from lowbit_conformance.defects.backends import CONTROL
from lowbit_conformance.report.gather import machine, suite

SCHEMA = "lowbit-kill-matrix-1"
SAVED_EVERY = 2.0  # seconds

Entry = dict[str, Any]
Mode = Literal["claims", "first-kill", "all"]


def entry_of(trial: Trial) -> Entry:
    """What the matrix keeps of a trial: for each clause how many cases found the defect, and the first of them."""
    first, kept = trial.first, ("verdict", "case", "executed", "killed", "seconds")
    clauses = {clause: {name: getattr(found, name) for name in kept} for clause, found in trial.findings.items()}
    own = {"killed": trial.killed, "verdict": first.verdict, "case": first.case, "first_kill": first.seconds}
    return own | {"seconds": trial.seconds, "clauses": clauses}


def described(name: str) -> Entry:
    """What a reader is told of a defect."""
    defect = ALL[name]
    lists = {"operations": list(defect.operations), "expected": list(defect.verdicts)}
    return {"name": name, "cause": defect.cause, "seen": defect.seen, **lists}


def fair(entry: Entry) -> bool:
    """Whether the defect was found, and for its own reason."""
    return bool(entry.get("killed")) and any(entry["verdict"].startswith(word) for word in entry["expected"])


def claims(name: str) -> tuple[str, ...]:
    """The clauses of which each must find the defect; of most habits none in particular, as any case may show them."""
    defect = ALL[name]
    return () if isinstance(defect, Habit) and not defect.everywhere else defect.clauses


def unkilled(name: str, entry: Entry) -> list[str]:
    """The clauses that a defect is said to break and that do not find it."""
    clauses = entry.get("clauses", {})
    return [clause for clause in claims(name) if not clauses.get(clause, {}).get("killed")]


def text_of(content: Entry) -> str:
    """JSON with a line for each operation of the control and for each defect, so that two runs can be compared."""

    def line(value: object) -> str:
        return json.dumps(value, ensure_ascii=False)

    head = line({name: value for name, value in content.items() if name not in ("control", "defects")})[:-1]
    control = ",\n".join(f"{line(name)}: {line(entry)}" for name, entry in content["control"].items())
    defects = ",\n".join(map(line, content["defects"]))
    return f'{head},\n"control": {{\n{control}\n}},\n"defects": [\n{defects}\n]}}\n'


class Matrix:
    """The matrix as it grows, and its file.

    Attributes:
        content: what the file holds.
    """

    def __init__(self, file: Path, seeds: int, mode: Mode, sample: int = 1) -> None:
        self._file, self._saved = file, 0.0
        self._names, self._operations = list(ALL)[::sample], list(OPERATIONS)[::sample]
        settings = {"suite": suite().sha256, "seeds": seeds, "mode": mode} | ({"sample": sample} if sample > 1 else {})
        self.content: Entry = {"schema": SCHEMA, **settings, "version": suite().version, "machine": asdict(machine())}
        self.content |= {"date": "", "control": {}, "defects": {}}
        before = earlier(file, SCHEMA)
        if before is None:
            return
        if any(before.get(name) != value for name, value in settings.items()):
            typer.echo(f"lowbit: {one_line(str(file))} is of another suite or other settings; begun anew", err=True)
            return
        try:
            self.content |= {"control": dict(before["control"])}
            self.content |= {"defects": {each["name"]: dict(each) for each in before["defects"]}}
            for _ in self.complaints():  # which reads every field
                pass
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise not_ours(file, "with other fields") from error

    def missing(self) -> list[tuple[str, str]]:
        """What is left to do: the name of a defect, or the control with the operation that it is tried on."""
        control = [
            (CONTROL.name, operation) for operation in self._operations if operation not in self.content["control"]
        ]
        return control + [(name, "") for name in self._names if name not in self.content["defects"]]

    def add(self, name: str, operation: str, entry: Entry) -> None:
        """Note what came of one of them."""
        if name == CONTROL.name:
            self.content["control"][operation] = entry
        else:
            self.content["defects"][name] = described(name) | entry
        if time.monotonic() - self._saved > SAVED_EVERY:
            self.save()

    def save(self) -> None:
        """Write the file, under a temporary name first."""
        self.content["date"] = datetime.now(UTC).date().isoformat()
        defects = [self.content["defects"][name] for name in ALL if name in self.content["defects"]]
        text = text_of(self.content | {"defects": defects})
        self._file.parent.mkdir(parents=True, exist_ok=True)
        # Half of a surrogate pair that the file spelled is spelled again so: JSON has the same escape as Python.
        write_whole(self._file, text.encode(errors="backslashreplace"))
        self._saved = time.monotonic()

    def complaints(self) -> Iterator[str]:
        """A line for everything that is not as it should be."""
        for operation, entry in self.content["control"].items():
            if entry.get("killed") or "error" in entry:
                yield f"false alarm: {entry.get('verdict') or entry.get('error')} in {entry.get('case') or operation}"
        for name, entry in self.content["defects"].items():
            if not entry.get("killed"):
                yield f"survivor: {name} ({entry['cause']}) {entry.get('error', '')}".rstrip()
            elif not fair(entry):
                yield f"found for another reason: {name} is {entry['verdict']} in {entry['case']}"
            elif idle := unkilled(name, entry) if self.content["mode"] != "first-kill" else []:
                yield f"not found by every clause: {name} by {', '.join(idle)}"


def work(name: str, operation: str, seeds: int, mode: Mode, deadline: float | None) -> Entry:
    """One trial, in a process of its own pool."""
    try:
        if name == CONTROL.name:
            return entry_of(try_out(name, seeds=seeds, stop="never", operations=(operation,), deadline=deadline))
        if mode == "claims" and (own := claims(name)):
            return entry_of(try_out(name, seeds=seeds, stop="clause", only=own, deadline=deadline))
        stop: Stop = "never" if mode == "all" else "defect"
        return entry_of(try_out(name, seeds=seeds, stop=stop, deadline=deadline))
    except Exception as error:  # one that cannot be tried must not end the others
        return {"killed": False, "error": f"{type(error).__name__}: {error}"[:400]}


def fill(matrix: Matrix, seeds: int, mode: Mode, deadline: float | None, jobs: int) -> None:
    """Do what is missing, several at a time, with progress on standard error."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        Progress(*columns, console=Console(stderr=True), transient=True) as progress,
        ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool,
    ):
        missing = matrix.missing()
        task = progress.add_task("kill matrix", total=len(missing))
        futures: dict[Future[Entry], tuple[str, str]] = {
            pool.submit(work, name, operation, seeds, mode, deadline): (name, operation) for name, operation in missing
        }
        try:
            for future in as_completed(futures):
                name, operation = futures[future]
                matrix.add(name, operation, future.result())
                progress.update(task, advance=1, description=f"{name} {operation}".rstrip())
        finally:
            for future in futures:
                future.cancel()
            matrix.save()


def main(
    out: Annotated[Path, typer.Option(help="The file, as JSON; what it holds already is not done again.")],
    seeds: Annotated[int, typer.Option(min=0, help="Seeds of the random tier.")] = 20,
    first_kill: Annotated[bool, typer.Option("--first-kill", help="Stop every defect at its first kill.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Run every case.")] = False,
    sample: Annotated[
        int, typer.Option(min=1, help="Try one defect and one operation of the control in this many.")
    ] = 1,
    deadline: Annotated[
        float | None,
        typer.Option(min=0.1, help="Seconds that one call may take.", show_default="3 for what hangs, else 120"),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Trials at a time.")] = len(os.sched_getaffinity(0)),
) -> None:
    """Try every defect, and the control, against the suite."""
    mode: Mode = "all" if every else "first-kill" if first_kill else "claims"
    matrix = Matrix(out, seeds, mode, sample)
    fill(matrix, seeds, mode, deadline, jobs)
    complaints = list(matrix.complaints())
    for line in complaints:
        typer.echo(one_line(line))
    typer.echo(f"{len(matrix.content['defects'])} of {len(ALL)} defects, {len(complaints)} complaints")
    raise typer.Exit(1 if complaints else 0)


if __name__ == "__main__":
    answered(lambda: typer.run(main))
