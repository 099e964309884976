"""Tying a test to a clause and to the cases that check it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from lowbit_conformance.cases import Case, MatrixCase

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


def checks(clause: str, generator: Generator) -> Callable[[Test], Test]:
    """Mark a test as the check of `clause`, to be run on every case that `generator` yields for it."""

    def mark(test: Test) -> Test:
        test.lowbit_checks = (clause, generator)  # type: ignore[attr-defined]  # read by the plugin
        return test

    return mark
