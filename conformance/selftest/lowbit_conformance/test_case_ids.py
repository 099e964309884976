"""The id of a case means the same case in every later version: a line in a report, an issue or a paper stays true.

`case_ids.json` holds, for each test, the first and the last id of its cases and the number that the case's generator
draws first. Ids may be added, never changed: when a test is new, ``python
conformance/selftest/lowbit_conformance/test_case_ids.py`` adds its ids to the file and leaves those that are there.
The id of a case of a retired clause stays in the file too; it stands for the cases of the clause's successor.
"""

import json
from pathlib import Path

import pytest

from lowbit.contract.operation import RETIRED
from lowbit_conformance.suite.cases import Case
from lowbit_conformance.suite.clauses import load_suite
from lowbit_conformance.suite.marking import MARKS, Settings

FILE = Path(__file__).with_name("case_ids.json")


def drawn(case: Case) -> int:
    """The first number of the case's own source of random numbers, from which its arrays follow."""
    return int(case.generator().integers(0, 2**32))


def present() -> dict[str, dict[str, int]]:
    """The first and the last case of each test, and what they draw."""
    load_suite()
    found: dict[str, dict[str, int]] = {}
    for mark in MARKS:
        cases = list(mark.generator(mark.clause, Settings(range(2))))
        kept = {case.id: drawn(case) for case in (cases[0], cases[-1])}
        found.setdefault(f"{mark.test.__module__.rpartition('.')[2]}.{mark.test.__name__}", {}).update(kept)
    return found


def all_cases() -> dict[str, Case]:
    load_suite()
    return {case.id: case for mark in MARKS for case in mark.generator(mark.clause, Settings(range(2)))}


def test_ids_of_before_are_cases_still() -> None:
    """Every id that was written down is a case today, and draws the numbers that it drew then."""
    cases, kept = all_cases(), json.loads(FILE.read_text())
    clauses = {case.clause for case in cases.values()}
    for name, ids in kept.items():
        for case_id, number in ids.items():
            if successor := RETIRED.get("/".join(case_id.split("/")[:2])):
                assert successor in clauses, (
                    f"{name}: {successor}, the successor of the clause of {case_id}, has no case"
                )
                continue
            assert case_id in cases, f"{name}: the case {case_id} is gone"
            assert drawn(cases[case_id]) == number, f"{name}: the case {case_id} has other inputs"


def test_every_test_has_ids_written_down() -> None:
    """No test is without."""
    missing = present().keys() - json.loads(FILE.read_text()).keys()
    if missing:
        pytest.fail(f"run this file as a program, which adds: {sorted(missing)}")


if __name__ == "__main__":
    before = json.loads(FILE.read_text()) if FILE.exists() else {}
    FILE.write_text(json.dumps(present() | before, indent=1, sort_keys=True) + "\n")
