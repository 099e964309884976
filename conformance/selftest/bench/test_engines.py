"""Engines of the benchmark of whole models: processes of their own, what they answer, and why one is absent."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import decode
import engine_process
import engines
import growth
import jsonschema
import pytest
import quality
import quality_report
from paths import ROOT
from peers.base import AbsentError
from tiny_gguf import write as write_gguf

from lowbit.formats import fetch as data
from lowbit.runtime import Options, load

SCHEMAS = ROOT / "bench/schema"


QUIET: Any = SimpleNamespace(wait=lambda patience: 0.0, fast=lambda: True)
"""A watch of cores that are always free."""


class Fake:
    """An engine in a process, as `decode` and `growth` use it."""

    def __init__(self, name: str, tokens: list[int]) -> None:
        self.name, self._tokens = name, tokens
        self.version, self.model_bytes, self.peak, self.pid, self.batches = "1", 10**8, 99.6, os.getpid(), True
        self.failure = ""

    def continued(self, prompt: list[int], count: int) -> engines.Continued:
        return engines.Continued(self._tokens[:count], 0.5, 0.25)

    def rounds(self, prompts: list[list[int]], count: int) -> float:
        return 0.5 * count

    def nats(self, window: list[int]) -> float:
        return 2.0 * (len(window) - 1)


def test_what_engines_answer_is_summed_up() -> None:
    """Rates, tokens alike, versions and memory, of a prompt, a context and a batch."""
    found: Any = [Fake("lowbit", [1, 2, 3]), Fake("other", [1, 2, 4])]
    reader: Any = SimpleNamespace(freedom=lambda: 2.0, seconds=lambda count: count / 40e9)
    options: Any = SimpleNamespace(repetitions=2, tokens=3, longest=60)
    run = decode.of_prompt(found, [7, 8], reader, QUIET, options)
    assert run["turns"] == run["free_turns"] == 6  # two engines, three repetitions with the first
    assert run["equal_tokens"] == [3, 2] and run["prompt_tokens"] == 2 and len(run["generators"]) == 2
    one = run["generators"][1]
    assert (one["name"], one["version"], one["peak_megabytes"]) == ("other", "1", 100)
    assert one["tokens_per_second"][0] == 8 and one["first_seconds"][0] == 0.5 and len(one["repetitions"]) == 2
    (point, _), (batch, _) = (
        list(growth.of_context(found, [7, 8], reader, options)),
        list(growth.of_batch(found, list(range(999)), 4, reader, options)),
    )
    assert point["context"] == 2 and point["prompt_per_second"][0] == 4 and point["peak_megabytes"] == 100
    assert point["repetitions"] == 2
    assert batch["batch"] == 4 and batch["tokens_per_second"][0] == 8


def test_growth_leaves_out_what_takes_too_long() -> None:
    """An engine beyond the most seconds of a turn, at its last speed; and repetitions after one that took longer."""
    reader: Any = SimpleNamespace(freedom=lambda: 2.0, seconds=lambda count: count / 40e9)
    options: Any = SimpleNamespace(repetitions=3, longest=0)
    found: Any = [Fake("one", [1, 2, 3])]
    points = list(growth.of_context(found, [7, 8], reader, options))
    assert [point["repetitions"] for point in points] == [1]
    (point,) = points
    rate = growth.TOKENS / point["tokens_per_second"][0]
    for context, seconds in ((2, 0.5 + rate), (200, 50 + rate)):  # half a second for two tokens
        assert growth.too_slow(points, context, seconds + 0.01) == {}
        assert growth.too_slow(points, context, seconds - 0.01)["one"].endswith("are expected from 2 tokens")


def test_several_models_may_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """By their files, or by the names under which lowbit fetches them."""
    monkeypatch.setattr(data, "fetch", lambda name: Path("cache") / name)
    options = decode.parsed(["--model", "gemma3-270m", "--model", "own.gguf"])
    assert options.model == [Path("cache/gemma3-270m"), Path("own.gguf")]
    assert decode.parsed([]).model is None


def test_an_engine_that_is_not_there_is_absent_with_the_reason(tmp_path: Path) -> None:
    """The worker says it; a module that no one has stands in for an engine that is not installed."""
    file = tmp_path / "m.gguf"
    file.write_bytes(b"no model")
    setting = engines.Setting(file, 1, 16)
    with engine_process.running(setting, (), ("ONNX",)) as (found, absent):
        assert found == [] and list(absent) == ["ONNX Runtime GenAI"] and absent["ONNX Runtime GenAI"]
    names = [each.name for each in (*engines.own(), *engines.own("avx2"), *engines.OTHERS)]
    assert len(set(names)) == len(names)


@pytest.mark.toolchain
def test_lowbit_answers_in_a_process_of_its_own(tmp_path: Path) -> None:
    """Tokens are those of the library, for a prompt and for rounds; the process tells its memory."""
    file = write_gguf(tmp_path / "tiny.gguf")
    with engine_process.running(engines.Setting(file, 1, 16), (), ("step by operations",)) as (found, absent):
        assert not absent and [each.name for each in found] == ["lowbit float32, step by operations"]
        told = found[0].continued([5, 7, 1], 4)
        assert found[0].rounds([[5], [7, 1]], 2) > 0 and found[0].peak > 10 and found[0].batches
    with load(file, "cppyy", Options(step="operations")) as model:
        assert told.tokens == [step.token for step in model.generate([5, 7, 1], 4, stop=())]
    assert told.first > 0 and told.after > 0


def test_an_engine_that_ends_is_left_out(tmp_path: Path) -> None:
    """Its process says no more; the others are measured, and the reason is its last words."""
    file = write_gguf(tmp_path / "tiny.gguf")
    with engine_process.running(engines.Setting(file, 1, 16), (), ("step by operations",)) as (found, _):
        with pytest.raises(AbsentError, match=r"its process ended with status 1: .*tokens"):
            found[0].continued([99999], 2)
        assert "99999" in found[0].failure
        pair: Any = [found[0], Fake("other", [1, 2, 3])]
        reader: Any = SimpleNamespace(freedom=lambda: 2.0, seconds=lambda count: count / 40e9)
        options: Any = SimpleNamespace(repetitions=1, tokens=3, longest=60)
        points = list(growth.of_context(pair, [7], reader, options))
        assert [point["engine"] for point in points] == ["other"]
        run = decode.of_prompt(pair, [7], reader, QUIET, options)
        assert [each["name"] for each in run["generators"]] == ["other"]


def test_quality_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Pairs alternate; a report of three rows, one of them absent, keeps its schema, and the picture is written."""
    ours: Any = Fake("ours", [1, 2, 3])
    base: Any = Fake("lowbit", [1, 2, 3])
    row = quality.in_pairs(ours, base, [7], quality.parsed(["--tokens", "3", "--repetitions", "4"]))
    assert row["over_file"] == [1, 1, 1] and row["tokens_per_second"][0] == 8 and row["version"] == "1"
    row |= {"nats": [6.0], "perplexity": 7.4, "scored": 3}
    rows = [
        {"settings": {"engine": "lowbit float32 4 bits, groups of 64", "threads": 1}} | row,
        {"settings": {"engine": "llama.cpp file of Q4_0", "threads": 1}} | row,
        {"settings": {"engine": "llama.cpp file of Q2_K", "threads": 1}, "absent": "not there"},
    ]
    report: dict[str, Any] = {
        "schema": "lowbit-bench-quality/1",
        "started": "2026-01-01T00:00:00+00:00",
        "projects": [],
    }
    report |= {"machine": {"cpu": "c", "cores": 2}, "runs": rows}
    report |= {"settings": {"repetitions": 5, "tokens": 64, "window": 512, "windows": 33}}
    jsonschema.validate(report, json.loads((SCHEMAS / "quality.schema.json").read_text()))
    quality_report.show(report)
    quality_report.draw(report, tmp_path / "quality.svg")
    text = capsys.readouterr().out
    assert "7.40" in text and "absent llama.cpp file of Q2_K: not there" in text
    assert (tmp_path / "quality.svg").read_text().rstrip().endswith("</svg>")
