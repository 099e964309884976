"""From the JSON of pytest-benchmark to a table and a picture: ``python bench/report.py bench.json bench.svg``."""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from rich.console import Console
from rich.table import Table

COLORS = {"reference": "#9e9e9e", "numpy": "#4c78a8", "cppyy": "#f58518"}


def rows_of(report: dict[str, Any]) -> list[dict[str, Any]]:
    """One row a benchmark: its group, and what its test noted, with the median in milliseconds; group by group."""
    rows = [
        {"group": bench["group"], "ms": 1e3 * bench["stats"]["median"], **bench["extra_info"]}
        for bench in report["benchmarks"]
    ]
    groups = list(dict.fromkeys(row["group"] for row in rows))
    return sorted(rows, key=lambda row: (groups.index(row["group"]), row["ms"]))


def show(report: dict[str, Any]) -> None:
    machine = report["machine_info"]
    here, cpu = report["lowbit"], machine.get("cpu", {}).get("brand_raw", machine["processor"])
    Console().print(
        f"{cpu}, {here['threads']} threads, Python {machine['python_version']}; "
        f"two-thread spin {here['spin_speedup']} times one; read limit: {here['reader']}"
    )
    table = Table("backend", title="Medians; share: time of reading / time of the call, in pairs", title_justify="left")
    for column in ("ms", "read ms", "share", "conformance"):
        table.add_column(column, justify="right")
    previous = ""
    for row in rows_of(report):
        if row["group"] != previous:
            table.add_section()
            table.add_row(f"[bold]{row['group']}[/]")
            previous = row["group"]
        numbers = (f"{row['ms']:.3f}", f"{row['read_limit_ms']:.3f}", f"{row['share_of_limit']:.2f}")
        table.add_row(row["backend"], *numbers, row["conformance"])
    Console().print(table)


def draw(report: dict[str, Any], path: Path) -> None:
    """Horizontal bars by problem, time on a logarithmic axis; the tick beside each bar is its own read limit."""
    rows = rows_of(report)
    groups = list(dict.fromkeys(row["group"] for row in rows))
    figure, axes = plt.subplots(figsize=(9, 0.5 + 0.75 * len(groups)), layout="constrained")
    for index, group in enumerate(groups):
        here = [row for row in rows if row["group"] == group]
        for slot, row in enumerate(here):
            y = index + (slot - (len(here) - 1) / 2) * 0.26
            proven = row["conformance"].startswith("passed")
            color = COLORS.get(row["backend"], "#54a24b")
            axes.barh(y, row["ms"], height=0.24, color=color, alpha=1 if proven else 0.3, label=row["backend"])
            axes.plot([row["read_limit_ms"]] * 2, [y - 0.12, y + 0.12], color="black", linewidth=1.5)
            axes.text(1.05 * row["ms"], y, f"{row['ms']:.3g}", va="center", fontsize=7)
    axes.set_yticks(range(len(groups)), groups, fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.margins(x=0.1)
    axes.set_xlabel("milliseconds a call, median (black tick: reading the same bytes, in the same run)")
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    figure.legend(list(unique.values()), list(unique.keys()), loc="outside upper right", ncols=3, fontsize=8)
    temporary = path.with_name(f".{path.name}.partial{path.suffix}")
    figure.savefig(temporary)
    temporary.replace(path)


def main() -> None:
    source, picture = (Path(argument) for argument in sys.argv[1:])
    report = json.loads(source.read_text())
    show(report)
    draw(report, picture)
    print(f"picture: {picture}")


if __name__ == "__main__":
    main()
