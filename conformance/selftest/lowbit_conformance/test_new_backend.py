"""`lowbit new-backend`: what it writes, what it refuses, and that it writes all or nothing."""

import ast
import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from lowbit.errors import ArgumentError
from lowbit_conformance.cli.new_backend import new_backend, package
from lowbit_conformance.cli.wheel import PACKAGES, wheel_of_lowbit

app = typer.Typer()
app.command()(new_backend)


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def contents(folder: Path) -> dict[str, str]:
    """Every file below a folder but the wheel, by its path."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".whl")
    return {str(path.relative_to(folder)): path.read_text() for path in files}


def test_the_package_bears_the_name_everywhere(tmp_path: Path) -> None:
    """Distribution, entry point, module, class, tests and workflow name one backend, and no name of the starter is
    left."""
    result = call("my-4-kernels", "--folder", str(tmp_path / "there"), "--json")
    answer = json.loads(result.stdout)
    written = contents(tmp_path / "there")
    assert result.exit_code == 0
    (wheel,) = (path for path in answer["files"] if path.startswith("wheels/"))
    assert sorted(answer["files"]) == sorted([*written, wheel])
    assert 'pip install --find-links wheels -e ".[test]"' in answer["next"]
    assert 'pip install --find-links wheels -e ".[test]"' in written[".github/workflows/conformance.yml"]
    assert answer["folder"] == str(tmp_path / "there")
    project = tomllib.loads(written["pyproject.toml"])
    assert project["project"]["name"] == "my-4-kernels"
    assert project["project"]["entry-points"]["lowbit.backends"] == {"my-4-kernels": "my_4_kernels:My4Kernels"}
    names = [node.name for node in ast.parse(written["src/my_4_kernels/__init__.py"]).body if hasattr(node, "name")]
    assert names == ["My4Kernels"]
    assert "lowbit conformance my-4-kernels --junit" in written[".github/workflows/conformance.yml"]
    assert not [path for path, text in written.items() if re.search("my[-_]?backend", path + text, re.IGNORECASE)]


def test_the_backend_of_the_package_computes(tmp_path: Path) -> None:
    """What it answers for words of its one width is what the specification answers."""
    import numpy as np

    from lowbit.quantization.packing import unpack

    scope: dict[str, Any] = {}
    exec(dict(package("tiny"))["src/tiny/__init__.py"], scope)
    words = np.arange(6, dtype=np.uint32).reshape(2, 3) * np.uint32(0x12345678)
    given = scope["Tiny"]().run("packing.unpack", words, 4)
    assert np.array_equal(given, unpack(words, 4))


@pytest.mark.parametrize(
    "name", ["", "A", "é", "a b", "../a", "a--b", "-a", "a-", "4a", "a.b", "class", "a" * 61, "a\n"]
)
def test_names_that_cannot_be_modules_are_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is named in one line, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError, match=r"^name is .*; allowed: small letters, digits"):
        new_backend(name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["numpy", "reference", "json", "lowbit"])
def test_names_that_are_taken_are_refused(name: str, tmp_path: Path) -> None:
    """Those of installed backends and those of modules that would be hidden."""
    with pytest.raises(ArgumentError, match=rf"^name is '{name}'; allowed: another one"):
        new_backend(name, tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def test_folders_that_hold_something_are_refused(tmp_path: Path) -> None:
    """A folder with a file, a file, a link and a folder inside none are left as they are; an empty folder is used."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    before = contents(tmp_path)
    for folder in ("full", "full/notes", "link", "none/inside", "full/notes/inside"):
        with pytest.raises(ArgumentError, match=r"^folder is "):
            new_backend("kernels", tmp_path / folder)
    assert contents(tmp_path) == before
    new_backend("kernels", tmp_path / "empty")
    assert (tmp_path / "empty/pyproject.toml").is_file()


def test_a_folder_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full at the third file leaves nothing behind, and says so in one line."""
    write, written = Path.write_bytes, []

    def full(path: Path, content: bytes) -> int:
        written.append(path)
        if len(written) == 3:
            raise OSError(28, "No space left on device")
        return write(path, content)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ArgumentError, match=r"folder is .*/kernels; allowed: one that can be written \(No space left"):
        new_backend("kernels", tmp_path / "kernels")
    assert len(written) == 3
    assert list(tmp_path.iterdir()) == []


def test_the_wheel_installs_the_lowbit_that_runs(tmp_path: Path) -> None:
    """pip takes it without a network: all modules, with the commands and backends that this lowbit has."""
    name, archive = wheel_of_lowbit()
    (tmp_path / name).write_bytes(archive)
    target = tmp_path / "site"
    pip = [sys.executable, "-P", "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    if importlib.util.find_spec("pip") is None:
        pytest.skip("pip is not installed")
    subprocess.run([*pip, "--target", str(target), str(tmp_path / name)], check=True, timeout=300)
    (installed,) = importlib.metadata.distributions(name="lowbit", path=[str(target)])
    mine = importlib.metadata.distribution("lowbit")
    assert set(installed.entry_points) == set(mine.entry_points)
    for name_of_package in PACKAGES:
        assert (target / name_of_package / "__init__.py").is_file()
    assert (target / "lowbit_conformance/starter/workflow.yml").is_file()
    assert wheel_of_lowbit() == (name, archive)
