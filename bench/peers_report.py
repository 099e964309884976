"""From a report of `compare` to tables of 80 columns and two pictures; ``python bench/peers_report.py peers.json``."""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from accuracy import CLASSES
from contests import HEADLINE
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter
from rich.console import Console
from rich.markup import escape
from rich.table import Table

COLORS = {
    "lowbit": "#d62728",
    "ONNX Runtime": "#4c78a8",
    "llama.cpp": "#54a24b",
    "PyTorch": "#b279a2",
    "OpenVINO": "#e3a008",
    "numpy": "#7f7f7f",
    "QIGen": "#9c755f",
}
MARKERS = {
    "lowbit": "o",
    "ONNX Runtime": "^",
    "llama.cpp": "s",
    "PyTorch": "D",
    "OpenVINO": "v",
    "numpy": "X",
    "QIGen": "P",
}

Problem = dict[str, Any]


def show(report: dict[str, Any], console: Console) -> None:
    """Everything that was measured, what is absent, and the goals."""
    machine = report["machine"]
    console.print(
        f"{machine['cpu']}, {machine['cores']} cores, caches {', '.join(machine['caches'].values())}, "
        f"{machine['memory_gib']} GiB, {machine['python']}"
    )
    show_projects(report, console)
    for problem in report["problems"]:
        show_problem(problem, console)
    show_goals(report, console)
    if report["conformance"]:
        said = (f"{isa}: {verdict}" for isa, verdict in report["conformance"].items())
        console.print(f"[bold]Conformance of cppyy[/] {'; '.join(said)}", highlight=False)
    longest = sorted(report["seconds"].items(), key=lambda item: -item[1])[:8]
    console.print(f"[dim]seconds: {', '.join(f'{name} {value:.0f}' for name, value in longest)}[/]", highlight=False)


def show_projects(report: dict[str, Any], console: Console) -> None:
    for project in report["projects"]:
        versions = ", ".join(f"{name} {version}" for name, version in project["versions"].items())
        if reason := project.get("absent"):
            console.print(f"[yellow]absent:[/] {project['name']}: {escape(reason)}", highlight=False)
        else:
            console.print(f"{project['name']}: {versions}", highlight=False)


def heading(problem: Problem) -> str:
    """A problem in one line."""
    return f"{problem['contest']}, batch {problem['batch']}, {problem['threads']} thread(s)"


def show_problem(problem: Problem, console: Console) -> None:
    """One table, the fastest first; names of lowbit's own are those of instruction sets, and bold."""
    busy = "" if problem["free_rounds"] == problem["rounds"] else f"{problem['free_rounds']} free of "
    spins = f"spin {problem['spin_before']:.2f} and {problem['spin_after']:.2f} of {problem['threads']}"
    if "arithmetic" in problem:
        spins += f", {problem['arithmetic']:.2f} of its best"
    console.print(f"\n[bold]{heading(problem)}[/]", highlight=False)
    console.print(f"[dim]{busy}{problem['rounds']} rounds; {spins}; read: {problem['reader']}[/]", highlight=False)
    table = Table("", box=None, pad_edge=False, header_style="dim")
    for name in ("ms", "95 %", "share", "GB/s", "error", "class"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in sorted(problem["contestants"], key=lambda row: row["ms"][0]):
        ms, low, high = row["ms"]
        table.add_row(
            f"[bold]{row['id'].removeprefix('lowbit-')}[/]" if row["project"] == "lowbit" else row["id"],
            f"{ms:.4g}",
            f"{low:.3g}-{high:.3g}",
            f"{row['share'][0]:.2f}",
            f"{row['gbps']:.1f}",
            f"{row['error']['rms']:.0e}",
            row["accuracy"],
        )
    console.print(table)
    for each in problem["absent"]:
        console.print(f"  [yellow]absent[/] {each['id']}: {escape(each['reason'])}", highlight=False)


def show_goals(report: dict[str, Any], console: Console) -> None:
    """Each goal at its place; of those that are met everywhere only how many places there are."""
    judged = report["goals"]
    table = Table("goal", "where", "by", "value", "", box=None, pad_edge=False, title="Goals", title_justify="left")
    for goal in judged:
        style = "green" if goal["met"] else "red"
        table.add_row(
            goal["goal"], goal["where"], goal["by"], f"[{style}]{goal['value']:.2f}[/]", goal["wanted"].replace(" ", "")
        )
    console.print()
    console.print(table)
    met = sum(goal["met"] for goal in judged)
    console.print(f"{met} of {len(judged)} met")


# **Pictures.**


def headline(report: dict[str, Any]) -> list[Problem]:
    """The problems of 4 bits at the headline shape, or else at the largest shape that there is, on the number of
    threads that most batches were measured on; of two such numbers the larger."""
    found = [problem for problem in report["problems"] if problem["family"] == "4 bits"]
    shapes = {(problem["rows"], problem["columns"]) for problem in found}
    shape = HEADLINE if HEADLINE in shapes else max(shapes, default=(0, 0), key=lambda shape: shape[0] * shape[1])
    found = [problem for problem in found if (problem["rows"], problem["columns"]) == shape]
    counts = Counter(problem["threads"] for problem in found)
    threads = max(counts, default=0, key=lambda threads: (counts[threads], threads))
    return [problem for problem in found if problem["threads"] == threads]


def draw(report: dict[str, Any], folder: Path) -> None:
    """Both pictures, each under its name once it is complete."""
    chosen = headline(report) or report["problems"][:1]
    for name, picture in (("peers-roofline.svg", roofline), ("peers-error.svg", speed_against_error)):
        figure = picture(report, chosen)
        temporary = folder / f".{name}.partial.svg"
        with matplotlib.rc_context({"svg.hashsalt": "lowbit"}):
            figure.savefig(temporary, metadata={"Date": None})
        plt.close(figure)
        temporary.replace(folder / name)


def roofline(report: dict[str, Any], problems: list[Problem]) -> Any:
    """Operations a second over operations a byte, under the read limit and the ceilings of arithmetic."""
    figure, axes = plt.subplots(figsize=(8, 4.6), layout="constrained")
    read = max(row["read_gbps"] for problem in problems for row in problem["contestants"])
    ceilings = report["machine"]["ceilings"].get(str(problems[0]["threads"]), {})
    points = [(intensity(problem, row), gflops(problem, row)) for problem in problems for row in problem["contestants"]]
    left, right = min(x for x, _ in points) / 2, max(x for x, _ in points) * 2
    top = max([*ceilings.values(), max(y for _, y in points) * 1e9]) / 1e9
    axes.plot([left, min(right, top / read)], [left * read, min(right * read, top)], color="black", linewidth=1)
    for name, value in ceilings.items():
        axes.plot([value / 1e9 / read, right], [value / 1e9] * 2, color="black", linewidth=0.7, linestyle="--")
        axes.annotate(f" {name}: {value / 1e9:.0f}", (right, value / 1e9), fontsize=8, va="center")
    for problem in problems:
        for row in problem["contestants"]:
            mark(axes, intensity(problem, row), gflops(problem, row), row)
        x = sorted(intensity(problem, row) for row in problem["contestants"])[len(problem["contestants"]) // 2]
        axes.text(x, 0.02, f"batch {problem['batch']}", ha="center", transform=axes.get_xaxis_transform(), fontsize=8)
    axes.set(xscale="log", yscale="log", xlabel="operations for each byte of weights", ylabel="10⁹ operations a second")
    axes.set(xlim=(left, right), ylim=(axes.get_ylim()[0] / 1.5, None))
    said = f"{shape(problems[0])}, {count_threads(problems[0])}; solid line: reading at {read:.0f} GB/s"
    axes.set_title(said, fontsize=10, loc="left")
    legend(figure, axes)
    return figure


def speed_against_error(report: dict[str, Any], problems: list[Problem]) -> Any:
    """Time over error, a panel for each batch; lines divide the classes of accuracy, whose names stand above them."""
    columns = min(2, len(problems))
    lines = -(-len(problems) // columns)
    figure, panels = plt.subplots(
        lines, columns, figsize=(8, 0.5 + 3 * lines), layout="constrained", squeeze=False, sharex=True
    )
    for axes in panels.flat[len(problems) :]:
        axes.set_visible(False)
    for axes, problem in zip(panels.flat, problems, strict=False):
        for row in problem["contestants"]:
            mark(axes, row["error"]["rms"], row["ms"][0], row)
        for limit in CLASSES.values():
            axes.axvline(limit, color="black", linewidth=0.5, linestyle=":")
        axes.set(xscale="log", yscale="log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        said = f"{shape(problem)}, batch {problem['batch']}, {count_threads(problem)}"
        axes.set_title(said, fontsize=10, loc="left")
        name_classes(axes)
    figure.supylabel("milliseconds", fontsize=10)
    figure.supxlabel("root mean square error against float64, on the weights that the kernel holds", fontsize=10)
    legend(figure, panels[0][0])
    return figure


def name_classes(axes: Axes) -> None:
    """The class of accuracy between each two limits, at the lower edge."""
    limits = list(CLASSES.values())
    axes.set_xlim(limits[0] / 3e3, limits[-1])
    for name, low, high in zip(CLASSES, [limits[0] / 3e3, *limits], limits, strict=False):
        axes.text((low * high) ** 0.5, 0.02, name, fontsize=8, ha="center", transform=axes.get_xaxis_transform())
    axes.set_ylim(axes.get_ylim()[0] / 1.5)


def shape(problem: Problem) -> str:
    return f"{problem['rows']} × {problem['columns']}"


def count_threads(problem: Problem) -> str:
    return f"{problem['threads']} thread{'s' if problem['threads'] > 1 else ''}"


def mark(axes: Axes, x: float, y: float, row: dict[str, Any]) -> None:
    """One point. Its colour and form are the project's; the tables name the kernels."""
    own, project = row["project"] == "lowbit", row["project"]
    style: dict[str, Any] = {
        "s": 38 if own else 28,
        "zorder": 3 if own else 2,
        "linewidths": 0.4,
        "edgecolors": "black",
    }
    axes.scatter([x], [y], marker=MARKERS[project], color=COLORS[project], label=project, **style)


def legend(figure: Any, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    figure.legend(list(unique.values()), list(unique), loc="outside upper center", ncols=6, fontsize=9)


def intensity(problem: Problem, row: dict[str, Any]) -> float:
    """Operations for each byte of weights, a multiply-add counting two."""
    return float(operations(problem) / row["bytes"])


def gflops(problem: Problem, row: dict[str, Any]) -> float:
    """10⁹ operations a second."""
    return float(operations(problem) / row["ms"][0] / 1e6)


def operations(problem: Problem) -> int:
    return 2 * int(problem["rows"]) * int(problem["columns"]) * int(problem["batch"])


def main() -> None:
    source = Path(sys.argv[1])
    report = json.loads(source.read_text())
    show(report, Console())
    draw(report, source.parent)


if __name__ == "__main__":
    main()
