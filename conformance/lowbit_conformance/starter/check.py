"""my-backend keeps what it declares."""

import subprocess
import sys


def test_conformance() -> None:
    """The conformance suite of lowbit passes; if it does not, its report is shown."""
    command = [sys.executable, "-P", "-m", "lowbit", "conformance", "my-backend"]
    run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert run.returncode == 0, run.stdout
