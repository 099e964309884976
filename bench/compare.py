"""Side by side with other projects: ``nox -s bench -- --peers``, or in an environment that has them

    python bench/compare.py --peers
    python bench/compare.py --peers --quick
    python bench/compare.py --peers --problem 4096x11008 --peer ggml --threads 2 --batch 1

Writes peers.json, peers-roofline.svg and peers-error.svg into bench/results after every contest, so that an interrupt
keeps what is finished; ``--keep`` copies them into docs/data, where the page of the docs shows them (``stored.json``
for a run of stored matrices alone).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from select import select
from typing import IO, Any

from contests import BATCHES, QUICK_ROTATION, ROTATION, Contest, contests
from goals import goals
from machine import described, description
from measure import PATIENCE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from verdicts import Verdicts

from lowbit.system.interpreters import signal_name
from lowbit.system.storage import write_whole

HERE = Path(__file__).parent
RESULTS, KEPT = HERE / "results", HERE.parent / "docs/data"
FILES = ("peers.json", "peers-roofline.svg", "peers-error.svg")
STORED = "stored.json"
PAIRS = 30
LONGEST = 3600  # seconds that a problem may spend on waiting for free cores
SILENCE = 300  # seconds without a word, waits for free cores apart, after which a process is taken to hang
LIMITS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


Key = tuple[str, int, int]


def key_of(problem: dict[str, Any]) -> Key:
    """The contest, the batch and the number of threads, which identify a problem."""
    return problem["contest"], problem["batch"], problem["threads"]


@dataclass
class Run:
    """What a comparison has come to so far.

    Attributes:
        problems: the reports of the workers; some may be of an earlier run that is resumed.
        measured: which of them this run has measured.
    """

    options: argparse.Namespace
    problems: list[dict[str, Any]] = field(default_factory=list)
    measured: set[Key] = field(default_factory=set)
    ceilings: dict[str, dict[str, float]] = field(default_factory=dict)
    projects: list[dict[str, Any]] = field(default_factory=list)
    verdicts: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    started: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def done(self, threads: int) -> list[str]:
        """The problems that a worker with this many threads skips: this run has measured them, or an earlier run had
        enough free rounds."""
        return [
            f"{each['contest']} {each['batch']}"
            for each in self.problems
            if each["threads"] == threads
            and (key_of(each) in self.measured or each["free_rounds"] >= self.options.pairs)
        ]

    def take(self, problem: dict[str, Any]) -> None:
        """Add the report of a problem. It replaces an earlier report unless that one has more free rounds."""
        self.measured.add(key_of(problem))
        for place, earlier in enumerate(self.problems):
            if key_of(earlier) == key_of(problem):
                if problem["free_rounds"] >= earlier["free_rounds"]:
                    self.problems[place] = problem
                return
        self.problems.append(problem)

    def report(self) -> dict[str, Any]:
        """As the file holds it."""
        return {
            "schema": "lowbit-bench-peers/1",
            "started": self.started,
            "machine": description() | {"ceilings": self.ceilings},
            "projects": self.projects,
            "settings": {
                name: getattr(self.options, name) for name in ("pairs", "threads", "batch", "rotation", "quick")
            },
            "seconds": {name: round(value, 1) for name, value in self.seconds.items()},
            "conformance": self.verdicts,
            "goals": [asdict(goal) for goal in goals(self.problems)],
            "problems": self.problems,
            "failures": [f"{id or 'a process'}: {reason}" for id, reason in self.failed.items()],
        }


def run_worker(run: Run, threads: int, group: list[Contest], progress: Progress, task: Any) -> str:
    """Start one process and take in what it reports; the id of the contestant that it ended with, if it did not end
    well."""
    specification = {
        "contests": [asdict(contest) for contest in group],
        "threads": threads,
        "pairs": run.options.pairs,
        "patience": run.options.patience,
        "rotation": run.options.rotation * 2**20,
        "peers": run.options.peer,
        "left_out": run.failed,
        "not_installed": run.options.not_installed,
        "done": run.done(threads),
    }
    limits = dict.fromkeys(LIMITS, str(threads))
    command = [sys.executable, str(HERE / "worker.py"), json.dumps(specification)]
    with tempfile.TemporaryFile("w+") as said:
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=said, text=True, env=os.environ | limits
        ) as process:
            try:
                current = take_in(run, process, threads, progress, task)
            except KeyboardInterrupt:
                process.terminate()
                raise
        if process.returncode == 0:
            return ""
        said.seek(0)
        run.failed[current] = how_it_ended(process.returncode, said)
        if not current:  # it ended where it cannot be said who ended it
            progress.console.print(f"[red]{group[0].id}: {run.failed[current]}[/]")
        return current


def take_in(run: Run, process: "subprocess.Popen[str]", threads: int, progress: Progress, task: Any) -> str:
    """Follow the events of a process to its end; the id of who was last built or called."""
    current, started = "", time.perf_counter()
    for event in events(process, SILENCE + run.options.patience):
        kind = event.pop("event")
        if kind in ("building", "calling"):
            current = event["id"]
            progress.update(task, detail=f"{kind} {current}")
        elif kind == "round":
            current = ""
            progress.update(task, detail=f"round {event['done']} of {event['total']}")
        elif kind == "machine":
            run.ceilings[str(threads)] = event["ceilings"]
        elif kind == "problem":
            part = f"{event['contest']}, {threads} threads"
            run.seconds[part] = run.seconds.get(part, 0) + time.perf_counter() - started
            started = time.perf_counter()
            run.take(event)
            save(run)
            progress.advance(task)
    return current


def events(process: "subprocess.Popen[str]", silence: float) -> Iterator[dict[str, Any]]:
    """The lines of a process; one that is silent for too long is ended."""
    assert process.stdout is not None
    while True:
        if not select([process.stdout], [], [], silence)[0]:
            process.kill()
            return
        if not (line := process.stdout.readline()):
            return
        yield json.loads(line)


def how_it_ended(status: int, said: IO[str]) -> str:
    """In words, with the last line that was printed."""
    name = signal_name(-status) if status < 0 else f"status {status}"
    last = [line.strip() for line in said.read().splitlines() if line.strip()][-1:]
    return f"the process ended with {name}" + (f": {last[0][:200]}" if last else "")


def certify(run: Run, console: Console) -> None:
    """The verdict of the conformance suite on each instruction set of ours."""
    from peers.ours import instruction_sets

    verdicts, started = Verdicts(), time.perf_counter()
    for isa in instruction_sets():
        with console.status(f"conformance of cppyy, {isa}"):
            run.verdicts[isa] = verdicts.of("cppyy", isa)
    run.seconds["conformance"] = time.perf_counter() - started


def save(run: Run) -> None:
    """Write the report as it stands."""
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps(run.report(), indent=1, ensure_ascii=False)
    write_whole(RESULTS / FILES[0], text.encode() + b"\n")


def compare(run: Run, console: Console) -> None:
    """All processes one after the other, each again without who ended it."""
    chosen = run.options
    held = contests(chosen.quick, tuple(chosen.problem), tuple(chosen.batch))
    shapes = list(dict.fromkeys((contest.rows, contest.columns) for contest in held))
    total = sum(len(contest.batches) for threads in chosen.threads for contest in on(threads, held, chosen))
    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        *columns, TextColumn("{task.fields[detail]}"), console=console, transient=True, refresh_per_second=2
    ) as progress:
        task = progress.add_task("", total=total, detail="")
        for threads in chosen.threads:
            for shape in shapes:
                group = [c for c in on(threads, held, chosen) if (c.rows, c.columns) == shape]
                if not group:
                    continue
                progress.update(task, description=f"{shape[0]}x{shape[1]}, {threads} threads", detail="starting")
                while ended_by := run_worker(run, threads, group, progress, task):
                    console.print(f"[yellow]{ended_by}: {run.failed[ended_by]}; on without it[/]")


def on(threads: int, held: list[Contest], chosen: argparse.Namespace) -> list[Contest]:
    """The contests on so many threads: widths and groups are compared on the most, at the headline on all."""
    everything = threads == max(chosen.threads)
    return [contest for contest in held if everything or contest.family == "4 bits" or contest.headline]


def options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", action="store_true", help="what this program does; accepted for nox")
    parser.add_argument("--quick", action="store_true", help="one shape, one vector, two threads: under a minute")
    parser.add_argument("--problem", action="append", default=[], help="part of a contest's name: 4096x11008, groups")
    parser.add_argument("--peer", action="append", default=[], help="part of a contestant's name; lowbit's always run")
    parser.add_argument("--threads", type=int, action="append", default=[], help="by default 1 and all processors")
    parser.add_argument("--batch", type=int, action="append", default=[], help="rows of activations, 1 4 16 128")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="rounds with free cores that are wanted")
    parser.add_argument(
        "--patience", type=float, default=PATIENCE, help="seconds of a problem for waits and turns made again"
    )
    parser.add_argument("--resume", action="store_true", help="measure what bench/results lacks, or has of busy cores")
    parser.add_argument("--rotation", type=int, default=0, help="MiB of weights for each contestant, 1024 by default")
    parser.add_argument("--no-verdicts", action="store_true", help="do not ask the conformance suite")
    parser.add_argument("--keep", action="store_true", help="copy the results into docs/data")
    parser.add_argument("--not-installed", type=json.loads, default={}, help=argparse.SUPPRESS)  # project: reason
    chosen = parser.parse_args(arguments)
    if not 0 <= chosen.patience <= LONGEST:
        parser.error(f"--patience is {chosen.patience:g}; allowed: 0 to {LONGEST} seconds")
    cores = len(os.sched_getaffinity(0))
    chosen.threads = chosen.threads or ([min(2, cores)] if chosen.quick else sorted({1, min(2, cores)}))
    chosen.batch = chosen.batch or list(BATCHES)
    chosen.rotation = chosen.rotation or (QUICK_ROTATION if chosen.quick else ROTATION) // 2**20
    return chosen


def main() -> None:
    from peers_report import draw, show

    console, run = Console(), Run(options(sys.argv[1:]))
    started = time.perf_counter()
    if run.options.resume and (RESULTS / FILES[0]).is_file():
        kept = json.loads((RESULTS / FILES[0]).read_text())
        run.problems, run.seconds, run.verdicts = kept["problems"], kept["seconds"], kept["conformance"]
        run.ceilings, run.started = kept["machine"]["ceilings"], kept["started"]
    try:
        run.projects = described(run.options.not_installed)
        if not (run.options.no_verdicts or run.options.quick or run.verdicts):
            certify(run, console)
        compare(run, console)
    except KeyboardInterrupt:
        console.print("[yellow]interrupted: what is finished is kept[/]")
    run.seconds["all"] = time.perf_counter() - started
    if not run.problems:
        raise SystemExit("nothing was measured")
    save(run)
    report = json.loads((RESULTS / FILES[0]).read_text())
    show(report, console)
    draw(report, RESULTS)
    console.print(f"written to {RESULTS}: {', '.join(FILES)}; {run.seconds['all']:.0f} s")
    if run.options.keep:
        keep(console)


def keep(console: Console) -> None:
    """Copy the results to where the docs show them; the single rounds stay behind.

    A run of stored matrices alone has a file of its own, without pictures: the others are not measured again for it.
    """
    report = json.loads((RESULTS / FILES[0]).read_text())
    for problem in report["problems"]:
        for row in problem["contestants"]:
            del row["ms_of_rounds"]
    stored = all(problem["family"].startswith("stored") for problem in report["problems"])
    name, pictures = (STORED, ()) if stored else (FILES[0], FILES[1:])
    write_whole(KEPT / name, (json.dumps(report, indent=1, ensure_ascii=False) + "\n").encode())
    for picture in pictures:
        write_whole(KEPT / picture, (RESULTS / picture).read_bytes())
    console.print(f"kept in {KEPT}")


if __name__ == "__main__":
    main()
