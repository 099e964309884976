"""``lowbit perplexity`` and ``lowbit compare`` with ``--processes`` and ``--keep``: the numbers of one process."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import rewriting
import tiny_checkpoint
import tiny_gguf
from rewriting import events_of, killed
from typer.testing import Result

from lowbit.errors import ArgumentError, FormatError, UnavailableError
from lowbit.runtime import Options, open_model
from lowbit.runtime.evaluating import Models, Piece, Scoring

TWO = ("--processes", 2)
TIMES = ("seconds",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models of one tokenizer, a directory, and a text."""
    place = tmp_path_factory.mktemp("evaluate")
    for seed in (0, 1):
        tiny_gguf.write(place / f"{seed}.gguf", tiny_gguf.published(seed))
    tiny_checkpoint.write(place / "directory")
    (place / "text").write_text(rewriting.TEXT)
    return place


def words(folder: Path, command: str, *options: object) -> list[object]:
    """What follows a command, on the first model or on both, with short windows."""
    models = ["--model", folder / "0.gguf"] if command == "perplexity" else [folder / "0.gguf", folder / "1.gguf"]
    return [*models, "--text", folder / "text", "--tokens", 150, "--window", 20, "--backend", "numpy", *options]


def run(folder: Path, command: str, *options: object) -> Result:
    return rewriting.run(command, *words(folder, command, *options))


def answer(folder: Path, command: str, *options: object) -> dict[str, Any]:
    """The JSON answer without times."""
    found = rewriting.answer(command, *words(folder, command, *options))
    return {name: each for name, each in found.items() if name not in TIMES}


PERPLEXITIES = {
    "as stored": (),
    "another protocol": ("--protocol", "llama.cpp"),
    "quantised": ("--bits", 4, "--group-size", 16, "--experts-bits", 2),
    "integer": ("--bits", 4, "--group-size", 16, "--contract", "integer"),
}


@pytest.mark.parametrize("name", PERPLEXITIES)
def test_the_perplexity_is_that_of_one_process(name: str, folder: Path) -> None:
    """Of two processes, to the bit, and all else that the answer says but the time."""
    options = PERPLEXITIES[name]
    assert answer(folder, "perplexity", *options, *TWO) == answer(folder, "perplexity", *options)


def test_the_comparison_is_that_of_one_process(folder: Path) -> None:
    """Every number, that of each window and layer too."""
    expected = answer(folder, "compare")
    assert len(expected["windows"]) == 8 and len(expected["layers"]) == 2
    assert answer(folder, "compare", *TWO) == expected


def test_a_window_of_several_parts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of squares are added up in the order of the text, whether a window has one part or several."""
    monkeypatch.setattr("lowbit.model.decoder.PREFILL_TOKENS", 6)  # of this process
    expected = answer(folder, "compare", "--window", 19)
    (keep := folder / "parts").unlink(missing_ok=True)
    monkeypatch.setattr("lowbit.cli.executors.Processes", lambda processes: rewriting.Here())
    assert answer(folder, "compare", "--window", 19, "--keep", keep) == expected
    assert answer(folder, "compare", "--window", 19, "--keep", keep) == expected


@pytest.mark.parametrize("command", ["perplexity", "compare"])
def test_a_killed_run_is_resumed(command: str, folder: Path, tmp_path: Path) -> None:
    """Wherever it is killed, what it had kept is taken up."""
    expected, counts = answer(folder, command), []
    (tmp_path / "whole").mkdir()
    events = events_of(
        tmp_path / "whole", command, *words(folder, command, "--keep", tmp_path / "whole" / "kept", *TWO)
    )
    for eighth in (3, 6):
        (place := tmp_path / str(eighth)).mkdir()
        killed(place, events * eighth // 8, command, *words(folder, command, "--keep", place / "kept", *TWO))
        kept = json.loads((place / "kept").read_text())["parts"] if (place / "kept").exists() else {}
        counts.append(len(kept))
        assert answer(folder, command, "--keep", place / "kept") == expected
    assert 1 < counts[-1] < 9


def test_what_is_kept_is_not_computed_again(folder: Path, tmp_path: Path) -> None:
    """A number that is changed in the file is the number that is taken."""
    keep = tmp_path / "kept"
    first = answer(folder, "perplexity", "--keep", keep)
    record = json.loads(keep.read_text())
    record["parts"]["3"][0] += 1.0
    del record["parts"]["5"]
    keep.write_text(json.dumps(record))
    assert answer(folder, "perplexity", "--keep", keep)["nll"] == pytest.approx(first["nll"] + 1.0, rel=1e-12)


DAMAGED = {
    "a word": lambda parts: parts.__setitem__("3", ["many", 1]),
    "nothing": lambda parts: parts.__setitem__("3", None),
    "not finite": lambda parts: parts.__setitem__("3", [float("nan"), 1]),
    "too large": lambda parts: parts.__setitem__("3", [10**400, 1]),
    "no account": lambda parts: parts.pop("models"),
    "another account": lambda parts: parts.__setitem__("models", [["cppyy"]]),
}


@pytest.mark.parametrize("kind", DAMAGED)
@pytest.mark.parametrize("command", ["perplexity", "compare"])
def test_a_damaged_result_is_refused(kind: str, command: str, folder: Path, tmp_path: Path) -> None:
    """In a sentence, before any work; the file is as it was."""
    keep = tmp_path / "kept"
    answer(folder, command, "--keep", keep)
    record = json.loads(keep.read_text())
    DAMAGED[kind](record["parts"])
    keep.write_text(json.dumps(record))
    before = keep.read_bytes()
    result = run(folder, command, "--keep", keep)
    assert isinstance(result.exception, ArgumentError) and "--keep is " in str(result.exception), result.exception
    assert keep.read_bytes() == before


REFUSED = {
    "notes": "which is no record; allowed: a free name, or the file that the same command has kept",
    "another text": "the record of another command; allowed: a free name",
    "no folder": "allowed: a name in a folder that exists",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_file_of_something_else(kind: str, folder: Path, tmp_path: Path) -> None:
    """It is refused before any work, and is as it was."""
    keep = tmp_path / "none" / "kept" if kind == "no folder" else tmp_path / "kept"
    if kind == "another text":
        answer(folder, "perplexity", "--keep", keep, "--tokens", 40)
    elif kind == "notes":
        keep.write_text("my notes")
    before = keep.read_bytes() if keep.exists() else None
    result = run(folder, "perplexity", "--keep", keep)
    assert isinstance(result.exception, ArgumentError)
    assert str(result.exception).startswith("--keep is ") and REFUSED[kind] in str(result.exception)
    assert (keep.read_bytes() if keep.exists() else None) == before


@pytest.mark.parametrize("command", ["perplexity", "compare"])
def test_numbers_and_places(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the option; without ray it says what to install."""
    for options, message in {
        ("--processes", 0): "--processes is 0; allowed: an integer of at least 1",
        ("--processes", 1, "--cluster", "auto"): "--processes and --cluster are two places for the work",
    }.items():
        assert message in str(run(folder, command, *options).exception)
    monkeypatch.setitem(sys.modules, "ray", None)
    result = run(folder, command, "--cluster", "auto")
    assert isinstance(result.exception, UnavailableError)
    assert (
        str(result.exception) == "the cluster is unavailable: the package ray is not installed; pip install lowbit[ray]"
    )


def test_a_machine_without_the_model(folder: Path, tmp_path: Path) -> None:
    """It is named; and another model under the path is refused."""
    configs = (open_model(folder / "0.gguf").config,)
    piece = Piece(0, (3, 4, 5))
    with pytest.raises(
        UnavailableError, match=r"nothing is there on machine \S+, which has a part of the work; put it"
    ):
        Scoring(Models((tmp_path / "model.gguf",), configs, "numpy", Options()))(piece, 1)
    with pytest.raises(FormatError, match=r"shape of the model is another in .*; allowed: the model that the command"):
        Scoring(Models((folder / "directory",), configs, "numpy", Options()))(piece, 1)


def test_an_error_in_a_window(folder: Path) -> None:
    """What a process refuses is refused, in its words: here a window too long for the model."""
    result = run(folder, "perplexity", "--window", 100_000, *TWO)
    assert isinstance(result.exception, ArgumentError) and "window is 100000; allowed" in str(result.exception)
