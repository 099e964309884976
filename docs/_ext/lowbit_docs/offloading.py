"""Tables of the page on offloading: Table 2 in virtual time, registers of the kernels, measurements of GPUs.

Each table is made from a file that a script wrote. Values that were not measured are marked as such, and results of a
simulated device are never shown as measurements.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from docutils import nodes
from gpu import gemv
from gpu.measure import PARTS
from gpu.table2 import GOAL, GOAL_OF_COPIES, LISTED
from mixtral.paper import COLUMNS, ROWS, read
from mixtral.table2 import FULL, in_order
from sphinx.util.docutils import SphinxDirective

from lowbit_cuda.cuda import compiler
from lowbit_docs.tables import Cell, table

Record = Mapping[str, Any]
NOT_MEASURED = "not measured"


class BenchDirective(SphinxDirective):
    """A directive that shows a file written by a script of the repository."""

    def file(self, place: str) -> Path:
        """A file, by its path relative to the pages; the page is rebuilt when the file changes."""
        relative, file = self.env.relfn2path(place)
        self.env.note_dependency(relative)
        return Path(file)


# **Table 2.**


class VirtualTable2(BenchDirective):
    """``.. virtual-table2:: ratios``, ``mirror`` or ``residuals``: rows as in the paper, one column per machine."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        columns = json.loads(self.file("../bench/mixtral/table2.json").read_text("utf-8"))["columns"]
        kind = self.arguments[0]
        rows = table2_rows(columns, kind)
        heads = ["", *(f"{column['machine']}, {column['bits']}-bit" for column in columns)]
        shown: list[nodes.Node] = [table(heads, rows, [20] + [10] * len(columns))]
        if kind != "residuals":
            memory = ", mirror" if kind == "mirror" else ""
            counts = {full: sum(in_order(column, full, memory) for column in columns) for full in FULL}
            said = ", ".join(f"{count} of {len(columns)} ({full})" for full, count in counts.items())
            shown.append(nodes.paragraph(text=f"Columns whose rows are in the same order as the paper's: {said}."))
        return shown


def table2_rows(columns: Sequence[Record], kind: str) -> list[list[Cell]]:
    """Ratios to naive loading with the paper's in brackets, or the differences in milliseconds per token."""
    wanted = [row["row"] for row in columns[0]["rows"] if (", mirror" in row["row"]) == (kind == "mirror")]
    if kind == "mirror":
        wanted.append(ROWS[3])
    rows: list[list[Cell]] = []
    for name in wanted:
        found = [next(row for row in column["rows"] if row["row"] == name) for column in columns]
        if kind == "residuals":
            cells = [f"{1e3 * row['residual_seconds']:.0f}" for row in found]
        else:
            cells = [f"{row['ratio']:.2f} ({row['paper_ratio']:.2f})" for row in found]
        rows.append([name.removesuffix(", mirror"), *cells])
    if kind == "residuals":
        rows.append(["GB/s implied; of the link", *(f"{one['implied_gb']}; {one['link_gb']}" for one in columns)])
    return rows


# **Kernels.**


class CudaKernels(BenchDirective):
    """``.. cuda-kernels::``: registers and spills of each kernel on each architecture."""

    def run(self) -> list[nodes.Node]:
        file = self.file("data/cuda-kernels.json")
        if not file.is_file():
            return [nodes.paragraph(text="There is no record yet: run python -m gpu.compiled in the folder bench.")]
        for source in compiler.kernel_folder().glob("*.cuh"):
            self.env.note_dependency(str(source))
        compiled = json.loads(file.read_text("utf-8"))["compiled"]
        versions = sorted({one["nvrtc"] for one in compiled})
        said = f"NVRTC {', '.join(versions)}."
        if earlier(compiled, compiler.read_sources(compiler.kernel_folder())):
            said += " The kernels have changed since, so some of these numbers may be out of date."
        return [nodes.paragraph(text=said), kernel_table(compiled)]


def earlier(compiled: Sequence[Record], sources: Mapping[str, bytes]) -> bool:
    """Whether any kernel was compiled from sources other than these."""
    return any(compiler.digest(one["source"], one["arch"], one["nvrtc"], sources) != one["digest"] for one in compiled)


def kernel_table(compiled: Sequence[Record]) -> nodes.Node:
    """One row per kernel, one column per architecture."""
    architectures = sorted({one["arch"] for one in compiled}, key=lambda name: int(name[3:]))
    found = {(name, one["arch"]): used for one in compiled for name, used in one["kernels"].items()}
    rows: list[list[Cell]] = []
    for name in sorted({name for name, _ in found}):
        rows.append([[nodes.literal(text=name)], *(usage(found.get((name, arch))) for arch in architectures)])
    return table(["kernel", *architectures], rows, [40] + [20] * len(architectures))


def usage(record: Record | None) -> str:
    """Registers per thread, and spilled bytes if there are any."""
    if record is None:
        return ""
    spilled = record["spill_stores"] + record["spill_loads"]
    return f"{record['registers']}" + (f", {spilled} bytes spilled" if spilled else "")


# **Measurements.**


@dataclass(frozen=True)
class Wanted:
    """One quantity to measure on a GPU.

    Attributes:
        what: its description.
        goal: the target, or the paper's number; may be empty.
        part: the part of ``bench/gpu`` whose record contains it.
        value: takes it from the record's result.
    """

    what: str
    goal: str
    part: str
    value: Callable[[Record], str | None]


def wanted() -> Iterator[Wanted]:
    """Every quantity that ``bench/gpu/run.sh`` measures."""
    for part in ("compiled", "conformance", "kernels", "traces", "sanitizer"):
        yield Wanted(PARTS[part][0], "passed", part, lambda result: "" if result else None)
    for kind, bits in (("gemv", gemv.BITS), ("peers", (4,))):
        for shape in gemv.SHAPES:
            for width in bits:
                whose = "product" if kind == "gemv" else "PyTorch's int4 product"
                first = kind == "gemv" and (width, shape) == (gemv.BITS[0], gemv.SHAPES[0])
                words = f"{whose}, {width} bits, {shape[0]} × {shape[1]}, groups of {gemv.GROUP}"
                goal = f"≥ {gemv.GOAL} of a copy" if first else ""
                yield Wanted(words, goal, kind, partial(bandwidth, (width, *shape)))
    for bits_ in (2, 3):
        for row in LISTED:
            paper = read(COLUMNS[0], bits_, row.paper) / read(COLUMNS[0], bits_, ROWS[3])
            goal = f"≥ {GOAL}; misses ≥ {GOAL_OF_COPIES} of the time; " if row.guesses else ""
            words = f"Table 2, {bits_}-bit experts: {row.name}"
            key = (bits_, row.name)
            yield Wanted(words, f"{goal}the paper's A100: {paper:.2f}", "table2", partial(ratio, key))


def bandwidth(key: tuple[int, int, int], result: Record) -> str | None:
    """GB/s, and the fraction of a copy's rate."""
    for one in result.get("products", ()):
        if (one["bits"], one["rows"], one["columns"]) == key:
            return f"{one['gbytes_per_second']} GB/s, {one['ratio']:.2f} of a copy"
    return None


def ratio(key: tuple[int, str], result: Record) -> str | None:
    """Ratio to naive loading, and the fraction of the time that copies of missing experts need."""
    for column in result.get("columns", ()):
        for row in column["rows"]:
            if (column["bits"], row["row"]) == key:
                return f"{row['ratio']:.2f}; misses {row['share_of_misses']:.2f} of the time"
    return None


def cell(one: Wanted, records: Mapping[str, Record]) -> str:
    """The result of one machine: a number, the verdict with its reason, or that it was not measured.

    >>> compiled = next(wanted())
    >>> cell(compiled, {})
    'not measured'
    >>> cell(compiled, {"compiled": {"verdict": "failed", "why": "2 are wrong", "result": {"suite": 1}}})
    'failed: 2 are wrong'
    """
    record = records.get(one.part)
    if record is None:
        return NOT_MEASURED
    value = one.value(record["result"])
    if value:
        return value if record["verdict"] != "failed" else f"{value} (failed: {record['why']})"
    if value is None and record["verdict"] in ("passed", "measured"):
        return NOT_MEASURED
    said = record["verdict"] + (f": {record['why']}" if record["why"] else "")
    return f"{NOT_MEASURED} ({said})" if record["verdict"] == "skipped" else said


def measured(results: Path) -> list[tuple[str, dict[str, Record]]]:
    """The machines whose results are in folders below this one: a description, and the record of each part."""
    found = []
    for file in sorted(results.rglob("machine.json")):
        machine = load(file)
        if machine["simulated"]:
            continue
        records = {
            part: load(file.with_name(f"{part}.json")) for part in PARTS if file.with_name(f"{part}.json").is_file()
        }
        real = {part: record for part, record in records.items() if not record["simulated"]}
        found.append((described(machine), real))
    return found


def described(machine: Record) -> str:
    """A machine, on one line."""
    device = machine["device"].get("device") or machine["nvidia_smi"].get("name") or "a device that was not there"
    return f"{device}, {machine['device'].get('driver', 'no driver')}, {machine['processor']}, {machine['when'][:10]}"


def load(file: Path) -> Record:
    found: Record = json.loads(file.read_text("utf-8"))
    return found


class GpuResults(BenchDirective):
    """``.. gpu-results::``: one row per quantity, one column per machine."""

    def run(self) -> list[nodes.Node]:
        results = Path(self.env.srcdir).parent / "bench/results"
        for file in results.rglob("*.json"):
            self.env.note_dependency(str(file))
        machines = measured(results)
        heads = ["what", "goal", *(f"on machine {number}" for number in range(1, len(machines) + 1))]
        rows: list[list[Cell]] = []
        for one in wanted():
            cells = [cell(one, records) for _, records in machines] or [NOT_MEASURED]
            shown: list[Cell] = [[nodes.emphasis(text=text)] if text == NOT_MEASURED else text for text in cells]
            rows.append([one.what, one.goal, *shown])
        said = "; ".join(f"machine {number}: {text}" for number, (text, _) in enumerate(machines, 1))
        return [
            nodes.paragraph(text=f"{said}." if said else "No GPU has run the script yet."),
            table(heads if machines else [*heads, "on a GPU"], rows, [44, 26] + [30] * max(1, len(machines))),
        ]
