"""Children that run Python import nothing from the current folder (`lowbit.system.interpreters`)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lowbit.system.interpreters import program_environment, python_command, python_environment


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a module that says that it was imported."""
    for name in ("planted", "this", "ctypes", "json"):
        (tmp_path / f"{name}.py").write_text("print('planted')\n")
    return tmp_path


def said(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    """What a command prints, standing in a folder."""
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout + "".join(done.stderr.splitlines()[-1:])


@pytest.mark.parametrize(
    "words", [("-c", "import json, ctypes; print('real')"), ("-m", "planted"), ("-m", "json.tool")]
)
def test_a_child_imports_nothing_from_the_current_folder(folder: Path, words: tuple[str, ...]) -> None:
    """Neither with -c nor with -m; without the flag it does."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    assert "planted\n" in said([sys.executable, *words], folder, environment)
    assert "planted\n" not in said(python_command(*words), folder, environment)


def test_what_a_child_starts_is_safe_too(folder: Path) -> None:
    """The variable does it, since a flag is not inherited."""
    inner = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import json; print(json.__name__)'])"
    command = python_command("-c", inner)
    assert said(command, folder, python_environment()) == "json\n"
    assert "planted" in said(command, folder, program_environment())


def test_a_program_of_the_user_finds_its_own_modules(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``python program.py`` imports what lies beside it; lowbit's own setting of the variable is removed."""
    (folder / "program.py").write_text("import planted\n")
    for name, value in python_environment().items():
        monkeypatch.setenv(name, value)
    program = [sys.executable, str(folder / "program.py")]
    assert said(program, folder, python_environment()) == "ModuleNotFoundError: No module named 'planted'"
    assert said(program, folder, program_environment()) == "planted\n"


def test_the_users_own_setting_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has set the variable keeps it, also for programs; an empty one counts as none."""
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    assert python_environment()["PYTHONSAFEPATH"] == program_environment()["PYTHONSAFEPATH"] == "1"
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    assert python_environment()["PYTHONSAFEPATH"]
    assert python_environment({"A": "b"}) == {"A": "b", "PYTHONSAFEPATH": "yes"}


def test_a_child_still_has_the_users_packages(tmp_path: Path) -> None:
    """PYTHONPATH counts, as it must for backends that are not installed."""
    (tmp_path / "mine.py").write_text("print('mine')\n")
    environment = python_environment() | {"PYTHONPATH": str(tmp_path)}
    assert said(python_command("-m", "mine"), Path.cwd(), environment) == "mine\n"


@pytest.mark.parametrize("flag", ["-I", "-E", "-s"])
def test_a_child_is_as_isolated_as_its_parent(flag: str, tmp_path: Path) -> None:
    """Where this process ignores PYTHONPATH or the user's packages, a child does too."""
    shown = "import sys; print(sys.flags.ignore_environment, sys.flags.no_user_site, sys.flags.safe_path)"
    start = (
        f"import subprocess; from lowbit.system.interpreters import *; subprocess.run(python_command('-c', {shown!r}))"
    )
    expected = {"-I": "1 1 True\n", "-E": "1 0 True\n", "-s": "0 1 True\n"}
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONNOUSERSITE"}
    assert said([sys.executable, flag, "-c", start], tmp_path, variables) == expected[flag]
