"""Every clause of the specification is checked by a test of the suite, and every test checks a clause that exists."""

import importlib
import pkgutil

import pytest

import lowbit_conformance
from lowbit.contract import Promise, operation
from lowbit.operations import OPERATIONS
from lowbit.reference import ReferenceBackend
from lowbit_conformance.marking import Settings

SUITE = [
    importlib.import_module(f"{lowbit_conformance.__name__}.{module.name}")
    for module in pkgutil.iter_modules(lowbit_conformance.__path__)
    if module.name.startswith("test_")
]


def checked_clauses() -> list[str]:
    """The clause of every test of the suite."""
    tests = [value for module in SUITE for value in vars(module).values() if hasattr(value, "lowbit_checks")]
    return [test.lowbit_checks[0] for test in tests]


def test_no_clause_is_an_orphan() -> None:
    """The clauses that chapters declare and the clauses that tests check are the same."""
    declared = [clause for declaration in OPERATIONS.values() for clause in declaration.clauses]
    assert sorted(set(checked_clauses())) == sorted(declared)


def test_no_case_id_stands_for_two_cases() -> None:
    """Within a clause every case has an id of its own, so that an id names one case."""
    for module in SUITE:
        for test in vars(module).values():
            if hasattr(test, "lowbit_checks"):
                clause, generator = test.lowbit_checks
                cases = list(generator(clause, Settings(range(3))))
                assert len({case.id for case in cases}) == len(set(cases)), clause
                assert all(case.clause == clause for case in cases)


def test_every_operation_is_in_the_reference() -> None:
    """The reference backend declares every operation; the bounded ones with an arithmetic, the exact ones without."""
    declared = ReferenceBackend().capabilities().operations
    assert set(declared) == set(OPERATIONS)
    for name, declaration in declared.items():
        assert (declaration.arithmetic is not None) == (OPERATIONS[name].promise is Promise.BOUNDED)


def test_an_operation_cannot_be_declared_twice() -> None:
    """Two chapters with one name would make every report ambiguous."""
    with pytest.raises(ValueError, match=r"packing.pack is declared twice"):
        first = OPERATIONS["packing.pack"]
        operation(
            first.id,
            first.title,
            promise=first.promise,
            source=first.source,
            reference=first.reference,
            check=first.check,
            parameters=first.parameters,
            clauses={},
        )
