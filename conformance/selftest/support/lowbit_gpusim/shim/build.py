"""Compiling kernels with g++: one object per source, linked with the runtime and cached by digest.

The flavor *watched* is a shared library in which every memory access of a kernel is reported to the runtime
(`watch.cpp`). lowbit's own tests add flavors that are programs under a sanitizer.

All are compiled with one rounding per operation (``-ffp-contract=off``) and with warnings as errors. An object's name
in the cache is the digest of its preprocessed text, its options and the compiler, so a change of any included file
makes a new object. `lowbit.system.storage.kept_code` keeps them and replaces damaged ones.
"""

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

from lowbit.errors import UnavailableError
from lowbit.system.storage import code_folder, kept_code

HERE = Path(__file__).parent
KERNELS = Path(str(files("lowbit_cuda"))) / "kernels"
COMMON = (
    *("-std=c++17", "-gdwarf-4", "-g1", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-strict-aliasing"),
    *("-Wall", "-Wextra", "-Wshadow", "-Werror", f"-I{HERE}", f"-I{KERNELS}"),
)
KERNEL_NAME = re.compile(r'extern\s+"C"\s+void\s+(\w+)\s*\(')
TIMEOUT = 300  # seconds for one call of the compiler


@dataclass(frozen=True)
class Flavor:
    """Options with which kernels and runtime are compiled.

    Attributes:
        name: of the flavor.
        kernels: options for the kernels.
        runtime: options for the runtime.
        link: options for all of it.
        sources: the runtime: files of this folder, or absolute paths.
    """

    name: str
    kernels: tuple[str, ...]
    runtime: tuple[str, ...]
    link: tuple[str, ...]
    sources: tuple[str, ...]

    @property
    def is_library(self) -> bool:
        """Whether the result is a library for this process, and not a program."""
        return "-shared" in self.link


# Not linked with ThreadSanitizer: the calls that it puts into the kernels go to watch.cpp.
REPORTED = ("-fsanitize=thread", "--param", "tsan-instrument-func-entry-exit=0")
CORE = ("runtime.cpp", "threads.cpp")
WATCHED = Flavor(
    "watched",
    ("-O2", *REPORTED),
    ("-O2", "-DLOWBIT_SHIM_WATCH"),
    ("-shared", "-Wl,-Bsymbolic", "-Wl,-z,defs"),  # refuse calls that the watch does not define, for example atomics
    (*CORE, "fibers.cpp", "watch.cpp"),
)


def compiler() -> str:
    """The path of g++.

    Raises:
        UnavailableError: it is not installed.
    """
    found = shutil.which("g++")
    if found is None:
        raise UnavailableError("the kernels' C++", "g++ was not found", "install a C++ compiler (g++)")
    return found


def build(sources: Sequence[Path], flavor: Flavor) -> Path:
    """A program with the kernels of these sources, from the cache or newly compiled.

    Returns:
        The path of a shared library or of a program.

    Raises:
        UnavailableError: there is no g++, or it refuses a source; the reason has its first error.
    """
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        kernels = [pool.submit(_kernel_object, source, flavor) for source in sources]
        runtime = [pool.submit(_object, HERE / name, (*COMMON, *flavor.runtime)) for name in flavor.sources]
        objects = [str(future.result()) for future in (*kernels, *runtime)]
    name = f"{flavor.name}-{_digest(*objects, *flavor.link)}{'.so' if flavor.is_library else ''}"
    return _made(name, lambda target: _run([compiler(), *objects, *flavor.link, "-o", str(target)], "", target.parent))


def _kernel_object(source: Path, flavor: Flavor) -> Path:
    """The object of a source, with a line for each kernel that registers it with the runtime."""
    options = (*COMMON, *flavor.kernels)
    names = kernel_names(source)
    lines = (f'static const lowbit_shim::Known known_{n}(lowbit_shim::kernel<{n}>("{n}"));' for n in names)
    text = "\n".join([_including(HERE / "launch.h"), _including(source), *lines, ""])
    return _compiled(text, source.stem, options)


def _object(source: Path, options: tuple[str, ...]) -> Path:
    return _compiled(_including(source), source.stem, options)


def _including(source: Path) -> str:
    """Include by absolute path: messages name the file, and no file in the current folder can take its place."""
    return f'#include "{source.absolute()}"\n'


def _compiled(text: str, name: str, options: tuple[str, ...]) -> Path:
    key = _digest(_preprocessed(text, options), _version(compiler()), *options)
    command = [compiler(), *options, "-xc++", "-c", "-"]
    return _made(f"{name}-{key}.o", lambda target: _run([*command, "-o", str(target)], text, target.parent))


def _preprocessed(text: str, options: tuple[str, ...]) -> str:
    return _run([compiler(), *options, "-xc++", "-E", "-"], text)


@cache
def _version(path: str) -> str:
    return _run([path, "--version"])


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def _made(name: str, make: Callable[[Path], object]) -> Path:
    """A file of the cache, made if it does not exist."""
    folder = code_folder("shim")
    try:
        return kept_code(folder, name, make)
    except OSError as error:
        reason = f"the cache {folder} cannot be written: {error.strerror}"
        raise UnavailableError("the kernels' C++", reason, "make it writeable, or set LOWBIT_CACHE") from None


def _run(command: Sequence[str], text: str = "", folder: Path | None = None) -> str:
    """What a command prints, run in a folder of lowbit's own.

    The linker takes a libgcc_s.so.1 of the current folder for the system's. Temporary files lie there too, since others
    may be able to replace files in the folder of TMPDIR.
    """
    folder = code_folder("shim") if folder is None else folder
    environment = {**os.environ, "LC_ALL": "C", "TMPDIR": str(folder)}
    try:
        done = subprocess.run(
            command,
            input=text,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
            env=environment,
            cwd=folder,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise UnavailableError("the kernels' C++", f"g++ could not be run: {error}", "check the compiler") from None
    if done.returncode:
        lines = done.stderr.splitlines() or ["no message"]
        reason = next((line for line in lines if "error:" in line or "undefined reference" in line), lines[-1])
        raise UnavailableError("the kernels' C++", f"g++ refuses it: {reason.strip()}", "correct the source")
    return done.stdout


@cache
def kernel_names(source: Path) -> tuple[str, ...]:
    """The kernels of a file, which is read once in a process; empty for files that are only included by others."""
    return tuple(KERNEL_NAME.findall(_preprocessed(_including(source), COMMON)))
