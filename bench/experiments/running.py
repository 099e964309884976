"""Running an experiment row by row: finished rows are kept, and an interrupted run goes on where it ended.

A file holds the runs that measured its rows, each with its machine, versions and date; a row has the number of its run.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from machine import description
from training.files import write_json

RESULTS = Path(__file__).parents[2] / "docs/data/results"

Settings = Mapping[str, str | int]
Result = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        settings: what is measured; no two rows of an experiment have the same.
        measure: does it; gives JSON.
    """

    settings: Settings
    measure: Callable[[], Result]


@dataclass(frozen=True)
class Experiment:
    """A table of measurements.

    Attributes:
        name: of its file.
        about: what it measures, in one sentence.
        rows: its rows, on little text where they shall be quick.
    """

    name: str
    about: str
    rows: Callable[[bool], Sequence[Row]]


def run(experiment: Experiment, folder: Path = RESULTS, *, quick: bool = False, fresh: bool = False) -> Path:
    """Measure the rows that are not there yet, one after another; each is written as soon as it is measured.

    Args:
        experiment: which.
        folder: gets its file.
        quick: use little text.
        fresh: measure the rows anew that are there.

    Returns:
        The file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{experiment.name}.json"
    rows = list(experiment.rows(quick))
    kept = {} if fresh else _kept(file, quick)
    done = {_key(row.settings): kept[_key(row.settings)] for row in rows if _key(row.settings) in kept}
    began, left, this_run = time.monotonic(), len(rows) - len(done), stamp()
    for row in rows:
        key = _key(row.settings)
        if key in done:
            continue
        started = time.monotonic()
        result = dict(row.measure())
        seconds = time.monotonic() - started
        done[key] = {"settings": dict(row.settings), "seconds": round(seconds, 1), "run": this_run, **result}
        _write(file, experiment, quick, [done[_key(each.settings)] for each in rows if _key(each.settings) in done])
        measured = sum(_key(each.settings) in done for each in rows) - (len(rows) - left)
        rest = (time.monotonic() - began) / measured * (left - measured)
        words = " ".join(str(value) for value in row.settings.values())
        told = f"{experiment.name} {len(done)}/{len(rows)}  {words}  {rest / 60:.1f} min left"
        print(told, file=sys.stderr, flush=True)
    _write(file, experiment, quick, [done[_key(row.settings)] for row in rows])
    return file


def _key(settings: Settings) -> str:
    return json.dumps(dict(settings), sort_keys=True)


def stamp() -> dict[str, Any]:
    """What a run has in common: machine, versions and date."""
    packages = {name: version(name) for name in ("lowbit", "numpy")}
    return {"machine": description(), "versions": packages, "date": datetime.now(UTC).date().isoformat()}


def _kept(file: Path, quick: bool) -> dict[str, Result]:
    """The rows of a file of the same kind, each with its whole run."""
    if not file.is_file():
        return {}
    told = json.loads(file.read_text("utf-8"))
    if told["quick"] != quick:
        return {}
    return {_key(row["settings"]): row | {"run": told["runs"][row["run"]]} for row in told["rows"]}


def _write(file: Path, experiment: Experiment, quick: bool, rows: Sequence[Result]) -> None:
    runs = list[Mapping[str, Any]]()
    for row in rows:
        if row["run"] not in runs:
            runs.append(row["run"])
    numbered = [{**row, "run": runs.index(row["run"])} for row in rows]
    told = {"experiment": experiment.name, "about": experiment.about, "quick": quick, "runs": runs, "rows": numbered}
    write_json(file, told)
