"""From a report of `growth` to tables and a picture: ``python bench/growth_report.py growth.json``."""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from rich.console import Console
from rich.table import Table

COLORS = tuple(matplotlib.colormaps["tab20"](n) for n in range(20))
STYLES = {0: "-", 1: "--"}
FIRST = "first_seconds"
PANELS = (
    ("context", "prompt_per_second", "tokens of the prompt", "prompt, tokens/s"),
    ("context", "tokens_per_second", "tokens before", "decoding, tokens/s"),
    ("context", FIRST, "tokens of the prompt", "first token, seconds"),
    ("batch", "tokens_per_second", "sequences", "batch, tokens/s of all"),
)


def series(run: dict[str, Any], size: str, rate: str) -> dict[str, list[tuple[int, list[float]]]]:
    """The points of each engine along a size: the size, and the median with its interval."""
    found: dict[str, list[tuple[int, list[float]]]] = {}
    for point in run["points"]:
        if size in point:
            found.setdefault(point["engine"], []).append((point[size], rates_of(point, rate)))
    return found


def rates_of(point: dict[str, Any], rate: str) -> list[float]:
    """A rate of a point with its interval; the seconds to the first token follow from the prompt's tokens a second."""
    if rate != FIRST:
        return list(point[rate])
    middle, low, high = (point["context"] / each for each in point["prompt_per_second"])
    return [middle, high, low]


def show(report: dict[str, Any]) -> None:
    console = Console()
    for run in report["runs"]:
        spins = f"spin {run['spin_before']:.2f} and {run['spin_after']:.2f} of {run['threads']}"
        console.print(f"\n[bold]{run['model']}, {run['threads']} thread(s); {spins}[/]", highlight=False)
        for size, rate, along, title in PANELS:
            engines = series(run, size, rate)
            if not engines:  # an interrupted run may have no batches
                continue
            table = Table(along, box=None, pad_edge=False, header_style="dim", title=title, title_justify="left")
            for name in engines:
                table.add_column(name.removeprefix("lowbit "), justify="right")
            digits = ".3f" if rate == FIRST else ".1f"
            known = [dict(points) for points in engines.values()]
            for each in sorted({each for points in known for each in points}):
                cells = (format(points[each][0], digits) if each in points else "" for points in known)
                table.add_row(str(each), *cells)
            console.print(table)
        for command in run["commands"]:
            first, low, high = command["first_token_seconds"]
            said = f"{command['contract']}: first token {first:.2f} s ({low:.2f}-{high:.2f}) after the command, "
            console.print(f"{said}at most {command['peak_megabytes']} MB", highlight=False)
        for name, reason in run["absent"].items():
            console.print(f"  [yellow]absent[/] {name}: {reason}", highlight=False)


def draw(report: dict[str, Any], path: Path) -> None:
    """Lines of tokens a second along prompt, context and batch: a colour for each engine, dashed on two threads."""
    figure, panels = plt.subplots(2, 2, figsize=(9, 7.4), layout="constrained")
    for axes, (size, rate, along, title) in zip(panels.flat, PANELS, strict=True):
        for number, run in enumerate(report["runs"]):
            for color, (name, points) in zip(COLORS, series(run, size, rate).items(), strict=False):
                sizes, rates = [each for each, _ in points], [each[0] for _, each in points]
                label = f"{name}, {run['threads']} thread{'s' if run['threads'] > 1 else ''}"
                axes.plot(sizes, rates, STYLES.get(number, ":"), color=color, marker=".", label=label)
        axes.set(xscale="log", xlabel=along, title=title, ylim=(0, None))
        axes.set_xticks(
            sorted({each for run in report["runs"] for own in series(run, size, rate).values() for each, _ in own})
        )
        axes.get_xaxis().set_major_formatter(matplotlib.ticker.ScalarFormatter())
        axes.minorticks_off()
        axes.tick_params(labelsize=7)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=6)
    figure.savefig(path)
    plt.close(figure)


if __name__ == "__main__":
    found = json.loads(Path(sys.argv[1]).read_text())
    show(found)
    draw(found, Path(sys.argv[1]).with_suffix(".svg"))
