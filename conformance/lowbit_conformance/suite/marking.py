"""Tying a test to a clause and to the cases that check it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

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


@dataclass(frozen=True)
class Mark:
    """A test function, what it checks and on which cases."""

    clause: str
    generator: Generator
    test: Callable[..., None]


MARKS: list[Mark] = []
"""The marks of all test modules that have been imported, in the order of import."""


def checks(clause: str, generator: Generator) -> Callable[[Test], Test]:
    """Mark a test as the check of `clause`, to be run on every case that `generator` yields for it.

    The clause ``*/H4`` stands for the habit of every operation.
    """

    def mark(test: Test) -> Test:
        MARKS.append(Mark(clause, generator, test))
        return test

    return mark
