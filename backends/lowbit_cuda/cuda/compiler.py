"""Compiling the kernels to machine code with NVIDIA's run-time compiler, once.

NVRTC is a library, so compiling needs neither a toolkit nor a driver. The source is a file of `lowbit_cuda.kernels`;
the files that it includes are beside it. The result is a *cubin*, machine code for one architecture. No PTX is made,
because a driver would compile it in its own way.

**Options** are fixed, and the kernels' results depend on them: products and sums are never contracted into one
operation with one rounding (``-fmad=false``; a kernel that wants that calls ``fmaf``), denormals are kept, division and
square root are rounded correctly, C++17. Line numbers are kept for the sanitizer and cost nothing at run time.

**The cache** is a folder in lowbit's cache folder. The name of an entry contains the SHA-256 of everything that it
depends on: every source in the folder, the options, the version of NVRTC, the architecture. So a changed kernel is
another entry, and versions are never mixed. An entry is written under a temporary name and then renamed; a damaged
entry is replaced.

Source: the NVRTC documentation for the options.
"""

import hashlib
import io
import json
import re
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from lowbit.contract.checks import check_choice
from lowbit.errors import LowbitError, UnavailableError
from lowbit.system.json_files import parsed
from lowbit.system.storage import OWN_MODE, code_folder, read_own, write_whole
from lowbit_cuda.cuda.driver import INSTALL, missing_package

FORMAT, VERSION = "lowbit-cubin", 1
OPTIONS: Mapping[str, Any] = {
    "std": "c++17",
    "fma": False,
    "ftz": False,
    "prec_div": True,
    "prec_sqrt": True,
    "use_fast_math": False,
    "lineinfo": True,
    "no_source_include": True,  # which would be the current folder, before that of the kernels
    "ptxas_options": ["-v"],
}
SUFFIXES = (".cuh", ".cu", ".h")
MOST_BYTES = 1 << 28
"""The largest cache entry that is read; the largest cubin has a few megabytes."""

_USAGE = re.compile(
    r"Compiling entry function '(?P<name>\w+)'.*?(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
    r".*?Used (?P<registers>\d+) registers",
    re.DOTALL,
)


class CompileError(LowbitError, RuntimeError):
    """NVRTC does not accept a kernel.

    Attributes:
        source: the file.
        log: the compiler's complete log.
    """

    def __init__(self, source: str, arch: str, log: str) -> None:
        errors = [line.strip() for line in log.splitlines() if "error" in line and "detected" not in line]
        more = f" (and {len(errors) - 1} more in the attribute log)" if len(errors) > 1 else ""
        super().__init__(f"{source} does not compile for {arch}: {errors[0] if errors else log.strip()[:300]}{more}")
        self.source, self.arch, self.log = source, arch, log


@dataclass(frozen=True)
class Usage:
    """A kernel's registers per thread, and the bytes that it spills."""

    registers: int
    spill_stores: int
    spill_loads: int


@dataclass(frozen=True)
class Cubin:
    """Machine code of one source for one architecture.

    Attributes:
        source: the file that it was compiled from.
        arch: the architecture, such as ``sm_90``.
        nvrtc: the compiler's version.
        code: the machine code, an ELF file.
        log: the assembler's log.
        cached: whether it came from the cache.
    """

    source: str
    arch: str
    nvrtc: str
    code: bytes
    log: str
    cached: bool = False

    @property
    def usage(self) -> dict[str, Usage]:
        """The usage of each kernel in it, by name."""
        return {
            found["name"]: Usage(int(found["registers"]), int(found["stores"]), int(found["loads"]))
            for found in _USAGE.finditer(self.log)
        }


def compile_source(source: str, arch: str, *, folder: Path | None = None, keep: bool = True) -> Cubin:
    """The machine code of a source, from the cache or compiled now; needs no GPU.

    Args:
        source: the name of a file in `folder`.
        arch: the architecture, such as ``sm_90``.
        folder: the folder of the sources; by default `lowbit_cuda.kernels`.
        keep: whether to use the cache.

    Raises:
        ArgumentError: there is no such source or architecture.
        CompileError: the compiler does not accept the source.
        UnavailableError: NVRTC is not installed.
    """
    folder = kernel_folder() if folder is None else folder
    sources = read_sources(folder)
    check_choice("source", source, sorted(sources))
    check_choice("arch", arch, architectures())
    nvrtc = ".".join(map(str, compiler_version()))
    key = digest(source, arch, nvrtc, sources)
    cubins = _cubins() if keep else None
    path = cubins and cubins / f"{Path(source).stem}-{arch}-{key[:24]}.cubin"
    if path and (found := _read(path, key)) is not None:
        return found
    code, log = _compile(source, arch, sources[source].decode(), folder)
    made = Cubin(source, arch, nvrtc, code, log)
    if path:
        _write(path, key, made)
    return made


def _compile(source: str, arch: str, text: str, folder: Path) -> tuple[bytes, str]:
    from cuda.core import Program, ProgramOptions

    log = io.StringIO()
    options = ProgramOptions(name=source, arch=arch, include_path=[str(folder)], **OPTIONS)
    try:
        with closing(Program(text, "c++", options)) as program:
            return bytes(program.compile("cubin", logs=log).code), log.getvalue().replace("\0", "")
    except Exception as error:
        if "NVRTC_ERROR" not in str(error):
            raise
        raise CompileError(source, arch, str(error).split("compilation log:", 1)[-1]) from error


# **Architectures.**


@cache
def compiler_version() -> tuple[int, int]:
    """The version of NVRTC.

    Raises:
        UnavailableError: NVRTC or cuda.core is not installed.
    """
    nvrtc = _nvrtc()
    code, major, minor = nvrtc.nvrtcVersion()
    if int(code) != 0:
        raise UnavailableError("NVRTC", f"it answers {code.name}", INSTALL)
    return int(major), int(minor)


@cache
def architectures() -> tuple[str, ...]:
    """The architectures that NVRTC supports, such as ``sm_90``, oldest first; `UnavailableError` without NVRTC."""
    code, numbers = _nvrtc().nvrtcGetSupportedArchs()
    if int(code) != 0:
        raise UnavailableError("NVRTC", f"it answers {code.name}", INSTALL)
    return tuple(f"sm_{number}" for number in sorted(numbers))


def choose_architecture(capability: tuple[int, int]) -> str:
    """The architecture to compile for: the device's own, or else the next older one of the same generation.

    Machine code runs on later devices of its generation, and on no others.

    Raises:
        UnavailableError: NVRTC supports none of them.
    """
    major, minor = capability
    known = {int(name.removeprefix("sm_")) for name in architectures()}
    fitting = [number for number in known if number // 10 == major and number % 10 <= minor]
    if not fitting:
        version = ".".join(map(str, compiler_version()))
        reason = f"NVRTC {version} does not know the compute capability {major}.{minor}"
        raise UnavailableError("the kernels", reason, "install a newer nvidia-cuda-nvrtc, and cuda-bindings to match")
    return f"sm_{max(fitting)}"


def _nvrtc() -> Any:
    if missing := missing_package():
        raise UnavailableError("the compiler of the kernels", missing, INSTALL)
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError, OSError) as error:  # the library is loaded by the first call
        reason = "NVRTC, NVIDIA's run-time compiler, was not found"
        raise UnavailableError("the compiler of the kernels", reason, INSTALL) from error
    return nvrtc


# **The cache.**


def kernel_folder() -> Path:
    """The folder of the kernels' sources."""
    return Path(str(files("lowbit_cuda"))) / "kernels"


def read_sources(folder: Path) -> dict[str, bytes]:
    """Every source in a folder, by name."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.suffix in SUFFIXES}


def digest(source: str, arch: str, nvrtc: str, sources: Mapping[str, bytes]) -> str:
    """The SHA-256 of everything that a cubin depends on."""
    parts = {name: hashlib.sha256(text).hexdigest() for name, text in sorted(sources.items())}
    content = {"format": VERSION, "source": source, "arch": arch, "nvrtc": nvrtc, "options": dict(OPTIONS), "of": parts}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _cubins() -> Path | None:
    """The folder of the cache; None if another user could write to it, since cubins are code."""
    try:
        return code_folder("cubins")
    except UnavailableError:
        return None


def _write(path: Path, key: str, made: Cubin) -> None:
    """Cache a cubin; if that fails, it is compiled again next time."""
    header = {"format": FORMAT, "version": VERSION, "key": key, "source": made.source, "arch": made.arch}
    header |= {"nvrtc": made.nvrtc, "log": made.log, "sha256": hashlib.sha256(made.code).hexdigest()}
    with suppress(OSError):
        write_whole(path, json.dumps(header).encode() + b"\n" + made.code, OWN_MODE)


def _read(path: Path, key: str) -> Cubin | None:
    """A cached cubin, if the file is complete and matches its name."""
    try:
        head, _, code = read_own(path, MOST_BYTES).partition(b"\n")
        header = parsed(path.name, head)
        identity = header.value("format", str), header.value("version", int), header.value("key", str)
        if identity != (FORMAT, VERSION, key) or header.value("sha256", str) != hashlib.sha256(code).hexdigest():
            return None
        source, arch, nvrtc, log = (header.value(name, str) for name in ("source", "arch", "nvrtc", "log"))
        return Cubin(source, arch, nvrtc, code, log, True)
    except (LowbitError, OSError):
        return None
