"""A backend of the bank in this process: what a `Remote` shows to a test, without a host."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from kills.bank import backend
from kills.trial import cases_of, run, spread

from lowbit.backend import Capabilities
from lowbit.operations import OPERATIONS
from lowbit_conformance.suite.cases import CONCURRENT, Case

PATIENCE = 200


@dataclass(frozen=True)
class Called:
    """One call: the operation, its arguments, and what came back."""

    operation: str
    arguments: tuple[Any, ...]
    choices: dict[str, Any]
    given: Any


class InProcess:
    """The backend of a defect, which remembers its last call."""

    def __init__(self, name: str) -> None:
        self._backend, self.last = backend(name), None

    last: Called | None

    def capabilities(self) -> Capabilities:
        return self._backend.capabilities()

    def run(self, operation: str, *arguments: Any, **choices: Any) -> Any:
        OPERATIONS[operation].check(*arguments, **choices)
        given = self._backend.run(operation, *arguments, **choices)
        self.last = Called(operation, arguments, choices, given)
        return given

    def prepare(self, matrix: Any) -> "Prepared":
        return Prepared(self, matrix)


class Runs(Protocol):
    """What runs whole operations: `InProcess`, or `mistaken.Mistaken`."""

    def run(self, operation: str, *arguments: Any, **choices: Any) -> Any: ...


class Prepared:
    """A product, each of whose calls is one of the whole operation."""

    def __init__(self, owner: Runs, matrix: Any) -> None:
        self._owner, self._matrix = owner, matrix
        self.rows, self.columns = matrix.rows, matrix.columns

    def qgemv(self, x: Any, out: Any = None) -> Any:
        return self._owner.run("linear.qgemv", x, self._matrix)

    def qgemm(self, x: Any, out: Any = None) -> Any:
        return self._owner.run("linear.qgemm", x, self._matrix)

    def qgemm_bfp(self, x: Any, out: Any = None) -> Any:
        return self._owner.run("linear.qgemm_bfp", x, self._matrix)

    def guarded_blocks(self, x: Any) -> Any:
        return self.qgemm_bfp(x)

    def guarded(self, x: Any, vectors: int) -> Any:
        return self.qgemm(x) if vectors else self.qgemv(x[0])


def failures(name: str, operation: str, clauses: tuple[str, ...], seeds: int = 2) -> Iterator[tuple[Case, Called]]:
    """The cases of some clauses that a defect fails, each with the call after which it failed; see `spread`.

    Once one has failed, the search ends after `PATIENCE` cases in a row that pass.
    """
    owner: Any = InProcess(name)
    passed, found = 0, False
    tried = [(mark, case) for mark, case in cases_of(clauses, (operation,), seeds) if case.clause in clauses]
    for mark, case in spread(tried):
        if case.variant != CONCURRENT:
            owner.last, passed = None, passed + 1
            if run(mark, case, owner) and owner.last is not None:
                passed, found = 0, True
                yield case, owner.last
            if found and passed >= PATIENCE:
                return
