"""``lowbit new-backend NAME``: a package from which a kernel author starts.

What is written is the folder ``starter`` with three names replaced: a backend of one operation that passes, a test, and
a workflow for a CI service; and a wheel of the lowbit that is running, so that the package installs anywhere. The
package is complete or absent: everything is written to a temporary folder beside it, which then gets its name.
"""

import importlib.util
import json
import keyword
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from lowbit import backend as registry
from lowbit.errors import ArgumentError
from lowbit.text import one_line
from lowbit_conformance.cli.wheel import wheel_of_lowbit

NAME = re.compile(r"[a-z][a-z0-9]*(?:[-_][a-z0-9]+)*")
LONGEST = 60
STARTER = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "gitignore": ".gitignore",
    "workflow.yml": ".github/workflows/conformance.yml",
    "backend.py": "src/my_backend/__init__.py",
    "check.py": "tests/test_conformance.py",
}
"""Each file of the starter, and its path in the package."""
WHEELS = "wheels"
INSTALL = f'pip install --find-links {WHEELS} -e ".[test]"'


def new_backend(
    name: Annotated[str, typer.Argument(help="The name of the backend: small letters, digits, single dashes.")],
    folder: Annotated[Path | None, typer.Option(help="Where to write the package; ./NAME if not given.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Write a package with a backend of one operation that installs and passes."""
    check_name(name)
    target = Path(os.path.abspath(folder or name))
    check_folder(target)
    check_free(name)
    wheel, archive = wheel_of_lowbit()
    contents = {path: text.encode() for path, text in package(name)} | {f"{WHEELS}/{wheel}": archive}
    write(target, contents)
    steps = [f"cd {shlex.quote(str(target))}", INSTALL, f"lowbit conformance {name}", "pytest"]
    if as_json:
        print(json.dumps({"name": name, "folder": str(target), "files": list(contents), "next": steps}))
    else:
        print(one_line(f"{name} is in {target}:"), *contents, sep="\n  ")
        print("Next:", *map(one_line, steps), sep="\n  ")


def module_of(name: str) -> str:
    """The module for a backend of this name.

    >>> module_of("my-kernels")
    'my_kernels'
    """
    return name.replace("-", "_")


def class_of(name: str) -> str:
    """The class for a backend of this name.

    >>> class_of("my-kernels")
    'MyKernels'
    """
    return "".join(word.capitalize() for word in re.split("[-_]", name))


def check_name(name: str) -> None:
    """Refuse a name that a backend and its module cannot have."""
    if not NAME.fullmatch(name) or len(name) > LONGEST or keyword.iskeyword(module_of(name)):
        allowed = f"small letters, digits and single dashes, a letter first, at most {LONGEST}, and no word of Python's"
        raise ArgumentError("name", repr(name), allowed)


def check_free(name: str) -> None:
    """Refuse the name of an installed backend, and a name whose module would hide another."""
    if name in registry.names():
        raise ArgumentError("name", repr(name), f"another one; installed are {', '.join(registry.names())}")
    if importlib.util.find_spec(module_of(name)) is not None:
        raise ArgumentError("name", repr(name), f"another one; Python has a module {module_of(name)} already")


def check_folder(target: Path) -> None:
    """Refuse a folder that is not empty, or that cannot be created."""
    if not target.parent.is_dir():
        raise ArgumentError("folder", target, "one in a folder that exists")
    empty = target.is_dir() and not target.is_symlink() and not any(target.iterdir())
    if os.path.lexists(target) and not empty:
        raise ArgumentError("folder", target, "one that does not exist yet, or is empty")


def package(name: str) -> Iterator[tuple[str, str]]:
    """The files of the package: path and contents."""
    names = {"my-backend": name, "my_backend": module_of(name), "MyBackend": class_of(name)}

    def named(text: str) -> str:
        return re.sub("|".join(names), lambda found: names[found[0]], text)

    for source, path in STARTER.items():
        yield named(path), named((files("lowbit_conformance") / "starter" / source).read_text("utf-8"))
    yield named("src/my_backend/py.typed"), ""


def write(target: Path, contents: dict[str, bytes]) -> None:
    """Write the files into a new folder beside the target, then rename it to the target.

    Raises:
        ArgumentError: the folder cannot be written to, or something came there in the meantime.
    """
    try:
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name[:40]}-", dir=target.parent))
        try:
            for path, content in contents.items():
                file = temporary / "package" / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)
            os.rename(temporary / "package", target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise ArgumentError("folder", target, f"one that can be written ({error.strerror})") from error
