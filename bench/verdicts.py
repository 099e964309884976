"""The verdict of the conformance suite on a backend, which every row of a benchmark carries."""

import json
import subprocess
import sys


class Verdicts:
    """The verdict of the suite on a backend's linear layers, asked for once and in the same environment."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    def of(self, name: str) -> str:
        """``passed``, or ``unproven`` with what came instead."""
        if name not in self._known:
            command = [sys.executable, "-m", "lowbit.cli", "conformance", name, "--seeds", "1", "--json"]
            command += ["--op", "linear.qgemv", "--op", "linear.qgemm"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            verdict = json.loads(done.stdout)["verdict"] if done.stdout else f"status {done.returncode}"
            self._known[name] = verdict if verdict == "passed" else f"unproven ({verdict})"
        return self._known[name]
