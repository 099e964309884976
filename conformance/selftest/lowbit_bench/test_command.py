"""``lowbit bench``: what is measured, what is said of it, and what a broken backend leaves behind."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timed_functions
from command_line import CommandLine, command_line
from paths import SUPPORT

from lowbit.arrays import Array
from lowbit.backend.function import Claim, FunctionBackend
from lowbit.errors import ArgumentError
from lowbit.quantization.bfp import Blocks
from lowbit.tensor_formats.stored import Stored
from lowbit_bench.command import Claimed, folder_of, limits_by_default, status_of
from lowbit_bench.comparison import Heard
from lowbit_bench.inputs import PRESETS, activations_of, problem, weights_of
from lowbit_bench.intervals import interval
from lowbit_bench.judging import part_of
from lowbit_bench.layers import other_problem
from lowbit_bench.reading import Reader
from lowbit_bench.report import texts_of
from lowbit_bench.rounds import Contestant, measure, moment
from lowbit_bench.worker import compare, contestant, task_of
from lowbit_numpy import NumpyBackend

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
    """The suite is asked for the same operation of each. A function whose result is wrong at the size that is timed has
    no time; one that fails the suite elsewhere is the last row, compared with nothing, and the status is 1."""
    given = ("--op", "linear.gemv", "--format", "q8_0", "--shape", "64x32", "--rounds", "2", "--threads", "1")
    functions = [f"--function=timed_functions:{name}" for name in ("gemv", "wrong", "narrow")]
    done = bench(*functions, *given, "--json")
    told = json.loads(done.stdout)
    rows = {row["backend"] for each in told["problems"] for row in each["rows"]}
    assert done.returncode == 1 and rows == {"timed_functions:gemv", "timed_functions:narrow"}
    assert told["verdicts"]["timed_functions:gemv"].startswith("passed (quick)")
    assert told["verdicts"]["timed_functions:narrow"].startswith("failed (quick)")
    (missing,) = told["absent"]
    assert missing["name"] == "timed_functions:wrong" and missing["reason"].startswith("wrong result: ")
    (last,) = [line for line in map(str, texts_of(told, 200)) if line.startswith("timed_functions:narrow")]
    assert last.split()[4] == "-"
    assert list(told["repeat"].values()) == [
        "lowbit conformance --function timed_functions:narrow --operation linear.gemv --format q8_0 "
        "--activations float32 --result float32 --seeds 1 --quick"
    ]


def test_whatever_a_backend_does_the_others_are_measured() -> None:
    """Each that ends the process, does not return, raises or is wrong is named once with the reason."""
    names = ("Dies", "Exits", "Quits", "Hangs", "Partly", "Tires")
    given = (*(f"timed:{name}" for name in names), "numpy", "--shape", "64x96", "--shape", "64x900", "--rounds", "4")
    done = bench(*given, "--threads", "1", "--verdict", "none", "--deadline", "4", "--json")
    told = json.loads(done.stdout)
    small, large = told["problems"]
    assert done.returncode == 1
    assert {row["backend"] for row in small["rows"]} == {"numpy", "timed:Partly"}
    assert {row["backend"] for row in large["rows"]} == {"numpy", "timed:Tires"}
    reasons = {(each["name"].removeprefix("timed:"), bool(each["problem"])): each["reason"] for each in told["absent"]}
    quits = [each["problem"] for each in told["absent"] if each["name"] == "timed:Quits"]
    assert len(told["absent"]) == 7 and quits == [small["id"], large["id"]]
    assert reasons["Dies", False] == "it ended the process: SIG40"
    assert reasons["Exits", False] == "it ended the process: status 0"
    assert reasons["Quits", True] == "SystemExit: 0"
    assert reasons["Hangs", False] == "preparing took longer than 4 s; --deadline allows more"
    assert reasons["Partly", True].startswith("wrong result: 200 of 900 elements differ, columns 700, 701")
    assert reasons["Tires", True] == "RuntimeError: tired"


def test_an_interrupt_is_one_line() -> None:
    """The process that measures is in the same group as the command, and says nothing."""
    path = os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "lowbit", "bench", "timed:Waits", *SMALL]
    with subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": path},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a shell's background ignores it
    ) as running:
        assert running.stderr is not None
        assert running.stderr.readline() == "waiting\n"
        os.killpg(running.pid, signal.SIGINT)
        rest = running.stderr.read()
    assert running.returncode == 130 and "Traceback" not in rest


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
        (["--op", "linear.gemv"], "--op linear.gemv needs --format"),
        (["--op", "linear.gemv", "--format", "q4_k", "--shape", "64x64"], "rows is 64; allowed: a multiple of 256"),
        (["--preset", "sweep", "--shape", "8x8"], "--preset and --shape exclude each other"),
        (["--option", "bits=many"], "--option is 'bits=many'"),
        (["--batch", "2"], "--batch is 2; allowed: 1, since linear.qgemv multiplies one vector"),
        (["--rounds", "0"], "--rounds is 0"),
        (["nosuch"], "backend is 'nosuch'"),
        (["--library", "/nowhere/libmine.so"], "library /nowhere/libmine.so is unavailable"),
        (["--function", "nowhere:gemv"], "there is no module 'nowhere'"),
        (["--activations", "bfoo"], "--activations is 'bfoo'; allowed: float32"),
        (["--activations", "float32", "--result", "float16"], "--result is 'float16'; allowed: float32"),
        (["--op", "blocks.rms_norm", "--result", "float16"], "--result is 'float16'; allowed: float32"),
        (["--shape", "33x7"], "K of --shape is 33; allowed: a multiple of 8"),
        (["--option", "bits=5"], "--option bits is 5; allowed: 2, 3, 4 or 8"),
        (["--option", "group=64"], "--option is 'group'; allowed: bits or group_size"),
        (["--op", "blocks.rms_norm", "--option", "bits=4"], "--option is 'bits'; allowed: no option"),
        (["--op", "linear.gemv", "--format", "q8_0", "--option", "bits=4"], "--option is 'bits'; allowed: no option"),
        (["--shape", "99999999x99999999"], "--shape is 99999999x99999999; allowed: at most"),
        (["--out", ""], "--out is ''"),
        (["--out", "/dev/null/results"], "--out is '/dev/null/results'"),
        (["--limit", "bits=4"], "--limit, --arrays and --device describe a --function; give one"),
        (["--deadline", "0"], "--deadline"),
        (["--threads", "9999"], "--threads is 9999; allowed: an integer from 1"),
        (["--op", "kvcache.bfp", "--batch", "3"], "--batch is not possible: kvcache.bfp has no such size"),
        (["--op", "blocks.rms_norm", "--context", "5"], "--context is not possible: blocks.rms_norm has no such size"),
        (
            ["--op", "attention.attend", "--preset", "smollm2-135m", "--batch", "4", "--context", "3"],
            "--context is 3; allowed: at least 4, because it holds the tokens of --batch too",
        ),
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


def test_activations_of_16_bits_give_usual_results() -> None:
    """Random scales of Q6_K make large weights, and float16 ends at 65504."""
    made = problem("linear.gemv", (4096, 32), 1, "q6_k", "float16", "float16", {})
    weights = weights_of(made)
    part = part_of(made, weights)
    assert part is not None
    wide = activations_of(made, part.deviation).astype(np.float64)
    assert 1 < np.abs(wide @ weights.values).max() < 2000
    assert np.abs(activations_of(made).astype(np.float64) @ weights.values).max() > 65504


def test_a_problem_whose_inputs_cannot_be_made_is_no_fault_of_a_backend() -> None:
    """It is reported without a name, and the status is that of a wrong argument."""
    broken = replace(problem("linear.qgemv", (64, 32), 1, "", "", "", {}), options=(("bits", 4), ("group_size", 0)))
    heard, reader = Heard(), Reader(1, 2**20)
    given = {"rotation": 1, "rounds": 1}
    compare(
        broken, {"numpy": NumpyBackend()}, reader, given, lambda event, **rest: heard.take({"event": event, **rest})
    )
    reader.close()
    assert [each["name"] for each in heard.absent] == [""] and not heard.running
    assert status_of({"absent": heard.absent, "problems": [], "repeat": {}}, ["numpy"]) == 2


def test_each_call_of_a_function_reads_a_matrix_of_its_own() -> None:
    """Or it would find it in a cache. Each was multiplied once untimed."""
    made = problem("linear.gemv", (64, 32), 1, "q8_0", "float32", "float32", {})
    seen = list[int]()

    def gemv(x: Any, blocks: Any, rows: int, columns: int) -> Any:
        seen.append(blocks.ctypes.data)
        return timed_functions.gemv(x, blocks, rows, columns)

    backend = FunctionBackend.of(gemv, Claim("linear.gemv", {"format": "q8_0"}))
    one = contestant("mine", backend, task_of(made), 5 * 68 * 32, lambda event, **fields: None)
    assert len(set(seen)) == len(seen) == 5
    for call in one.calls:
        call()
    assert len(one.calls) == 5 and len(set(seen)) == 5


def test_a_function_is_claimed_with_the_options_that_are_timed() -> None:
    """Unless its limits say otherwise."""
    made = problem("linear.gemv", (256, 64), 1, "gptq-v2", "float32", "float32", {"bits": 4})
    assert list(limits_by_default(made, [])) == ["bits=4", "group_size=128"]
    assert list(limits_by_default(made, ["bits=4,8"])) == ["group_size=128"]
    words, judged = Claimed("linear.gemv", ("gptq-v2", "float32", "float32"), ["bits=4"], "torch", "cuda").target("m:f")
    assert " ".join(words).endswith("--limit bits=4 --arrays torch --device cuda")
    assert json.loads(judged[1])["limits"]["bits"] == [4]


def test_a_function_is_claimed_with_what_its_operation_has() -> None:
    """The specification's own products have one type; other operations call theirs the type of the inputs."""
    words, judged = Claimed("linear.qgemv", ("", "float32", "float32"), ["bits=4"], "numpy", "cpu").target("m:f")
    assert " ".join(words) == "--function m:f --operation linear.qgemv --limit bits=4"
    assert json.loads(judged[1])["limits"] == {"bits": [4]}
    made = other_problem("blocks.rms_norm", "smollm2-135m", 1, 1, "", "bfloat16", "bfloat16", {})
    assert list(limits_by_default(made, [])) == ["inputs=bfloat16"]
    assert list(limits_by_default(made, ["inputs=bfloat16,float16"])) == []


def test_a_function_of_own_matrices_is_timed_with_its_verdict() -> None:
    """It is called with a matrix that was prepared."""
    given = ("--shape", "64x32", "--rounds", "2", "--threads", "1")
    told = answer("--function", "timed_functions:qgemv", "--operation", "linear.qgemv", *given)
    ((row,),) = (each["rows"] for each in told["problems"])
    assert row["checked"] and row["bytes"] == 64 * 32 // 2 + 2 * 4 * 32
    assert told["verdicts"]["timed_functions:qgemv"].startswith("passed (quick)")


def test_no_folder_is_left_without_results(tmp_path: Path) -> None:
    """Whether it can be written is known at once; it is made when there is something to write."""
    (tmp_path / "there").mkdir()
    for name in ("new", "new/deeper", "there", "there/new"):
        assert folder_of(str(tmp_path / name)) == tmp_path / name
    assert list(tmp_path.rglob("*")) == [tmp_path / "there"]
    (tmp_path / "file").touch()
    with pytest.raises(ArgumentError, match="a folder that can be made"):
        folder_of(str(tmp_path / "file" / "new"))


def test_the_programs_of_a_backend_are_no_other_processes() -> None:
    """Their processor time counts as that of the process that measures."""
    with subprocess.Popen([sys.executable, "-c", "while sum(range(1000)): pass"], stdout=subprocess.DEVNULL) as program:
        before = moment()
        time.sleep(0.5)
        after = moment()
        program.kill()
    if before is not None and after is not None:
        assert after.process - before.process > 0.1


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="only Linux tells a thread its processors")
@pytest.mark.parametrize("more", [0, 1])
def test_each_thread_of_the_reader_keeps_to_its_processor(monkeypatch: pytest.MonkeyPatch, more: int) -> None:
    """If there are as many processors as threads; else every thread may use all, as may the caller in both cases."""
    seen, usable = list[frozenset[int]](), os.sched_getaffinity(0)
    meeting = threading.Barrier(len(usable) + more)

    def read(part: Array) -> int:
        meeting.wait(60)  # so that no thread reads two parts
        seen.append(frozenset(os.sched_getaffinity(0)))
        return 1

    monkeypatch.setattr("lowbit_bench.reading.largest", read)
    reader = Reader(len(usable) + more, 2**20)
    reader.seconds(2**20)
    reader.close()
    alone = len(usable) > 1 and not more
    assert sorted(map(sorted, seen)) == ([[each] for each in sorted(usable)] if alone else [sorted(usable)] * len(seen))
    assert os.sched_getaffinity(0) == usable


def test_problems_that_differ_have_different_headings() -> None:
    """A result of another type than usual is named."""
    given = [("q8_0", *types) for types in (("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "float32"))]
    ids = [problem("linear.gemv", (64, 32), 1, *types, {}).id for types in given]
    assert ids == [
        "linear.gemv q8_0 bfloat16 64x32 batch 1",
        "linear.gemv q8_0 bfloat16 to float32 64x32 batch 1",
        "linear.gemv q8_0 float32 64x32 batch 1",
    ]


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
