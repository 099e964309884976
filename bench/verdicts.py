"""The verdict of the conformance suite on a backend, which every row of a benchmark carries."""

import json
import subprocess
import sys


class Verdicts:
    """The verdict of the suite on a backend's linear layers, asked for once and in the same environment."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    def of(self, name: str) -> str:
        """``passed`` and the id of the report, or ``unproven`` with what came instead."""
        if name not in self._known:
            command = [sys.executable, "-m", "lowbit.cli", "conformance", name, "--seeds", "1", "--json"]
            command += ["--op", "linear.qgemv", "--op", "linear.qgemm"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            report = json.loads(done.stdout) if done.stdout else {"verdict": f"status {done.returncode}", "id": ""}
            passed = report["verdict"] == "passed"
            self._known[name] = f"passed {report['id']}" if passed else f"unproven ({report['verdict']})"
        return self._known[name]
