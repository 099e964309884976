"""Programs of generated C++ with two sanitizers, compiled once on a machine.

A compiler takes seconds for one of them. So a program is kept, like the other code that lowbit compiles, under a digest
of all that determines it: its text, the headers of `lowbit_cppyy`, the options and the compiler.
"""

import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path

from lowbit.system.storage import code_folder, kept_code

HEADERS = Path(str(files("lowbit_cppyy"))) / "cpp"
OPTIONS = ("-std=c++17", "-O1", "-pthread", "-ffp-contract=off", "-Wno-psabi")
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
LONGEST = 600  # seconds: only a compiler or a program that hangs takes as long


def sanitizing() -> list[str]:
    """The paths of g++ and clang++ with the libraries of the sanitizers; clang's are a package of their own."""
    return [path for name in ("g++", "clang++") if (path := shutil.which(name)) and _has_libraries(name, path)]


def _has_libraries(name: str, path: str) -> bool:
    if name == "g++":
        return True
    asked = subprocess.run([path, "-print-runtime-dir"], capture_output=True, text=True, check=False)
    return asked.returncode == 0 and Path(asked.stdout.strip()).is_dir()


def compiled(source: str, compiler: str, options: Sequence[str] = (), sanitizers: Sequence[str] = SANITIZERS) -> Path:
    """A program of one file, or a library.

    Args:
        source: C++, which may include the headers of `lowbit_cppyy`.
        compiler: the path of g++ or clang++.
        options: beside those of all these programs.
        sanitizers: the options that choose them.
    """
    words = (*OPTIONS, *sanitizers, *options)
    digest = hashlib.sha256("\0".join((source, _headers(), _version(compiler), *words)).encode()).hexdigest()

    def make(target: Path) -> None:
        command = [compiler, *words, f"-I{HEADERS}", "-xc++", "-", "-o", str(target)]
        subprocess.run(command, input=source, text=True, check=True, timeout=LONGEST, cwd=target.parent)

    return kept_code(code_folder("sanitized"), f"sanitized-{digest[:20]}", make)


def answer(program: Path, inputs: bytes, *arguments: str) -> "subprocess.CompletedProcess[bytes]":
    """Run such a program."""
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=1", "UBSAN_OPTIONS": "print_stacktrace=0"}
    command = [str(program), *arguments]
    return subprocess.run(command, input=inputs, capture_output=True, timeout=LONGEST, check=False, env=environment)


@cache
def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout


@cache
def _headers() -> str:
    """The text of all headers."""
    return "\0".join(path.read_text("utf-8") for path in sorted(HEADERS.rglob("*.h")))
