"""A backend whose C++ runs in a process of its own, under sanitizers: each array in memory of exactly its size.

It is the process of `lowbit_cppyy.emulation`, compiled for this processor.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import sanitized_programs

from lowbit_cppyy import CppyyBackend
from lowbit_cppyy.codegen.isa import InstructionSet
from lowbit_cppyy.emulation.backend import EmulatedRuntime
from lowbit_cppyy.emulation.guest import Guest
from lowbit_cppyy.runtime.compiler import using

PATIENCE = 60_000_000
"""Microseconds that a call waits for its threads. They are slow here, and a step on fewer of them would test less."""
THREADS = ("-fsanitize=thread", "-fno-builtin")
ENVIRONMENT = {
    "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0",
    "UBSAN_OPTIONS": "print_stacktrace=0",
    "TSAN_OPTIONS": "halt_on_error=1:exitcode=66",
}


class SanitizedGuest(Guest):
    """The process, on this processor."""

    def __init__(self, table: InstructionSet, compiler: str, sanitizers: Sequence[str]) -> None:
        super().__init__(table)
        self._compiler, self._sanitizers = compiler, sanitizers

    def compiled(self, source: str, *options: str) -> Path:
        words = "-fPIC", f"-DLOWBIT_GATHERING={PATIENCE}", *options
        return sanitized_programs.compiled(source, self._compiler, words, self._sanitizers)

    def _command(self, program: Path) -> list[str]:
        return ["env", *(f"{name}={value}" for name, value in ENVIRONMENT.items()), str(program)]


@contextmanager
def sanitized(
    table: InstructionSet,
    threads: int,
    compiler: str,
    sanitizers: Sequence[str] = sanitized_programs.SANITIZERS,
) -> Iterator[CppyyBackend]:
    """A backend of an instruction set under sanitizers; a request raises an error once the process has complained."""
    guest = SanitizedGuest(table, compiler, sanitizers)
    with closing(guest), using(EmulatedRuntime(guest)), CppyyBackend(isa=table.name, threads=threads) as backend:
        yield backend
