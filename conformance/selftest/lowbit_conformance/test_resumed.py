"""The files of long runs: resumed if they are sound, refused if they are not, and never lost in silence."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from kills import matrix, soak
from paths import SUPPORT

from lowbit.errors import ArgumentError
from lowbit.system.interpreters import python_command

ENTRY = {"seeds": 20, "counts": {}, "failures": [], "seconds": 1.0}
TRIAL = {
    "name": "nibbles-swapped",
    "killed": True,
    "verdict": "WRONG",
    "case": "x",
    "cause": "c",
    "expected": ["WRONG"],
}


def soaked(file: Path) -> None:
    """A sound file of the soak."""
    made = soak.Soak(file)
    made.add("numpy", 0, ENTRY)


def tried(file: Path) -> None:
    """A sound file of the kill matrix."""
    made = matrix.Matrix(file, 2, "claims")
    made.add("nibbles-swapped", "", {"killed": True, "verdict": "WRONG", "case": "x", "clauses": {}})
    made.save()


PROGRAMS = {
    "soak": (soaked, soak.Soak, "kills.soak"),
    "matrix": (tried, lambda file: matrix.Matrix(file, 2, "claims"), "kills.matrix"),
}
FOREIGN = {
    "notes": b"my notes\n",
    "nothing": b"",
    "null": b"null",
    "a list": b"[1, 2]",
    "other JSON": b'{"important": true}',
    "another schema": b'{"schema": "lowbit-soak-0"}',
    "not UTF-8": b"\xff\xfe\x00",
    "nested": b"[" * 200_000,
    "a number": b"9" * 10_000,
}


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("content", FOREIGN)
def test_a_file_of_something_else(program: str, content: str, tmp_path: Path) -> None:
    """It is refused before any work, and is as it was."""
    (file := tmp_path / "out.json").write_bytes(FOREIGN[content])
    with pytest.raises(
        ArgumentError, match=r"--out is .*out\.json, not (JSON|of schema .*); allowed: a file that this"
    ):
        PROGRAMS[program][1](file)
    assert file.read_bytes() == FOREIGN[content]


DAMAGE = {
    "soak": {
        "no fields": lambda found: found.pop("backends"),
        "a list": lambda found: found.update(backends=[]),
        "portions": lambda found: found.update(backends={"numpy": 5}),
        "an entry": lambda found: found.update(backends={"numpy": {"0": None}}),
        "no failures": lambda found: found["backends"]["numpy"]["0"].pop("failures"),
        "failures": lambda found: found["backends"]["numpy"]["0"].update(failures="none"),
        "a failure": lambda found: found["backends"]["numpy"]["0"].update(failures=[{}]),
    },
    "matrix": {
        "no control": lambda found: found.pop("control"),
        "no defects": lambda found: found.pop("defects"),
        "control": lambda found: found.update(control=7),
        "defects": lambda found: found.update(defects={"a": 1}),
        "no name": lambda found: found["defects"][0].pop("name"),
        "an unknown name": lambda found: found["defects"][0].update(name="two-left-feet"),
        "no verdict": lambda found: found["defects"][0].pop("verdict"),
        "clauses": lambda found: found["defects"][0].update(clauses=[1]),
    },
}


@pytest.mark.parametrize(("program", "kind"), [(name, kind) for name, kinds in DAMAGE.items() for kind in kinds])
def test_a_file_of_ours_that_is_damaged(program: str, kind: str, tmp_path: Path) -> None:
    """A file of the same suite without its fields, or with others, is refused and not lost."""
    write, open_file, _ = PROGRAMS[program]
    write(file := tmp_path / "out.json")
    open_file(file)
    found = json.loads(file.read_text())
    DAMAGE[program][kind](found)
    file.write_text(json.dumps(found))
    before = file.read_bytes()
    with pytest.raises(ArgumentError, match=re.escape("out.json, with other fields; allowed: a file that this")):
        open_file(file)
    assert file.read_bytes() == before


def test_half_of_a_surrogate_pair_does_not_end_a_run(tmp_path: Path) -> None:
    """JSON can spell it and UTF-8 cannot; the file could not be written again after the next portion."""
    for program, key in (("soak", "failures"), ("matrix", "case")):
        write, read, _ = PROGRAMS[program]
        file = tmp_path / program
        write(file)
        text = file.read_text()
        changed = text.replace(f'"{key}": []', f'"{key}": ["\\ud800"]').replace(f'"{key}": "x"', f'"{key}": "\\ud800"')
        assert changed != text
        file.write_text(changed)
        resumed = read(file)
        if isinstance(resumed, matrix.Matrix):
            resumed.save()
        else:
            assert isinstance(resumed, soak.Soak)
            resumed.add("numpy", 20, ENTRY)
        assert "\\ud800" in file.read_text()
        read(file)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_file_of_another_suite(program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is begun anew, which is said."""
    write, open_file, _ = PROGRAMS[program]
    write(file := tmp_path / "out.json")
    open_file(file)
    assert capsys.readouterr().err == ""
    file.write_text(json.dumps(json.loads(file.read_text()) | {"suite": "0" * 64}))
    open_file(file)
    assert "is of another suite" in capsys.readouterr().err


@pytest.mark.parametrize("program", PROGRAMS)
def test_what_is_no_file(program: str, tmp_path: Path) -> None:
    """A folder, a link to nowhere, a pipe, a folder that does not take files: nothing waits, nothing is replaced."""
    open_file = PROGRAMS[program][1]
    os.mkfifo(pipe := tmp_path / "pipe")
    (link := tmp_path / "link").symlink_to("nowhere")
    (file := tmp_path / "file").touch()
    for path in (tmp_path, pipe, link, file / "below" / "out.json"):
        with pytest.raises(ArgumentError, match="--out is"):
            open_file(path)


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_program_says_it_in_a_line(program: str, tmp_path: Path) -> None:
    """Status 2, and no traceback."""
    (file := tmp_path / "notes\n\x1b[31m.txt").write_text("my notes")
    command = python_command("-m", PROGRAMS[program][2], "--out", str(file))
    found = os.environ | {"PYTHONPATH": str(SUPPORT)}
    done = subprocess.run(command, env=found, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("lowbit: --out is ")
    assert "\x1b" not in done.stderr and file.read_text() == "my notes"
