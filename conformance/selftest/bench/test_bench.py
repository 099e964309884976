"""The benchmarks' own instruments: the readers read every byte, and a core that is shared is seen."""

import itertools
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import limits
import pytest
import quiet
import verdicts
from paths import ROOT

from lowbit.system.interpreters import python_command, python_environment
from lowbit_bench.rounds import Moment


def test_the_readers_read_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way of reading sums every word (it raises if it does not), also where the rotation begins again."""
    monkeypatch.setattr(limits, "ROTATION", 2**24)
    monkeypatch.setattr(limits, "TRIAL", 2**20)
    reader = limits.MemoryReader(2)
    assert reader.fastest in {way.name for way in reader.ways}
    assert len(reader.ways) == len({(way.reader, way.chunk) for way in reader.ways}) > 1
    assert all(reader.seconds(nbytes) > 0 for nbytes in (2**23, 2**23 + 8, 2**20 + 24))
    reader.try_again(2**20)
    assert reader.fastest == reader.ways[0].name
    assert reader.freedom() > 0


class Spins:
    """Stands in for a reader: half as fast where a neighbour runs."""

    seconds = 1e-4

    def spin(self, steps: int) -> float:
        return self.seconds


def test_a_core_that_is_shared_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spins that take longer than at their best are not fast, and the fraction of that best is reported."""
    spins = Spins()
    monkeypatch.setattr(quiet, "FIRST", 2)
    monkeypatch.setattr(quiet, "moment", lambda: None)
    watch = quiet.Watch(cast(limits.MemoryReader, spins))
    assert watch.arithmetic() == 1.0
    assert watch.fast() and watch.alone()
    spins.seconds = 2e-4
    assert not watch.fast() and not watch.fast()
    assert watch.arithmetic() == 0.5
    assert watch.wait(0.1) >= 0.1
    spins.seconds = 1e-4
    assert watch.wait(60) < 60


def test_what_others_use_during_a_wait_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the last fast spin to the end of the wait; before and after it, it does."""
    monkeypatch.setattr(quiet, "FIRST", 2)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)

    def alone(before: float, meanwhile: float, after: float) -> bool:
        """The answer where others use these seconds of three spans of ten: before, during and after a wait."""
        machine = itertools.accumulate([0, 0, before, meanwhile, after])
        moments = (Moment(10.0 * n, used, 0) for n, used in enumerate(machine))
        monkeypatch.setattr(quiet, "moment", lambda: next(moments))
        watch = quiet.Watch(cast(limits.MemoryReader, Spins()))
        assert watch.alone() and watch.fast()
        watch.wait(60)
        return watch.alone()

    assert alone(0, 9, 0) and alone(0.4, 0, 0.4)
    assert not alone(2, 0, 0) and not alone(0, 0, 2)


def test_the_sources_of_a_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All files of a package, compiled ones too, and the file of a module that is no package."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "single_backend.py").touch()
    (tmp_path / "whole_backend/__pycache__").mkdir(parents=True)
    for name in ("__init__.py", "kernels.so", "kernels.cu", "__pycache__/x.pyc"):
        (tmp_path / "whole_backend" / name).touch()
    assert verdicts.sources("single_backend") == [tmp_path / "single_backend.py"]
    found = [path.name for path in verdicts.sources("whole_backend")]
    assert found == ["__init__.py", "kernels.cu", "kernels.so"]
    assert verdicts.sources("no_such_backend") == []


def test_verdicts_are_asked_for_once_and_again_when_a_source_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verdict is kept in a file by name, instruction set, operations and sources, and each of them decides."""
    questions: list[tuple[str, str, int]] = []

    def answer(name: str, isa: str, operations: Sequence[str]) -> str:
        questions.append((name, isa, len(operations)))
        return f"passed {len(questions)}"

    monkeypatch.setattr(verdicts, "asked", answer)
    file = tmp_path / "results/verdicts.json"
    assert [verdicts.Verdicts(file).of("numpy") for _ in range(2)] == ["passed 1", "passed 1"]
    assert verdicts.Verdicts(file).of("numpy", "avx2") == "passed 2"
    assert verdicts.Verdicts(file).of("numpy", operations=("linear.gemv",)) == "passed 3"
    before = verdicts.state_of("numpy")
    monkeypatch.setattr(verdicts, "sources", lambda package: [file])
    assert verdicts.state_of("numpy") != before
    assert verdicts.Verdicts(file).of("numpy") == "passed 4"
    assert questions == [("numpy", "", 6), ("numpy", "avx2", 6), ("numpy", "", 1), ("numpy", "", 6)]


def test_a_broken_file_of_verdicts_is_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a file is not believed and not fatal."""
    monkeypatch.setattr(verdicts, "asked", lambda *asked: "unproven (failed)")
    file = tmp_path / "verdicts.json"
    file.write_text('{"numpy')
    assert verdicts.Verdicts(file).of("numpy") == "unproven (failed)"


@pytest.mark.whole
def test_two_runs_can_be_compared(tmp_path: Path) -> None:
    """``--benchmark-autosave``, then ``--benchmark-compare``: the second run shows the first beside itself."""
    chosen = [
        str(ROOT / "bench/test_speed.py"),
        f"--rootdir={ROOT}",
        "--backends",
        "numpy",
        "-k",
        "576x192 and numpy",
        "-p",
        "no:cacheprovider",
    ]
    kept = ["--benchmark-storage=runs", "--benchmark-autosave", "--benchmark-columns=median"]
    environment = python_environment() | {"LOWBIT_BENCH_VERDICTS": str(tmp_path / "verdicts.json")}
    environment.pop("PYTEST_XDIST_WORKER", None)  # beside other tests pytest-benchmark times nothing
    said = []
    for more in ([], ["--benchmark-compare"]):
        command = python_command("-m", "pytest", *chosen, *kept, *more)
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        said.append(done.stdout)
    assert "(NOW)" not in said[0] and "(NOW)" in said[1] and "(0001_" in said[1]
    runs = [json.loads(path.read_text())["benchmarks"] for path in sorted((tmp_path / "runs").rglob("*.json"))]
    assert [[each["extra_info"]["backend"] for each in run] for run in runs] == [["numpy"], ["numpy"]]
    assert runs[0][0]["extra_info"]["conformance"].startswith("passed ")
