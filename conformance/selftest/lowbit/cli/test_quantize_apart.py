"""``lowbit quantize --processes``: the bytes of one process, from several; killed runs are resumed."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import rewriting
from rewriting import TEXT, contents, events_of, fused_in, killed, sources_in
from task_work import KilledOnce

from lowbit.errors import ArgumentError, FormatError
from lowbit.rewriting.apart import Apart, Task
from lowbit.rewriting.layouts import layout_of
from lowbit.rewriting.methods import Rounding
from lowbit.rewriting.quantizing import Request, quantize
from lowbit.rewriting.source import open_source
from lowbit.system.tasks import Executor, Item, Processes, Result, Results, Work

run, answer = partial(rewriting.run, "quantize"), partial(rewriting.answer, "quantize")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    return {**sources_in(folder), "fused": fused_in(folder / "fused")}


GPTQ = ["--group-size", 32, "--method", "gptq", "--calibration", "TEXT", "--window", 32]
CASES = [
    ("dense", ["--group-size", 32], "new"),
    ("sparse", ["--group-size", 32, "--bits", 3, "--format", "compressed-tensors"], "new"),
    ("gguf", ["--group-size", 16, "--method", "hqq", "--format", "hqq"], "new"),
    ("dense", ["--group-size", 32, "--format", "gguf"], "new.gguf"),
    ("dense", [*GPTQ, "--act-order"], "new"),
    ("sparse", [*GPTQ, "--experts-bits", 3], "new"),
    ("fused", [*GPTQ, "--format", "awq"], "new"),
]


def with_text(options: list[object], sources: dict[str, Path]) -> list[object]:
    """Options with the path of the text."""
    return [sources["text"] if each == "TEXT" else each for each in options]


@pytest.mark.parametrize(("kind", "options", "name"), CASES)
def test_the_bytes_are_those_of_one_process(
    kind: str, options: list[object], name: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    """Of every file, and the answer too."""
    options = with_text(options, sources)
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    expected = answer(sources[kind], "-o", tmp_path / "one" / name, *options)
    found = answer(sources[kind], "-o", tmp_path / "two" / name, *options, "--processes", 2)
    assert contents(tmp_path / "two" / name) == contents(tmp_path / "one" / name)
    assert found["matrices"] == expected["matrices"]


class Elsewhere(Executor):
    """Tasks in this process, as on a machine that does not see the folder of the result."""

    def run(self, work: Work[Item, Result], items: Sequence[Item]) -> Results[Item, Result]:
        assert isinstance(work, Task)
        distant: Any = replace(work, folder=Path("/no/such/folder"))
        for item in reversed(items):
            yield item, distant(item, 1)


def test_a_machine_without_the_folder_sends_tensors(sources: dict[str, Path], tmp_path: Path) -> None:
    """The bytes are the same, in whatever order blocks come."""
    answer(sources["dense"], "-o", tmp_path / "expected", "--group-size", 32)
    request = Request(Rounding("rtn", 32), layout_of("gptq-v2"), 4, 4)
    blocks = Apart(Elsewhere(), sources["dense"])
    quantize(open_source(sources["dense"]), tmp_path / "new", request, blocks=blocks)
    assert contents(tmp_path / "new") == contents(tmp_path / "expected")


def test_another_model_under_the_path(sources: dict[str, Path], tmp_path: Path) -> None:
    """A machine that has another model there refuses the block."""
    request = Request(Rounding("rtn", 16), layout_of("gptq-v2"), 4, 4)
    blocks = Apart(Elsewhere(), sources["gguf"])
    with pytest.raises(FormatError, match=r"shape of the model is another in .*; allowed: the model that the command"):
        quantize(open_source(sources["dense"]), tmp_path / "new", request, blocks=blocks)
    assert list(tmp_path.iterdir()) == []


class Losing(Executor):
    """Tasks in two processes, of which one kills itself when it has begun an item.

    Args:
        folder: for a note that it has.
        item: as a message names it.
    """

    def __init__(self, folder: Path, item: str) -> None:
        self.folder, self.item = folder, item

    def run(self, work: Work[Item, Result], items: Sequence[Item]) -> Results[Item, Result]:
        return Processes(2).run(KilledOnce(work, self.folder, self.item), items)


def test_the_task_of_a_lost_process_is_done_again(sources: dict[str, Path], tmp_path: Path) -> None:
    """With GPTQ, where the next block waits for it: the bytes are the same."""
    (noted := tmp_path / "noted").mkdir()
    source = open_source(sources["sparse"])
    tokens = tuple(source.tokenizer.encode(TEXT, begin=False))
    request = Request(Rounding("gptq", 32), layout_of("gptq-v2"), 4, 4, tokens, 32)
    quantize(source, tmp_path / "expected", request)
    blocks = Apart(Losing(noted, "0.feed_forward.experts[1].down"), sources["sparse"])
    quantize(source, tmp_path / "new", request, blocks=blocks)
    assert contents(tmp_path / "new") == contents(tmp_path / "expected")
    assert len(list(noted.iterdir())) == 1


@pytest.mark.parametrize("more", [["--group-size", 32], GPTQ], ids=["rtn", "gptq"])
def test_a_killed_run_is_resumed(more: list[object], sources: dict[str, Path], tmp_path: Path) -> None:
    """Wherever it is killed, a run in one process makes what is left."""
    options = [sources["sparse"], *with_text(more, sources)]
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


def test_two_places_for_the_work(sources: dict[str, Path], tmp_path: Path) -> None:
    """They are refused, and nothing is left."""
    result = run(sources["dense"], "-o", tmp_path / "new", "--group-size", 32, "--processes", 2, "--cluster", "auto")
    assert isinstance(result.exception, ArgumentError)
    assert "--processes and --cluster are two places for the work" in str(result.exception)
    assert list(tmp_path.iterdir()) == []


def test_no_process_is_too_few(sources: dict[str, Path], tmp_path: Path) -> None:
    """The message names the option."""
    result = run(sources["dense"], "-o", tmp_path / "new", "--processes", 0)
    assert "--processes is 0; allowed: an integer of at least 1" in str(result.exception)
