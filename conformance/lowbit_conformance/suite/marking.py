"""Tying a test to a clause and to the cases that check it."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeVar

from lowbit_conformance.suite.cases import Case, MatrixCase

Test = TypeVar("Test", bound=Callable[..., None])
Record = Callable[[str, object], None]
"""pytest's ``record_property``, which passes the fraction of the bound that was used to the report."""


@dataclass(frozen=True)
class Settings:
    """The options of a run: the random seeds, and cases from a model.

    Attributes:
        seeds: the seeds of the random tier.
        model: cases made from a model's own matrices, empty without ``--model``.
    """

    seeds: range
    model: tuple[MatrixCase, ...] = ()


Generator = Callable[[str, Settings], Iterator[Case]]


def grid(kind: Callable[..., Case], tier: str, variants: Iterable[str], *shapes: tuple[object, ...]) -> Generator:
    """A case for each variant at each shape; a shape holds the arguments that follow the variant."""
    every = list(product(variants, shapes))

    def generator(clause: str, settings: Settings) -> Iterator[Case]:
        for variant, shape in every:
            yield kind(clause, tier, variant, *shape)

    return generator


def chained(*generators: Generator) -> Generator:
    """The cases of several generators, one after another."""

    def generator(clause: str, settings: Settings) -> Iterator[Case]:
        for each in generators:
            yield from each(clause, settings)

    return generator


def unrecorded(name: str, value: object) -> None:
    """A ``record_property`` for tests that are called outside a run; it records nothing."""


def call(test: Callable[..., None], backend: Any, case: Case, record_property: Record = unrecorded) -> None:
    """Call a test with the fixtures that its parameters name, as pytest does, but without a model.

    Raises:
        AssertionError: the backend fails the case.
    """
    given = {"backend": backend, "case": case, "record_property": record_property, "model_matrices": {}}
    test(**{name: given[name] for name in inspect.signature(test).parameters})


@dataclass(frozen=True, eq=False)
class Mark:
    """A test function, what it checks and on which cases."""

    clause: str
    generator: Generator
    test: Callable[..., None]

    def run(self, backend: Any, case: Case) -> None:
        """Call the test outside a run; see `call`."""
        call(self.test, backend, case)


MARKS: list[Mark] = []
"""The marks of all imported test modules, in the order of import."""


def checks(clauses: str | Iterable[str], generator: Generator) -> Callable[[Test], Test]:
    """Mark a test as the check of one or several clauses, to run on every case that `generator` yields for each.

    The clause ``*/H4`` stands for the habit of every operation.
    """

    def mark(test: Test) -> Test:
        for clause in [clauses] if isinstance(clauses, str) else clauses:
            MARKS.append(Mark(clause, generator, test))
        return test

    return mark
