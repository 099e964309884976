"""``lowbit prove``: what is said and kept, exit statuses, and which certificates are believed."""

import doctest
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from command_line import CommandLine, command_line

from lowbit.errors import UnavailableError
from lowbit_cppyy.names import kernel_of
from lowbit_prove import catalogue, certificates, command, deciding, machine, products, symbols
from lowbit_prove.deciding import Decided
from lowbit_prove.theorem import Proof, Refutation, Theorem, Undecided

KERNEL = "gemv_f32_u4_s16z_fold_1x1c1t1_p64a0_avx2"


@pytest.fixture(scope="module")
def commands() -> Iterator[CommandLine]:
    with command_line("lowbit_prove.command", "lowbit_prove.catalogue") as running:
        yield running


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOWBIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_kernel_is_proved_once(commands: CommandLine, cache: Path) -> None:
    """The second run believes the certificate of the first, and `--fresh` does not."""
    variables = {"LOWBIT_CACHE": str(cache)}
    for options, certified in (((), False), ((), True), (("--fresh",), False)):
        found = commands.run("prove", KERNEL, "--json", *options, variables=variables)
        assert found.returncode == 0, found.stderr
        theorems = json.loads(found.stdout)["theorems"]
        assert [each["theorem"] for each in theorems] == [
            f"{kind}/{KERNEL}" for kind in ("products", "memory", "roundings")
        ]
        for each in theorems:
            assert each["outcome"] == "proof" and each["steps"] > 5 and each["certified"] == certified


def test_kinds_and_parts_are_listed(commands: CommandLine) -> None:
    listed = commands.run("prove", "places", "--list").stdout.splitlines()
    assert len(listed) == 8 and all(each.startswith("places/") for each in listed)
    found = commands.run("prove", "places", "--sample", "4", "--fresh")
    assert found.returncode == 0 and "2 of 2 theorems proved" in found.stdout


def test_wrong_arguments_are_refused_in_words(commands: CommandLine) -> None:
    found = commands.run("prove", "everything")
    assert found.returncode == 2 and "'everything'" in found.stderr and "formats" in found.stderr
    assert commands.run("prove", "gemv_f32_u5").returncode == 2
    assert commands.run("prove", "places", "--sample", "0").returncode == 2
    assert commands.run("prove", "places", "--jobs", "0").returncode == 2


def test_several_processes_find_what_one_finds(cache: Path) -> None:
    """Of more theorems than one process takes alone, in the order of the catalogue; the second time by certificates."""
    choice = deciding.Choice(("places", "formats/q4_0/qs"))
    assert len(choice.theorems) > deciding.FEW
    several = deciding.decided(choice, fresh=False, jobs=2)
    assert [each.theorem.id for each in several] == [each.id for each in choice.theorems]
    assert all(isinstance(each.outcome, Proof) and not each.certified for each in several)
    again = deciding.decided(choice, fresh=False, jobs=2)
    assert [each.outcome for each in again] == [each.outcome for each in several]
    assert all(each.certified for each in again)
    one = deciding.decided(choice, fresh=True, jobs=1)
    assert [each.outcome for each in one] == [each.outcome for each in several]


def test_without_the_solver_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    with pytest.raises(UnavailableError, match=r"z3-solver is not installed; pip install 'lowbit\[prove\]'"):
        command.prove([])


def test_a_refutation_is_told_with_its_numbers() -> None:
    theorem = Theorem("products", "some", "y = x", lambda: "", lambda: Undecided(""), lambda numbers: None)
    refuted = Decided(theorem, Refutation("a code is 3", {f"w_{n}": 255 for n in range(20)}), 0.5, False)
    lines = list(command.told(refuted))
    assert (
        lines[1] == "    REFUTED: a code is 3"
        and "    w_0 = 0xff" in lines
        and lines[-2] == "    and 8 more, with --json"
        and lines[-1].endswith("lowbit prove products/some --json > FILE; lowbit prove --run FILE")
    )
    assert refuted.document["outcome"] == "refutation" and len(refuted.document["numbers"]) == 20
    undecided = Decided(theorem, Undecided("it takes too long"), 0.5, False)
    assert list(command.told(undecided))[1] == "    undecided: it takes too long"


def test_the_numbers_of_a_refutation_can_be_run(commands: CommandLine, tmp_path: Path) -> None:
    """A kernel that is right gives what it should; numbers that are none are refused."""
    path = tmp_path / "numbers.json"
    path.write_text(json.dumps({"w_0": 0x12345678, "x_0_1": 1, "place": 0}))
    found = commands.run("prove", KERNEL, "--run", str(path))
    assert found.returncode == 0 and "right on these numbers" in found.stdout
    path.write_text("[1]")
    assert commands.run("prove", KERNEL, "--run", str(path)).returncode == 2


# Certificates.


def proved() -> tuple[Theorem, certificates.Certificate]:
    theorem = products.of_kernel(kernel_of(KERNEL))
    return theorem, certificates.certificate(theorem)


def test_a_certificate_is_for_one_subject_one_meaning_and_one_solver(cache: Path) -> None:
    """Whatever differs asks for another proof; a name alone does not."""
    _, wanted = proved()
    certificates.keep(wanted, Proof(7))
    assert certificates.kept(wanted) == Proof(7)
    assert certificates.kept(replace(wanted, theorem="products/another")) == Proof(7)
    others = (
        replace(wanted, statement="another"),
        replace(wanted, subject="another"),
        replace(wanted, meaning="another"),
    )
    for other in (*others, replace(wanted, solver="another")):
        assert certificates.kept(other) is None, other


@pytest.mark.parametrize("field", ("statement", "subject", "meaning", "solver", "version", "steps", "by"))
def test_a_certificate_that_was_changed_is_not_believed(field: str, cache: Path) -> None:
    """Its name is a digest of what it is for, and all of that stands in it again."""
    _, wanted = proved()
    certificates.keep(wanted, Proof(7))
    (path,) = (cache / "proofs").glob("*.json")
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, field: -1}))
    assert certificates.kept(wanted) is None
    path.write_text("{")
    assert certificates.kept(wanted) is None


PROGRAMS = ("products", "memory", "roundings")
"""Kinds of theorems about programs, of which two kernels may have the same."""


def sampled() -> list[Theorem]:
    """All theorems, but of those about programs one in thirty."""
    return [each for n, each in enumerate(catalogue.theorems()) if each.kind not in PROGRAMS or n % 30 == 0]


def test_other_programs_have_other_certificates() -> None:
    """Two theorems with one certificate are about the same program, layout or function."""
    subjects = dict[str, tuple[str, str, str]]()
    for theorem in sampled():
        what = theorem.kind, theorem.statement, theorem.subject()
        assert subjects.setdefault(certificates.certificate(theorem).key, what) == what
    theorem, wanted = proved()
    other = products.of_kernel(kernel_of(KERNEL), kernel_of(KERNEL.replace("fold", "shift")).program)
    assert other.statement == theorem.statement and certificates.certificate(other).key != wanted.key


def test_every_theorem_of_one_certificate_has_one_decision() -> None:
    """Bits, sizes and fields are part of what a certificate is for."""
    ids = dict[str, set[str]]()
    for theorem in sampled():
        if theorem.kind not in PROGRAMS:
            ids.setdefault(certificates.certificate(theorem).key, set()).add(theorem.id)
    assert all(len(each) == 1 for each in ids.values())


@pytest.mark.parametrize("module", (catalogue, machine, symbols), ids=lambda each: each.__name__)
def test_examples_of_docstrings(module: ModuleType) -> None:
    failed, tried = doctest.testmod(module)
    assert failed == 0 and tried > 0
