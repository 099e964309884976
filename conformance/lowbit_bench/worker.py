"""The process that measures: it loads the backends, and reports line by line.

``python -m lowbit_bench.worker`` reads one JSON object from standard input and writes one a line to what was its
standard output; what backends print goes to standard error. Because the process is a separate one, the memory of each
comparison is released, and if a backend ends it, `lowbit_bench.command` knows which one and continues without it.
"""

import json
import os
import resource
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np

from lowbit.backend import Backend
from lowbit.errors import LowbitError
from lowbit_bench.inputs import PRODUCTS, Problem, activations_of, call_of, prepared, weights_of
from lowbit_bench.intervals import interval, ratios
from lowbit_bench.layers import arguments_of, bytes_of, call_of_other
from lowbit_bench.reading import Reader
from lowbit_bench.rounds import Contestant, kept, measure
from lowbit_bench.targets import Target

Say = Callable[..., None]
MOST_COPIES = 64


def main() -> None:
    """Measure what standard input says: targets, problems, rounds, threads, rotation."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    given, say = json.load(sys.stdin), sayer()
    reader = Reader(given["threads"])
    targets = [Target(**each) for each in given["targets"]]
    with ExitStack() as opened:
        backends = dict(usable(targets, opened, say))
        for fields in given["problems"]:
            if backends:
                compare(Problem.read(fields), backends, reader, given, say)
    reader.close()


def sayer() -> Say:
    """A function that writes to the standard output of this process, which backends can then no longer reach."""
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(event: str, **fields: Any) -> None:
        channel.write(json.dumps({"event": event, **fields}) + "\n")

    return say


def usable(targets: Iterable[Target], opened: ExitStack, say: Say) -> Iterable[tuple[str, Backend]]:
    """The backends that can run here; for each of the others, the reason is reported."""
    for target in targets:
        say("entering", name=target.shown)
        try:
            yield target.shown, opened.enter_context(target.open())
        except Exception as error:  # whatever a stranger's code raises
            say("absent", name=target.shown, problem="", reason=in_words(error))


def in_words(error: Exception) -> str:
    """An error in one line."""
    text = " ".join(str(error).split())[:300]
    return text if isinstance(error, LowbitError) else f"{type(error).__name__}: {text}"


def compare(
    problem: Problem, backends: Mapping[str, Backend], reader: Reader, given: Mapping[str, Any], say: Say
) -> None:
    """All backends at one problem."""
    build = builder(problem, given["rotation"])
    contestants = []
    for name, backend in backends.items():
        say("entering", name=name)
        try:
            contestants.append(build(name, backend))
        except Exception as error:
            say("absent", name=name, problem=problem.id, reason=in_words(error))
    if not contestants:
        return

    def entering(name: str) -> None:
        say("entering", name=name)

    free = measure(
        contestants, reader, given["rounds"], entering, lambda done, total: say("round", done=done, total=total)
    )
    rows = [row_of(each, kept(free, given["rounds"])) for each in contestants]
    say("problem", id=problem.id, problem=vars(problem), rows=rows, rounds=len(free), free=sum(free))


def builder(problem: Problem, rotation: int) -> Callable[[str, Backend], Contestant]:
    """A function that makes a contestant of a backend; the inputs are drawn once."""
    if problem.operation in PRODUCTS:
        weights, x = weights_of(problem), activations_of(problem)
        return lambda name, backend: contestant(name, backend, problem, weights, x, rotation)
    arguments = arguments_of(problem)
    return lambda name, backend: other_contestant(name, backend, problem, arguments, rotation)


def other_contestant(
    name: str, backend: Backend, problem: Problem, arguments: tuple[Any, ...], rotation: int
) -> Contestant:
    """A backend with copies of the arguments of an operation that is no product, after one call that must succeed.

    Raises:
        LowbitError: the backend does not declare the problem.
    """
    first = call_of_other(backend, problem, arguments)
    nbytes = bytes_of(arguments) + bytes_of(first())
    copies = min(max(rotation // max(nbytes, 1), 1), MOST_COPIES)
    calls = [first, *(call_of_other(backend, problem, arguments) for _ in range(copies - 1))]
    return Contestant(name, calls, nbytes)


def contestant(name: str, backend: Backend, problem: Problem, weights: Any, x: Any, rotation: int) -> Contestant:
    """A backend with as many copies of the matrix as fill the rotation, after one call that must succeed.

    Raises:
        LowbitError: the backend does not declare the problem.
        ValueError: the result is not finite.
    """
    matrix, nbytes = prepared(backend, problem, weights)
    first = call_of(backend, problem, matrix, x)
    if not np.isfinite(np.asarray(first(), np.float64)).all():
        raise ValueError("the result is not finite")
    copies = min(max(rotation // max(nbytes, 1), 1), MOST_COPIES)
    calls = [first]
    if matrix is not weights:  # without a prepared form, each call reads the same matrix
        calls += [call_of(backend, problem, prepared(backend, problem, weights)[0], x) for _ in range(copies - 1)]
    return Contestant(name, calls, nbytes)


def row_of(one: Contestant, counted: list[int]) -> dict[str, Any]:
    """What was measured of one backend: seconds, the share of the reading beside it, bytes a second."""
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
