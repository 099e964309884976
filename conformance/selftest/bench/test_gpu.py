"""The script for a machine with a GPU, tried on a simulated device: what it writes, and that no part loses another."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gpu import gemv, measure, sanitizer, traces
from gpu.entry_points import write as write_entry_points
from gpu.parts import Setting
from paths import ROOT

from lowbit_cuda.kernels.layouts import MatrixLayout
from lowbit_gpusim.sim.device import SimDevice

ROOT = ROOT


def ran(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / "bench/gpu/run.sh"), *map(str, arguments)]
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "PYTHON": sys.executable}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)


def read(folder: Path, name: str) -> Any:
    return json.loads((folder / f"{name}.json").read_text())


@pytest.mark.whole
def test_each_part_leaves_a_record_that_says_it_is_simulated(tmp_path: Path) -> None:
    """A part that is done, one that cannot run here, the machine, and the sum of it all."""
    patient = ("--limit", "600", "--total", "800")
    done = ran(tmp_path, "--simulate", "--only", "kernels", "--only", "sanitizer", *patient)
    assert done.returncode == 0, done.stdout + done.stderr
    kernels, skipped, summary = read(tmp_path, "kernels"), read(tmp_path, "sanitizer"), read(tmp_path, "summary")
    assert (kernels["verdict"], skipped["verdict"]) == ("simulated", "skipped")
    assert skipped["why"] == "there is nothing to watch on a simulated device"
    assert kernels["result"]["launches"] > 50
    assert kernels["result"]["wrong"] == {}
    assert all(record["simulated"] for record in (kernels, skipped, summary, read(tmp_path, "machine")))
    assert set(summary["parts"]) == {"kernels", "sanitizer"}
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("kernels.json", "machine.json", "sanitizer.json", "summary.json")
    ]


def measured(*arguments: str | Path) -> Any:
    """Run the parts from this process; the exit status."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(sys, "argv", ["measure", *map(str, arguments)])
        patch.setattr(signal, "signal", lambda *_: None)
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "bench"), *filter(None, sys.path)]))
        measure.main()
    return ended.value.code


TWO_PARTS = ("--simulate", "--only", "traces", "--only", "peers")


def test_a_part_that_takes_too_long_loses_only_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is ended, with what it has started, and the next one runs; the status says that something failed."""
    monkeypatch.setattr(measure, "PARTS", measure.PARTS | {"traces": ("what is too slow", 1.0)})
    assert measured(tmp_path, *TWO_PARTS) == 1
    summary = read(tmp_path, "summary")["parts"]
    assert summary["traces"]["verdict"] == "timed out"
    assert summary["traces"]["why"] == "it took more than 1 seconds"
    assert summary["peers"]["verdict"] == "skipped"


def test_all_parts_together_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part for which no time is left is not begun, and says so; a part gets no more than what is left."""
    clock, limits = iter([100.0, 101.0, 102.0]), dict[str, float]()  # the beginning, and what each part sees
    part = measure.part

    def noted(name: str, options: Any, left: float) -> dict[str, Any]:
        limits[name] = left
        monkeypatch.setattr(measure, "time", time)
        try:
            return part(name, options, left)
        finally:
            monkeypatch.setattr(measure, "time", SimpleNamespace(monotonic=lambda: next(clock)))

    monkeypatch.setattr(measure, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(measure, "part", noted)
    assert measured(tmp_path, *TWO_PARTS, "--total", "3") == 1
    endless, peers = read(tmp_path, "traces"), read(tmp_path, "peers")
    assert limits == {"traces": 2.0, "peers": 1.0}
    assert (endless["verdict"], peers["verdict"]) == ("timed out", "timed out")
    assert endless["limit"] == 2.0 and peers["seconds"] == 0
    assert peers["why"] == "of the 3 seconds for all parts none were left"
    assert set(read(tmp_path, "summary")["parts"]) == {"traces", "peers"}


def test_the_option_limits_each_part() -> None:
    """``--limit`` takes the place of a part's own."""
    options = measure.parsed(["out", *TWO_PARTS, "--limit", "0.01"])
    assert measure.part("traces", options, 100.0)["limit"] == 0.01


def test_what_a_part_found_before_its_end_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the reason why it is not all."""
    file = tmp_path / "answer.json"
    for status, limit, verdict in ((-9, 20.0, "timed out"), (-11, None, "crashed")):
        monkeypatch.setenv("LOWBIT_GPU_ANSWER", str(file))
        Setting(True, tmp_path).so_far({"products": [1]})
        Setting(True, tmp_path).so_far({"products": [1, 2]})
        answer = measure.answered(file, status, limit)
        assert (answer["verdict"], answer["result"]) == (verdict, {"products": [1, 2]})
        assert answer["why"]


@pytest.mark.parametrize(
    ("left", "status", "verdict"),
    [('{"verdict": "passed"}', 0, "passed"), ("", -11, "crashed"), ('{"verd', 1, "crashed"), (None, 3, "crashed")],
)
def test_a_part_that_dies_is_said_to_have(tmp_path: Path, left: str | None, status: int, verdict: str) -> None:
    """Whatever it left of an answer, there is a verdict."""
    file = tmp_path / "answer.json"
    if left is not None:
        file.write_text(left)
    answer = measure.answered(file, status, None)
    assert answer["verdict"] == verdict
    assert verdict == "passed" or str(status) in answer["why"]


@pytest.mark.parametrize("arguments", [["--limit", "0"], ["--total", "nan"], ["--only", "everything"], []])
def test_a_wrong_command_line_is_refused(tmp_path: Path, arguments: list[str]) -> None:
    """Before anything is written."""
    with pytest.raises(SystemExit) as caught:
        measure.parsed([str(tmp_path / "out"), *arguments] if arguments else [])
    assert caught.value.code == 2


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_wrong_product_is_seen(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first and the last panel are compared: right ones differ by rounding, one wrong number by more."""
    monkeypatch.setattr(gemv, "ROTATED", 1 << 14)
    monkeypatch.setattr(gemv, "COPIED", 1 << 14)
    monkeypatch.setattr(gemv, "ROUNDS", 3)
    layout = MatrixLayout(bits, 256, 96, 128)
    with SimDevice() as device:
        found = gemv.product(device, layout, checked=True)
    assert found["error"] <= gemv.TOLERANCE
    assert {len(seconds) for seconds in found["rounds"].values()} == {3}
    assert set(found["rounds"]) == {"products", "copies", "copies in a graph"}
    random = np.random.default_rng(5)
    parts, x = gemv.random_parts(layout, random), random.standard_normal(256).astype(np.float32)
    packed = np.concatenate([part.view(np.uint8) for part in parts])
    y = (x @ gemv.dense(layout, packed)).astype(np.float32)
    assert gemv.worst_error(layout, parts, x, y) <= gemv.TOLERANCE
    for column in (5, 70):
        wrong = y.copy()
        wrong[column] *= 1.01
        assert gemv.worst_error(layout, parts, x, wrong) > gemv.TOLERANCE
    wrong[3] = np.nan
    assert gemv.worst_error(layout, parts, x, wrong) > gemv.TOLERANCE


def test_what_the_sanitizer_says_is_understood() -> None:
    """A finding is a failure, a tool that is refused is not, and silence is no proof."""
    clean = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
    races = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
    found = "========= Invalid __global__ read of size 16 bytes\n========= ERROR SUMMARY: 1 error\n"
    refused = "========= Error: Target application terminated before first instrumented API call\nDevice not supported"
    assert sanitizer.judged(0, clean, finished=True)["verdict"] == "clean"
    assert sanitizer.judged(0, races, finished=True)["verdict"] == "clean"
    assert sanitizer.judged(sanitizer.FOUND, found, finished=True)["verdict"] == "found"
    assert sanitizer.judged(0, "", finished=True)["verdict"] == "failed"
    assert sanitizer.judged(0, clean, finished=False)["verdict"] == "failed"
    assert sanitizer.judged(1, f"========= {refused.splitlines()[1]}", finished=False)["verdict"] == "refused"


def test_where_two_traces_part() -> None:
    """The first event that differs, or the end of the shorter."""
    assert traces.first_difference([1, 2], [1, 2]) is None
    assert traces.first_difference([1, 2, 3], [1, 4, 3]) == 1
    assert traces.first_difference([1, 2, 3], [1, 2]) == 2


def test_where_lowbit_is_not_installed_its_names_are_found(tmp_path: Path) -> None:
    """The metadata that an installation would have written: a backend and a command, by name."""
    write_entry_points(tmp_path)
    script = (
        "from importlib.metadata import distributions\n"
        f"(found,) = distributions(path=[{str(tmp_path)!r}])\n"
        "print(found.version, {entry.name: entry.value for entry in found.entry_points}['cuda'])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split()[1] == "lowbit_cuda.backend:CudaBackend"
