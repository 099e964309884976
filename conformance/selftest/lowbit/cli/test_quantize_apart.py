"""``lowbit quantize --processes``: the bytes of one process, from several; killed runs are resumed."""

from functools import partial
from pathlib import Path

import pytest
import rewriting
from rewriting import contents, events_of, killed, sources_in

from lowbit.errors import ArgumentError

run, answer = partial(rewriting.run, "quantize"), partial(rewriting.answer, "quantize")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return sources_in(tmp_path_factory.mktemp("sources"))


CASES = [
    ("dense", ["--group-size", 32], "new"),
    ("sparse", ["--group-size", 32, "--bits", 3, "--format", "compressed-tensors"], "new"),
    ("gguf", ["--group-size", 16, "--method", "hqq", "--format", "hqq"], "new"),
    ("dense", ["--group-size", 32, "--format", "gguf"], "new.gguf"),
]


@pytest.mark.parametrize(("kind", "options", "name"), CASES)
def test_the_bytes_are_those_of_one_process(
    kind: str, options: list[object], name: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    """Of every file, and the answer too."""
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    expected = answer(sources[kind], "-o", tmp_path / "one" / name, *options)
    found = answer(sources[kind], "-o", tmp_path / "two" / name, *options, "--processes", 2)
    assert contents(tmp_path / "two" / name) == contents(tmp_path / "one" / name)
    assert found["matrices"] == expected["matrices"]


def test_a_killed_run_is_resumed(sources: dict[str, Path], tmp_path: Path) -> None:
    """Wherever it is killed, a run in one process makes what is left."""
    options = [sources["sparse"], "--group-size", 32]
    answer(*options, "-o", tmp_path / "expected")
    (tmp_path / "whole").mkdir()
    events = events_of(tmp_path / "whole", "quantize", *options, "-o", tmp_path / "whole/new", "--processes", 2)
    resumed = []
    for place in (3, 5, 6):
        folder = tmp_path / str(place)
        folder.mkdir()
        killed(folder, events * place // 8, "quantize", *options, "-o", folder / "new", "--processes", 2)
        resumed.append(answer(*options, "-o", folder / "new")["resumed"])
        assert contents(folder / "new") == contents(tmp_path / "expected")
    assert resumed[-1] > 0


REFUSED = [
    (["--method", "gptq"], "--processes and --cluster do not apply to --method gptq"),
    (["--cluster", "auto"], "--processes and --cluster are two places for the work"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_does_not_go_together(
    options: list[object], message: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    """It is refused, and nothing is left."""
    text = ["--calibration", sources["text"]] if "gptq" in options else []
    words = [sources["dense"], "-o", tmp_path / "new", "--group-size", 32, "--processes", 2, *options, *text]
    result = run(*words)
    assert isinstance(result.exception, ArgumentError) and message in str(result.exception)
    assert list(tmp_path.iterdir()) == []


def test_no_process_is_too_few(sources: dict[str, Path], tmp_path: Path) -> None:
    """The message names the option."""
    result = run(sources["dense"], "-o", tmp_path / "new", "--processes", 0)
    assert "--processes is 0; allowed: an integer of at least 1" in str(result.exception)
