"""The suite needs no compiler and no library of kernels: it installs and runs where cppyy and its kin are absent."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from absence import ABSENCE
from paths import ROOT

ABSENT = ("cppyy", "archspec", "torch", "onnx", "onnxruntime", "llama_cpp", "matplotlib", "hypothesis")
EXTRAS = ("cppyy", "adapters", "torch")
NEED_TORCH = (
    *("lowbit_torch", "lowbit_torch.layer", "lowbit_torch.linears", "lowbit_torch.network"),
    *("lowbit_torch.operator", "lowbit_torch.uptraining"),
)

IMPORT_ALL = f"""
import importlib, pkgutil
import lowbit, lowbit_conformance
for package in (lowbit, lowbit_conformance):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if module.name not in {NEED_TORCH}:
            importlib.import_module(module.name)
"""


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """An environment in which Python finds none of these."""
    (tmp_path / "sitecustomize.py").write_text(ABSENCE.format(absent=ABSENT))
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PYTHONPATH": path, "COLUMNS": "100"}


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_every_module_imports_without_extras(bare: dict[str, str]) -> None:
    """Each module of the specification and of the suite can be imported."""
    done = run(bare, "-c", IMPORT_ALL)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", NEED_TORCH)
def test_without_torch_its_chapters_say_what_to_install(bare: dict[str, str], module: str) -> None:
    """The typed error, in one line, with the command; lowbit itself works on."""
    script = f"""
import lowbit.backend
from lowbit.errors import UnavailableError
try:
    import {module}
except UnavailableError as error:
    print(error)
print(lowbit.backend.load("reference").name)
"""
    done = run(bare, "-c", script)
    assert done.returncode == 0, done.stderr
    message, name = done.stdout.splitlines()
    assert message == (
        "lowbit_torch is unavailable: torch cannot be imported: No module named 'torch'; pip install 'lowbit[torch]'"
    )
    assert name == "reference"


@pytest.mark.whole
def test_the_suite_runs_without_extras(bare: dict[str, str]) -> None:
    """A backend is certified where cppyy cannot be imported, and cppyy's own says what to install."""
    done = run(bare, "-m", "lowbit", "conformance", "numpy", "--op", "packing.pack", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["verdict"] == "passed"
    listed = json.loads(run(bare, "-m", "lowbit", "backends", "numpy", "cppyy", "--json").stdout)
    assert listed["numpy"]["usable"]
    assert not listed["cppyy"]["usable"]
    assert "cppyy" in listed["cppyy"]["remedy"]


def test_what_the_suite_requires_names_no_extra() -> None:
    """Neither lowbit itself nor its extra `conformance` asks for a package of the extras with kernels."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    plain = {name_of(line) for line in (*project["dependencies"], *extras["conformance"])}
    assert not plain & {name_of(line) for extra in EXTRAS for line in extras[extra]}


def name_of(requirement: str) -> str:
    return requirement.split("[")[0].split(">")[0].split("=")[0].strip()


def test_without_torch_training_says_what_to_install(bare: dict[str, str], tmp_path: Path) -> None:
    """The command is there with its options, and fails before it reads the model."""
    text = tmp_path / "text"
    text.write_text("some words")
    done = run(bare, "-P", "-m", "lowbit", "uptrain", "m.gguf", "-o", "new", "--text", str(text), "--steps", "2")
    assert done.returncode == 2 and "pip install 'lowbit[torch]'" in " ".join(done.stderr.split())
