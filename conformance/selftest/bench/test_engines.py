"""Engines of the benchmark of whole models: processes of their own, what they answer, and why one is absent."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import decode
import engine_process
import engines
import growth
import pytest
from tiny_gguf import write as write_gguf

from lowbit.runtime import Options, load


class Fake:
    """An engine in a process, as `decode` and `growth` use it."""

    def __init__(self, name: str, tokens: list[int]) -> None:
        self.name, self._tokens = name, tokens
        self.version, self.model_bytes, self.peak, self.pid, self.batches = "1", 10**8, 99.6, os.getpid(), True

    def continued(self, prompt: list[int], count: int) -> engines.Continued:
        return engines.Continued(self._tokens[:count], 0.5, 0.25)

    def rounds(self, prompts: list[list[int]], count: int) -> float:
        return 0.5 * count


def test_what_engines_answer_is_summed_up() -> None:
    """Rates, tokens alike, versions and memory, of a prompt, a context and a batch."""
    found: Any = [Fake("lowbit", [1, 2, 3]), Fake("other", [1, 2, 4])]
    reader: Any = SimpleNamespace(freedom=lambda: 2.0, seconds=lambda count: count / 40e9)
    options: Any = SimpleNamespace(repetitions=2, tokens=3)
    run = decode.of_prompt(found, [7, 8], reader, options)
    assert run["equal_tokens"] == [3, 2] and run["prompt_tokens"] == 2 and len(run["generators"]) == 2
    one = run["generators"][1]
    assert (one["name"], one["version"], one["peak_megabytes"]) == ("other", "1", 100)
    assert one["tokens_per_second"][0] == 8 and one["first_seconds"][0] == 0.5 and len(one["repetitions"]) == 2
    (point, _), (batch, _) = (
        list(growth.of_context(found, [7, 8], reader, 2)),
        list(growth.of_batch(found, list(range(999)), 4, reader, 2)),
    )
    assert point["context"] == 2 and point["prompt_per_second"][0] == 4 and point["peak_megabytes"] == 100
    assert batch["batch"] == 4 and batch["tokens_per_second"][0] == 8


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
