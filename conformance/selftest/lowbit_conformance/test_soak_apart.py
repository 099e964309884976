"""The soak with ``--processes``: the file of one process, but for dates and seconds."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from kills.portions import PORTION, Portion, Running
from kills.soak import Soak
from paths import SUPPORT

from lowbit.errors import UnavailableError
from lowbit.system.interpreters import python_command

RIGHT, WRONG = "odd_backends:Narrow", "odd_backends:DeclaresWhatItLacks"


def soaked(file: Path, *options: object) -> tuple[int, str]:
    """Soak both backends with two seeds; the exit status and what was printed."""
    words = ["--out", file, "--seeds", 2, "--backend", RIGHT, "--backend", WRONG, *options]
    command = python_command("-m", "kills.soak", *map(str, words))
    found = os.environ | {"PYTHONPATH": os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, env=found, capture_output=True, text=True, timeout=600, check=False)
    return done.returncode, done.stdout


def kept(file: Path) -> str:
    """All of a file, in its order, without the date and seconds."""
    content: dict[str, Any] = json.loads(file.read_text())
    for portions in content["backends"].values():
        for entry in portions.values():
            entry["seconds"] = 0
    return json.dumps(content | {"date": ""})


@pytest.mark.whole
def test_the_file_is_that_of_one_process(tmp_path: Path) -> None:
    """Counts, failures, their order, what is printed, and the exit status."""
    said = soaked(tmp_path / "one")
    assert said[0] == 1 and f"{WRONG}: RAISED in packing.unpack" in said[1]
    assert soaked(tmp_path / "two", "--processes", 2) == said
    assert kept(tmp_path / "two") == kept(tmp_path / "one")


def test_portions_have_their_places(tmp_path: Path) -> None:
    """Whenever they come: backends as they were asked for, portions by their first seed."""
    soak = Soak(tmp_path / "soak")
    missing = soak.missing(["b", "a"], 3 * PORTION)
    assert missing[:3] == [Portion("b", 0, PORTION), Portion("a", 0, PORTION), Portion("b", PORTION, PORTION)]
    for part in reversed(missing):
        soak.add(part.backend, part.first, {"failures": []})
    found = json.loads((tmp_path / "soak").read_text())["backends"]
    assert [(name, list(portions)) for name, portions in found.items()] == [
        ("b", ["0", "20", "40"]),
        ("a", ["0", "20", "40"]),
    ]


def test_a_machine_with_another_suite() -> None:
    """Its results would be of something else, so it is refused."""
    with pytest.raises(UnavailableError, match=r"a machine has suite [0-9a-f]{12}, and the command was started with 0"):
        Running("0" * 64)(Portion(RIGHT, 0, 1), 1)
