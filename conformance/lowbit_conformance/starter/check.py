"""Tests that my-backend is right in everything that it declares."""

import subprocess
import sys


def test_conformance() -> None:
    """lowbit's conformance suite passes; if it fails, the report is shown."""
    command = [sys.executable, "-P", "-m", "lowbit", "conformance", "my-backend"]
    run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert run.returncode == 0, run.stdout
