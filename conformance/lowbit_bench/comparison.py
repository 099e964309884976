"""The comparison, seen from the command: it starts the process that measures, and continues without a backend that ends
that process or does not return in time.
"""

import json
import os
import select
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from lowbit.errors import LowbitError
from lowbit.system.interpreters import python_command, python_environment, signal_name
from lowbit_bench.inputs import Problem
from lowbit_bench.targets import Target
from lowbit_conformance.isolation.descendants import end_below
from lowbit_conformance.report.gather import machine
from lowbit_conformance.suite.deadlines import DEADLINE, LOADING_DEADLINE

ROTATION = 2**29
THREADS = ("LOWBIT_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
CLOSING = 10.0
"""Seconds allowed for closing the backends at the end."""


@dataclass(frozen=True)
class Plan:
    """The parameters of a comparison.

    Attributes:
        threads: of each backend.
        rounds: the number of rounds in which nothing else runs.
        deadline: seconds that a backend may take for one thing; None for the suite's deadlines.
    """

    threads: int
    rounds: int
    deadline: float | None = None

    def limit(self, doing: str) -> float | None:
        """Seconds until the next report of the process is due; None while no backend runs."""
        if not doing:
            return None
        return self.deadline or (LOADING_DEADLINE if doing == "loading" else DEADLINE)


@dataclass
class Heard:
    """The reports of the process so far.

    Attributes:
        problems: the measured problems.
        absent: which backend was not measured, at which problem, and why; the name is empty if a problem could not be
            made.
        finished: the number of problems that are done, measured or not.
        running: the running backend.
        doing: what it does: loading, preparing or calling; empty while none runs.
        done: whether the process reported its end.
    """

    problems: list[dict[str, Any]] = field(default_factory=list)
    absent: list[dict[str, str]] = field(default_factory=list)
    finished: int = 0
    running: str = ""
    doing: str = ""
    done: bool = False

    def take(self, event: Mapping[str, Any]) -> None:
        """Record one line of the process's output."""
        rest = {name: value for name, value in event.items() if name != "event"}
        if event["event"] == "entering":
            self.running, self.doing = rest["name"], rest["doing"]
        elif event["event"] == "left":
            self.running = self.doing = ""
        elif event["event"] == "absent":
            self.leave_out(**rest)
        elif event["event"] == "problem":
            self.problems.append(rest)
        elif event["event"] == "finished":
            self.finished += 1
        elif event["event"] == "done":
            self.done = True

    def leave_out(self, name: str, problem: str, reason: str) -> None:
        """Record once why a backend is not measured; a restarted process repeats its reports of backends that it cannot
        load."""
        if not any((each["name"], each["problem"]) == (name, problem) for each in self.absent):
            self.absent.append({"name": name, "problem": problem, "reason": reason})

    @property
    def never(self) -> set[str]:
        """The backends that were not measured at any problem."""
        return {each["name"] for each in self.absent if not each["problem"]}


def compared(targets: Sequence[Target], problems: Sequence[Problem], plan: Plan) -> dict[str, Any]:
    """The measurement; a backend that ends its process, or does not return in time, is left out from then on.

    Raises:
        LowbitError: the process ended while no backend ran.
    """
    heard, left, started = Heard(), list(targets), datetime.now(UTC)
    while left and heard.finished < len(problems):
        heard.running = heard.doing = ""
        try:
            ended = f"it ended the process: {measured(left, problems[heard.finished :], plan, heard)}"
        except TimeoutError as late:
            ended = str(late)
        if heard.done:
            break
        if not heard.running:
            raise LowbitError(f"the process that measures ended while no backend ran: {ended.rpartition(': ')[2]}")
        heard.leave_out(heard.running, "", ended)
        left = [each for each in left if each.shown not in heard.never]
    return {
        "machine": asdict(machine()),
        "started": started.isoformat(timespec="seconds"),
        "threads": plan.threads,
        "rounds": plan.rounds,
        "problems": heard.problems,
        "absent": heard.absent,
    }


def measured(targets: Sequence[Target], problems: Sequence[Problem], plan: Plan, heard: Heard) -> str:
    """Run the process once; returns how it ended: a signal or a status.

    Raises:
        TimeoutError: a backend took longer than it may.
    """
    given: dict[str, Any] = {"threads": plan.threads, "rounds": plan.rounds, "rotation": ROTATION}
    given |= {"targets": [asdict(each) for each in targets], "problems": [asdict(each) for each in problems]}
    environment = python_environment() | dict.fromkeys(THREADS, str(plan.threads))
    terminal = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn())
    with (
        subprocess.Popen(
            python_command("-m", "lowbit_bench.worker"), env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process,
        Progress(*columns, console=terminal, transient=True, disable=not terminal.is_interactive) as progress,
    ):
        assert process.stdin is not None and process.stdout is not None
        task = progress.add_task("preparing", total=plan.rounds)
        try:
            process.stdin.write(json.dumps(given).encode())
            process.stdin.close()
            for event in events(process.stdout.fileno(), plan, heard):
                heard.take(event)
                if heard.done:
                    break
                if event["event"] == "round":
                    progress.update(task, completed=event["done"])
                elif event["event"] == "entering":
                    progress.update(task, description=event["name"][-40:])
            if heard.done:
                process.wait(CLOSING)
        except subprocess.TimeoutExpired:  # everything was measured
            end(process)
        except BaseException:
            end(process)
            raise
    return signal_of(process.returncode)


def events(channel: int, plan: Plan, heard: Heard) -> Iterator[dict[str, Any]]:
    """The reports of the process, until it closes the channel.

    A deadline begins anew with each report, so it covers one thing that a backend does: loading, preparing a copy of
    the matrix, or a call.

    Raises:
        TimeoutError: the backend that runs has taken longer than it may; the text says for what.
    """
    rest = b""
    since = time.monotonic()
    while True:
        limit = plan.limit(heard.doing)
        wait = None if limit is None else max(0.0, since + limit - time.monotonic())
        if not select.select([channel], [], [], wait)[0]:
            raise TimeoutError(f"{heard.doing} took longer than {limit or 0:g} s; --deadline allows more")
        found = os.read(channel, 2**16)
        if not found:
            return
        *lines, rest = (rest + found).split(b"\n")
        for line in lines:
            yield json.loads(line)
        since = time.monotonic()


def end(process: "subprocess.Popen[bytes]") -> None:
    """Kill the process and the programs that its backends started."""
    end_below(process.pid)
    process.kill()


def signal_of(status: int) -> str:
    """How a process ended."""
    return signal_name(-status) if status < 0 else f"status {status}"
