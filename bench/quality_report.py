"""From a report of `quality` to a table and a picture: ``python bench/quality_report.py quality.json``."""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from rich.console import Console
from rich.table import Table

MARKERS = {"4": "o", "3": "s", "2": "^"}


def show(report: dict[str, Any]) -> None:
    console, absent = Console(), list[str]()
    table = Table("engine", "threads", box=None, pad_edge=False, header_style="dim")
    for name in ("perplexity", "tokens/s", "from-to", "over the file", "MB"):
        table.add_column(name, justify="right")
    for row in report["runs"]:
        engine, threads = row["settings"]["engine"], str(row["settings"]["threads"])
        if "absent" in row:
            absent.append(f"absent {engine}: {row['absent']}")
            continue
        speed, low, high = row["tokens_per_second"]
        ratio = f"{row['over_file'][0]:.2f}"
        spread = f"{low:.1f}-{high:.1f}"
        table.add_row(
            engine, threads, f"{row['perplexity']:.2f}", f"{speed:.1f}", spread, ratio, str(row["peak_megabytes"])
        )
    console.print(table)
    for line in absent:
        console.print(line, soft_wrap=True, highlight=False)


def draw(report: dict[str, Any], path: Path) -> None:
    """Perplexity over speed, a panel for each number of threads; a line joins the groups of one width.

    Speed is that of pairs, which meet the same load of the machine, and not tokens a second alone.
    """
    counts = sorted({row["settings"]["threads"] for row in report["runs"]})
    figure, panels = plt.subplots(1, len(counts), figsize=(9, 4.4), squeeze=False, layout="constrained")
    for axes, threads in zip(panels[0], counts, strict=True):
        found = [row for row in report["runs"] if row["settings"]["threads"] == threads and "absent" not in row]
        for label, points in series(found).items():
            speeds, losses = ([point[part] for point in points] for part in (0, 1))
            bits = label.rpartition(" bits")[0][-1:]
            axes.plot(speeds, losses, marker=MARKERS.get(bits, "D"), linewidth=0.8, markersize=4, label=label)
            for speed, loss, name in points:
                axes.annotate(name, (speed, loss), fontsize=5, xytext=(3, 3), textcoords="offset points")
        title = f"{threads} thread{'s' * (threads > 1)}"
        axes.set(title=title, xlabel="speed over lowbit's on the file as it is", ylabel="perplexity", yscale="log")
        axes.grid(alpha=0.3)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=7)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def series(rows: list[dict[str, Any]]) -> dict[str, list[tuple[float, float, str]]]:
    """The points of each line: speed, perplexity, and the size of a group or the type of a file.

    >>> row = {"settings": {"engine": "lowbit float32 4 bits, groups of 64"}, "perplexity": 9.0}
    >>> series([row | {"over_file": [1.2, 1.1, 1.3]}])
    {'lowbit float32 4 bits': [(1.2, 9.0, '64')]}
    """
    found: dict[str, list[tuple[float, float, str]]] = {}
    for row in rows:
        label, _, name = row["settings"]["engine"].replace(" file of ", ", groups of ").partition(", groups of ")
        found.setdefault(label, []).append((row["over_file"][0], row["perplexity"], name))
    return found


if __name__ == "__main__":
    report = json.loads(Path(sys.argv[1]).read_text())
    show(report)
    draw(report, Path(sys.argv[1]).with_suffix(".svg"))
