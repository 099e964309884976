"""The suite finds what it must find, and finds nothing in what is right."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import broken_backends
import pytest
from broken_backends import FOUND_BY_RESULT, FOUND_BY_VERDICT

HERE = Path(__file__).parent


def conformance(backend: type | str, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Run ``lowbit conformance`` on a class of `broken_backends`; exit status, JSON answer, standard error."""
    name = backend if isinstance(backend, str) else f"broken_backends:{backend.__name__}"
    command = [sys.executable, "-m", "lowbit.cli", "conformance", name, "--json", *arguments]
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=300, check=False
    )
    return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr


def test_the_control_passes() -> None:
    """A correct backend passes all that it declares; what it does not declare is counted apart."""
    clauses = [part for number in (2, 3, 4, 5, 6) for part in ("--op", f"linear.qgemv/C{number}")]
    status, answer, _ = conformance(broken_backends.Correct, *clauses, "--op", "packing.pack")
    assert (status, answer["verdict"]) == (0, "passed")
    rows = {row["operation"]: row for row in answer["operations"]}
    assert rows["packing.pack"]["declared"] == 0 < rows["packing.pack"]["specified"]
    assert 0 < rows["linear.qgemv"]["passed"] == rows["linear.qgemv"]["declared"]
    assert 0 < rows["linear.qgemv"]["worst_share"] < 1


# The reference against itself where the backends do not declare all, which is where no other run computes with it.
RUNS = {
    "cppyy": (),
    "numpy": (),
    "reference": ("offload.trace", "bfp.store", "bfp.load", "bfp.total", "linear.qgemv/C3"),
}


@pytest.mark.parametrize("name", RUNS)
def test_the_backends_of_this_distribution_pass(name: str) -> None:
    """The suite, run as a user runs it: every operation and clause that a backend declares."""
    chosen = [part for operation in RUNS[name] for part in ("--op", operation)]
    status, answer, error = conformance(name, "--seeds", "0", *chosen)
    assert (status, answer["verdict"], answer["failures"]) == (0, "passed", []), error


@pytest.mark.parametrize("defect", FOUND_BY_RESULT, ids=lambda defect: defect.__name__)
def test_a_wrong_result_fails(defect: type[broken_backends.Correct]) -> None:
    """Each wrong kernel is found by its result, without any random seed: by the lattice or an edge."""
    operation = f"linear.qgemv/{FOUND_BY_RESULT[defect]}"
    status, answer, _ = conformance(defect, "--op", operation, "--seeds", "0", "-x")
    assert (status, answer["verdict"]) == (1, "failed")
    assert "WRONG" in answer["failures"][0]["message"]


@pytest.mark.parametrize("defect", FOUND_BY_VERDICT, ids=lambda defect: defect.__name__)
def test_a_bad_habit_gets_its_verdict(defect: type[broken_backends.Correct]) -> None:
    """Each habit that no single result shows gets the verdict that names it."""
    verdict, clause = FOUND_BY_VERDICT[defect]
    _, answer, _ = conformance(defect, "--op", f"linear.qgemv/{clause}", "--seeds", "1", "-x")
    assert [failure["message"].partition(":")[0] for failure in answer["failures"]] == [verdict]


def test_rows_past_a_block_are_found() -> None:
    """A prompt longer than a kernel takes at once: the rows past its first block are checked too."""
    status, answer, _ = conformance(broken_backends.RowsPastSixtyFour, "--op", "linear.qgemm/C1", "--seeds", "0", "-x")
    assert (status, answer["verdict"]) == (1, "failed")
    assert "tall" in answer["failures"][0]["id"]


@pytest.mark.parametrize(
    ("defect", "message"),
    [
        (broken_backends.LeavesEarly, "CRASHED: the process ended with status 0"),
        (broken_backends.SkipsItself, "skipped by the backend itself"),
        (broken_backends.Interrupts, "CRASHED: the process ended with status 2"),
        (broken_backends.Hangs, "HUNG: longer than 1 s"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_no_way_of_ending_is_a_pass(defect: type, message: str) -> None:
    """A backend that leaves in good order, skips, interrupts or hangs has failed, in the case in which it did."""
    status, answer, _ = conformance(defect, "--op", "linear.qgemv/C1", "--seeds", "0", "-x", "--deadline", "1")
    assert status == 1
    assert answer["failures"][-1]["message"].startswith(message)
    assert answer["failures"][-1]["id"].startswith("linear.qgemv/")


def test_declarations_of_what_does_not_exist_are_refused() -> None:
    """An operation or a parameter that the specification does not have is named."""
    status, _, error = conformance(broken_backends.DeclaresAnUnknownOperation)
    assert status == 2
    assert "an operation that the backend declares is linear.qgemw" in error
    _, answer, _ = conformance(broken_backends.LimitsAnUnknownParameter, "--op", "linear.qgemv/C4", "-x")
    assert "limit of a declaration is 'bitz'; allowed: bits," in answer["failures"][0]["message"]


def test_a_failure_is_reproduced_alone() -> None:
    """The line that a report prints runs that case, and it fails again."""
    _, answer, _ = conformance(broken_backends.DroppedProduct, "--op", "linear.qgemv", "-x")
    case = answer["failures"][-1]["id"]
    status, again, _ = conformance(broken_backends.DroppedProduct, "--case", case)
    assert status == 1
    assert [failure["id"] for failure in again["failures"]] == [case]
    assert sum(row["specified"] for row in again["operations"]) == 1


def test_a_crash_is_the_verdict_of_its_case() -> None:
    """A backend that ends the process fails, and the case that was running is named with the signal."""
    status, answer, _ = conformance(broken_backends.Crashes, "--op", "linear.qgemv", "-x")
    assert status == 1
    assert answer["failures"][-1]["message"] == "CRASHED(SIGSEGV)"
    assert answer["failures"][-1]["id"].startswith("linear.qgemv/")


def test_an_unavailable_backend_is_an_error() -> None:
    """A backend that was named and cannot run is a usage error that says why, never a pass."""
    status, answer, error = conformance(broken_backends.Unavailable)
    assert (status, answer) == (2, {})
    assert "it needs an abacus; buy one" in error


def test_an_unknown_backend_is_an_error() -> None:
    """A name that nobody offers is a usage error that lists the names there are."""
    status, _, error = conformance("abacus")
    assert status == 2
    assert "'abacus'; allowed: cppyy, numpy or reference" in " ".join(error.split()).replace(", or", " or")


def test_nothing_executed_is_no_pass() -> None:
    """A backend that declares nothing has not passed."""
    status, answer, _ = conformance(broken_backends.DeclaresNothing, "--op", "packing.pack")
    assert (status, answer["verdict"]) == (1, "nothing executed")


def test_declared_and_lacking_is_a_failure() -> None:
    """What a backend declares and has no code for fails; no other backend answers in its place."""
    status, answer, _ = conformance(broken_backends.DeclaresWhatItLacks, "--op", "packing.pack", "--seeds", "0")
    assert status == 1
    assert "does not declare packing.pack" in answer["failures"][0]["message"]
