"""Names of files, modules and profiles in prose exist: a renamed one leaves no sentence behind."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from paths import ROOT, SUPPORT

from lowbit.profiles import PROFILES

PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")), *ROOT.glob("docs/*.rst")]
SUITE = ("conformance/lowbit_conformance", "conformance/lowbit_bench", "conformance/lowbit_prove")
WRITTEN = ("spec", "backends", *SUITE, "bench", "docs/_ext", "docs/figures")
SOURCES = [path for folder in (*WRITTEN, SUPPORT / "lowbit_gpusim") for path in (ROOT / folder).rglob("*.py")]
PARENTS = {
    "lowbit": ROOT / "spec",
    "lowbit_conformance": ROOT / "conformance",
    "lowbit_bench": ROOT / "conformance",
    "lowbit_prove": ROOT / "conformance",
    "lowbit_docs": ROOT / "docs/_ext",
    "lowbit_gpusim": SUPPORT,
}
DOTTED = re.compile(r"(?<![\w./-])(lowbit(?:_[a-z]+)?(?:\.(?!__)\w+)+)")
GROUPS = {"lowbit.backends", "lowbit.commands", "lowbit.certify"}
"""Groups of entry points."""
FILES = {"lowbit.h", "lowbit.css", "lowbit.json"}
PATH = re.compile(r"`((?:spec|backends|conformance|docs|bench|\.ci)/[\w./-]+)`|\]\(([\w./-]+\.(?:md|rst))\)")
MADE = ("docs/reference", "bench/results", "docs/_build")
"""Folders that git ignores and a command makes."""


@cache
def defined(path: Path) -> set[str]:
    """Every name that a module gives to something, in a class too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
    return found


def exists(name: str) -> bool:
    """Whether a dotted name is a module, or something that a module defines.

    What comes after a name that was imported is not followed.
    """
    first, *parts = name.split(".")
    place = PARENTS.get(first, ROOT / "backends") / first
    while parts and (place / parts[0]).is_dir():
        place /= parts.pop(0)
    if parts and (place / f"{parts[0]}.py").is_file():
        place /= f"{parts.pop(0)}.py"
    else:
        place /= "__init__.py"
    return place.is_file() and (not parts or parts[0] in defined(place))


def missing(text: str) -> Iterator[tuple[int, str]]:
    """Dotted names and paths in a text that do not exist, each with its line."""
    for match in DOTTED.finditer(text):
        if match[1] not in GROUPS | FILES and not exists(match[1]):
            yield text.count("\n", 0, match.start()) + 1, match[1]
    for match in PATH.finditer(text):
        path = match[1] or match[2]
        if not path.startswith(MADE) and not (ROOT / path).exists():
            yield text.count("\n", 0, match.start()) + 1, path


@pytest.mark.parametrize(
    "stale",
    [
        "see `lowbit.packing`",
        "`lowbit.quantization.affine.matrix_parameters`",
        "lowbit_cppyy.isa.TABLES",
        "lowbit_absent.part",
        "``spec/lowbit/packing.py``",
        "[page](docs/absent.rst)",
    ],
)
def test_a_stale_name_is_found(stale: str) -> None:
    """A module that has moved, a function that is gone, a package and a file that never were."""
    assert len(list(missing(stale))) == 1


def test_names_in_prose_exist() -> None:
    """In every page, and in every docstring, comment, message and line of code of what ships."""
    assert len(PAGES) > 20 and len(SOURCES) > 200
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in PAGES + SOURCES
        for line, name in missing(path.read_text("utf-8"))
    ]
    assert not found


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_commands_name_profiles_that_exist(page: Path) -> None:
    """A reader who copies a command does not get an error."""
    named = set(re.findall(r"--profile (lowbit-\S+)", page.read_text("utf-8")))
    assert named <= set(PROFILES)
