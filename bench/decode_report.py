"""From a report of `decode` to a table and a picture: ``python bench/decode_report.py decode.json``."""

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


def show(report: dict[str, Any]) -> None:
    console = Console()
    for run in report["runs"]:
        spins = f"spin {run['spin_before']:.2f} and {run['spin_after']:.2f} of {run['threads']}"
        if "turns" in run:
            spins += f", {run['free_turns']} of {run['turns']} turns on free cores"
        title = f"{run['model']}, {run['threads']} thread(s), prompt of {run['prompt_tokens']}; {spins}"
        console.print(f"\n[bold]{title}[/]", highlight=False)
        table = Table("", box=None, pad_edge=False, header_style="dim")
        for name in ("tokens/s", "from-to", "first token", "prompt t/s", "at most", "alike", "MB"):
            table.add_column(name, justify="right")
        for generator, alike in zip(run["generators"], run["equal_tokens"], strict=True):
            speed, low, high = generator["tokens_per_second"]
            first = generator["first_seconds"][0]
            table.add_row(
                generator["name"],
                f"{speed:.1f}",
                f"{low:.1f}-{high:.1f}",
                f"{1e3 * first:.0f} ms",
                f"{run['prompt_tokens'] / first:.0f}",
                f"{limit(run, generator):.0f}",
                str(alike),
                str(generator.get("peak_megabytes", "")),
            )
        console.print(table)
        for name, reason in run["absent"].items():
            console.print(f"  [yellow]absent[/] {name}: {reason}", highlight=False)
    console.print("[dim]at most: tokens/s if a token took as long as reading the file; alike: tokens before the first")
    console.print("[dim]that differs from the first engine's; MB: the most memory in use[/]")


def limit(run: dict[str, Any], generator: dict[str, Any]) -> float:
    """Tokens a second if each took only as long as reading the file once."""
    return float(generator["read_gbps"] * 1e9 / generator.get("model_bytes", run["model_bytes"]))


def label(run: dict[str, Any], *, several: bool) -> str:
    """What is below the bars of a run; its model too, if the report has several."""
    told = f"{run['threads']} thread{'s' * (run['threads'] > 1)}, prompt of {run['prompt_tokens']}"
    return f"{Path(run['model']).stem[:28].rstrip('.-')}\n{told}" if several else told


def draw(report: dict[str, Any], path: Path) -> None:
    """Bars of tokens a second, steady state left and prompt right, for each number of threads."""
    figure, panels = plt.subplots(2, 1, figsize=(8, 6.4), layout="constrained")
    runs = report["runs"]
    for axes, title in zip(panels, ("after the first token", "reading the prompt"), strict=True):
        for index, run in enumerate(runs):
            bars(axes, index, run, title == "reading the prompt")
        axes.set_xticks(
            range(len(runs)),
            [label(run, several=len({run["model"] for run in runs}) > 1) for run in runs],
            fontsize=8,
        )
        axes.set_title(title, fontsize=9)
        axes.set_ylabel("tokens a second")
        axes.margins(y=0.12)
    handles, labels = panels[0].get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    figure.legend(list(unique.values()), list(unique), loc="outside lower center", ncols=3, fontsize=7)
    temporary = path.with_name(f".{path.name}.partial.svg")
    figure.savefig(temporary, metadata={"Date": None})
    plt.close(figure)
    temporary.replace(path)


def bars(axes: Any, index: int, run: dict[str, Any], prompt: bool) -> None:
    """The bars of one number of threads, each with its interval."""
    width = 0.8 / len(run["generators"])
    for slot, generator in enumerate(run["generators"]):
        if prompt:
            middle, least, most = (run["prompt_tokens"] / generator["first_seconds"][n] for n in (0, 2, 1))
        else:
            middle, least, most = generator["tokens_per_second"]
        x = index + (slot + 0.5) * width - 0.4
        axes.bar(x, middle, 0.95 * width, color=COLORS[slot % len(COLORS)], label=generator["name"])
        axes.errorbar(x, middle, [[middle - least], [most - middle]], color="black", linewidth=0.8, capsize=2)
        axes.annotate(f"{middle:.0f}", (x, most), ha="center", va="bottom", fontsize=5)


if __name__ == "__main__":
    report = json.loads(Path(sys.argv[1]).read_text())
    show(report)
    draw(report, Path(sys.argv[1]).with_suffix(".svg"))
