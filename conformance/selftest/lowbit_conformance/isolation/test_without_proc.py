"""A system without ``/proc``, such as macOS: the suite runs there, and says what it could not see."""

import json
import subprocess
from pathlib import Path

import pytest
import without_proc

from lowbit.system.interpreters import python_command

OPERATIONS = ("packing.pack", "offload.trace/H4", "blocks.swiglu")


def lowbit(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run ``lowbit`` there."""
    command, environment = python_command("-m", "lowbit", *words), without_proc.environment(folder)
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_a_right_backend_passes_and_the_report_says_what_was_not_seen(tmp_path: Path) -> None:
    """Operations with and without arrays of float32, and one whose processes and memory are counted."""
    chosen = [part for operation in OPERATIONS for part in ("--op", operation)]
    done = lowbit(tmp_path, "conformance", "numpy", "--json", "--quick", *chosen)
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert report["verdict"] == "passed"
    assert report["isolation"]["method"] == "unobserved"
    assert "Without /proc it was not seen whether calls leave child processes" in report["isolation"]["meaning"]


def test_a_wrong_backend_fails(tmp_path: Path) -> None:
    """Nothing is passed because it cannot be seen: results are compared as everywhere."""
    done = lowbit(
        tmp_path, "conformance", "bank:last-product-dropped", "--json", "--quick", "--op", "linear.qgemv", "-x"
    )
    assert (done.returncode, json.loads(done.stdout)["verdict"]) == (1, "failed")


@pytest.mark.parametrize("command", [("backends",), ("profiles",)], ids=" ".join)
def test_other_commands_run(tmp_path: Path, command: tuple[str, ...]) -> None:
    """Backends are asked in children, and processors counted, in ways that macOS has too."""
    done = lowbit(tmp_path, *command)
    assert (done.returncode, done.stderr) == (0, "")
