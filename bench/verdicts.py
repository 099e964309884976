"""The verdict of the conformance suite on a backend, which every row of a benchmark carries."""

import json
import os
import subprocess
import sys

OPERATIONS = ("linear.qgemv", "linear.qgemm", "linear.qgemm_bfp")


class Verdicts:
    """The verdict of the suite on a backend's linear layers, asked for once and in the same environment."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], str] = {}

    def of(self, name: str, isa: str = "") -> str:
        """``passed`` and the id of the report, or ``unproven`` with what came instead."""
        # `isa` forces one of cppyy's instruction sets.
        if (name, isa) not in self._known:
            command = [sys.executable, "-m", "lowbit.cli", "conformance", name, "--seeds", "1", "--json"]
            command += [word for operation in OPERATIONS for word in ("--op", operation)]
            chosen = {"LOWBIT_CPPYY_ISA": isa} if isa else {}
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | chosen)
            report = json.loads(done.stdout) if done.stdout else {"verdict": f"status {done.returncode}", "id": ""}
            passed = report["verdict"] == "passed"
            self._known[name, isa] = f"passed {report['id']}" if passed else f"unproven ({report['verdict']})"
        return self._known[name, isa]
