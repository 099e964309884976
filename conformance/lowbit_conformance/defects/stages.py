"""Stages of an operation: the numbers between its steps, each of which may be read, made or kept wrongly.

A chapter computes in steps, and each step has numbers: scores, exponentials, their sum. An operation is written here
as a function that shows each of these to `At`, which gives back what the next step uses. A mistake is then a stage and
what was done to its numbers: taken one place later, not cleared between rows, doubled, kept in fewer bits. Some stages
name *others*, the values that are easily taken in their place: the number of heads for the width of a head. `places`
changes arguments and results by the same list of changes.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from lowbit.arrays import Array
from lowbit_conformance.defects.defect import Defect, Function, arithmetical
from lowbit_conformance.defects.narrow import FORMATS, Change
from lowbit_conformance.defects.places import changes

REMEMBERED = 32  # calls whose stages are kept: failures of an operation and right calls


class At:
    """Receives the numbers of a staged operation; here all pass unchanged and are recorded."""

    def __init__(self) -> None:
        self.values: dict[str, Array] = {}
        self.others: dict[tuple[str, str], Callable[[], Any]] = {}

    def __call__(self, stage: str, value: Any, **others: Callable[[], Any]) -> Any:
        """The numbers of a stage that the next step uses.

        Args:
            stage: its name.
            value: its numbers.
            others: what may replace them.
        """
        self.values[stage] = np.asarray(value)
        self.others |= {(stage, name): other for name, other in others.items()}
        return value


class Instead(At):
    """Replaces the numbers of one stage for the next step."""

    def __init__(self, stage: str, value: Any) -> None:
        super().__init__()
        self._stage, self._value = stage, value

    def __call__(self, stage: str, value: Any, **others: Callable[[], Any]) -> Any:
        return self._value if stage == self._stage else value


Staged = Callable[..., Any]
"""Takes an `At` and the arguments of an operation."""


@dataclass(frozen=True, eq=False)
class Stages:
    """An operation in stages.

    Attributes:
        run: the operation; takes an `At` and the reference's arguments.
        names: its stages, the last first, because an ambiguous mistake is more likely a late one.
        others: for a stage the values that may replace it, and their names in a sentence.
    """

    run: Staged
    names: tuple[str, ...]
    others: Mapping[str, Mapping[str, str]]


# **One run** of each call is kept, because hundreds of changes are tried on it.


@dataclass(frozen=True, eq=False)
class Recorded:
    """A call and the numbers at its stages."""

    run: Staged
    given: tuple[Any, ...]
    choices: dict[str, Any]
    at: At
    right: Any
    answers: dict[tuple[Any, ...], Any]


_recorded: deque[Recorded] = deque(maxlen=REMEMBERED)


def _record(run: Staged, given: tuple[Any, ...], choices: dict[str, Any]) -> Recorded:
    for each in _recorded:
        same = each.run is run and len(each.given) == len(given) and each.choices == choices
        if same and all(one is other for one, other in zip(each.given, given, strict=True)):
            return each
    at = At()
    found = Recorded(run, given, choices, at, run(at, *given, **choices), {})
    _recorded.append(found)
    return found


def _equal(one: Array, other: Array) -> bool:
    return one.shape == other.shape and bool(np.array_equal(one, other, equal_nan=one.dtype.kind == "f"))


def _changing(run: Staged, stage: str, change: Change) -> Function:
    def wrong(*given: Any, **choices: Any) -> Any:
        seen = _record(run, given, choices)
        if stage not in seen.at.values:
            return seen.right
        value = change(seen.at.values[stage])
        if _equal(value, seen.at.values[stage]):
            return seen.right
        key = (stage, value.shape, value.dtype.str, value.tobytes())  # with few numbers many changes are the same
        if key not in seen.answers:
            seen.answers[key] = run(Instead(stage, value), *given, **choices)
        return seen.answers[key]

    return wrong


def _replacing(run: Staged, stage: str, other: str) -> Function:
    def wrong(*given: Any, **choices: Any) -> Any:
        seen = _record(run, given, choices)
        if (stage, other) not in seen.at.others:
            return seen.right
        return run(Instead(stage, seen.at.others[stage, other]()), *given, **choices)

    return wrong


# **Changes** of numbers between steps, besides those of arguments and results.


def _numeric(change: Change) -> Change:
    def changed(array: Array) -> Array:
        if array.dtype.kind not in "fiu":
            return array
        with np.errstate(all="ignore"):
            return np.asarray(change(array.astype(np.float64)))

    return changed


def _narrowed(way: Change) -> Change:
    def changed(array: Array) -> Array:
        if array.dtype.kind != "f":
            return array
        with np.errstate(all="ignore"):
            return np.asarray(way(array.astype(np.float32)).astype(array.dtype))

    return changed


NUMBERS: tuple[tuple[str, str, Change], ...] = (
    ("root-taken", "as their roots", np.sqrt),
    ("inverted", "as 1 divided by them", lambda a: 1 / a),
    ("truncated", "with their fractions truncated", np.trunc),
    ("rounded-down", "rounded down", np.floor),
    *(
        (f"raised-by-1e-{power}", f"with 1e-{power} added", lambda a, least=10.0**-power: a + least)
        for power in range(3, 13)
    ),
    *(
        (f"saturated-at-{bits}-bits", f"saturated at {bits} bits", lambda a, m=2.0 ** (bits - 1): np.clip(a, -m, m - 1))
        for bits in (8, 16, 32)
    ),
    *(
        (f"wrapped-at-{bits}-bits", f"wrapped at {bits} bits", lambda a, m=2.0 ** (bits - 1): (a + m) % (2 * m) - m)
        for bits in (8, 16, 32)
    ),
)


@cache
def _all_changes() -> tuple[tuple[str, str, Change], ...]:
    found = list(changes())
    found += [(name, f"is taken {words}.", _numeric(change)) for name, words, change in NUMBERS]
    for format, (words, ways) in FORMATS.items():
        found += [(f"in-{format}", f"is {words}.", _narrowed(way)) for way in ways]
    return tuple(found)


def members(operation: str, stages: Stages) -> Iterator[Defect]:
    """All mistakes with the stages of an operation."""
    for stage in stages.names:
        words = stage.replace("-", " ")
        for other, what in stages.others.get(stage, {}).items():
            wrong = _replacing(stages.run, stage, other)
            name = f"{stage}-{other}".replace("_", "-")
            yield arithmetical(name, f"Taken for the intermediate “{words}”: {what}.", "", {operation: wrong})
    for stage in stages.names:
        words = stage.replace("-", " ")
        for name, does, change in _all_changes():
            wrong = _changing(stages.run, stage, change)
            yield arithmetical(f"{stage}-{name}", f"The intermediate “{words}” {does}", "", {operation: wrong})
