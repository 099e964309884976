"""``lowbit bench``: what is measured, what is said of it, and what a broken backend leaves behind."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from command_line import CommandLine, command_line
from paths import SUPPORT

from lowbit.quantization.bfp import Blocks
from lowbit.tensor_formats.stored import Stored
from lowbit_bench.inputs import PRESETS, activations_of, problem, weights_of
from lowbit_bench.intervals import interval
from lowbit_bench.reading import Reader
from lowbit_bench.rounds import Contestant, measure

SMALL = ("--shape", "64x96", "--rounds", "2", "--verdict", "none", "--threads", "1")


def bench(*arguments: str) -> "subprocess.CompletedProcess[str]":
    path = os.pathsep.join(filter(None, [str(SUPPORT), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-m", "lowbit", "bench", *arguments]
    return subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=600, check=False
    )


@pytest.fixture(scope="module")
def commands() -> Iterator[CommandLine]:
    with command_line("lowbit_bench.command") as running:
        yield running


def answer(*arguments: str) -> dict[str, Any]:
    done = bench(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_backends_are_timed_side_by_side(tmp_path: Path) -> None:
    """Each with its times and its share of reading; a table, JSON and pictures say the same."""
    told = answer("numpy", "reference", *SMALL, "--batch", "1", "--out", str(tmp_path), "--op", "linear.qgemm")
    assert [each["id"] for each in told["problems"]] == ["linear.qgemm bits=4 group_size=64 float32 64x96 batch 1"]
    (compared,) = told["problems"]
    assert {row["backend"] for row in compared["rows"]} == {"numpy", "reference"}
    for row in compared["rows"]:
        median, low, high = row["seconds"]
        assert 0 < low <= median <= high and row["share"][0] > 0 and len(row["runs"]) >= 2
    assert json.loads((tmp_path / "bench.json").read_text()) == told
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert "linear.qgemm" in (tmp_path / "bench.html").read_text()


@pytest.mark.whole
def test_a_stored_format_and_a_function_are_timed_with_their_verdicts() -> None:
    """The suite is asked for the same operation of each; of a wrong one the row says that it failed."""
    given = ("--op", "linear.gemv", "--format", "q8_0", "--shape", "64x32", "--rounds", "2", "--threads", "1")
    told = answer("numpy", "--function", "timed_functions:gemv", "--function", "timed_functions:narrow", *given)
    rows = {row["backend"] for each in told["problems"] for row in each["rows"]}
    assert rows == {"numpy", "timed_functions:gemv", "timed_functions:narrow"}
    assert told["verdicts"]["numpy"].startswith("passed (quick)")
    assert told["verdicts"]["timed_functions:gemv"].startswith("passed (quick)")
    assert told["verdicts"]["timed_functions:narrow"].startswith("failed (quick)")


def test_who_ends_the_process_is_named_and_left_out() -> None:
    """The others are measured."""
    told = answer("timed:Dies", "numpy", *SMALL)
    assert [row["backend"] for row in told["problems"][0]["rows"]] == ["numpy"]
    assert told["absent"] == [{"name": "timed:Dies", "problem": "", "reason": "it ended the process: SIG40"}]


def test_what_is_not_declared_is_said_and_nothing_else() -> None:
    """Status 1 where nothing was measured."""
    done = bench("timed:Narrow", *SMALL)
    assert done.returncode == 1
    assert "not measured: timed:Narrow at linear.qgemv" in done.stdout
    assert "does not declare linear.qgemv for bits 4" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--shape", "12"], "--shape is '12'; allowed: KxN"),
        (["--op", "kvcache.bpf"], "--op is 'kvcache.bpf'"),
        (["--op", "linear.gemv"], "--format is not given"),
        (["--op", "linear.gemv", "--format", "q4_k", "--shape", "64x64"], "rows is 64; allowed: a multiple of 256"),
        (["--preset", "sweep", "--shape", "8x8"], "--preset is 'sweep'"),
        (["--option", "bits=many"], "--option is 'bits=many'"),
        (["--batch", "2"], "--batch is 2; allowed: 1, since linear.qgemv multiplies one vector"),
        (["--rounds", "0"], "--rounds is 0"),
        (["--activations", "bfoo"], "--activations is 'bfoo'; allowed: float32"),
        (["--activations", "float32", "--result", "float16"], "--result is 'float16'; allowed: float32"),
        (["--op", "blocks.rms_norm", "--result", "float16"], "--result is 'float16'; allowed: float32"),
        (["--shape", "33x7"], "K of --shape is 33; allowed: a multiple of 8"),
        (["--option", "bits=5"], "--option bits is 5; allowed: 2, 3, 4 or 8"),
        (["--option", "group=64"], "--option is 'group'; allowed: bits or group_size"),
        (["--op", "blocks.rms_norm", "--option", "bits=4"], "--option is 'bits'; allowed: no option"),
        (["--op", "linear.gemv", "--format", "q8_0", "--option", "bits=4"], "--option is 'bits'; allowed: no option"),
        (["--shape", "99999999x99999999"], "--shape is 99999999x99999999; allowed: at most"),
    ],
)
def test_wrong_arguments_are_refused_in_words(commands: CommandLine, arguments: list[str], said: str) -> None:
    """With status 2, before anything is loaded."""
    done = commands.run("bench", "numpy", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in " ".join(done.stderr.replace("`", "").split())


@pytest.mark.parametrize(
    ("operation", "format", "activations"),
    [
        ("linear.qgemv", "", "float32"),
        ("linear.qgemm_bfp", "", "float32"),
        ("linear.gemv", "q4_k", "bfloat16"),
        ("linear.gemm", "gptq-v2", "float16"),
        ("linear.gemm_cast", "q6_k", "q8_k"),
    ],
)
def test_inputs_are_of_the_sizes_that_were_asked_for(operation: str, format: str, activations: str) -> None:
    """Wider than what is drawn, and whatever the types are."""
    batch = 1 if operation.endswith("gemv") else 3
    made = problem(operation, (256, 608), batch, format, activations, "float32", {})
    weights, x = weights_of(made), activations_of(made)
    assert (weights.rows, weights.columns) == (256, 608)
    if isinstance(x, Stored):
        shape: tuple[int, ...] = (x.columns, x.rows)
    else:
        shape = (x.mantissas if isinstance(x, Blocks) else x).shape
    assert shape == ((256,) if operation.endswith("gemv") else (3, 256))


def test_presets_are_shapes_of_models() -> None:
    """Whole units of every width."""
    assert all(rows % 32 == 0 and columns % 32 == 0 for shapes in PRESETS.values() for rows, columns in shapes)


def test_every_round_gives_each_a_turn_beside_a_reading() -> None:
    """As many times as readings, on copies in turn."""
    called: list[int] = []
    ones = [Contestant(str(n), [partial(called.append, 10 * n + copy) for copy in (0, 1)], 64) for n in (1, 2)]
    reader, entered = Reader(1, 2**20), list[str]()
    free = measure(ones, reader, 3, entered.append, lambda done, total: None)
    reader.close()
    assert sorted(entered) == sorted(["1", "2"] * len(free))
    assert all(len(each.runs) == len(each.reads) == len(free) for each in ones)
    assert set(called) == {10, 11, 20, 21}
    assert interval(ones[0].runs).median > 0
