"""Profiles: frozen, not hollow, and certified only by a run in which all of it passed."""

import json
import re

import pytest
from typer.testing import CliRunner

from lowbit.cli import app
from lowbit.errors import ArgumentError
from lowbit.operations import OPERATIONS
from lowbit.profiles import PROFILES, SUCCESSORS, Profile, profile
from lowbit_conformance.suite.cases import CONCURRENT, Case, MatrixCase
from lowbit_conformance.suite.certify import LEAST_SEEDS, certify
from lowbit_conformance.suite.clauses import load_suite
from lowbit_conformance.suite.marking import MARKS, Settings
from lowbit_conformance.suite.tally import Verdict

DIGESTS = {
    "lowbit-1.1/packing": "e649f25ee92f9b80b2f0517d456b28a0021e249c08353ec8f2b18d19bb900882",
    "lowbit-1.1/qgemv-4": "69fae9f07b3e691001ab47c17297feec3b0e45193d5f38e1592f504e3f4d110b",
    "lowbit-1.1/bfp": "d2b0f63876656eb2cf690a2c06e50e8d2f1f02f1bfc5ff96fd70b47b1888f34e",
    "lowbit-1.1/kv-cache": "7e13de540828e3b4e8e305cf84f5a374735e5449884158dd0363d4a8a2261db7",
    "lowbit-1.1/moe-offload": "7e99e5fbbe9c97a3dd87a3c737c03c0e20987871be84aabe850a43960ca0db37",
}
"""Only a new profile adds a line here. A line that would have to change means that a promise did: name it anew."""

PACKING = PROFILES["lowbit-1.1/packing"]


def all_cases() -> list[Case]:
    """Every case of the suite, with the seeds of a plain run."""
    load_suite()
    return [case for mark in MARKS for case in mark.generator(mark.clause, Settings(range(LEAST_SEEDS)))]


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return all_cases()


def test_profiles_are_frozen() -> None:
    """The clauses, their sentences, the habits and the parameters of each profile are those it was published with."""
    assert {id: each.digest for id, each in PROFILES.items()} == DIGESTS
    assert all(re.fullmatch(r"lowbit-\d+\.\d+/[a-z0-9-]+", id) for id in PROFILES)


@pytest.mark.parametrize("one", PROFILES.values(), ids=list(PROFILES))
def test_no_profile_is_hollow(one: Profile, cases: list[Case]) -> None:
    """Each clause, and each habit with cases of its own, has a case in the profile; an operation that has a parameter
    of the profile has a case for each of the values asked for."""
    selected = [case for case in cases if one.selects(case.clause, case.parameters())]
    own = own_habits(one)
    assert {*one.clauses, *own} == {case.clause for case in selected}
    for operation in one.operations:
        mine = [case.parameters() for case in selected if case.operation == operation]
        for name, asked in one.parameters.items():
            found = {parameters[name] for parameters in mine if name in parameters}
            assert found in ({*asked}, set()), f"{operation}: {name}"


@pytest.mark.parametrize("convention", ["minimum", "zero_point"])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_qgemv_4_tries_each_clause_in_each_group_size(cases: list[Case], group_size: int, convention: str) -> None:
    """What published weights have: no group size and no convention is certified for clauses it was not tried on."""
    one = PROFILES["lowbit-1.1/qgemv-4"]
    wanted = {"group_size": group_size, "convention": convention}
    tried = {
        case.clause
        for case in cases
        if one.selects(case.clause, case.parameters()) and wanted.items() <= case.parameters().items()
    }
    assert set(one.clauses) <= tried


def own_habits(one: Profile) -> list[str]:
    """The habits that have cases of their own; a stateful operation says in its clauses what repetition means."""
    own = [f"{operation}/{habit}" for operation in one.operations for habit in ("H6", "H8")]
    return own + [f"{operation}/H4" for operation in one.operations if not OPERATIONS[operation].stateful]


def some_cases() -> list[Case]:
    """One case for each clause of the packing profile and for each habit with cases of its own."""
    clauses = [*PACKING.clauses, *own_habits(PACKING)]
    return [MatrixCase(clause, "lattice", "", bits, 96, 5) for clause in clauses for bits in (2, 4)]


def passed(cases: list[Case]) -> dict[str, Verdict]:
    return {case.id: Verdict(case.id, "passed") for case in cases}


def test_a_certificate_needs_all_of_it() -> None:
    """A run in which everything passed is certified, whatever became of cases of other profiles."""
    cases = some_cases()
    other = MatrixCase("linear.qgemv/C1", "lattice", "", 4, 64, 5, 32)
    verdicts = [*passed(cases).values(), Verdict(other.id, "failed", "WRONG: somewhere else")]
    certificate = certify(PACKING, [*cases, other], verdicts, LEAST_SEEDS)
    assert (certificate.certified, certificate.missing, certificate.cases) == (True, (), len(cases))
    assert str(certificate) == f"lowbit-1.1/packing: certified, {len(cases)} cases"


def test_threads_are_not_asked_of_everyone() -> None:
    """A case of several threads that the backend declines is passed over; one that fails is not."""
    cases = some_cases()
    threads = MatrixCase("packing.pack/H4", "habit", CONCURRENT, 4, 96, 5)
    verdicts = [*passed(cases).values(), Verdict(threads.id, "not declared", "calls from several threads")]
    assert certify(PACKING, [*cases, threads], verdicts, LEAST_SEEDS).certified
    verdicts[-1] = Verdict(threads.id, "failed", "NONDETERMINISTIC: somewhere")
    assert not certify(PACKING, [*cases, threads], verdicts, LEAST_SEEDS).certified


@pytest.mark.parametrize("place", range(20))
def test_one_case_decides(place: int) -> None:
    """Any one case that failed, was not declared or was not run is enough, and the certificate names its clause."""
    cases = some_cases()
    case = cases[place]
    for verdict, reason in (
        (Verdict(case.id, "failed", "WRONG"), f"1 of 2 cases failed, first {case.id}"),
        (Verdict(case.id, "not declared", "bits 2"), "1 of 2 cases are not declared (bits 2)"),
        (None, "1 of 2 cases were not run"),
    ):
        verdicts = passed(cases)
        if verdict:
            verdicts[case.id] = verdict
        else:
            del verdicts[case.id]
        certificate = certify(PACKING, cases, verdicts.values(), LEAST_SEEDS)
        assert not certificate.certified
        assert certificate.missing == (f"{case.clause}: {reason}",)


def test_a_suite_without_cases_certifies_nothing() -> None:
    """A clause without a case is missing, and so is a random tier of fewer seeds than a plain run has."""
    certificate = certify(PACKING, [], [], LEAST_SEEDS)
    assert not certificate.certified
    assert "packing.pack/C1: the suite has no case of it" in certificate.missing
    cases = some_cases()
    certificate = certify(PACKING, cases, passed(cases).values(), LEAST_SEEDS - 1)
    assert certificate.missing == ("the random tier: 4 seeds, at least 5 are needed",)


def test_profiles_are_listed() -> None:
    """`lowbit profiles --json` has every profile with its promises in full; the table names each."""
    listed = json.loads(CliRunner().invoke(app, ["profiles", "--json"]).stdout)
    assert {id: each["digest"] for id, each in listed.items()} == DIGESTS
    assert listed["lowbit-1.1/qgemv-4"]["parameters"]["bits"] == [4]
    assert set(listed["lowbit-1.1/packing"]["clauses"]) == set(PACKING.clauses)
    table = CliRunner().invoke(app, ["profiles"], env={"COLUMNS": "200"}).stdout
    assert all(id in table for id in PROFILES)


def test_an_unknown_profile_is_refused() -> None:
    """The message lists those that there are."""
    with pytest.raises(ArgumentError, match=r"profile is 'lowbit-1.1/all'; allowed: lowbit-1.1/packing, "):
        profile("lowbit-1.1/all")


def test_a_profile_of_before_is_answered_with_its_successor() -> None:
    """Each name that was published once leads to a profile of today."""
    for old, new in SUCCESSORS.items():
        assert old not in PROFILES and new in PROFILES
        with pytest.raises(ArgumentError, match=f"{old}, which this version does not certify; allowed: .* {new}"):
            profile(old)
