"""Bars of time relative to llama.cpp, for seven types of GGUF files and 4096 × 11008 weights, with one and two threads.

Data: ``docs/data/stored.json``. lowbit's kernels for 8 bits take 0.47 to 0.55 of llama.cpp's time with one thread, and
0.42 to 0.60 with two.
"""

import json
from pathlib import Path

import matplotlib.pyplot as plt

report = json.loads(Path("../data/stored.json").read_text("utf-8"))  # the folder of a figure is its own
problems = {
    (each["family"].split()[1], each["threads"]): each
    for each in report["problems"]
    if any(row["project"] == "llama.cpp" for row in each["contestants"])
}
KINDS = list(dict.fromkeys(kind for kind, _ in problems))
THREADS = sorted({threads for _, threads in problems})
SHOWN = {
    "8 bits": ("lowbit, activations of 8 bits", "#c44e52"),
    "float32": ("lowbit, float32 activations", "#e5a6a8"),
}


def relative(problem: dict, accuracy: str) -> float:
    """The least time of lowbit in a class over llama.cpp's least."""
    rows = [(row["project"] == "lowbit", row["accuracy"], row["ms"][0]) for row in problem["contestants"]]
    peer = min(ms for own, _, ms in rows if not own)
    return min(ms for own, kind, ms in rows if own and kind == accuracy) / peer


figure, axes = plt.subplots(1, len(THREADS), figsize=(8, 3.4), sharey=True, layout="constrained")
for axis, threads in zip(axes, THREADS, strict=True):
    for shift, (accuracy, (label, color)) in zip((-0.2, 0.2), SHOWN.items(), strict=True):
        for place, kind in enumerate(KINDS):
            ratio = relative(problems[kind, threads], accuracy)
            axis.barh(place + shift, ratio, 0.36, color=color, label=label if place == 0 else None)
            axis.text(ratio + 0.02, place + shift, f"{ratio:.2f}", va="center", fontsize=9)
    axis.set(title=f"{threads} thread{'s' if threads > 1 else ''}", xlim=(0, 1.4))
    axis.axvline(1, color="0.6", linewidth=0.8)
    axis.spines[["top", "right"]].set_visible(False)
axes[0].set_yticks(range(len(KINDS)), [kind.upper() for kind in KINDS])
axes[0].invert_yaxis()
figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=2, fontsize=9, frameon=False)
figure.supxlabel("time relative to llama.cpp, which takes 1: shorter is faster", fontsize=10)
