"""The tables of the page on offloading: nothing that is simulated, skipped or missing looks like a measurement."""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from gpu import gemv, table2
from gpu.parts import Answer, Setting
from paths import ROOT

from lowbit_cuda.cuda import compiler
from lowbit_cuda.kernels.layouts import MatrixLayout
from lowbit_gpusim.sim.device import SimDevice

DOCS = ROOT / "docs"
MACHINE = {
    "simulated": False,
    "when": "2026-01-02T03:04:05+00:00",
    "processor": "some processor",
    "device": {"device": "some GPU", "driver": "CUDA 13.0"},
    "nvidia_smi": {},
}


@pytest.fixture(autouse=True)
def extension(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The extension of the documentation can be imported, for one test."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(DOCS / "_ext"))
    yield
    for name in set(sys.modules) - before:
        if name.startswith("lowbit_docs"):
            del sys.modules[name]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    """Results with the fields that the script really writes, made on a simulated device."""
    with SimDevice("a100", backed=False, log_limit=0) as device:
        product = gemv.product(device, MatrixLayout(gemv.BITS[0], *gemv.SHAPES[0], gemv.GROUP), checked=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table2, "LISTED", table2.LISTED[:2])
        rows = table2.run(Setting(True, tmp_path_factory.mktemp("table2")))
    return {
        "gemv": Answer("measured", "", {"products": [product]}),
        "table2": replace(rows, verdict="measured"),
        "sanitizer": Answer("skipped", "there is no such tool"),
        "traces": Answer("failed", "swap: another event"),
        "kernels": Answer("passed", "71 launches", {"launches": [1]}),
    }


def write(folder: Path, answers: dict[str, Answer], *, simulated: bool) -> None:
    """What a run of the script leaves."""
    folder.mkdir(parents=True)
    (folder / "machine.json").write_text(json.dumps(MACHINE | {"simulated": simulated}))
    for part, answer in answers.items():
        (folder / f"{part}.json").write_text(json.dumps({"part": part, "simulated": simulated} | asdict(answer)))


def cells(results: Path) -> list[dict[str, str]]:
    """For each machine what is said of each thing to be measured."""
    from lowbit_docs.offloading import cell, measured, wanted

    return [{one.what: cell(one, records) for one in wanted()} for _, records in measured(results)]


@pytest.mark.whole
def test_results_fill_the_table(tmp_path: Path, answers: dict[str, Answer]) -> None:
    """Numbers as they were found, failures with their reason, and whatever is missing or skipped as not measured."""
    write(tmp_path / "gpu/here", answers, simulated=False)
    (found,) = cells(tmp_path)
    product = answers["gemv"].result["products"][0]
    assert found.pop("product, 4 bits, 8192 × 28672, groups of 128") == (
        f"{product['gbytes_per_second']} GB/s, {product['ratio']:.2f} of a copy"
    )
    for column in answers["table2"].result["columns"]:
        for row in column["rows"]:
            said = f"{row['ratio']:.2f}; misses {row['share_of_misses']:.2f} of the time"
            assert found.pop(f"Table 2, {column['bits']}-bit experts: {row['row']}") == said
    assert found.pop("the engine's events on the device and on the simulation") == "failed: swap: another event"
    assert found.pop("each kernel on small arrays against its meaning in numpy") == "passed: 71 launches"
    tool = "compute-sanitizer over small arrays: memcheck, racecheck, synccheck"
    assert found.pop(tool) == "not measured (skipped: there is no such tool)"
    assert set(found.values()) == {"not measured"}
    assert len(found) == 2 + 15 + 4 + 2 * (
        len(table2.LISTED) - 2
    )  # compiler, suite, other products, PyTorch's, other rows


@pytest.mark.parametrize("verdict", ["crashed", "timed out", "failed"])
def test_a_part_that_ended_early_has_no_numbers(tmp_path: Path, verdict: Any) -> None:
    """It says how it ended."""
    write(tmp_path / "here", {"gemv": Answer(verdict, "in the middle")}, simulated=False)
    (found,) = cells(tmp_path)
    assert {said for what, said in found.items() if what.startswith("product")} == {f"{verdict}: in the middle"}


def test_what_is_simulated_is_not_shown(tmp_path: Path, answers: dict[str, Answer]) -> None:
    """Neither a whole run with --simulate, nor a simulated part among real ones."""
    write(tmp_path / "tried", answers, simulated=True)
    assert cells(tmp_path) == []
    write(tmp_path / "real", {}, simulated=False)
    for part in ("gemv", "table2", "kernels"):
        (tmp_path / "real" / f"{part}.json").write_text((tmp_path / "tried" / f"{part}.json").read_text())
    (found,) = cells(tmp_path)
    assert set(found.values()) == {"not measured"}


def test_the_virtual_table_is_the_file() -> None:
    """Every cell of the three tables is the number that the script wrote."""
    from lowbit_docs.offloading import table2_rows

    columns = json.loads((DOCS.parent / "bench/mixtral/table2.json").read_text())["columns"]
    ratios, mirror, left = (table2_rows(columns, kind) for kind in ("ratios", "mirror", "residuals"))
    assert [row[0] for row in ratios] == [row[0] for row in left[:-1]]
    for rows, suffix in ((ratios, ""), (mirror, ", mirror"), (left, "")):
        for name, *shown in rows[: len(ratios)]:
            for column, text in zip(columns, shown, strict=True):
                full = str(name) if name == "naive" else f"{name}{suffix}"
                row = next(row for row in column["rows"] if row["row"] == full)
                if rows is left:
                    assert float(str(text)) == pytest.approx(1e3 * row["residual_seconds"], abs=0.51)
                else:
                    ours, theirs = str(text).rstrip(")").split(" (")
                    assert float(ours) == pytest.approx(row["ratio"], abs=0.0051)
                    assert float(theirs) == pytest.approx(row["paper_ratio"], abs=0.0051)


def test_every_source_of_the_kernels_is_shown() -> None:
    """All but those that only name a width and a dtype."""
    shown = re.findall(r"^\.\. literalinclude:: \.\./(.*)$", (DOCS / "cuda-sources.rst").read_text(), re.MULTILINE)
    sources = {path.name for path in compiler.kernel_folder().glob("*.cuh")}
    assert {Path(name).name for name in shown} == {name for name in sources if not re.match(r"linear_b\d_", name)}
    assert all((DOCS.parent / name).is_file() for name in shown)


def test_a_record_of_other_sources_is_said_to_be_one() -> None:
    """Whoever changes a kernel and does not compile it again is told by the page."""
    from lowbit_docs.offloading import earlier

    sources = {"one.cuh": b"1", "two.cuh": b"2", "shared.cuh": b"3"}
    recorded = [
        {"source": name, "arch": "sm_90", "nvrtc": "13.0", "digest": compiler.digest(name, "sm_90", "13.0", sources)}
        for name in ("one.cuh", "two.cuh")
    ]
    assert not earlier(recorded, sources)
    assert earlier(recorded, sources | {"shared.cuh": b"4"})
    assert earlier(recorded, {name: text for name, text in sources.items() if name != "two.cuh"})


def test_a_kernel_has_a_row_and_an_architecture_a_column() -> None:
    """Kernels of several sources in one table, architectures by their age."""
    from lowbit_docs.offloading import kernel_table

    used = {"registers": 32, "spill_stores": 0, "spill_loads": 0}
    compiled = [
        {"arch": arch, "kernels": {name: used | {"registers": registers}}}
        for arch, name, registers in [("sm_100", "b", 1), ("sm_80", "b", 2), ("sm_80", "a", 3)]
    ]
    assert kernel_table(compiled).astext().split() == ["kernel", "sm_80", "sm_100", "a", "3", "b", "2", "1"]


def test_spills_are_said() -> None:
    """Registers alone, or with the bytes that did not fit; nothing where a kernel was not compiled."""
    from lowbit_docs.offloading import usage

    assert usage({"registers": 40, "spill_stores": 0, "spill_loads": 0}) == "40"
    assert usage({"registers": 255, "spill_stores": 8, "spill_loads": 12}) == "255, 20 bytes spilled"
    assert usage(None) == ""
