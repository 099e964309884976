"""What `token_parts` has measured, for people: lines on the terminal, and bars."""

from itertools import cycle
from pathlib import Path
from typing import Any

PRODUCTS, OTHERS = "product by ", ("attend", "experts")
BLUES, REDS = ("#3a5a94", "#5b7fbd", "#85a5d6", "#adc6ea", "#d3e2f6"), ("#c44e52", "#e08a8d")
GRAYS = {"norms and rotations": "#707070", "waiting": "#a0a0a0", "outside the step": "#d0d0d0"}


def shares_of(run: dict[str, Any]) -> dict[str, float]:
    """The milliseconds of a run by what they are spent on: the products, what else reads memory, and the rest."""
    parts = run["parts"]
    named = {part["part"]: part["ms"] for part in parts if part["part"].startswith((PRODUCTS, *OTHERS))}
    rest = sum(part["ms"] for part in parts) - sum(named.values())
    waiting = sum(part["wait_ms"] for part in parts)
    shown = {name.partition(", add")[0].partition(", swiglu")[0]: ms for name, ms in named.items()}
    return shown | {"norms and rotations": rest, "waiting": waiting, "outside the step": run["outside_ms"]}


def reading_ms(run: dict[str, Any]) -> float:
    """The milliseconds that reading the bytes of a token takes."""
    return float(sum(part["bytes"] for part in run["parts"]) / run["read_gbps"] / 1e6)


def title(run: dict[str, Any]) -> str:
    kind = "float32" if run["contract"] == "float32" else "8 bits"
    return f"{kind}, {run['threads']} thread{'s' if run['threads'] > 1 else ''}"


def show(report: dict[str, Any]) -> None:
    for run in report["runs"]:
        print(f"{title(run)}: {run['ms']:.2f} ms a token, {reading_ms(run):.2f} ms to read its bytes")
        print("  " + ", ".join(f"{name} {ms:.2f}" for name, ms in shares_of(run).items()))


def draw(report: dict[str, Any], file: Path) -> None:
    """A bar for each run, and a line where reading its bytes would end."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    runs = report["runs"]
    figure, axis = plt.subplots(figsize=(8, 0.6 * len(runs) + 1.6), layout="constrained")
    for place, run in enumerate(runs):
        left = 0.0
        blues, reds = cycle(BLUES), cycle(REDS)
        for name, ms in shares_of(run).items():
            color = GRAYS.get(name) or next(blues if name.startswith(PRODUCTS) else reds)
            axis.barh(place, ms, 0.62, left, color=color, label=name if place == 0 else None)
            left += ms
        reading = reading_ms(run)
        axis.plot(
            [reading, reading],
            [place - 0.42, place + 0.42],
            color="black",
            linewidth=2,
            label="reading" if place == 0 else None,
        )
    axis.set_yticks(range(len(runs)), [title(run) for run in runs])
    axis.invert_yaxis()
    axis.set_xlabel("milliseconds of a token")
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=4, fontsize=8, frameon=False)
    figure.savefig(file, metadata={"Date": None})
    plt.close(figure)
