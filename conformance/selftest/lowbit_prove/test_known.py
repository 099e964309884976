"""What is known of kernels and backends: by certificates of today's code, and by nothing else."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from lowbit import theorems
from lowbit.backend import ENTRY_POINTS
from lowbit.system.entries import entries
from lowbit_conformance.report import report_of
from lowbit_conformance.suite.tally import Tally
from lowbit_cppyy.cli.kernel import proved
from lowbit_prove import certificates, known
from lowbit_prove.catalogue import chosen
from lowbit_prove.known import CPPYY, CUDA, KnownProofs
from lowbit_prove.theorem import Proof

KERNEL = "gemv_f32_u4_s16z_fold_1x1c1t1_p64a0_avx2"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOWBIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def keep(name: str) -> None:
    """Keep a certificate for each theorem of a name."""
    for each in chosen([name]):
        certificates.keep(certificates.certificate(each), Proof(7))


def holding(name: str) -> set[str]:
    return {each.theorem.partition("/")[0] for each in theorems.of_kernel(name) if each.holds}


def test_the_prover_is_found_by_its_entry_point() -> None:
    assert isinstance(theorems.prover(), KnownProofs)


def test_a_kernel_has_the_theorems_of_its_certificates() -> None:
    assert len(theorems.of_kernel(KERNEL)) == 3 and holding(KERNEL) == set()
    keep(f"products/{KERNEL}")
    assert holding(KERNEL) == {"products"}
    keep(KERNEL)
    assert holding(KERNEL) == {"products", "memory", "roundings"}
    assert holding(KERNEL.replace("1x1", "1x2")) == set()
    assert not theorems.of_kernel("gemv_of_nothing")


def test_a_certificate_of_other_code_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code that gives theorems their meaning has changed since."""
    keep(KERNEL)
    monkeypatch.setattr(certificates, "meaning", lambda: "of other code")
    assert holding(KERNEL) == set()


def test_a_certificate_of_another_program_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    keep(KERNEL)
    own = certificates.certificate
    monkeypatch.setattr(
        certificates,
        "certificate",
        lambda theorem: own(type(theorem)(**{**vars(theorem), "subject": lambda: theorem.subject() + " and more"})),
    )
    assert holding(KERNEL) == set()


@pytest.mark.parametrize("field", ("subject", "meaning", "solver", "statement", "version"))
def test_a_forged_certificate_is_not_believed(field: str, cache: Path) -> None:
    keep(f"products/{KERNEL}")
    (path,) = (cache / "proofs").iterdir()
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, field: "another"}))
    assert holding(KERNEL) == set()


def test_the_command_says_what_holds_and_how_to_prove_the_rest() -> None:
    keep(f"memory/{KERNEL}")
    lines = list(proved(KERNEL))
    assert any(each.startswith("memory: proved, 7 steps by solver, z3 ") for each in lines)
    assert f"products: no proof is kept; lowbit prove products/{KERNEL}" in lines


def test_of_a_backend_only_its_own_theorems_are_known() -> None:
    """Without certificates nothing is looked for; with one, those of its table and those about all of it."""
    details = {"instruction set": "avx2"}
    assert not theorems.of_backend(CPPYY, details)
    keep("steps")
    found = theorems.of_backend(CPPYY, details)
    assert {each.theorem for each in found if each.holds} == {each.id for each in chosen(["steps"])}
    kernels = [each for each in found if each.theorem.startswith("products/")]
    assert len(kernels) > 50 and all(each.theorem.endswith("_avx2") for each in kernels)
    assert {each.theorem.partition("/")[0] for each in theorems.of_backend(CUDA, {})} == {"graphs", "offload"}
    assert not theorems.of_backend("another.package:Backend", details)


def test_backends_are_known_by_their_entry_points() -> None:
    assert {CPPYY, CUDA} <= {each.value for each in entries(ENTRY_POINTS)}


def test_a_report_counts_the_theorems_of_its_backend() -> None:
    keep("steps")
    details = {"instruction set": "avx2"}
    report = report_of(Tally("cppyy", details, {}, 0, []), ["cppyy"], {}, datetime.now(UTC))
    count = len(chosen(["steps"]))
    assert f"steps {count} of {count}" in report.proved and "products 0 of" in report.proved
    assert not report_of(Tally("numpy", {}, {}, 0, []), ["numpy"], {}, datetime.now(UTC)).proved


def test_without_a_prover_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ImportError("z3")

    monkeypatch.setattr(known, "KnownProofs", missing)
    assert theorems.prover() is None and not theorems.of_kernel(KERNEL) and not theorems.of_backend(CPPYY, {})
