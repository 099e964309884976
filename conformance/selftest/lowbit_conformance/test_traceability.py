"""Nothing stands alone: each clause has a page, a test and a defect, and each test and defect a clause that exists."""

from collections import Counter
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace

import pytest
from kills.bank import ALL
from kills.traceability import SuiteTest, orphans, rows, suite_tests
from lowbit_docs.pages import modules
from paths import ROOT

from lowbit.backend.reference import ReferenceBackend
from lowbit.contract.operation import HABITS, Promise, operation
from lowbit.operations import OPERATIONS
from lowbit_conformance.suite.marking import Settings


def pages() -> set[str]:
    """The modules that have a page."""
    return {module.name for module in modules(ROOT)}


def test_nothing_is_an_orphan() -> None:
    """Clauses, tests, defects and pages name each other, and none is missing."""
    assert list(orphans(pages=pages())) == []


def test_every_clause_has_a_row() -> None:
    """The table has each clause and each habit once, and something in every column that must not be empty."""
    table = rows()
    clauses = [clause for declaration in OPERATIONS.values() for clause in declaration.clauses]
    assert [row.clause for row in table] == [*clauses, *HABITS]
    assert sum(len(row.tests) for row in table) == len(suite_tests())


def some_test(clause: str) -> SuiteTest:
    return SuiteTest("test_some.test_one", clause, lambda clause, settings: iter(()), lambda: None)


FIRST = OPERATIONS["packing.pack"]
ALONE = replace(FIRST, clauses=MappingProxyType({"packing.pack/C1": "It is so."}))
BREAKS = {"some-defect": SimpleNamespace(clauses=("packing.pack/C1", *(f"packing.pack/{habit}" for habit in HABITS)))}


@pytest.mark.parametrize(
    ("tests", "defects", "pages", "complaint"),
    [
        (["packing.pack/C1"], BREAKS, ["lowbit.quantization.packing", "lowbit.contract.operation"], None),
        ([], BREAKS, None, "clause packing.pack/C1 has no test"),
        (["packing.pack/C1", "packing.pack/C9"], BREAKS, None, "test test_some.test_one checks packing.pack/C9"),
        (["packing.pack/C1", "*/C1"], BREAKS, None, "test test_some.test_one checks */C1"),
        (["packing.pack/C1"], {}, None, "clause packing.pack/C1 has no defect"),
        (["packing.pack/C1"], {}, None, "habit H3 has no defect"),
        (
            ["packing.pack/C1"],
            BREAKS,
            ["lowbit.contract.operation"],
            "clause packing.pack/C1 has no page: lowbit.quantization.packing",
        ),
        (["packing.pack/C1"], BREAKS | {"b": SimpleNamespace(clauses=())}, None, "defect b breaks no clause"),
        (
            ["packing.pack/C1"],
            BREAKS | {"b": SimpleNamespace(clauses=("packing.pack/C2",))},
            None,
            "defect b breaks packing.pack/C2, which there is not",
        ),
    ],
)
def test_each_kind_of_orphan_is_found(
    tests: list[str], defects: dict[str, SimpleNamespace], pages: list[str] | None, complaint: str | None
) -> None:
    """One operation with one clause: whole, nothing is said; with something missing or too much, that is."""
    found = list(orphans([ALONE], map(some_test, tests), defects, pages))
    if complaint is None:
        assert found == []
    else:
        assert any(line.startswith(complaint) for line in found), found


def test_no_case_id_stands_for_two_cases() -> None:
    """Every test has cases, and every case of the whole suite has an id of its own, so that an id names one case."""
    ids: Counter[str] = Counter()
    for test in suite_tests():
        cases = set(test.generator(test.clause, Settings(range(3))))
        assert cases, test.name
        habit = test.clause.partition("/")[0] == "*"
        assert all(habit or case.clause == test.clause for case in cases), test.name
        ids.update(case.id for case in cases)
    assert [id for id, count in ids.items() if count > 1] == []


def test_every_defect_is_of_operations_whose_clauses_it_breaks() -> None:
    """A defect that is made for no operation of its clauses could not break them."""
    for name, defect in ALL.items():
        operations = {clause.rpartition("/")[0] for clause in defect.clauses}
        assert operations & set(defect.operations), name


def test_every_operation_is_in_the_reference() -> None:
    """The reference backend declares every operation; the bounded ones with an arithmetic, the exact ones without."""
    declared = ReferenceBackend().capabilities().operations
    assert set(declared) == set(OPERATIONS)
    for name, declaration in declared.items():
        assert (declaration.arithmetic is not None) == (OPERATIONS[name].promise is Promise.BOUNDED)


def test_an_operation_cannot_be_declared_twice() -> None:
    """Two chapters with one name would make every report ambiguous."""
    with pytest.raises(ValueError, match=r"packing.pack is declared twice"):
        operation(FIRST.id, FIRST.title, FIRST.reference, promise=FIRST.promise, source=FIRST.source, clauses={})
