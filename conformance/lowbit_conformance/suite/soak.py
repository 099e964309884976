"""A long run: a thousand seeds of each backend, in portions, so that it can be stopped and go on.

``python -m lowbit_conformance.suite.soak --out FILE`` runs ``lowbit conformance`` portion by portion and keeps what
came of each. A portion that was done with the same suite is not done again. A failure of one of these backends, which
are held to be right, is a false alarm of the suite or a defect of the backend; either makes the exit status 1.
"""

import json
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from lowbit.cli import answered
from lowbit.system.interpreters import python_command, python_environment
from lowbit.system.storage import write_whole
from lowbit.text import one_line
from lowbit_conformance.report.gather import machine, suite
from lowbit_conformance.suite.resumed import earlier, not_ours

SCHEMA = "lowbit-soak-1"
BACKENDS = ("reference", "numpy", "cppyy")
PORTION = 20

Entry = dict[str, Any]


class Soak:
    """What was done, and its file.

    Attributes:
        content: what the file holds: the portions of each backend by their first seed.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self.content: Entry = {"schema": SCHEMA, "suite": suite().sha256, "version": suite().version}
        self.content |= {"machine": vars(machine()), "date": "", "backends": {}}
        before = earlier(file, SCHEMA)
        if before is None:
            return
        if before.get("suite") != self.content["suite"]:
            typer.echo(f"lowbit: {one_line(str(file))} is of another suite and is begun anew", err=True)
        elif is_sound(before.get("backends")):
            self.content["backends"] = before["backends"]
        else:
            raise not_ours(file, "with other fields")

    def missing(self, backends: list[str], seeds: int) -> list[tuple[str, int]]:
        """The portions left to do: backend and first seed, one backend after another in turns."""
        portions = [(name, first) for first in range(0, seeds, PORTION) for name in backends]
        return [part for part in portions if str(part[1]) not in self.content["backends"].get(part[0], {})]

    def add(self, name: str, first: int, entry: Entry) -> None:
        """Note a portion, and write the file, under a temporary name first."""
        self.content["backends"].setdefault(name, {})[str(first)] = entry
        self.content["date"] = datetime.now(UTC).date().isoformat()
        self._file.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.content, indent=1, ensure_ascii=False) + "\n"
        # Half of a surrogate pair that the file spelled is spelled again so: JSON has the same escape as Python.
        write_whole(self._file, text.encode(errors="backslashreplace"))

    def failures(self) -> Iterator[str]:
        """A line for each failure."""
        for name, portions in self.content["backends"].items():
            for entry in portions.values():
                yield from (f"{name}: {failure}" for failure in entry["failures"])


def is_sound(backends: object) -> bool:
    """Whether this is, for each backend, an entry with a list of failures for each first seed."""
    if not isinstance(backends, dict) or not all(isinstance(portions, dict) for portions in backends.values()):
        return False
    entries = [entry for portions in backends.values() for entry in portions.values()]
    lists = [entry.get("failures") if isinstance(entry, dict) else None for entry in entries]
    return all(isinstance(each, list) and all(isinstance(line, str) for line in each) for each in lists)


def portion(name: str, first: int, count: int) -> Entry:
    """Run one portion."""
    command = python_command("-m", "lowbit", "conformance", name, "--json")
    command += ["--first-seed", str(first), "--seeds", str(count)]
    done = subprocess.run(command, env=python_environment(), capture_output=True, text=True, check=False)
    if not done.stdout:
        return {"seeds": count, "counts": {}, "failures": [done.stderr.strip()[-400:] or "no answer"], "seconds": 0.0}
    try:
        report = json.loads(done.stdout)
    except ValueError:
        return {"seeds": count, "counts": {}, "failures": ["an answer that is not JSON"], "seconds": 0.0}
    failures = [f"{failure['verdict']} in {failure['id']}" for failure in report["failures"]]
    return {"seeds": count, "counts": report["counts"], "failures": failures, "seconds": report["seconds"]}


def main(
    out: Annotated[Path, typer.Option(help="The file, as JSON; what it holds already is not done again.")],
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of the random tier.")] = 1000,
    backend: Annotated[list[str] | None, typer.Option(help="Only this one; repeatable.")] = None,
) -> None:
    """Run many seeds of the backends that are held to be right."""
    soak = Soak(out)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as progress:
        missing = soak.missing(backend or list(BACKENDS), seeds)
        task = progress.add_task("soak", total=len(missing))
        for name, first in missing:
            progress.update(task, description=f"{name}, seeds {first} and on")
            soak.add(name, first, portion(name, first, min(PORTION, seeds - first)))
            progress.advance(task)
    failures = list(soak.failures())
    for line in failures:
        typer.echo(one_line(line))
    typer.echo(f"{len(failures)} failures")
    raise typer.Exit(1 if failures else 0)


if __name__ == "__main__":
    answered(lambda: typer.run(main))
