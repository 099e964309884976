"""Which kernels of `mistakes_special` the suite finds, each by the first case that meets its condition.

In this process the cases of an operation run once, on a right backend that asks the conditions at each call. The first
case in which one holds runs again on the kernel that is wrong there, and has to fail.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mistakes_special_layers  # noqa: F401  # adds to the list
import numpy as np
from in_process import Prepared
from kills.trial import cases_of, run, spread
from mistakes_special import SPECIAL, Special

from lowbit.backend import Capabilities
from lowbit.operations import OPERATIONS
from lowbit_conformance.defects.bank import backend
from lowbit_conformance.suite.cases import CONCURRENT, HABIT, Case
from lowbit_conformance.suite.marking import Mark


def spoilt(result: Any) -> Any:
    """Clearly wrong, and of the same kind: an array has another element, what has parts another part."""
    if isinstance(result, np.ndarray):
        wrong = result.copy()
        last = wrong.reshape(-1)[-1:]
        last[...] = (2 * last + 1 if np.isfinite(last).all() else 0) if wrong.dtype.kind == "f" else last ^ 1
        return wrong
    if isinstance(result, tuple):
        return (*result[:-1], spoilt(result[-1])) if result and isinstance(result[-1], np.ndarray) else result[:-1]
    if isinstance(result, list):
        return result[:-1]
    parts = {name: part for name, part in vars(result).items() if isinstance(part, np.ndarray)}
    name, part = next(iter(parts.items()))
    object.__setattr__(result, name, spoilt(part))
    return result


class Watching:
    """A backend in this process that asks conditions at each call, and is wrong in the calls of one of them.

    Attributes:
        noticed: the kernels whose conditions have held.
    """

    def __init__(self, operation: str, watched: Sequence[Special], spoil: Special | None = None) -> None:
        self._right, self._operation = backend("none"), operation
        self._watched, self._spoil = list(watched), spoil
        self.noticed = list[Special]()

    def capabilities(self) -> Capabilities:
        return self._right.capabilities()

    def run(self, operation: str, *arguments: Any, **choices: Any) -> Any:
        OPERATIONS[operation].check(*arguments, **choices)
        result = self._right.run(operation, *arguments, **choices)
        return self.judged(result, *arguments, **choices) if operation == self._operation else result

    def judged(self, result: Any, *arguments: Any, **choices: Any) -> Any:
        """The result, wrong if the condition of the spoilt kernel holds; conditions that hold are noted."""
        for special in [each for each in self._watched if holds(each, *arguments, **choices)]:
            self.noticed.append(special)
            self._watched.remove(special)
        return spoilt(result) if self._spoil and holds(self._spoil, *arguments, **choices) else result

    def prepare(self, matrix: Any) -> Prepared:
        return Prepared(self, matrix)

    def open(self, operation: str, *arguments: Any) -> "Session":
        return Session(self, arguments, self._right.open(operation, *arguments))

    def walk(self, session: "Session", steps: Sequence[tuple[Any, ...]], times: int) -> None:
        for _ in range(times):
            for step in steps:
                session.step(*step)

    @contextmanager
    def same_arrays(self) -> Iterator[None]:
        yield


MOST_STEPS = 1000
"""After which conditions on all steps, each of which takes longer than the one before, are no longer asked."""


class Session:
    """A stateful operation that has been opened."""

    def __init__(self, owner: Watching, opening: tuple[Any, ...], right: Any) -> None:
        self._owner, self._opening, self._right = owner, opening, right
        self._steps = list[tuple[Any, ...]]()

    def step(self, *arguments: Any) -> Any:
        result = self._right.step(*arguments)
        self._steps.append(arguments)
        return self._owner.judged(result, *self._opening, self._steps) if len(self._steps) < MOST_STEPS else result

    def close(self) -> None:
        self._right.close()


def holds(special: Special, *arguments: Any, **choices: Any) -> bool:
    with np.errstate(all="ignore"):
        return bool(special.when(*arguments, **choices))


def needs_no_host(case: Case) -> bool:
    """Habits and threads need one, and so do refusals of an array to write to."""
    return case.tier != HABIT and case.variant != CONCURRENT and not case.clause.endswith("/H8")


def own_cases(operation: str) -> list[tuple[Mark, Case]]:
    """The cases of an operation that need no host, the exhaustive ones first, since most kernels are found there."""
    pairs = [pair for pair in cases_of((), (operation,), 1) if needs_no_host(pair[1])]
    return sorted(spread(pairs), key=lambda pair: (pair[1].large, pair[1].tier != "exhaustive"))


def survivors(operation: str) -> tuple[list[str], list[str]]:
    """The kernels of an operation that no case meets, and the failures of the right backend."""
    left = [each for each in SPECIAL if each.operation == operation]
    failures = list[str]()
    for mark, case in own_cases(operation):
        if not left:
            break
        watching: Any = Watching(operation, left)
        message = run(mark, case, watching)
        if message and "object has no attribute" not in message:  # what only a host can do
            failures.append(f"{case.id}: {message}")
        for special in watching.noticed:
            if run(mark, case, Watching(operation, (), special)):  # type: ignore[arg-type]  # it stands for a host
                left.remove(special)
    return [special.name for special in left], failures
