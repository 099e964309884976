"""The process that measures: it loads the backends, and reports line by line.

``python -m lowbit_bench.worker`` reads one JSON object from standard input and writes one a line to what was its
standard output; what backends print goes to standard error. Because the process is a separate one, the memory of each
comparison is released, and if a backend ends it, `lowbit_bench.command` knows which one and continues without it.
"""

import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np

from lowbit.backend import Backend
from lowbit.errors import LowbitError
from lowbit.tensor_formats.stored import Stored
from lowbit_bench.inputs import PRODUCTS, Call, Problem, activations_of, call_of, prepared, weights_of
from lowbit_bench.intervals import interval, ratios
from lowbit_bench.judging import Check, check_of, part_of
from lowbit_bench.judging_layers import check_of_other
from lowbit_bench.layers import arguments_of, bytes_of, call_of_other
from lowbit_bench.reading import Reader
from lowbit_bench.rounds import CallError, Contestant, kept, measure
from lowbit_bench.targets import Target

Say = Callable[..., None]
MOST_COPIES = 64


def main() -> None:
    """Measure as standard input says: targets, problems, rounds, threads, rotation."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command kills this process
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    given, say = json.load(sys.stdin), sayer()
    reader = Reader(given["threads"])
    targets = [Target(**each) for each in given["targets"]]
    with ExitStack() as opened:
        backends = dict(usable(targets, opened, say))
        for fields in given["problems"]:
            if backends:
                compare(Problem.read(fields), backends, reader, given, say)
            say("finished")
        say("done")  # without this report the command knows that a backend has ended this process
    reader.close()


def sayer() -> Say:
    """A function that writes to the standard output of this process, which is then inaccessible to backends."""
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(event: str, **fields: Any) -> None:
        channel.write(json.dumps({"event": event, **fields}) + "\n")

    return say


@contextmanager
def turn(say: Say, name: str, doing: str) -> Iterator[None]:
    """Report what a backend does, and that it has returned."""
    say("entering", name=name, doing=doing)
    try:
        yield
    finally:
        say("left")


def usable(targets: Iterable[Target], opened: ExitStack, say: Say) -> Iterator[tuple[str, Backend]]:
    """The backends that can run here; for each of the others, the reason is reported."""
    for target in targets:
        try:
            with turn(say, target.shown, "loading"):
                backend = opened.enter_context(target.open())
        except (Exception, SystemExit) as error:  # third-party code may raise anything
            say("absent", name=target.shown, problem="", reason=in_words(error))
        else:
            yield target.shown, backend


def in_words(error: BaseException) -> str:
    """An error on one line."""
    text = " ".join(str(error).split())[:300]
    return text if isinstance(error, LowbitError) else f"{type(error).__name__}: {text}"


# **One problem.**


@dataclass(frozen=True)
class Task:
    """What all backends compute.

    Attributes:
        problem: its sizes and types.
        first: from a backend to the timed call, a function that makes the same call on copies of its inputs, and the
            bytes that a call reads besides its result.
        check: of the result; None if there is no judge for it.
        result_counts: whether the bytes of the result are counted too.
    """

    problem: Problem
    first: Callable[[Backend], tuple[Call, Callable[[], Call], int]]
    check: Check | None
    result_counts: bool = False


def compare(
    problem: Problem, backends: Mapping[str, Backend], reader: Reader, given: Mapping[str, Any], say: Say
) -> None:
    """Measure all backends at one problem."""
    say("left")
    try:
        task = task_of(problem)
    except Exception as error:  # such as too little memory
        say("absent", name="", problem=problem.id, reason=in_words(error))
        return
    contestants = []
    for name, backend in backends.items():
        try:
            contestants.append(contestant(name, backend, task, given["rotation"], say))
        except (Exception, SystemExit) as error:
            say("absent", name=name, problem=problem.id, reason=in_words(error))
    while contestants:
        try:
            free = rounds_of(contestants, reader, given["rounds"], say)
        except CallError as failed:
            say("absent", name=failed.name, problem=problem.id, reason=in_words(failed.error))
            contestants = [
                Contestant(each.name, each.calls, each.nbytes) for each in contestants if each.name != failed.name
            ]
            continue
        rows = [row_of(each, kept(free, given["rounds"])) | {"checked": task.check is not None} for each in contestants]
        say("problem", id=problem.id, problem=vars(problem), rows=rows, rounds=len(free), free=sum(free))
        return


def rounds_of(contestants: list[Contestant], reader: Reader, rounds: int, say: Say) -> list[bool]:
    """Measure, with a report of each turn; returns for each round whether it was free."""

    def entering(name: str) -> None:
        say("entering", name=name, doing="calling")

    free = measure(contestants, reader, rounds, entering, lambda done, total: say("round", done=done, total=total))
    say("left")
    return free


def task_of(problem: Problem) -> Task:
    """The task for a problem; its inputs are drawn once."""
    if problem.operation not in PRODUCTS:
        arguments = arguments_of(problem)

        def other(backend: Backend) -> tuple[Call, Callable[[], Call], int]:
            def again() -> Call:
                return call_of_other(backend, problem, arguments)

            return again(), again, bytes_of(arguments)

        return Task(problem, other, check_of_other(problem, arguments), result_counts=True)
    weights = weights_of(problem)
    part = part_of(problem, weights)
    x = activations_of(problem, part.deviation if part else 0.0)

    def product(backend: Backend) -> tuple[Call, Callable[[], Call], int]:
        matrix, nbytes = prepared(backend, problem, weights)

        def again() -> Call:
            # Without a prepared form a call reads the stored matrix itself, so that each backend has its own copy.
            own = deepcopy(weights) if isinstance(matrix, Stored) else prepared(backend, problem, weights)[0]
            return call_of(backend, problem, own, x)

        return call_of(backend, problem, matrix, x), again, nbytes

    return Task(problem, product, check_of(problem, weights, x, part))


def contestant(name: str, backend: Backend, task: Task, rotation: int, say: Say) -> Contestant:
    """A backend with enough copies of its inputs to fill the rotation, after one call with a right result.

    Raises:
        LowbitError: the backend does not declare the problem, or the result is wrong.
        ValueError: the result is not finite.
    """
    with turn(say, name, "preparing"):
        first, again, nbytes = task.first(backend)
    with turn(say, name, "calling"):
        result = first()
    if task.check is not None:
        task.check(backend, result)
    elif task.problem.operation in PRODUCTS and not np.isfinite(np.asarray(result, np.float64)).all():
        raise ValueError("the result is not finite")
    nbytes += bytes_of(result) if task.result_counts else 0
    calls = [first]
    for _ in range(min(max(rotation // max(nbytes, 1), 1), MOST_COPIES) - 1):
        with turn(say, name, "preparing"):
            calls.append(again())
        with turn(say, name, "calling"):
            calls[-1]()  # a backend may choose its kernel for a matrix on the first call, which a model makes once
    return Contestant(name, calls, nbytes)


def row_of(one: Contestant, counted: list[int]) -> dict[str, Any]:
    """The measurement of one backend: seconds, fraction of the reading speed, bytes per second."""
    runs, reads = ([times[number] for number in counted] for times in (one.runs, one.reads))
    seconds, share = interval(runs), interval(ratios(reads, runs))
    return {
        "backend": one.name,
        "bytes": one.nbytes,
        "copies": len(one.calls),
        "seconds": list(seconds),
        "share": list(share),
        "read_seconds": float(np.median(reads)),
        "bytes_per_second": one.nbytes / seconds.median,
        "runs": [float(f"{run:.4g}") for run in runs],
    }


if __name__ == "__main__":
    main()
