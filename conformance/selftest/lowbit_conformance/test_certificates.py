"""Certificates end to end: what is claimed must be certified, and the exit status and the report say so."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lowbit.cli import app
from lowbit.errors import LowbitError

PACKING = "lowbit-1.1/packing"

MODULE = """
import numpy as np
from lowbit.backend import Backend, Capabilities, Declaration

class {name}(Backend):
    name = "{name}"
    def capabilities(self):
        limits = Declaration({limits})
        return Capabilities({{"packing.pack": Declaration(), "packing.unpack": limits}}, profiles=("{profile}",))

    def _packing_pack(self, codes, bits):
        each = codes.T[:, :, None] >> np.arange(bits, dtype=np.uint8) & 1
        octets = np.packbits(each.reshape(codes.shape[1], -1), axis=1, bitorder="little")
        return octets.view("<u4").T.copy()

    def _packing_unpack(self, words, bits):
        each = np.unpackbits(words.T.copy().view(np.uint8), axis=1, bitorder="little")
        each = each.reshape(words.shape[1], -1, bits) << np.arange(bits, dtype=np.uint8)
        return each.sum(axis=2, dtype=np.uint8).T.copy()
"""


def write(folder: Path, name: str, limits: str = "", profile: str = PACKING) -> str:
    (folder / f"{name.lower()}.py").write_text(MODULE.format(name=name, limits=limits, profile=profile))
    return f"{name.lower()}:{name}"


def run(*arguments: str) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(app, ["conformance", *arguments, "--json"])
    status = 2 if isinstance(done.exception, LowbitError) else done.exit_code  # as `lowbit.cli.main` ends
    said = {"verdict": f"none: {done.exception!r}, {done.output[-2000:]}"}
    return status, json.loads(done.stdout) if done.stdout.startswith("{") else said


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.whole
def test_a_claim_that_holds_is_certified(here: Path) -> None:
    """A run of everything certifies what is claimed, and passes."""
    status, report = run(write(here, "Whole"))
    assert status == 0
    assert [(each["profile"], each["certified"], each["missing"]) for each in report["certificates"]] == [
        (PACKING, True, [])
    ]


@pytest.mark.whole
def test_a_claim_that_does_not_hold_fails_the_run(here: Path) -> None:
    """All that is declared passes, and yet the run fails, since less is declared than is claimed."""
    status, report = run(write(here, "Partly", limits='{"bits": (2, 4, 8)}'))
    assert (status, report["verdict"], report["failures"]) == (1, "failed", [])
    (certificate,) = report["certificates"]
    assert not certificate["certified"]
    assert any("packing.unpack with bits 3" in line for line in certificate["missing"])
    assert all(line.startswith("packing.unpack/") for line in certificate["missing"])


def test_a_part_of_the_suite_judges_no_claim(here: Path) -> None:
    """One clause alone, and a few cases of each, pass whatever is claimed, and certify nothing."""
    name = write(here, "Alone", limits='{"bits": (2, 4, 8)}')
    for part in (["--op", "packing.unpack/C2"], ["--quick"]):
        status, report = run(name, *part)
        assert (status, report["verdict"], report["certificates"]) == (0, "passed", [])


@pytest.mark.whole
def test_a_profile_is_certified_for_who_does_not_claim_it(here: Path) -> None:
    """`--profile` runs that profile's cases only and certifies it, with as many seeds as that takes."""
    name = write(here, "Shy")
    status, report = run(name, "--profile", PACKING)
    assert (status, report["selection"]) == (0, f"only {PACKING}")
    assert {each["id"].partition("/")[0] for each in report["passed"]} == {"packing.pack", "packing.unpack", "backend"}
    status, report = run(name, "--profile", PACKING, "--op", "packing.unpack/C2", "--seeds", "1")
    assert (status, report["failures"]) == (1, [])
    assert "the random tier: 1 seeds, at least 5 are needed" in report["certificates"][0]["missing"]


def test_unknown_profiles_are_refused(here: Path) -> None:
    """On the command line with status 2; a claim is a part of the declaration, which is refused."""
    assert run("numpy", "--profile", "lowbit-1.1/all")[0] == 2
    status, report = run(write(here, "Vain", profile="lowbit-9.9/all"))
    assert (status, [each["verdict"] for each in report["failures"]]) == (1, ["DECLARATION_REFUSED"])


@pytest.mark.parametrize("asked", [("--op", "packing.pack/C3"), ("--case", "packing.pack/C3/edge/bits-5-b2-32x3-s0")])
def test_a_retired_clause_is_answered_with_its_successor(here: Path, asked: tuple[str, str]) -> None:
    """By its id, or that of one of its cases, as a report of before printed it: the cases of H8 are run."""
    status, report = run(write(here, "Whole"), *asked)
    assert (status, report["verdict"]) == (0, "passed")
    clauses = {"/".join(each["id"].split("/")[:2]) for each in report["passed"]}
    assert "packing.pack/H8" in clauses <= {"packing.pack/H8", "backend/H6"}
