"""A picture of a search: predictions against measurements, and the fastest kernels.

The command and the documentation draw it from the JSON of ``lowbit tune --json``.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from lowbit.errors import ArgumentError
from lowbit.system.storage import written

Document = Mapping[str, Any]

COLOURS = {
    "shift": "#a6611a",
    "fold": "#3182bd",
    "subnormal": "#17becf",
    "table": "#31a354",
    "sums": "#e6550d",
    "dot4": "#756bb1",
    "pairs": "#bcbd22",
}
OTHER = "#636363"
BARS = 12
"""The number of bars for the fastest kernels; those that `mark` names are added."""


def draw(search: Document, scatter: Any, bars: Any) -> None:
    """Draw one search.

    Args:
        search: of ``lowbit tune --json``.
        scatter: a matplotlib axis for predicted cycles against the time in the cache.
        bars: a matplotlib axis for the rates from memory.
    """
    trials = search["trials"]
    measured = [trial for trial in trials if trial["cache_gb_per_s"]]
    for method in sorted({method_of(trial) for trial in measured}):
        points = [trial for trial in measured if method_of(trial) == method]
        times = [nanoseconds(trial, search) for trial in points]
        colour = COLOURS.get(method, OTHER)
        scatter.plot([cycles(trial) for trial in points], times, "o", color=colour, label=method, alpha=0.6)
    if measured:
        ratio = median(nanoseconds(trial, search) / cycles(trial) for trial in measured)
        most = max(map(cycles, measured))
        scatter.plot([0, most], [0, ratio * most], "--", color=OTHER, linewidth=1, label="in proportion")
    scatter.set(xlabel="predicted: cycles", ylabel="measured in the cache: ns", xlim=(0, None), ylim=(0, None))
    scatter.set_title(f"a register of {search['lanes']} products", fontsize="small")
    scatter.legend(fontsize="x-small")
    _bars(search, bars)


def _bars(search: Document, bars: Any) -> None:
    """Draw the rates from memory, the fastest on top."""
    trials = [trial for trial in search["trials"] if trial["memory_gb_per_s"]]
    ranked = sorted(trials, key=lambda trial: float(trial["memory_gb_per_s"]))
    marked = [trial for trial in ranked if mark(trial, search)]
    for height, trial in enumerate([each for each in ranked if each in marked or each in ranked[-BARS:]]):
        bars.barh(height, trial["memory_gb_per_s"], color=COLOURS.get(method_of(trial), OTHER), alpha=0.6)
        bars.text(0, height, f" {short(trial)}{mark(trial, search)}", va="center", fontsize="xx-small")
    bars.set(yticks=[], xlabel="measured from memory: GB/s")
    title = f"{search['bits']} bits, {search['purpose']}, {search['instruction_set']}, {search['threads']} thread(s)"
    bars.set_title(title, fontsize="small")


def nanoseconds(trial: Document, search: Document) -> float:
    """The time of one thread for one register of products, in the cache."""
    each = trial["predicted"]["bytes_per_code"] * search["lanes"] / search["vectors"]
    return float(each * search["threads"] / trial["cache_gb_per_s"])


def cycles(trial: Document) -> float:
    """The predicted cycles of a trial."""
    return float(trial["predicted"]["cycles"])


def method_of(trial: Document) -> str:
    """The method, from the name of the kernel."""
    return str(trial["kernel"]).split("_")[4]


def short(trial: Document) -> str:
    """The part of a kernel's name that differs within its search."""
    return "_".join(str(trial["kernel"]).split("_")[4:7])


def mark(trial: Document, search: Document) -> str:
    """Whether a kernel is the default or the chosen one."""
    marks = [name for name in ("default", "chosen") if trial["kernel"] == search[name]]
    return f" ({', '.join(marks)})" if marks else ""


def picture(searches: Sequence[Document]) -> Any:
    """A figure with a row for each search.

    Raises:
        ArgumentError: no searches.
    """
    from matplotlib.figure import Figure

    if not searches:
        raise ArgumentError("searches", "none", "at least one")
    figure = Figure(figsize=(8.4, 3.6 * len(searches)), layout="constrained")
    axes = figure.subplots(len(searches), 2, squeeze=False)
    for search, (scatter, bars) in zip(searches, axes, strict=True):
        draw(search, scatter, bars)
    return figure


def save(searches: Sequence[Document], file: Path) -> None:
    """Write the picture; it replaces an older one only when it is complete."""
    metadata = {"Date": None} if file.suffix == ".svg" else {}
    with written(file) as stream:
        picture(searches).savefig(stream, format=file.suffix[1:], metadata=metadata)
