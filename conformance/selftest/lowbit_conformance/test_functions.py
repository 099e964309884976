"""Plain functions under the suite: certified, checked in this process, and as a test of pytest."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timed_functions

import lowbit
from lowbit.backend import Range
from lowbit.backend.function import Claim, FunctionBackend, described
from lowbit.errors import ArgumentError, LowbitError
from lowbit_conformance.cli.conformance import run
from lowbit_conformance.cli.functions import claim_of, function_target, limits_of
from lowbit_conformance.suite.marking import MARKS
from lowbit_conformance.testing import check, conforms

Q8: dict[str, Any] = {"format": "q8_0", "activations": "float32"}


def weights_of(blocks: Any, rows: int, columns: int) -> Any:
    records = blocks.reshape(columns, rows // 32, 34)
    d = np.ascontiguousarray(records[..., :2]).view(np.float16).astype(np.float32)
    return (d * records[..., 2:].view(np.int8)).reshape(columns, rows)


def right(x: Any, blocks: Any, rows: int, columns: int) -> Any:
    with np.errstate(invalid="ignore", over="ignore"):
        return x @ weights_of(blocks, rows, columns).T


def neighbour(x: Any, blocks: Any, rows: int, columns: int) -> Any:
    """Each block has the scale of the one before."""
    records = blocks.reshape(columns, rows // 32, 34).copy()
    records[..., :2] = np.roll(records[..., :2], 1, axis=1)
    return x @ weights_of(records, rows, columns).T


def test_a_right_function_is_certified_and_a_wrong_one_is_not() -> None:
    """In a process of its own; the diagnosis names the mistake."""
    found = lowbit.certify(right, "linear.gemv", **Q8)
    assert (found.verdict, found.failed, found.passed > 15) == ("passed", 0, True), found.report["failures"]
    found = lowbit.certify(neighbour, "linear.gemv", **Q8)
    assert found.verdict == "failed"
    assert any("stored-scale-of-the-neighbour" in each["diagnosis"] for each in found.report["failures"])


def deep(x: Any, blocks: Any, rows: int, columns: int) -> Any:
    """Rows behind the first 1024 are left out, as by the parts of a kernel that divides a column."""
    return x[..., :1024] @ weights_of(blocks, rows, columns)[:, :1024].T


def wide(x: Any, blocks: Any, rows: int, columns: int) -> Any:
    """Columns behind the first 256 are."""
    product = right(x, blocks, rows, columns)
    product[..., 256:] = 0
    return product


def many(x: Any, blocks: Any, rows: int, columns: int) -> Any:
    """Vectors behind the first 40 are."""
    product = right(x, blocks, rows, columns)
    product[40:] = 0
    return product


@pytest.mark.parametrize(
    ("kernel", "operation"),
    [(deep, "linear.gemv"), (wide, "linear.gemv"), (deep, "linear.gemm"), (many, "linear.gemm")],
)
def test_a_mistake_at_large_sizes_is_found(kernel: Any, operation: str) -> None:
    """What small matrices and few vectors do not show."""
    assert check(kernel, operation, **Q8).failures


@pytest.mark.whole
def test_a_function_claims_a_profile() -> None:
    """It says operation, format, types and sizes; the certificate names it."""
    one = "lowbit-1.1/q8_0-q8_0"
    found = lowbit.certify(stored_product, profiles=one)
    (certificate,) = found.report["certificates"]
    assert (found.verdict, certificate["profile"], certificate["certified"]) == ("passed", one, True)
    with pytest.raises(ArgumentError, match=r"profile of a function is lowbit-1\.1/packing, of .*packing\.unpack"):
        lowbit.certify(right, profiles="lowbit-1.1/packing")
    with pytest.raises(ArgumentError, match="profiles of a function is 2; allowed: one"):
        lowbit.certify(right, profiles=[one, "lowbit-1.1/packing"])


def stored_product(x_blocks: Any, blocks: Any, rows: int, columns: int) -> Any:
    x = weights_of(x_blocks, rows, len(x_blocks))
    return np.ascontiguousarray(x @ weights_of(blocks, rows, columns).T)


@pytest.mark.parametrize(
    ("kernel", "operation"),
    [
        (timed_functions.qgemv, "linear.qgemv"),
        (timed_functions.qgemv, "linear.qgemm"),
        (timed_functions.qgemm_bfp, "linear.qgemm_bfp"),
    ],
    ids=["qgemv", "qgemm", "qgemm_bfp"],
)
def test_a_function_of_own_matrices_is_certified(kernel: Any, operation: str) -> None:
    """One that takes their words, scales and zeros; `check` has the same cases, but for those that need a process."""
    found = lowbit.certify(kernel, operation, quick=True, bits=(2, 4, 8))
    assert (found.verdict, found.failed, found.passed > 15) == ("passed", 0, True), found.report["failures"]
    checked = check(kernel, operation, most=2, bits=(2, 4, 8))
    assert not checked.failures and checked.passed > 4

    def last_scale(words: Any, scales: Any, **given: Any) -> Any:
        names = ("zeros", "bits", "group_size", "convention")
        blocks = {f"x_{name}": given.get(f"x_{name}") for name in ("mantissas", "exponents", "format")}
        x = blocks if "x_format" in given else {"x": given["x"]}
        return kernel(**x, words=words, scales=scales[::-1], **{name: given[name] for name in names})

    assert check(last_scale, operation, most=2, bits=(2, 4, 8)).failures


def test_a_closure_is_certified() -> None:
    """A function that no module names travels as its code."""
    scale = np.float32(1.0)
    found = lowbit.certify(
        lambda x, blocks, rows, columns: scale * right(x, blocks, rows, columns), "linear.gemm", **Q8
    )
    assert found.verdict == "passed"


def test_a_module_beside_a_script_travels_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function of a script that calls a module of the script's folder, which another process cannot import."""
    (tmp_path / "beside_a_script.py").write_text("def twice(x):\n    return 2 * x\n")
    monkeypatch.syspath_prepend(tmp_path)
    found: dict[str, Any] = {"__name__": "a_script"}
    text = "import beside_a_script\ndef f(x):\n    return beside_a_script.twice(x)\n"
    exec(compile(text, tmp_path / "script.py", "exec"), found)
    told = json.loads(described(found["f"], Claim("linear.gemv", {"format": "q8_0"})))
    alone = f"import base64, pickle; print(pickle.loads(base64.b64decode({told['function']['pickle']!r}))(21))"
    assert subprocess.run([sys.executable, "-c", alone], capture_output=True, text=True, check=True).stdout == "42\n"


def test_a_check_is_no_certificate() -> None:
    """It finds the same mistakes, and says what it is."""
    assert not check(right, "linear.gemv", **Q8).failures
    wrong = check(neighbour, "linear.gemv", **Q8)
    assert wrong.failures and "WRONG" in wrong.failures[0][1]
    assert str(wrong).startswith("checked in this process, which is no certificate: ")
    few = check(lambda codes, bits: np.zeros(0), "packing.pack", most=7)
    tests = [mark for mark in MARKS if mark.clause.startswith("packing.pack/C")]
    assert len(tests) < few.passed + len(few.failures) <= 7 * len(tests)


def test_the_decorator_makes_a_test() -> None:
    """One that passes for the right function, and fails with the cases for the wrong one."""
    conforms("linear.gemv", quick=True, **Q8)(lambda: right)()
    with pytest.raises(AssertionError, match=r"linear\.gemv: failed \(.*\n?.*WRONG"):
        conforms("linear.gemv", quick=True, **Q8)(lambda: neighbour)()


def test_a_narrow_function_has_cases_too() -> None:
    """Only multiples of 64 and 128: a quick run takes its cases among these."""
    found = lowbit.certify(right, "linear.gemv", quick=True, columns=Range(64), rows=Range(128), **Q8)
    assert (found.verdict, found.failed) == ("passed", 0) and found.passed > 3


def last_left_out(x: Any, blocks: Any, rows: int, columns: int) -> Any:
    found = right(x, blocks, rows, columns)
    found[..., -1] = 0
    return found


@pytest.mark.whole
@pytest.mark.parametrize(
    ("operation", "limits"),
    [
        ("linear.gemv", {"columns": Range(24)}),
        pytest.param("linear.gemv", {"rows": Range(96)}, marks=pytest.mark.whole),
        pytest.param("linear.gemv", {"columns": 7, "rows": Range(least=1500, most=1600)}, marks=pytest.mark.whole),
        pytest.param("linear.gemm", {"batch": 2}, marks=pytest.mark.whole),
    ],
    ids=["columns=*24", "rows=*96", "columns=7", "batch=2"],
)
def test_cases_are_moved_to_the_sizes_of_a_function(operation: str, limits: dict[str, Any]) -> None:
    """None of the suite's own sizes is allowed: a quick run has cases of each clause, and finds a mistake."""
    found = lowbit.certify(right, operation, quick=True, **limits, **Q8)
    assert (found.verdict, found.failed) == ("passed", 0)
    clauses = {"/".join(each["id"].split("/")[:2]) for each in found.report["passed"]}
    assert {f"{operation}/C{number}" for number in (1, 2, 3, 4)} <= clauses
    found = lowbit.certify(last_left_out, operation, quick=True, **limits, **Q8)
    assert found.verdict == "failed"
    assert any("result-last-dropped" in each["diagnosis"] for each in found.report["failures"])


@pytest.mark.whole
def test_a_moved_case_runs_again_by_its_id() -> None:
    """A whole run has it, too, and names it in its report; `check` has the same."""
    limits = {"columns": Range(24)} | Q8
    found = lowbit.certify(last_left_out, "linear.gemv", seeds=0, **limits)
    wrong = found.report["failures"][0]["id"]
    assert found.verdict == "failed" and int(wrong.partition("x")[2].partition("-")[0]) % 24 == 0
    claim = described(last_left_out, claim_of("linear.gemv", None, "numpy", "cpu", limits))
    settings = {"seeds": 5, "first_seed": 0, "ops": [], "profiles": [], "case": wrong, "model": None, "quick": False}
    again = run(("--function", "last_left_out"), settings, None, judged=("--function", claim))
    assert [(each.id, each.outcome) for each in again.tally.verdicts] == [(wrong, "failed")]
    assert wrong in dict(check(last_left_out, "linear.gemv", **limits).failures)


def test_a_format_is_named() -> None:
    """The arrays of a stored matrix mean nothing without: one sentence before anything is run."""
    with pytest.raises(ArgumentError, match=r"^.* needs format, the format of the matrix .*: awq-gemm, "):
        lowbit.certify(right, "linear.gemv", activations="float32")
    with pytest.raises(ArgumentError, match=r"^.* needs --format, the format of the matrix .* or "):
        function_target("mine:gemv", "linear.gemv", {"activations": "float32"}, [], "numpy", "cpu")


def test_limits_that_no_case_meets_are_no_mistake() -> None:
    """Nothing is executed, nothing is said to be wrong, and one sentence says why: more rows than a case may have, or
    several vectors where the operation takes one."""
    for limits, reason in (
        ({"rows": Range(2**25)}, "rows of 33554432 or more, and a case has at most 16777216 numbers"),
        ({"batch": 2}, "cases have batch 1 and cannot have what it allows"),
    ):
        found = lowbit.certify(right, "linear.gemv", quick=True, **limits, **Q8)
        assert (found.verdict, found.failed) == ("nothing executed", 0)
        said = {each["missing"] for each in found.report["not_declared"] if "linear.gemv" in each["missing"]}
        assert said == {f"no case lies within the limits of linear.gemv: {reason}"}


@pytest.mark.parametrize(
    ("name", "sentence"), [("nowhere:f", "no module 'nowhere'"), ("json:nope", "json has no function 'nope'")]
)
def test_a_function_that_does_not_exist_is_one_sentence(name: str, sentence: str) -> None:
    """It is refused as the backend is loaded, before any case."""
    made = FunctionBackend(described(name, Claim("linear.gemv", {"format": "q8_0"})))
    with pytest.raises(ArgumentError, match=sentence):
        made.availability()


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("nope", "module_of_a_test has no function 'nope'"), ("f", "module_of_a_test fails with ValueError: on purpose")],
)
def test_a_function_that_cannot_be_loaded_is_no_verdict(
    name: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The suite ends with the sentence that says why, as for a class, and reports no case."""
    text = "def g(): pass\n" if name == "nope" else "raise ValueError('on purpose')\n"
    (tmp_path / "module_of_a_test.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    words, judged = function_target(f"module_of_a_test:{name}", "packing.pack", {}, [], "numpy", "cpu")
    settings = {"seeds": 0, "first_seed": 0, "ops": ["packing.pack"], "profiles": [], "case": None, "model": None}
    with pytest.raises(LowbitError, match=sentence) as caught:
        run(words[:2], settings | {"quick": True}, None, judged=judged)
    assert "{" not in str(caught.value)


def test_limits_of_the_command_line() -> None:
    """Values, multiples and ranges; anything else is refused."""
    found = limits_of(["bits=4", "rows=*32:64..128", "columns=8..", "activations=float16,bfloat16"])
    assert found == {
        "bits": (4,),
        "rows": Range(32, 64, 128),
        "columns": Range(1, 8),
        "activations": ("float16", "bfloat16"),
    }
    with pytest.raises(ArgumentError, match="--limit is 'bits'"):
        limits_of(["bits"])


def test_a_backend_is_not_described() -> None:
    """What describes a function is refused for a backend."""
    with pytest.raises(ArgumentError, match="format: only a function is described so"):
        lowbit.certify("numpy", ["packing.pack"], format="q8_0")
    with pytest.raises(ArgumentError, match="arrays: only a function is described so"):
        lowbit.certify("numpy", ["packing.pack"], arrays="torch")
    with pytest.raises(ArgumentError, match="the one operation that the function computes"):
        lowbit.certify(right)
