"""The suite as a command: what it says of right backends, of odd ones, and of what cannot be run."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import odd_backends
import pytest
from paths import SUPPORT
from typer.testing import CliRunner

import lowbit
from lowbit.backend import Declaration, Range
from lowbit.cli import app
from lowbit.errors import ArgumentError, LowbitError
from lowbit.operations import OPERATIONS
from lowbit_conformance.cli import conformance as command
from lowbit_conformance.suite import plugin
from lowbit_conformance.suite.cases import Case, MatrixCase
from lowbit_conformance.suite.clauses import load_suite
from lowbit_conformance.suite.fitting import moved
from lowbit_conformance.suite.marking import MARKS, Settings
from lowbit_conformance.suite.plugin import QUICK_CASES, Run, few
from lowbit_cppyy import CppyyBackend
from lowbit_numpy import NumpyBackend

HERE = SUPPORT


def conformance(backend: type | str, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Run ``lowbit conformance`` on a class of `odd_backends`; exit status, JSON answer, standard error."""
    name = backend if isinstance(backend, str) else f"odd_backends:{backend.__name__}"
    command = [sys.executable, "-m", "lowbit", "conformance", name, "--json", *arguments]
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=3600, check=False
    )
    return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr


@pytest.mark.whole
def test_a_narrow_backend_passes() -> None:
    """A right backend passes all that it declares; what it does not declare is counted apart."""
    status, answer, _ = conformance(odd_backends.Narrow, "--op", "packing.pack", "--op", "packing.unpack")
    assert (status, answer["verdict"]) == (0, "passed")
    rows = {row["operation"]: row for row in answer["operations"]}
    assert rows["packing.unpack"]["declared"] == 0 < rows["packing.unpack"]["specified"]
    assert 0 < rows["packing.pack"]["passed"] == rows["packing.pack"]["declared"] < rows["packing.pack"]["specified"]


# In parts that take about as long as each other, side by side. The reference runs against itself only where no backend
# declares all.
DECLARED = CppyyBackend().capabilities().operations.keys()
BOTH, NUMPY_ALONE = (
    [each for each in OPERATIONS if each in DECLARED],
    [each for each in OPERATIONS if each not in DECLARED],
)
PRODUCTS = [each for each in BOTH if each.startswith("linear.")]
OTHERS = [each for each in BOTH if each not in PRODUCTS]
RUNS = {
    "cppyy-products": ("cppyy", PRODUCTS),
    "numpy": ("numpy", BOTH),
    "cppyy-others": ("cppyy", OTHERS),
    "numpy-alone": ("numpy", NUMPY_ALONE),
    "reference": ("reference", ["linear.qgemv/C3"]),
}


def test_the_whole_runs_are_of_all_that_is_declared() -> None:
    """Every operation is declared by a backend of this distribution, and is in a run of each that declares it."""
    assert NumpyBackend().capabilities().operations.keys() == {*BOTH, *NUMPY_ALONE} == OPERATIONS.keys()


@pytest.mark.whole
@pytest.mark.parametrize(("name", "operations"), RUNS.values(), ids=RUNS)
def test_the_backends_of_this_distribution_pass(name: str, operations: list[str]) -> None:
    """The suite, run as a user runs it: every operation and clause that a backend declares."""
    chosen = [part for operation in operations for part in ("--op", operation)]
    status, answer, error = conformance(name, "--seeds", "1", *chosen)
    assert (status, answer["verdict"], answer["failures"]) == (0, "passed", []), error


@pytest.mark.whole
@pytest.mark.parametrize("name", ["numpy", "cppyy", "reference"])
def test_a_quick_run_passes(name: str) -> None:
    """A few cases of every clause."""
    status, answer, error = conformance(name, "--quick")
    assert (status, answer["verdict"], answer["failures"]) == (0, "passed", []), error


def test_each_clause_of_a_test_has_verdicts() -> None:
    """A test may check several clauses, and the cases of each of them are run."""
    _, answer, _ = conformance("numpy", "--op", "blocks.swiglu/C1", "--op", "blocks.geglu/C1", "--quick")
    passed = {row["operation"]: row["passed"] for row in answer["operations"]}
    assert passed["blocks.swiglu"] == passed["blocks.geglu"] > 0


SOME = ("--quick", "--op", "packing.unpack", "--op", "packing.pack", "--op", "linear.qgemv")
"""A few cases of what the odd backends declare."""
ODD = [
    (odd_backends.DeclaresWhatItLacks, "RAISED: NotDeclaredError"),
    (odd_backends.LimitsAnUnknownParameter, "DECLARATION_REFUSED: a limit of"),
    (odd_backends.SkipsItself, "RAISED: Skipped"),
    (odd_backends.NeverPrepares, "WRONG: prepare gave a NoneType, which is no PreparedLinear"),
    (
        odd_backends.AnswersWithAnArgument,
        "WRONG: an array of the result is in the memory of an argument; allowed: an",
    ),
    (odd_backends.AnswersWithAMatrix, "WRONG: an array of the result is a matrix; allowed: a numpy.ndarray"),
    (odd_backends.CannotBeImported, "CRASHED(SIGABRT)"),
    (odd_backends.SetsTheEnvironment, "STATE_CHANGED: environment"),
]


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: odd[0].__name__)
def test_an_odd_backend_fails(odd: tuple[type, str]) -> None:
    """What is declared and lacks, a skip of its own, and an end while loading are failures in the case they are in."""
    backend, message = odd
    status, answer, _ = conformance(backend, "--seeds", "0", *SOME)
    assert (status, answer["verdict"]) == (1, "failed")
    found = [failure["message"] for failure in answer["failures"] if failure["message"].startswith(message)]
    assert found and all("narrow its limits" in each for each in found if "NotDeclaredError" in each)


def test_claims_that_change_are_a_failure_of_loading() -> None:
    """Capabilities must be the same when they are asked for again."""
    status, answer, _ = conformance(odd_backends.ChangesItsMind, *SOME)
    assert status == 1
    assert [failure["verdict"] for failure in answer["failures"]] == ["NONDETERMINISTIC"]


def test_an_unknown_operation_is_refused() -> None:
    """A declaration of what the specification does not have is named."""
    status, answer, _ = conformance(odd_backends.DeclaresAnUnknownOperation, *SOME)
    assert status == 1
    assert [failure["verdict"] for failure in answer["failures"]] == ["DECLARATION_REFUSED"]
    assert "an operation in capabilities() is 'linear.qgemw'" in answer["failures"][0]["message"]


def test_a_failure_is_reproduced_alone() -> None:
    """The line that a report prints runs that case, and it fails again."""
    _, answer, _ = conformance("bank:last-product-dropped", "--op", "linear.qgemv/C1", "-x")
    case = answer["failures"][-1]["id"]
    status, again, _ = conformance("bank:last-product-dropped", "--case", case)
    assert status == 1
    assert [failure["id"] for failure in again["failures"]] == [case]
    assert sum(row["specified"] for row in again["operations"]) == 1


def test_an_unavailable_backend_is_an_error() -> None:
    """A backend that was named and cannot run is a usage error that says why, never a pass."""
    status, answer, error = conformance(odd_backends.Unavailable)
    assert (status, answer) == (2, {})
    assert "it needs an abacus; buy one" in error


def test_an_unknown_backend_is_an_error() -> None:
    """A name that nobody offers is a usage error that lists the names there are."""
    status, _, error = conformance("abacus")
    assert status == 2
    assert "backend is 'abacus'; allowed: cppyy" in error


UNKNOWN = [
    (["abacus"], "backend is 'abacus'; allowed: cppyy"),
    (["abacus.beads:Wooden"], "there is no module 'abacus' in this folder or on Python's path"),
    (["--library", "abacus.so"], r"abacus\.so is unavailable: there is no such file; build it first"),
]
"""How a backend is named that does not exist, and what the error says."""


@pytest.mark.parametrize(
    ("named", "message"),
    [
        *UNKNOWN,
        (["--function", "abacus:pack", "--operation", "packing.pack"], "there is no module 'abacus'"),
        (["--function", "abacus:pack", "--op", "packing.pack"], "there is no module 'abacus'"),
        (["--function", "abacus", "--operation", "packing.pack"], "function is 'abacus'; allowed: module:function"),
        (["--function", "a:b", "--operation", "linear.gemv", "--format", "q8_00"], "--format is 'q8_00'; allowed: "),
        (
            ["--function", "a:b", "--operation", "linear.gemv", "--profile", "lowbit-1.1/q8_0-q8_0"],
            "--operation is linear.gemv; allowed: linear.gemm_cast, which the profile is about",
        ),
    ],
)
def test_an_unknown_backend_is_refused_before_cases_are_made(
    named: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the command: pytest, which makes them, is not started."""
    monkeypatch.setattr(command, "run_suite", lambda *_: pytest.fail("the suite was started"))
    error = CliRunner().invoke(app, ["conformance", *named]).exception
    assert isinstance(error, LowbitError) and re.search(message, str(error))


def test_certify_refuses_an_unknown_backend_as_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the command does."""
    monkeypatch.setattr(command, "run_suite", lambda *_: pytest.fail("the suite was started"))
    with pytest.raises(ArgumentError, match="backend is 'abacus'; allowed: cppyy"):
        lowbit.certify("abacus")


@pytest.mark.parametrize(("named", "message"), UNKNOWN)
def test_pytest_refuses_an_unknown_backend_as_early(
    named: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the suite runs without the command, as ``pytest -p lowbit_conformance.suite.plugin``."""
    monkeypatch.setattr(plugin, "load_suite", lambda: pytest.fail("cases were made"))
    parser = pytest.Parser(_ispytest=True)
    plugin.pytest_addoption(parser)
    option = parser.parse([*named] if len(named) == 2 else ["--backend", *named])
    config: Any = SimpleNamespace(option=option, pluginmanager=SimpleNamespace(get_plugins=list))
    with pytest.raises(pytest.UsageError, match=message):
        Run(config)


def test_nothing_executed_is_no_pass() -> None:
    """A backend that declares nothing has not passed."""
    status, answer, _ = conformance(odd_backends.DeclaresNothing, "--op", "packing.pack")
    assert (status, answer["verdict"]) == (1, "nothing executed")


@pytest.mark.whole
def test_cases_are_moved_to_the_heads_of_a_backend() -> None:
    """Of 40 channels, which no case has: attention and rotations in all types; a mistake is found there."""
    asked = ["--quick", "--op", "attention.attend", "--op", "rope.rotate"]
    status, answer, _ = conformance(odd_backends.HeadsOf40, *asked)
    assert (status, answer["verdict"]) == (0, "passed"), answer["failures"]
    for name in ("attention.attend", "rope.rotate"):
        own = [each["parameters"] for each in answer["passed"] if each["id"].startswith(f"{name}/C")]
        assert all(given["head_dim"] % 40 == 0 for given in own)
        assert {given.get("inputs", "float32") for given in own} == {"float32", "float16", "bfloat16"}
    _, answer, _ = conformance(odd_backends.HeadsOf40Cut, *asked)
    wrong = {each["id"].partition("/")[0] for each in answer["failures"] if each["verdict"] == "WRONG"}
    assert wrong == {"attention.attend", "rope.rotate"}


@pytest.mark.parametrize(
    "name",
    [
        "attention.attend",
        "attention.attend_stored",
        "attention.attend_residual",
        "rope.rotate",
        "kvcache.bfp",
        "kvcache.kivi",
    ],
)
def test_every_clause_of_heads_has_cases_that_move(name: str) -> None:
    """Also of the caches: every clause of an operation has cases of 40 channels then."""
    claim = Declaration({"inputs": ("float32", "float16", "bfloat16"), "head_dim": Range(40)})
    if name.startswith("kvcache"):
        claim = Declaration({"head_dim": Range(40), "kv_heads": (6,)})
    load_suite()
    found: dict[str, list[Case]] = {clause: [] for clause in OPERATIONS[name].clauses}
    for mark in MARKS:
        if mark.clause in found:
            found[mark.clause] += moved(mark.generator(mark.clause, Settings(range(2))), claim)
    assert all(case.possible and not claim.lacks(case.parameters()) for own in found.values() for case in own)
    assert all(found.values()), [clause for clause, own in found.items() if not own]


def test_two_names_are_refused() -> None:
    """A backend is named in one way."""
    status, _, error = conformance("numpy", "--library", "libmine.so")
    assert status == 2
    assert "NAME, --library, --command and --function" in error


def test_quick_keeps_all_cases_of_a_model() -> None:
    """Of a test's other cases it takes a few; who names a model asks for all that are made from it."""
    plain = [MatrixCase("linear.qgemv/C1", "lattice", "", 4, 8 * units, 2, 8) for units in range(1, 40)]
    slow = [replace(plain[0], variant="large"), replace(plain[0], tier="exhaustive")]
    own = [replace(plain[0], variant=f"ffn_up-{bits}bits-dense") for bits in (2, 3, 4, 8, 5, 6)]
    assert few([*plain, *slow, *own], ("ffn_up-",))[-len(own) :] == own
    for chosen in (few([*plain, *slow, *own], ("ffn_up-",))[: -len(own)], few([*plain, *slow])):
        assert 0 < len(chosen) <= QUICK_CASES and set(chosen) < set(plain)
