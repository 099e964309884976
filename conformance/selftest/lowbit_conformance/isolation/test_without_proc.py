"""A system without ``/proc``, such as macOS: the suite runs there, and says what it could not see."""

import json
import os
import subprocess
from typing import Any

import pytest
from paths import SUPPORT

from lowbit.system.interpreters import python_command

OPERATIONS = ("packing.pack", "offload.trace/H4", "blocks.swiglu")


def conformance(name: str, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Run ``lowbit conformance`` there; exit status, report and standard error."""
    path = f"{SUPPORT / 'without_proc'}{os.pathsep}{SUPPORT}"
    command = python_command("-m", "lowbit", "conformance", name, "--json", "--quick", *arguments)
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=300, check=False
    )
    return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr


@pytest.mark.slow
def test_a_right_backend_passes_and_the_report_says_what_was_not_seen() -> None:
    chosen = [part for operation in OPERATIONS for part in ("--op", operation)]
    status, report, error = conformance("numpy", *chosen)
    assert (status, report["verdict"], error) == (0, "passed", "")
    assert report["isolation"]["method"] == "unobserved"
    assert "Without /proc it was not seen whether calls leave child processes" in report["isolation"]["meaning"]


@pytest.mark.slow
def test_a_wrong_backend_fails() -> None:
    """Nothing is passed because it cannot be seen: results are compared as everywhere."""
    status, report, _ = conformance("bank:last-product-dropped", "--op", "linear.qgemv", "-x")
    assert (status, report["verdict"]) == (1, "failed")


@pytest.mark.slow
@pytest.mark.parametrize("command", [("backends",), ("profiles",)], ids=" ".join)
def test_other_commands_run(command: tuple[str, ...]) -> None:
    """Backends are asked in children, and processors counted, in ways that macOS has too."""
    path = str(SUPPORT / "without_proc")
    run = python_command("-m", "lowbit", *command)
    done = subprocess.run(
        run, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
