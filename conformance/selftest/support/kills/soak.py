"""A long run: a thousand seeds of each backend, in portions, so that it resumes where it stopped.

``python -m kills.soak --out FILE`` runs ``lowbit conformance`` portion by portion and keeps the result of each. A
portion that was done with the same suite is not done again. A failure of one of these backends, which
are held to be right, is a false alarm of the suite or a defect of the backend; either makes the exit status 1.

With ``--processes`` or ``--cluster`` a portion is a task (`lowbit.system.tasks`). The file is then the same but for
dates and seconds. Backends get as many threads as a task may use.
"""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kills.portions import PORTION, Entry, Portion, Running
from kills.resumed import earlier, not_ours
from lowbit.cli import answered
from lowbit.cli.executors import executor_of
from lowbit.system.storage import write_whole
from lowbit.system.threads import usable_processors
from lowbit.text import one_line
from lowbit_conformance.report.gather import machine, suite

SCHEMA = "lowbit-soak-1"
BACKENDS = ("reference", "numpy", "cppyy")


class Soak:
    """What was done, and its file.

    Attributes:
        content: what the file holds: the portions of each backend by their first seed.
    """

    def __init__(self, file: Path) -> None:
        self._file, self._order = file, list[str]()
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

    def missing(self, backends: list[str], seeds: int) -> list[Portion]:
        """The portions left to do, one backend after another in turns."""
        self._order, done = backends, self.content["backends"]
        portions = [
            Portion(name, first, min(PORTION, seeds - first)) for first in range(0, seeds, PORTION) for name in backends
        ]
        return [part for part in portions if str(part.first) not in done.get(part.backend, {})]

    def add(self, name: str, first: int, entry: Entry) -> None:
        """Note a portion, in its place whenever it comes, and write the file, under a temporary name first."""
        backends = self.content["backends"]
        portions = {**backends.get(name, {}), str(first): entry}
        backends[name] = {each: portions[each] for each in sorted(portions, key=int)}
        names = [*(each for each in self._order if each in backends), *backends]
        self.content["backends"] = {each: backends[each] for each in names}
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


def main(
    out: Annotated[Path, typer.Option(help="The file, as JSON; what it holds already is not done again.")],
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of the random tier.")] = 1000,
    backend: Annotated[list[str] | None, typer.Option(help="Only this one; repeatable.")] = None,
    processes: Annotated[
        int | None, typer.Option(help="Number of portions that run at a time; one by default.")
    ] = None,
    cluster: Annotated[str | None, typer.Option(help="Run portions on a Ray cluster: HOST:PORT or auto.")] = None,
) -> None:
    """Run many seeds of the backends that are held to be right."""
    executor, soak = executor_of(processes, cluster), Soak(out)
    missing, work = soak.missing(backend or list(BACKENDS), seeds), Running(soak.content["suite"])
    here = ((part, work(part, usable_processors())) for part in missing)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("soak", total=len(missing))
        for part, entry in here if executor is None else executor.run(work, missing):
            soak.add(part.backend, part.first, entry)
            progress.update(task, description=f"after {part}", advance=1)
    failures = list(soak.failures())
    for line in failures:
        typer.echo(one_line(line))
    typer.echo(f"{len(failures)} failures")
    raise typer.Exit(1 if failures else 0)


if __name__ == "__main__":
    answered(lambda: typer.run(main))
