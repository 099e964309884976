"""Shared libraries of a step: compiled by the system's C++ compiler, kept in the cache, called through ctypes.

A library has one table of addresses: of functions of ``lowbit::bridge``, and of kernels. It is kept under the digest of
everything that determines it: its text, the headers, the compiler and its options. The compiler is the command ``c++``,
whose headers cppyy also uses; results have the same bits as with cppyy, because no sum may be reordered and no product
fused.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from lowbit.arrays import Array
from lowbit.errors import UnavailableError
from lowbit.system.storage import kept_code
from lowbit.system.threads import usable_processors
from lowbit_cppyy.codegen.isa import InstructionSet
from lowbit_cppyy.codegen.lowering import Compilable, prelude
from lowbit_cppyy.runtime.definitions import as_options

CPP = Path(str(files("lowbit_cppyy"))) / "cpp"
SPEED = ("-O2", "-ftree-vectorize", "-fvect-cost-model=dynamic")
"""A step runs as fast as with -O3, and compiles in less than half of the time."""
OPTIONS = ("-std=c++17", *SPEED, "-fPIC", "-ffp-contract=off", "-Wno-psabi", f"-I{CPP}")
LIBRARY = ("-shared", "-pthread")
LONGEST = 600  # seconds: only a compiler that hangs takes this long
FUNCTIONS = (
    *("create_pool", "create_linear", "create_route", "create_stored_route"),
    *("create_kernel_set", "create_products", "create_model"),
    *("destroy_pool", "destroy_linear", "destroy_route", "destroy_stored_route"),
    *("destroy_kernel_set", "destroy_products", "destroy_model"),
    *("stop_pool", "run_step", "run_on", "run_batch", "score_rows", "choose_token"),
)
"""The functions of `lowbit::bridge` that create a step and run it."""


def compiler() -> str | None:
    """The path of the system's C++ compiler; None if there is none."""
    return shutil.which("c++")


def identity(path: str) -> str:
    """A string that identifies a compiler without starting it."""
    found = os.stat(path)
    return f"{os.path.realpath(path)} {found.st_size} {found.st_mtime_ns}"


@cache
def _version(path: str) -> str:
    return _said([path, "--version"]).stdout


@dataclass(frozen=True)
class Source:
    """The source of a library.

    Attributes:
        prefix: the first part of its name.
        text: its C++.
        entries: the functions in its table.
        options: of the compiler, in addition to `OPTIONS`: the instructions that it may use.
    """

    prefix: str
    text: str
    entries: list[str]
    options: tuple[str, ...]

    @classmethod
    def of(
        cls,
        prefix: str,
        header: str,
        kernels: Sequence[Compilable],
        table: InstructionSet,
        functions: Sequence[str] = (),
    ) -> Self:
        """A library with a header and these kernels; in its table, functions of the bridge precede the kernels."""
        parts = [f'#include "{header}"', prelude(table), *(kernel.source for kernel in kernels)]
        addresses = [f"&lowbit::bridge::{name}" for name in functions]
        addresses += [f"&lowbit::{table.name}::{kernel.name}" for kernel in kernels]
        entries = "".join(f"  reinterpret_cast<const void*>({address}),\n" for address in addresses)
        parts.append(f'extern "C" {{\nextern const void* const lowbit_table[] = {{\n{entries}}};\n}}\n')
        names = [*functions, *(kernel.name for kernel in kernels)]
        return cls(prefix, "\n".join(parts), names, (*table.options, *as_options()))


Names = list[tuple[str, list[str]]]
"""The files of libraries, and the functions in their tables."""


class Compiling:
    """Compiles libraries in parallel, except those already kept; leaving it as a context manager waits for them.

    Args:
        folder: of kept code.

    Raises:
        UnavailableError: there is no compiler.
    """

    def __init__(self, folder: Path) -> None:
        command = compiler()
        if command is None:
            raise UnavailableError("keeping a compiled step", "there is no C++ compiler", "install g++ or clang++")
        self._folder, self._command = folder, command
        self._threads, self._begun = ThreadPoolExecutor(usable_processors()), list[Future[tuple[str, list[str]]]]()

    def begin(self, source: Source) -> None:
        """Begin to compile a library."""
        self._begun.append(self._threads.submit(self._compiled, source))

    def names(self) -> Names:
        """The files and functions of the libraries begun so far, after waiting for them.

        Raises:
            UnavailableError: the compiler fails.
            OSError: the folder cannot be written.
        """
        return [each.result() for each in self._begun]

    def _compiled(self, source: Source) -> tuple[str, list[str]]:
        options = *LIBRARY, *source.options
        return kept_library(self._folder, source.prefix, self._command, source.text, options), source.entries

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown(cancel_futures=error is not None)


def kept_library(folder: Path, prefix: str, command: str, text: str, options: Sequence[str]) -> str:
    """The file of a library or a program in a folder of kept code, named by a digest of all that determines it.

    Args:
        folder: from `code_folder`.
        prefix: the first part of its name.
        command: the compiler.
        text: C++.
        options: in addition to `OPTIONS`.

    Raises:
        UnavailableError: the compiler fails.
        OSError: the folder cannot be written.
    """
    words = [command, *OPTIONS, *options]
    headers = [path.read_text("utf-8") for path in sorted(CPP.glob("*.h"))]
    digest = hashlib.sha256("\0".join((text, *headers, _version(command), *words)).encode()).hexdigest()
    name = f"{prefix}-{digest[:32]}.so"
    kept_code(folder, name, lambda target: _compile(words, text, target))
    return name


def _compile(words: Sequence[str], text: str, target: Path) -> None:
    _said([*words, "-xc++", "-", "-o", str(target)], text, target.parent)


def _said(words: Sequence[str], text: str = "", folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The result of running the compiler.

    Raises:
        UnavailableError: it fails, or takes too long.
        OSError: it cannot be started.
    """
    try:
        done = subprocess.run(
            words,
            input=text,
            text=True,
            errors="replace",
            capture_output=True,
            timeout=LONGEST,
            check=False,
            cwd=folder,
            env={**os.environ, "LC_ALL": "C"},
        )
    except subprocess.TimeoutExpired:
        reason = f"{words[0]} did not end within {LONGEST} seconds"
        raise UnavailableError("compiling C++", reason, "check the C++ compiler") from None
    if done.returncode:
        lines = done.stderr.splitlines()
        reason = next((line for line in lines if "error" in line), "without saying why")
        raise UnavailableError("compiling C++", f"{words[0]} failed: {reason}", "check the C++ compiler")
    return done


class MissingError(Exception):
    """A library is missing or damaged."""


class Library:
    """A kept library.

    Raises:
        MissingError: there is no library of this name, or it has changed.
    """

    def __init__(self, folder: Path, name: str, entries: Sequence[str]) -> None:
        path = kept_code(folder, name, _missing)
        try:
            library = ctypes.CDLL(str(path))
            table = (ctypes.c_void_p * len(entries)).in_dll(library, "lowbit_table")
        except (OSError, ValueError) as error:
            raise MissingError(name) from error
        with suppress(OSError):
            os.utime(path)  # marks it as used now
        self._kept = library
        self.addresses: dict[str, int] = {entry: int(table[n] or 0) for n, entry in enumerate(entries)}


def _missing(path: Path) -> None:
    raise MissingError(path.name)


I64, U64, POINTER = ctypes.c_int64, ctypes.c_uint64, ctypes.c_void_p
RUNS: Mapping[str, tuple[type, ...]] = {
    "run_step": (
        *(U64, POINTER, I64, POINTER, POINTER, POINTER, I64, I64, POINTER, POINTER, POINTER),
        *(ctypes.c_int,),
    ),
    "run_on": (
        *(U64, POINTER, I64, POINTER, POINTER, POINTER, POINTER, POINTER, POINTER, POINTER, POINTER),
        *(I64, POINTER, POINTER, POINTER, POINTER, I64, I64, I64, POINTER),
    ),
    "run_batch": (U64, POINTER, I64, POINTER, POINTER, POINTER, POINTER, POINTER, POINTER, POINTER),
    "score_rows": (U64, POINTER, I64, POINTER, POINTER),
    "choose_token": (POINTER, I64, POINTER, I64, POINTER),
}
"""The argument types of the functions that run a step; each returns an int."""


def running(name: str, address: int) -> Callable[..., int]:
    """A function that runs a step. It takes arrays for pointers and runs without the GIL."""
    kinds = RUNS[name]
    function = ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(address)

    def call(*arguments: object) -> int:
        plain = [each if kind is not POINTER else address_of(each) for kind, each in zip(kinds, arguments, strict=True)]
        return int(function(*plain))

    return call


def address_of(array: object) -> int:
    """The address of an array; the caller keeps it alive."""
    assert isinstance(array, np.ndarray)
    return int(array.ctypes.data)


def create(address: int, arguments: Sequence[int | Array]) -> int:
    """Call a function that creates an object, with 64-bit integers and with pointers for arrays; returns the object's
    address."""
    plain = [address_of(each) if isinstance(each, np.ndarray) else each for each in arguments]
    return int(ctypes.CFUNCTYPE(U64, *[U64] * len(plain))(address)(*plain))
