"""The portions of a long run: some seeds of a backend, each run by ``lowbit conformance`` in a process of its own."""

import json
import subprocess
from dataclasses import dataclass
from typing import Any

from lowbit.errors import UnavailableError
from lowbit.system.interpreters import python_command, python_environment
from lowbit_conformance.report.gather import suite

PORTION = 20
"""Seeds of a portion."""

Entry = dict[str, Any]


@dataclass(frozen=True)
class Portion:
    """Some seeds of a backend.

    Attributes:
        backend: its name.
        first: the first seed.
        count: of seeds.
    """

    backend: str
    first: int
    count: int

    def __str__(self) -> str:
        return f"{self.backend}, seeds {self.first} and on"


@dataclass(frozen=True)
class Running:
    """The work on a portion.

    Attributes:
        suite: the digest of the suite that is meant.
    """

    suite: str

    def __call__(self, portion: Portion, threads: int) -> Entry:
        """Run a portion.

        Raises:
            UnavailableError: this machine has another suite.
        """
        if (own := suite().sha256) != self.suite:
            reason = f"a machine has suite {own[:12]}, and the command was started with {self.suite[:12]}"
            raise UnavailableError("the suite", reason, "install the same lowbit on every machine")
        return entry_of(portion.backend, portion.first, portion.count)


def entry_of(name: str, first: int, count: int) -> Entry:
    """Run some seeds of a backend, and say what came of them."""
    command = python_command("-m", "lowbit", "conformance", name, "--json")
    command += ["--first-seed", str(first), "--seeds", str(count)]
    done = subprocess.run(command, env=python_environment(), capture_output=True, text=True, check=False)
    if not done.stdout:
        return {"seeds": count, "counts": {}, "failures": [done.stderr.strip()[-400:] or "no answer"], "seconds": 0.0}
    try:
        report = json.loads(done.stdout)
    except ValueError:
        return {"seeds": count, "counts": {}, "failures": ["an answer that is not JSON"], "seconds": 0.0}
    failures = [f"{failure['verdict']} in {failure['id']}" for failure in report["failures"]]
    return {"seeds": count, "counts": report["counts"], "failures": failures, "seconds": report["seconds"]}
