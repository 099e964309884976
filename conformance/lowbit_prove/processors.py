"""Processors: compiled intrinsics, run on this processor or on one that QEMU emulates.

What an emulator does says nothing about a processor. So a probe names what it ran on, and runs on an emulator only
where this processor lacks the instruction.
"""

import ctypes
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from platform import machine
from typing import Any

import numpy as np

from lowbit.arrays import Array
from lowbit.errors import UnavailableError
from lowbit.system.storage import code_folder
from lowbit_cppyy.codegen.isa import TABLES, InstructionSet
from lowbit_cppyy.emulation import guest
from lowbit_cppyy.kept.libraries import LIBRARY, compiler, kept_library
from lowbit_cppyy.runtime import processor
from lowbit_prove.bodies import Use, intrinsic, uses
from lowbit_prove.intrinsics import register

ABOUT = ("vendor_id", "cpu family", "model", "model name", "stepping", "microcode", "flags")
ABOUT_ARM = ("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision", "Features")
"""Lines of ``/proc/cpuinfo`` that distinguish processors."""
HERE = "this processor"

Run = Callable[[list[Array], Array, int], Array]
"""Runs an intrinsic on its operands with a bit count `i`; fills an array with the results and returns it."""


@dataclass(frozen=True)
class Probe:
    """A use of an intrinsic in tables.

    Attributes:
        table: the first table, in order, that has it; the processor needs the features of this table.
        use: its name and constants.
    """

    table: InstructionSet
    use: Use

    @property
    def name(self) -> str:
        constants = [f"{each:#x}" for each in self.use[1] if each is not None]
        return "-".join((self.use[0], *constants[:1]))

    @property
    def function(self) -> str:
        """The C++ name of its function."""
        return "probe_" + self.name.replace("-", "_")

    @property
    def native(self) -> bool:
        """Whether this processor has the instruction."""
        return not lacking(self.table)

    @property
    def processor(self) -> str:
        """The processor on which it runs, as text; empty if nothing has the instruction."""
        if self.native:
            return HERE
        version = emulator() if self.table.name in guest.PROCESSORS else ""
        return f"{version}, an emulator and no processor," if version else ""

    @property
    def possible(self) -> bool:
        """Whether it can run."""
        return bool(self.processor)

    @property
    def described(self) -> str:
        """The processor on which it runs, distinguished from others."""
        return this_processor() if self.native else f"{emulator()} {guest.PROCESSORS[self.table.name]}"


def probes() -> list[Probe]:
    """One probe for each use of an intrinsic in any table, with the smallest table that has it."""
    found = dict[Use, Probe]()
    for table in sorted(TABLES.values(), key=lambda each: len(each.requires)):
        for use in uses(table):
            found.setdefault(use, Probe(table, use))
    return list(found.values())


def unchecked() -> list[str]:
    """Intrinsics that cannot be compared here: this processor lacks them, and no emulator has them."""
    return [each.name for each in probes() if not each.possible]


def emulated() -> dict[str, list[str]]:
    """Intrinsics that are compared only with an emulator, by emulator."""
    found = dict[str, list[str]]()
    for each in probes():
        if each.possible and not each.native:
            found.setdefault(emulator(), []).append(each.name)
    return found


def lacking(table: InstructionSet) -> list[str]:
    """The features of a table that this processor lacks; all of them if archspec is not installed."""
    if find_spec("archspec") is None:
        return list(table.requires)
    return [each for each in table.requires if not processor.has(each)]


@cache
def this_processor() -> str:
    """A text that distinguishes this processor from others."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    told = (*ABOUT, *ABOUT_ARM)
    return "\n".join(sorted({machine(), *(line for line in lines if line.partition("\t")[0].strip() in told)}))


@cache
def emulator() -> str:
    """The emulator of ARM processors with its version; empty if it or its compiler is not installed."""
    if guest.missing() is not None:
        return ""
    told = subprocess.run([str(guest.EMULATOR), "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"version (\S+)", told.stdout)
    return f"QEMU {found[1]}" if found else ""


@contextmanager
def running(probe: Probe) -> Iterator[Run]:
    """A function that runs an intrinsic.

    Raises:
        UnavailableError: there is no compiler, or the emulated process has ended.
    """
    if probe.native:
        yield partial(_called, library()[probe.function])
        return
    alike = [each for each in probes() if each.table == probe.table]
    program = guest.compiled(source(alike) + _main(alike), probe.table)
    command = guest.command(program, probe.table)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield partial(_asked, process, alike.index(probe))


@cache
def library() -> ctypes.CDLL:
    """The functions of all probes that this processor can run, compiled.

    Raises:
        UnavailableError: there is no compiler.
    """
    command = compiler()
    if command is None:
        raise UnavailableError("lowbit prove", "there is no C++ compiler", "install g++ or clang++")
    folder, text = code_folder("proofs"), source([each for each in probes() if each.native])
    return ctypes.CDLL(str(folder / kept_library(folder, "probes", command, text, LIBRARY)))


def _called(function: Any, taken: list[Array], result: Array, count: int) -> Array:
    addresses = [each.ctypes.data for each in taken] + [None] * (3 - len(taken))
    function(*map(ctypes.c_void_p, addresses), ctypes.c_void_p(result.ctypes.data), len(result), count)
    return result


def _asked(process: "subprocess.Popen[bytes]", function: int, taken: list[Array], result: Array, count: int) -> Array:
    """The same in an emulated process: sends sizes and registers, and receives results."""
    assert process.stdin is not None and process.stdout is not None
    sizes = [each.nbytes for each in taken] + [0] * (3 - len(taken))
    head = np.array([function, *sizes, result.nbytes, len(result), count], np.int64)
    try:
        process.stdin.write(b"".join(each.tobytes() for each in (head, *taken)))
        process.stdin.flush()
        found = process.stdout.read(result.nbytes)
    except BrokenPipeError:
        found = b""
    if len(found) < result.nbytes:
        raise UnavailableError("lowbit prove", "the emulated process ended", "run it again")
    result.reshape(-1).view(np.uint8)[:] = np.frombuffer(found, np.uint8)
    return result


# **C++.**

PARAMETERS = "unsigned char* a, unsigned char* b, unsigned char* c, unsigned char* out, std::int64_t n, int i"
X86 = {"int": "__m{}i", "float": "__m{}", "double": "__m{}d"}


def source(chosen: Sequence[Probe]) -> str:
    """The functions of probes in C++: each applies an intrinsic to `n` registers in turn."""
    headers = dict.fromkeys(header for each in chosen for header in each.table.headers)
    lines = [f"#include <{header}>" for header in ("cstdint", "cstring", *headers)]
    return "\n".join([*lines, *map(_text, chosen)]) + "\n"


def _main(chosen: Sequence[Probe]) -> str:
    """A program that answers requests, as `_asked` makes them."""
    names = ", ".join(each.function for each in chosen)
    return f"""\
#include <cstdio>
#include <vector>
void (*const functions[])({PARAMETERS}) = {{{names}}};
int main() {{
  std::int64_t head[7];
  while (std::fread(head, 8, 7, stdin) == 7) {{
    std::vector<unsigned char> parts[4];
    for (int n = 0; n < 4; ++n) parts[n].resize(head[n + 1]);
    for (int n = 0; n < 3; ++n)
      if (std::fread(parts[n].data(), 1, parts[n].size(), stdin) != parts[n].size()) return 1;
    functions[head[0]](parts[0].data(), parts[1].data(), parts[2].data(), parts[3].data(), head[5], int(head[6]));
    std::fwrite(parts[3].data(), 1, parts[3].size(), stdout);
    std::fflush(stdout);
  }}
}}
"""


def _text(probe: Probe) -> str:
    (found, lanes), name = intrinsic(probe.use[0]), probe.use[0]
    constants = iter("i" if each is None else str(each) for each in probe.use[1])
    loads, arguments, letters = [], [], iter("abc")
    for kind in found.takes:
        if kind == "constant":
            arguments.append(next(constants))
            continue
        letter = next(letters)
        place = f"{letter} + {register(kind, lanes).size} * k"
        if kind == "pointer":
            cast = "float*" if "ps" in name else f"__m{32 * lanes}i*"
            arguments.append(f"reinterpret_cast<{cast}>({place})" if found.gives != "none" else "target")
            continue
        arguments.append(letter.upper())
        loads.append(
            f"{_type(kind, lanes)} {letter.upper()}; std::memcpy(&{letter.upper()}, {place}, sizeof {letter.upper()});"
        )
    call, size = f"{name}({', '.join(arguments)})", register(found.gives, lanes).size
    kept = f"const auto r = {call}; std::memcpy(out + {size} * k, &r, {size});"
    if found.gives == "none":
        kept = f"float* const target = reinterpret_cast<float*>(out + {size} * k); {call};"
    head = f'extern "C" {probe.table.attribute} void {probe.function}({PARAMETERS})'
    return f"{head} {{\n  for (std::int64_t k = 0; k < n; ++k) {{ {' '.join(loads)} {kept} }}\n}}"


def _type(kind: str, lanes: int) -> str:
    if kind.endswith("_t"):
        return kind
    if kind.startswith("scalar"):
        return kind.partition(" ")[2]
    if kind in ("half", "quarter"):
        return f"__m{8 * register(kind, lanes).size}i"
    return X86[kind].format(32 * lanes if lanes > 4 or kind == "int" else "")
