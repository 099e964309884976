"""The registry: backends are found by their entry points and by ``module:Class``, and errors name what is wrong."""

import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from lowbit.backend import Availability, registry
from lowbit.errors import ArgumentError, UnavailableError
from lowbit_numpy import NumpyBackend


def test_the_backends_of_this_distribution_are_found() -> None:
    """Entry points make them known; nothing lists them."""
    assert {"cppyy", "numpy", "reference"} <= set(registry.names())
    assert registry.find("lowbit_numpy:NumpyBackend").name == "numpy"


def test_a_broken_package_is_unavailable_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that cannot be imported, or that offers something else, is an error in words, not a traceback."""
    entries = [EntryPoint("gone", "no_such_module:Thing", "lowbit.backends")]
    entries += [EntryPoint("other", "fractions:Fraction", "lowbit.backends")]
    monkeypatch.setattr(registry, "entries", lambda group: entries)
    with pytest.raises(UnavailableError, match="ModuleNotFoundError"):
        registry.find("gone")
    with pytest.raises(UnavailableError, match=r"is not a lowbit.backend.Backend"):
        registry.find("other")
    with pytest.raises(ArgumentError, match="'third'; allowed: gone or other"):
        registry.find("third")


def test_an_unusable_backend_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """load refuses with the backend's own reason and remedy; find still gives it, for a listing."""
    monkeypatch.setattr(NumpyBackend, "availability", lambda self: Availability(False, "no such CPU", "buy one"))
    name = "lowbit_numpy:NumpyBackend"
    assert registry.find(name).name == "numpy"
    with pytest.raises(UnavailableError, match="is unavailable: no such CPU; buy one"):
        registry.load(name)


# **Names that do not exist.**


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("numpi", "'numpi'; allowed: .*; the nearest name is numpy"),
        (
            "lowbit_nunpy:Numpy",
            "there is no module 'lowbit_nunpy' in this folder .*; the nearest name is lowbit_numpy",
        ),
        (
            "lowbit_numpy.groops:X",
            "there is no module 'lowbit_numpy.groops' .*; the nearest name is groups",
        ),
        ("lowbit_numpy:NumpyBackent", "lowbit_numpy has no class 'NumpyBackent'; the nearest name is NumpyBackend"),
    ],
)
def test_a_misspelt_name_is_called_that(name: str, words: str) -> None:
    """A module or class that does not exist is an argument, and the message has the nearest name."""
    with pytest.raises(ArgumentError, match=words):
        registry.find(name)


def test_existence_is_checked_without_running_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module in the current folder counts, and is not imported; one that is nowhere is refused."""
    (tmp_path / "never_imported.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    for check in (registry.check_exists, registry.check_function):
        check("never_imported:Mine")
        check("never_imported.part:Mine")
        check("lowbit_numpy:NumpyBackend")
        with pytest.raises(ArgumentError, match=r"'never_importd' .*; the nearest name is never_imported"):
            check("never_importd:Mine")
        with pytest.raises(ArgumentError, match="there is no module '' in this folder"):
            check(".:Mine")


def test_a_module_here_comes_before_a_mere_folder_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder on Python's path that has the name of the module hides no module in the current folder."""
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    (elsewhere / "shadowed_backend").mkdir(parents=True)
    here.mkdir()
    (here / "shadowed_backend.py").write_text("from lowbit_numpy import NumpyBackend as Mine\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(elsewhere)])
    monkeypatch.chdir(here)
    assert registry.find("shadowed_backend:Mine").name == "numpy"
    del sys.modules["shadowed_backend"]


def test_a_module_without_a_name_does_not_exist() -> None:
    """What has the form ``module:Class`` and cannot name a module is refused as one that does not exist."""
    with pytest.raises(ArgumentError, match="there is no module"):
        registry.find(".:Mine")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import numppy", "imports numppy, which is not installed or misspelt; install numppy, or mend the import"),
        ("1 / 0", "fails with ZeroDivisionError: division by zero; mend the module"),
    ],
)
def test_a_module_that_fails_is_told_apart(
    text: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that exists and cannot be imported is unavailable, and the message says what in it fails."""
    name = f"failing_{len(text)}"
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UnavailableError, match=words):
        registry.find(f"{name}:Mine")
