"""Tying a test to a clause and to the cases that check it."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from lowbit_conformance.suite.cases import Case, MatrixCase

Test = TypeVar("Test", bound=Callable[..., None])


@dataclass(frozen=True)
class Settings:
    """What the user asked for: which random seeds, and cases from which model.

    Attributes:
        seeds: the seeds of the random tier.
        model: cases made from a model's own matrices, empty without ``--model``.
    """

    seeds: range
    model: tuple[MatrixCase, ...] = ()


Generator = Callable[[str, Settings], Iterator[Case]]


def unrecorded(name: str, value: object) -> None:
    """A ``record_property`` for calls of a test outside a run, which report nothing."""


def call(test: Callable[..., None], **given: Any) -> None:
    """Call a test with those of the given values that it has parameters for, as pytest does."""
    test(**{name: given[name] for name in inspect.signature(test).parameters})


@dataclass(frozen=True, eq=False)
class Mark:
    """A test function, what it checks and on which cases."""

    clause: str
    generator: Generator
    test: Callable[..., None]

    def run(self, backend: Any, case: Case) -> None:
        """Call the test outside a run, which reports nothing and has no model.

        Raises:
            AssertionError: the backend fails the case.
        """
        call(self.test, backend=backend, case=case, record_property=unrecorded, model_matrices={})


MARKS: list[Mark] = []
"""The marks of all test modules that have been imported, in the order of import."""


def checks(clauses: str | Iterable[str], generator: Generator) -> Callable[[Test], Test]:
    """Mark a test as the check of a clause, or of several, to be run on every case that `generator` yields for each.

    The clause ``*/H4`` stands for the habit of every operation.
    """

    def mark(test: Test) -> Test:
        for clause in [clauses] if isinstance(clauses, str) else clauses:
            MARKS.append(Mark(clause, generator, test))
        return test

    return mark
