"""``import lowbit``: what it offers, that it is quick, and what each name does."""

import subprocess
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_gguf import write

import lowbit
from lowbit import api, certification
from lowbit.backend import Availability, registry
from lowbit.errors import ArgumentError, LowbitError, UnavailableError
from lowbit.linear.linear import qgemv
from lowbit.model.quantization_plan import Plan
from lowbit.runtime import Options
from lowbit.system.entries import entries
from lowbit.system.interpreters import python_command
from lowbit_cppyy.backend import CppyyBackend
from lowbit_numpy import NumpyBackend

WEIGHTS = np.random.default_rng(0).standard_normal((64, 24)).astype(np.float32)


def test_importing_lowbit_imports_nothing_else() -> None:
    """No backend, no array library, none of its own chapters; yet every name is listed."""
    script = "import sys; before = set(sys.modules); import lowbit; print(sorted(set(sys.modules) - before)); "
    script += "print(set(lowbit.__all__) <= set(dir(lowbit)))"
    done = subprocess.run(python_command("-c", script), capture_output=True, text=True, timeout=60, check=True)
    imported, listed = done.stdout.splitlines()
    assert imported == "['lowbit']"
    assert listed == "True"


def test_every_name_is_there_and_documented() -> None:
    """And no other one."""
    for name in lowbit.__all__:
        assert name == "__version__" or (getattr(lowbit, name).__doc__ or "").strip()
    assert set(api.__all__) == set(lowbit.__all__) - {"__version__"}
    with pytest.raises(AttributeError, match="module 'lowbit' has no attribute 'quantise'"):
        getattr(lowbit, "quantise")  # noqa: B009 - mypy knows that there is none


def test_matmul() -> None:
    """A vector gives a vector and a matrix a matrix, on a named backend, on the default, and on one that is open."""
    W = lowbit.quantize(WEIGHTS, bits=4, group_size=32)
    x = np.random.default_rng(1).standard_normal((3, 64)).astype(np.float32)
    exact = qgemv(x[0], W)
    for backend in ("numpy", "reference", None, NumpyBackend()):
        np.testing.assert_allclose(lowbit.matmul(x[0], W, backend), exact, rtol=0, atol=1e-4)
        both = lowbit.matmul(x, W, backend=backend)
        assert both.shape == (3, 24)
        np.testing.assert_allclose(both[0], exact, rtol=0, atol=1e-4)
    np.testing.assert_allclose(lowbit.dequantize(W).T @ x[0], exact, rtol=0, atol=1e-4)
    with pytest.raises(ArgumentError, match="dtype of x is float64; allowed: float32"):
        lowbit.matmul(np.ones(64), W, "numpy")  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(ArgumentError, match="backend is 'abacus'"):
        lowbit.matmul(x, W, "abacus")


def test_the_backend_that_matmul_opens_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that was given stays open."""
    closed = []
    monkeypatch.setattr(NumpyBackend, "close", lambda self: closed.append(self))
    W, own = lowbit.quantize(WEIGHTS, bits=4, group_size=32), NumpyBackend()
    lowbit.matmul(np.ones(64, np.float32), W, own)
    assert closed == []
    lowbit.matmul(np.ones(64, np.float32), W, "numpy")
    assert len(closed) == 1 and closed[0] is not own


def test_the_default_backend_is_the_first_that_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the published order; one that cannot run here, or is not installed or broken, is passed over."""
    assert registry.DEFAULT_ORDER == ("cppyy", "numpy", "reference")
    monkeypatch.setattr(CppyyBackend, "availability", lambda self: Availability(True))
    assert lowbit.load_backend().name == "cppyy"
    monkeypatch.setattr(CppyyBackend, "availability", lambda self: Availability(False, "no compiler", "install one"))
    assert lowbit.load_backend().name == "numpy"
    installed = entries(registry.ENTRY_POINTS)
    for other in ([], [EntryPoint("numpy", "no_such_module:Thing", registry.ENTRY_POINTS)]):
        kept = [entry for entry in installed if entry.name not in ("cppyy", "numpy")] + other
        monkeypatch.setattr(registry, "entries", lambda group, kept=kept: kept)
        assert lowbit.load_backend().name == "reference"
    with pytest.raises(UnavailableError):
        lowbit.load_backend("numpy")


def test_load_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path gives a model that completes text; `bits` quantises it; without a path the default model is fetched."""
    path = write(tmp_path / "tiny.gguf")
    with lowbit.load_model(path, "numpy") as model:
        tokens = [step.token for step in model.generate("hello", 5)]
        assert model.complete("hello", 5) == model.tokenizer.decode(tokens, special=False)
        assert model.account().fields["requantized"] is None
    monkeypatch.setattr(api, "fetch", lambda name: path)
    with lowbit.load_model(backend="numpy", bits=2, group_size=32) as model:
        part = {"bits": 2, "group_size": 32, "method": "nearest"}
        assert model.account().fields["requantized"] == {"experts": part, "attention": part, "head": None}
    with pytest.raises(ArgumentError, match=r"bits and options\.plan both say"):
        lowbit.load_model(path, "numpy", bits=2, options=Options(Plan.uniform(4, 32)))


def test_certify() -> None:
    """The suite's verdict, its counts and its report; what it refuses is an error."""
    found = lowbit.certify("numpy", ["packing.unpack"], quick=True)
    counts = {"passed": found.passed, "declared": found.passed + found.failed}
    assert (found.verdict, found.failed) == ("passed", 0)
    assert found.report["verdict"] == "passed" and found.report["backend"] == "numpy"
    assert {name: found.report["counts"][name] for name in counts} == counts and found.passed > 0
    assert found.report["counts"]["specified"] == found.passed + found.not_declared
    with pytest.raises(LowbitError, match=r"--op is linear\.magic; allowed: "):
        lowbit.certify("numpy", ["linear.magic"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"backend": 3}, "backend is an int; allowed: a name, module:Class, or a function"),
        ({"operations": 3}, "operations is an int; allowed: a name, or a sequence of names"),
        ({"profiles": [3]}, "profiles is a list; allowed: a name, or a sequence of names"),
        ({"seeds": "5"}, "seeds is '5'; allowed: an integer of at least 0"),
        ({"seeds": -1}, "seeds is -1; allowed: an integer of at least 0"),
        ({"deadline": "1"}, "deadline is '1'; allowed: a finite number of at least 0.1"),
        ({"deadline": 0}, "deadline is 0; allowed: a finite number of at least 0.1"),
        ({"model": 3}, "model is an int; allowed: the path of a GGUF file"),
    ],
)
def test_certify_refuses(given: dict[str, Any], message: str) -> None:
    """Wrong arguments are named before any process is started."""
    arguments: dict[str, Any] = {"backend": "numpy", "operations": "packing.pack"}
    with pytest.raises(ArgumentError) as refusal:
        lowbit.certify(**arguments | given)
    assert str(refusal.value) == message


def test_certify_takes_a_path_of_a_model() -> None:
    """As a Path too; here of a file that does not exist. A long path would be shown in part."""
    with pytest.raises(LowbitError, match=r"model is 'absent\.gguf'"):
        lowbit.certify("numpy", "packing.pack", quick=True, model=Path("absent.gguf"))


@pytest.mark.parametrize(("offers", "reason"), [(0, "no installed package offers"), (2, "several packages offer it")])
def test_certify_without_one_suite(offers: int, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The specification knows the suite by an entry point only."""
    found = [EntryPoint("suite", f"suite{number}:certify", certification.CERTIFY) for number in range(offers)]
    monkeypatch.setattr(certification, "entries", lambda group: found)
    with pytest.raises(UnavailableError, match=reason):
        lowbit.certify("numpy")
