"""Traceability: for each clause the chapter that says it, the tests that check it and the defects that break it.

A clause that no test checks is a wish, a test of no clause checks nobody knows what, and a clause that no known defect
breaks is one whose tests have never been seen to fail. So the four are held together by their ids alone, gathered here
from where each is written (`OPERATIONS`, the test functions' marks, `kills.bank`), and whatever stands alone is
an *orphan*. The documentation prints the table; the tests of lowbit fail on an orphan.

Habits are promised by every operation in the same words, so they are traced once: a defect that breaks the habit of
any operation breaks the habit. Most are no business of a test of their own, since every call of every case is watched
for them; such a habit is no orphan as long as a defect is there to be caught.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kills.bank import ALL
from lowbit.contract.operation import HABITS, Operation
from lowbit.operations import OPERATIONS
from lowbit_conformance.suite import clauses
from lowbit_conformance.suite.clauses import load_suite
from lowbit_conformance.suite.marking import MARKS, Generator

HABITS_PAGE = "lowbit.contract.operation"
LOADING = "backend/H6"
"""What is checked of a backend before it is asked for an operation; a case of that habit."""


@dataclass(frozen=True)
class SuiteTest:
    """A test function of the suite.

    Attributes:
        name: module and function: ``test_packing.test_pack_refuses``.
        clause: one that it checks; ``*/H4`` for a habit of every operation.
        generator: of its cases.
        function: itself.
    """

    name: str
    clause: str
    generator: Generator
    function: Callable[..., None]


@dataclass(frozen=True)
class Row:
    """One clause or habit, and all that hangs on it.

    Attributes:
        clause: ``packing.pack/C1``, or ``H1``.
        sentence: what it says.
        page: the chapter that says it, a module.
        tests: the names of the tests that check it.
        defects: the names of the defects that break it.
    """

    clause: str
    sentence: str
    page: str
    tests: tuple[str, ...]
    defects: tuple[str, ...]

    @property
    def habit(self) -> bool:
        return self.clause in HABITS

    @property
    def operation(self) -> str:
        """``packing.pack``; empty for a habit."""
        return self.clause.rpartition("/")[0]


def suite_tests() -> list[SuiteTest]:
    """All test functions of the suite, module by module, each once for every clause that it checks."""
    load_suite()
    found = []
    for mark in MARKS:
        package, _, module_name = mark.test.__module__.rpartition(".")
        if package == clauses.__name__:
            name = f"{module_name}.{mark.test.__name__}"
            found.append(SuiteTest(name, mark.clause, mark.generator, mark.test))
    return sorted(found, key=lambda test: test.name.partition(".")[0])


def rows(
    operations: Iterable[Operation] = OPERATIONS.values(),
    tests: Iterable[SuiteTest] | None = None,
    defects: Mapping[str, Any] = ALL,
) -> list[Row]:
    """The table: the clauses in the order of the chapters, then the habits.

    Args:
        operations: whose clauses are traced.
        tests: None for those of the suite.
        defects: by name; each has `clauses`.
    """
    tested: dict[str, list[str]] = defaultdict(list)
    for test in suite_tests() if tests is None else tests:
        tested[_traced(test.clause)].append(test.name)
    broken: dict[str, list[str]] = defaultdict(list)
    for name, defect in defects.items():
        for clause in dict.fromkeys(map(_traced, defect.clauses)):
            broken[clause].append(name)
    promises = [
        (clause, sentence, operation.reference.__module__)
        for operation in operations
        for clause, sentence in operation.clauses.items()
    ]
    promises += [(habit, sentence, HABITS_PAGE) for habit, sentence in HABITS.items()]
    return [
        Row(clause, sentence, page, tuple(tested[clause]), tuple(broken[clause])) for clause, sentence, page in promises
    ]


def _traced(clause: str) -> str:
    """The id under which a clause is traced: a habit loses its operation.

    >>> _traced("packing.pack/C1"), _traced("packing.pack/H4"), _traced("*/H4")
    ('packing.pack/C1', 'H4', 'H4')
    """
    number = clause.rpartition("/")[2]
    return number if number in HABITS else clause


def orphans(
    operations: Iterable[Operation] = OPERATIONS.values(),
    tests: Iterable[SuiteTest] | None = None,
    defects: Mapping[str, Any] = ALL,
    pages: Iterable[str] | None = None,
) -> Iterator[str]:
    """What stands alone, a line each; nothing, if all is well.

    Args:
        operations: see `rows`.
        tests: see `rows`.
        defects: see `rows`.
        pages: the modules that have a page; None to ask for none, where the documentation is not at hand.
    """
    operations, tests = list(operations), suite_tests() if tests is None else list(tests)
    known = {clause for operation in operations for clause in operation.clauses}
    known |= {f"{operation.id}/{habit}" for operation in operations for habit in HABITS}
    for row in rows(operations, tests, defects):
        if not row.tests and not row.habit:
            yield f"clause {row.clause} has no test"
        if not row.defects:
            yield f"{'habit' if row.habit else 'clause'} {row.clause} has no defect"
        if pages is not None and row.page not in pages:
            yield f"clause {row.clause} has no page: {row.page}"
    for test in tests:
        if test.clause not in known | {LOADING} and not (
            test.clause.startswith("*/") and _traced(test.clause) in HABITS
        ):
            yield f"test {test.name} checks {test.clause}, which there is not"
    for name, defect in defects.items():
        if not defect.clauses:
            yield f"defect {name} breaks no clause"
        for clause in defect.clauses:
            if clause not in known:
                yield f"defect {name} breaks {clause}, which there is not"
