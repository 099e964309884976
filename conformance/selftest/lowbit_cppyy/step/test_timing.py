"""Timed steps: the bits of steps that are not timed, and seconds for every part of them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from step_runs import logits, model, operations
from tiny_gguf import published, write
from typer.testing import CliRunner

from lowbit.cli import app
from lowbit_cppyy import CppyyBackend
from lowbit_cppyy.cli.token_time import told
from lowbit_cppyy.step.phases import Attend, Norm

pytestmark = pytest.mark.toolchain


@pytest.mark.parametrize("name", ("odd", "gemma3", "q4_0", "sparse mixed"))
def test_reading_a_clock_changes_no_bit(name: str) -> None:
    """A prompt and tokens after it, on one thread and two; then every part that did work has seconds."""
    for threads in (1, 2):
        with CppyyBackend(threads=threads) as backend:
            decoder = operations(backend, model(name))
            timed = backend.timed(decoder)
            np.testing.assert_array_equal(logits(timed.decoder, 3, 4), logits(backend.compiled(decoder), 3, 4))
            seconds = timed.seconds
            assert seconds.shape == (len(timed.parts), threads, 2)
            assert (seconds >= 0).all() and (seconds[:, 0, 0] > 0).all()
            norms = [isinstance(part.phase, Norm) for part in timed.parts]
            assert not seconds[norms][:, :, 1].any()
            timed.begin()
            assert not timed.seconds.any()


def test_products_read_the_bytes_of_the_matrices() -> None:
    """All parts together, without attention, read as many bytes as the kernels' matrices have."""
    with CppyyBackend(threads=1) as backend:
        decoder: Any = operations(backend, model("llama"))
        timed = backend.timed(decoder)
        read = {told(part): timed.bytes_of(part, 10) for part in timed.parts}
        matrices = [each for block in decoder.blocks for each in block.linears.values()]
        prepared = sum(each.prepared.nbytes for each in [*matrices, decoder.scores.linears["head"]])
        config = decoder.config
        (attention,) = (part for part in timed.parts if isinstance(part.phase, Attend))
        assert timed.bytes_of(attention, 10) == config.layers * config.kv_heads * 10 * 2 * 4 * config.head_dim
        assert sum(read.values()) - read["attend"] == prepared


def test_the_command(tmp_path: Path) -> None:
    """The parts of a token in order, as JSON and in 80 columns; the parts and what is outside make up the token."""
    file = write(tmp_path / "m.gguf", published())
    arguments = ["kernel", "time", "--model", str(file), "--threads", "2", "--after", "5", "--tokens", "3"]
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    assert (answer["threads"], answer["after"], answer["tokens"]) == (2, 5, 3)
    assert [part["part"] for part in answer["parts"]][-2:] == ["norm", "product by head"]
    inside = sum(part["ms"] + part["wait_ms"] for part in answer["parts"])
    assert inside + answer["outside_ms"] == pytest.approx(answer["ms"], abs=1e-3)
    shown = CliRunner().invoke(app, arguments, env={"COLUMNS": "80"})
    assert shown.exit_code == 0, shown.output
    assert "product by gate, up, swiglu" in shown.stdout
    assert max(map(len, shown.stdout.splitlines())) <= 80


@pytest.mark.parametrize(
    ("option", "given", "said"),
    [("--after", "0", "--after is 0"), ("--tokens", "100000", "so that they fit the model's context")],
)
def test_wrong_numbers_are_refused(option: str, given: str, said: str, tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf", published())
    done = CliRunner().invoke(app, ["kernel", "time", "--model", str(file), option, given])
    assert done.exit_code != 0
    assert said in str(done.exception) + done.output
