"""The arrows of `lowbit_cuda`: who imports whom, as the page on the architecture draws it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "backends/lowbit_cuda"
ALLOWED = {
    "port": set[str](),
    "kernels": {"port"},
    "engine": {"port"},
    "sim": {"port"},
    "shim": {"port"},
    "cuda": {"port"},
    "model": {"port", "kernels", "engine"},
}


def imports(file: Path) -> Iterator[str]:
    """The modules that a file imports, anywhere in it; of ``from x import y`` both x and x.y."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file.name}: a relative import"
            yield from (str(node.module), *(f"{node.module}.{name.name}" for name in node.names))


def parts(files: list[Path]) -> set[str]:
    """Which parts of the package they import."""
    names = {name.split(".")[1] for file in files for name in imports(file) if name.startswith("lowbit_cuda.")}
    return names & {path.stem for path in PACKAGE.iterdir()}


def files_of(part: str) -> list[Path]:
    one = PACKAGE / f"{part}.py"
    return [one] if one.is_file() else sorted((PACKAGE / part).rglob("*.py"))


@pytest.mark.parametrize("part", ALLOWED)
def test_a_part_imports_only_what_it_may(part: str) -> None:
    """The engine knows no device and no kernel, a device no engine, and the port nobody."""
    assert files_of(part)
    assert parts(files_of(part)) - {part} <= ALLOWED[part]


def test_only_one_folder_needs_nvidias_packages() -> None:
    """Everything else can be imported, and tested, where they are not installed."""
    users = {file for file in PACKAGE.rglob("*.py") if any(name.split(".")[0] == "cuda" for name in imports(file))}
    assert users
    assert {file.parent.name for file in users} == {"cuda"}


def test_nobody_imports_the_suite() -> None:
    """A backend never does."""
    everything = sorted(PACKAGE.rglob("*.py"))
    assert not [file for file in everything if any(name.startswith("lowbit_conformance") for name in imports(file))]
