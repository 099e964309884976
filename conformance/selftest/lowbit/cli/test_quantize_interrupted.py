"""``lowbit quantize`` that is interrupted or fails: the same command resumes, and nothing unfinished is published."""

import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rewriting
import tiny_checkpoint
from rewriting import contents, events_of, killed, run_counted, sources_in

from lowbit.arrays import Array
from lowbit.errors import FormatError, UnavailableError
from lowbit.formats.checkpoint import tensors
from lowbit.rewriting import quantizing, writing
from lowbit.rewriting.layouts import LAYOUTS, Layout
from lowbit.rewriting.methods import Rounding
from lowbit.rewriting.source import open_source
from lowbit.tensor_formats.stored import Stored

GROUP = ["--group-size", 16]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return sources_in(tmp_path_factory.mktemp("sources"))


run, answer = partial(rewriting.run, "quantize"), partial(rewriting.answer, "quantize")


CHOICES: dict[str, list[object]] = {
    "rtn": ["--method", "rtn"],
    "gptq": ["--method", "gptq", "--window", 32, "--calibration", "TEXT"],
    "gguf": ["--method", "rtn", "--format", "gguf"],
}


@pytest.fixture(scope="module")
def finished(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, int, Path]]:
    """Of each choice the arguments, how many events a run has that nothing interrupts, and what it writes."""
    found = {}
    for name, options in CHOICES.items():
        folder = tmp_path_factory.mktemp(name)
        given = [sources["text"] if each == "TEXT" else each for each in options]
        arguments = [sources["gguf"], *given, "--group-size", 32]
        events = events_of(folder, "quantize", *arguments, "-o", folder / "whole")
        found[name] = arguments, events, folder / "whole"
    return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", list(CHOICES))
def test_a_killed_run_is_resumed(
    name: str, seed: int, finished: dict[str, tuple[Any, int, Path]], tmp_path: Path
) -> None:
    """At a random moment: what has the final name then is whole, and the same command gives the same bytes."""
    arguments, events, whole = finished[name]
    last = int(np.random.default_rng([seed, len(name)]).integers(1, events + 1))
    killed(tmp_path, last, "quantize", *arguments, "-o", tmp_path / "new")
    if not (tmp_path / "new").exists():
        answer(*arguments, "-o", tmp_path / "new")
        assert [path.name for path in tmp_path.iterdir()] == ["new"]
    assert contents(tmp_path / "new") == contents(whole)


def test_finished_blocks_are_kept(sources: dict[str, Path], finished: dict[str, Any], tmp_path: Path) -> None:
    """A run that was killed late has less to do, and files of others in its folder are removed."""
    arguments, events, _ = finished["gptq"]
    killed(tmp_path, events - 8, "quantize", *arguments, "-o", tmp_path / "new")
    (left,) = tmp_path.glob(".new.*.rewriting")
    (left / "half").mkdir()
    assert answer(*arguments, "-o", tmp_path / "new")["resumed"] == 2
    assert not (tmp_path / "new/half").exists()


@pytest.mark.parametrize(("layout", "most"), [("gptq-v2", 20000), ("gptq-v2", 60000), ("gguf", 20000), ("gguf", 60000)])
def test_a_disk_that_fills_up(layout: str, most: int, sources: dict[str, Path], tmp_path: Path) -> None:
    """In a block, around the blocks, or while a file is put together: an error in words, and it resumes."""
    arguments = [sources["gguf"], "--format", layout, "--group-size", 32, "-o", tmp_path / "new"]
    status, said = run_counted(tmp_path, "quantize", *arguments, most=most)
    assert status == 2 and "cannot be written" in said and "File too large" in said
    assert "run the same command again to resume" in said
    assert not (tmp_path / "new").exists()
    found = answer(*arguments)
    assert found["resumed"] == (2 if most > 20000 else 0)
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def interrupted(sources: dict[str, Path], folder: Path, monkeypatch: pytest.MonkeyPatch, *options: object) -> Path:
    """What a run leaves that is interrupted after its first block."""
    with monkeypatch.context() as patch:
        made = writing.commit_layer

        def commit(parts: Any, target: Any, source: Any, number: int, *rest: Any) -> None:
            if number == 1:
                raise KeyboardInterrupt
            made(parts, target, source, number, *rest)

        patch.setattr(quantizing, "commit_layer", commit)
        result = run(sources["gguf"], "-o", folder / "new", *GROUP, *options)
    assert result.exit_code == 130 and "run the same command again to resume" in result.stderr
    (left,) = folder.glob(".new.*.rewriting")
    return left


def test_ctrl_c(sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit status is 130, a remark says how to resume, and only this user can enter the folder."""
    left = interrupted(sources, tmp_path, monkeypatch)
    assert not (tmp_path / "new").exists() and left.stat().st_mode & 0o777 == 0o700
    said = run(sources["gguf"], "-o", tmp_path / "new", *GROUP)
    assert said.exit_code == 0 and "1 blocks were there from an interrupted run" in said.stderr


def test_a_resumed_run_needs_room_for_what_is_left(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk has no room for the whole beside the block that is finished, and need not have."""
    source = open_source(sources["gguf"])
    request = quantizing.Request(Rounding("rtn", 16), LAYOUTS["gptq-v2"], 4, 4)
    left = interrupted(sources, tmp_path, monkeypatch)
    free = quantizing.room(source, request) - (left / "model-00001-of-00003.safetensors").stat().st_size
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": free}))
    assert answer(sources["gguf"], "-o", tmp_path / "new", *GROUP)["resumed"] == 1
    result = run(sources["gguf"], "-o", tmp_path / "other", *GROUP)
    assert isinstance(result.exception, UnavailableError) and "are needed and" in str(result.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


@pytest.mark.parametrize("options", [[], ["--processes", 2]])
def test_a_damaged_source_leaves_nothing(options: list[object], tmp_path: Path) -> None:
    """A NaN behind a block that is finished: the same command would meet it again, and a mended file is another one."""
    model = tiny_checkpoint.published(tiny_checkpoint.DENSE)
    name = "model.layers.1.mlp.up_proj.weight"
    model.types[name] = "F32"
    model.tensors[name] = np.full_like(model.tensors[name], np.nan)
    source = tiny_checkpoint.write(tmp_path / "source", model)
    error = run(source, "-o", tmp_path / "new", *GROUP, *options).exception
    assert isinstance(error, FormatError) and f"a number in tensor '{name}' is nan" in str(error)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


SEEN = ["--method", "gptq", "--calibration", "TEXT", "--window", 32]


@pytest.mark.parametrize(
    ("file", "options"),
    [
        ("model-00001-of-00003.safetensors", []),
        ("model-00001-of-00003.safetensors", SEEN),
        ("streams-00001.safetensors", SEEN),
    ],
)
def test_damaged_parts_are_made_again(
    file: str, options: list[object], sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A changed byte in a finished part counts as no part; without the streams of a text it is read from the start."""
    options = [sources["text"] if each == "TEXT" else each for each in options]
    left = interrupted(sources, tmp_path, monkeypatch, *options)
    octets = bytearray((left / file).read_bytes())
    octets[-1] ^= 1
    (left / file).write_bytes(octets)
    assert answer(sources["gguf"], "-o", tmp_path / "new", *GROUP, *options)["resumed"] == 0
    answer(sources["gguf"], "-o", tmp_path / "whole", *GROUP, *options)
    assert contents(tmp_path / "new") == contents(tmp_path / "whole")


def test_another_command_begins_anew(sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of other bits is removed; one that others can write to is neither taken up nor removed."""
    left = interrupted(sources, tmp_path, monkeypatch, "--bits", 8)
    left.chmod(0o777)
    assert answer(sources["gguf"], "-o", tmp_path / "new", *GROUP, "--bits", 8)["resumed"] == 0
    assert left.exists()
    left.chmod(0o700)
    (tmp_path / "new").rename(tmp_path / "old")
    assert answer(sources["gguf"], "-o", tmp_path / "new", *GROUP, "--bits", 4)["resumed"] == 0
    assert not left.exists()


def test_a_full_disk(sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in words, and nothing under the final name."""

    def full(*_: object, **__: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(tensors, "save_file", full)
    result = run(sources["gguf"], "-o", tmp_path / "new", *GROUP)
    assert isinstance(result.exception, UnavailableError) and "No space left" in str(result.exception)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    result = run(sources["gguf"], "-o", tmp_path / "new", *GROUP)
    assert "are needed and" in str(result.exception)


def test_what_loads_otherwise_is_not_published(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If scales were written in another order, the final check would find it."""
    made = Layout.tensors

    def turned(self: Layout, module: str, matrix: Stored) -> Iterator[tuple[str, Array]]:
        for name, array in made(self, module, matrix):
            yield name, array[::-1] if name.endswith("scales") else array

    monkeypatch.setattr(Layout, "tensors", turned)
    result = run(sources["gguf"], "-o", tmp_path / "new", *GROUP)
    assert isinstance(result.exception, FormatError)
    assert "other numbers when it is loaded" in str(result.exception)
    assert not (tmp_path / "new").exists()
