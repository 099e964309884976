"""Profiles: frozen, not hollow, and certified only by a run in which all of it passed."""

import json
import re
from collections import defaultdict

import pytest
from typer.testing import CliRunner

from lowbit.cli import app
from lowbit.contract.ranges import Range
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
    "lowbit-1.1/gptq-gemv-fp16": "3395f85906225e148d3cdddc2b64c4105133223024a5258e01ae913a7a9b5f8e",
    "lowbit-1.1/gptq-gemm-fp16": "1b55068e5a2abb582c691ba4ba858679e6caff811a9be2d970e3b4cfeb88cb0d",
    "lowbit-1.1/gptq-gemv-bf16": "e6e2452793290bde9cc29205164ad3a50f8ab3bcd727a26ec1736f3d9ceda88b",
    "lowbit-1.1/gptq-gemm-bf16": "a423c6fb613d3c5ead0fdd32ed35730453c1d015df4232149b2666d7407ee9f5",
    "lowbit-1.1/gptq-v2-gemv-fp16": "9ae6380ccf26288efd809a84606daed92b3f150877a19bd8acb2168813ec96c5",
    "lowbit-1.1/gptq-v2-gemm-fp16": "1b439419775254365450a5469b3a7229139e975e8c49478008066fb2e62beb81",
    "lowbit-1.1/gptq-v2-gemv-bf16": "a9ae8d1999753d816f43b33739c5d1bbf1f0715b76f674aea99d59f958f5b495",
    "lowbit-1.1/gptq-v2-gemm-bf16": "b300a1b0ad055e62ad862b355c22ba914ee0cde6a55ed307581525ea9508811c",
    "lowbit-1.1/awq-gemv-fp16": "9fdf7cb43a9e3f3e2da13ed557ffb4f8430d6dae433dbe2758653434db1c0bd1",
    "lowbit-1.1/awq-gemm-fp16": "1b64fe03c8046774cd45336102866bb10eb71d75ef871fe356dfde4dbd077cbb",
    "lowbit-1.1/awq-gemv-bf16": "a5543e22d1bf30619d4cd045d82a59e8dabce006cc01deb810052e3d4f612408",
    "lowbit-1.1/awq-gemm-bf16": "ff9623cb995381c1147af5b311066f8358a7c5a431421a928f1891e0726d82c4",
    "lowbit-1.1/marlin-gemv-fp16": "418fcffbbc54be9393481a2ddfc5fe270f692ce841c07ac10f91e16eb03f8fec",
    "lowbit-1.1/marlin-gemm-fp16": "6d921b53fae95efec8c395f73c3ae470331128e1a3359a278694f6cccd57823b",
    "lowbit-1.1/hqq-gemv-fp16": "cf2ec2ade662d3c1ca0b1a393ae27cfb495a00f90e42d45f896d1d227b846116",
    "lowbit-1.1/hqq-gemm-fp16": "f12a90c4dffe67681f5273e914e4db59b8999812cff3db3b3220edd135abafa0",
    "lowbit-1.1/hqq-gemv-bf16": "8151fa864a0cbdc1f7aafdeead9c976ddcdd9601e08a97d785c42d626bfa11d5",
    "lowbit-1.1/hqq-gemm-bf16": "b06281bcec773c13bb67187080a8e8e35fa42a5cd0c9a7ac6cee6c98ea5a665a",
    "lowbit-1.1/nf4-gemv-bf16": "5d4600e9a3548b618f12f16b73693e0760c257efdb0f87f2acbc703229bd66d0",
    "lowbit-1.1/nf4-gemm-bf16": "83e2d03e2b11a769693bf313e409080e2a056f624e16995c619a7eb24aba6a14",
    "lowbit-1.1/matmulnbits-gemv-fp32": "ebc195385653407405441e14c19eb52eb2065071725a5c12f922ac6da00b5dac",
    "lowbit-1.1/matmulnbits-gemm-fp32": "6e8eda6601d57fb985d61360e1e0def8622f89bc9c25af604c284e68029ea671",
    "lowbit-1.1/matmulnbits-gemv-fp16": "aa73f6dc8b9676632a6a357f3ee9e673969839ce99774f9a95935f809dce104c",
    "lowbit-1.1/matmulnbits-gemm-fp16": "ec4c77ea3bae907f5597421149dc8e476c5df3b5a4872367b6cc51c740a1cc26",
    "lowbit-1.1/mxfp4-gemv-bf16": "6a7f1e6e9497d1fc9b3cbdef4e76476b523dcd2cf609fd94403c8f724c823a14",
    "lowbit-1.1/mxfp4-gemm-bf16": "c8441f62c2513e2e12dd8dbed7d14f82bd928b7c8f028bdc2342487675d7936c",
    "lowbit-1.1/nvfp4-gemv-bf16": "3f0793c6ee208ec652428fb658f0adbad78a92e26a1005232608714252dcaea9",
    "lowbit-1.1/nvfp4-gemm-bf16": "4ae262c20b687fa561668d8d285f2893d65a4db59d794cd10f85610dcb79b393",
    "lowbit-1.1/fp8-tensor-gemv-bf16": "e88dfe3fd33c3a6e79bb91814f59ad5fd69c70e580b21088616b9f94fe2c7e92",
    "lowbit-1.1/fp8-tensor-gemm-bf16": "21e9a7aaaa515f2fdabd14322e95f430988a3468bb9f9d896b112bc97709d49c",
    "lowbit-1.1/fp8-channel-gemv-bf16": "8fcf37ed965ac6a3191b4165cb8940b610fc69d22ab366664b6b65e3efda6235",
    "lowbit-1.1/fp8-channel-gemm-bf16": "a9f70fd136909ff8ea323f71c3192914d987f1705254e4b5454c5c706ec268ed",
    "lowbit-1.1/fp8-block-gemv-bf16": "ba75b19178edc9a4ddbef24b5a24472163a6b816791b2a2c9e5f3533788281d6",
    "lowbit-1.1/fp8-block-gemm-bf16": "485904dcd0360ece1d34742e714e96cbd4a1722ca8ca8120ee46a0d3da0acd57",
    "lowbit-1.1/q4_0-q8_0": "0236c35b65164362a2d7ef18edbde753653e5981bc3e6b7e2296da557533bbb4",
    "lowbit-1.1/q5_0-q8_0": "c5656942e78cd868a22b3af827db3c9156e0c1de889c40121de530041a7dd919",
    "lowbit-1.1/q8_0-q8_0": "d28dcb74a739cf49fc0aca9f5384b11f48278d76b6bd30cf7e52f8445725a2f8",
    "lowbit-1.1/iq4_nl-q8_0": "8e5e2e804490f457a78de2858795a2f3567f21f0aac888664d79acf2f2eb4425",
    "lowbit-1.1/gguf-mxfp4-q8_0": "938cbd938ac4c4e5db083f0d17f01a9522744c71093a318078fa80bea277b20f",
    "lowbit-1.1/q4_1-q8_1": "490931d00c7741257cab3c5898da8e03e31d4edab7d54090fd28ad0268d1863a",
    "lowbit-1.1/q5_1-q8_1": "1a58c745e2e68095c1fe61e64102117ea5f64395fea616a653f159fb00cb7d11",
    "lowbit-1.1/q2_k-q8_k": "2ecb3872b66ecc064cb83fc1594f6c9e024bffa2b6885a444f565a4a08a58014",
    "lowbit-1.1/q3_k-q8_k": "68c14e7c50b529aed5e592210d05571ff3fb1ecdba59e580b89854138f8f073b",
    "lowbit-1.1/q4_k-q8_k": "f6255b827928154d4ea970f41f6bcf2ecc99973f1e3dbae7ba36e4356e334858",
    "lowbit-1.1/q5_k-q8_k": "4afad6e7189244ddacf2260b78f748400aa5f7adfda0adfbfee28a842a886dbb",
    "lowbit-1.1/q6_k-q8_k": "4259dfa9eada7adfa30f0159f9f797d1976bac7302c076725188d401d17e6f64",
    "lowbit-1.1/iq4_xs-q8_k": "e61679035cb66ad36004af9d69228ea5b0c629cb53d05c7862745c0fd6188bdf",
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


@pytest.fixture(scope="module")
def by_operation(cases: list[Case]) -> dict[str, list[Case]]:
    found = defaultdict(list)
    for case in cases:
        found[case.operation].append(case)
    return found


def test_profiles_are_frozen() -> None:
    """The clauses, their sentences, the habits and the parameters of each profile are those it was published with."""
    assert {id: each.digest for id, each in PROFILES.items()} == DIGESTS
    assert all(re.fullmatch(r"lowbit-\d+\.\d+/[a-z0-9_-]+", id) for id in PROFILES)


@pytest.mark.parametrize("one", PROFILES.values(), ids=list(PROFILES))
def test_no_profile_is_hollow(one: Profile, by_operation: dict[str, list[Case]]) -> None:
    """Each clause, and each habit with cases of its own, has a case in the profile; an operation that has a parameter
    of the profile has a case for each of the values asked for."""
    cases = [case for operation in one.operations for case in by_operation[operation]]
    selected = [case for case in cases if one.selects(case.clause, case.parameters())]
    own = own_habits(one)
    assert {*one.clauses, *own} == {case.clause for case in selected}
    for operation in one.operations:
        mine = [case.parameters() for case in selected if case.operation == operation]
        for name, asked in one.parameters.items():
            found = {parameters[name] for parameters in mine if name in parameters}
            if isinstance(asked, Range):
                assert len(found) > 1, f"{operation}: {name}"
            else:
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
