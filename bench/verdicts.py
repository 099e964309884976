"""The verdict of the conformance suite on a backend, which every row of a benchmark carries.

Asking takes minutes, so an answer is kept in bench/results together with what it follows from: the sources of the
suite, the specification and the backend, the backend's name and instruction set, and the processor. Where all of these
are as they were, so is the verdict.
"""

import hashlib
import json
import os
import subprocess
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from lowbit.backend import ENTRY_POINTS
from lowbit.system.entries import entries
from lowbit.system.interpreters import python_command, python_environment
from lowbit.system.storage import write_whole
from lowbit_bench.inputs import PRODUCTS
from lowbit_conformance.report.gather import machine, suite

KNOWN = Path(os.environ.get("LOWBIT_BENCH_VERDICTS") or Path(__file__).parent / "results/verdicts.json")


class Verdicts:
    """The verdict of the suite on a backend's products, asked for where it is not known."""

    def __init__(self, file: Path = KNOWN) -> None:
        self._file = file
        try:
            self._known: dict[str, str] = json.loads(file.read_text())
        except (OSError, ValueError):
            self._known = {}

    def of(self, name: str, isa: str = "", operations: Sequence[str] = PRODUCTS) -> str:
        """``passed`` and the id of the report, or ``unproven`` with what came instead.

        Args:
            name: the backend.
            isa: forces one of cppyy's instruction sets.
            operations: those of which the verdict is wanted.
        """
        key = " ".join(filter(None, [name, isa, *operations, state_of(name)]))
        if key not in self._known:
            self._known[key] = asked(name, isa, operations)
            self._file.parent.mkdir(exist_ok=True)
            write_whole(self._file, json.dumps(self._known, indent=1).encode())
        return self._known[key]


def asked(name: str, isa: str, operations: Sequence[str]) -> str:
    """What ``lowbit conformance`` says."""
    command = python_command("-m", "lowbit", "conformance", name, "--seeds", "1", "--json")
    command += [word for operation in operations for word in ("--op", operation)]
    chosen = {"LOWBIT_CPPYY_ISA": isa} if isa else {}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=python_environment() | chosen)
    report = json.loads(done.stdout) if done.stdout else {"verdict": f"status {done.returncode}", "id": ""}
    return f"passed {report['id']}" if report["verdict"] == "passed" else f"unproven ({report['verdict']})"


def state_of(name: str) -> str:
    """A sum over all that a verdict follows from."""
    total = hashlib.sha256(f"{suite().sha256} {machine()}".encode())
    for entry in entries(ENTRY_POINTS):
        if entry.name == name:
            for path in sources(entry.module.partition(".")[0]):
                total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()[:16]


def sources(package: str) -> list[Path]:
    """The files of a package, compiled ones too, or the one of a module, in order."""
    spec = find_spec(package)
    if spec is None:
        return []
    if spec.submodule_search_locations is None:
        return [Path(spec.origin)] if spec.origin is not None else []
    found = [path for folder in spec.submodule_search_locations for path in Path(folder).rglob("*")]
    return sorted(path for path in found if path.is_file() and path.suffix != ".pyc")
