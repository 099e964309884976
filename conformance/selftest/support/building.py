"""What the tests of foreign backends share: compilers, and the examples of the docs."""

import functools
import shutil
import subprocess
from pathlib import Path

import pytest
from paths import ROOT

from lowbit_foreign import INCLUDE

EXAMPLES = ROOT / "docs/examples/foreign"
SOURCES = Path(__file__).parent / "foreign"
STRICT = ("-Wall", "-Wextra", "-Wpedantic", "-Werror", "-Wshadow", f"-I{INCLUDE}")


@functools.cache
def compiler(*names: str) -> str:
    """The first of these compilers that is installed; the test is skipped, and says so, where none is."""
    for name in names:
        if found := shutil.which(name) or shutil.which(name, path=str(Path.home() / ".cargo/bin")):
            return found
    pytest.skip(f"no {' or '.join(names)} is installed")


def build(words: list[str]) -> None:
    """Run a compiler, whose complaints are the failure."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def c_library(source: Path, target: Path, *options: str, libraries: tuple[str, ...] = ()) -> Path:
    """A shared library of one C file."""
    c = compiler("cc", "gcc", "clang")
    build([c, "-std=c99", "-O1", "-shared", "-fPIC", *STRICT, *options, str(source), "-o", str(target), *libraries])
    return target
