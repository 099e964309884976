"""Bars of the increase of perplexity with keys in BFP12, by the order of their channels, for blocks of half a head.

Data: ``docs/data/results/ksort.json``; the first pair of bars is the paper's.
"""

import json
from math import expm1
from pathlib import Path

import matplotlib.pyplot as plt
from lowbit_docs.results import LLAMA2_7B, LLAMA2_7B_FLOAT, loss, models, of

rows = json.loads(Path("../data/results/ksort.json").read_text("utf-8"))["rows"]  # the folder of a figure is its own
SHOWN = [
    ("before RoPE", "unsorted", "#9aa5b1"),
    ("before RoPE", "row norm", "#c44e52"),
    ("before RoPE", "calibrated", "#e5a6a8"),
    ("before RoPE", "keys over queries", "#8c2d31"),
    ("after RoPE", "unsorted", "#6b7785"),
    ("after RoPE", "calibrated", "#4c72b0"),
    ("after RoPE", "Hadamard", "#a3b8da"),
]
named = models(rows)
figure, axes = plt.subplots(figsize=(9, 3.6), layout="constrained")
for place, value in enumerate(LLAMA2_7B[2]):
    axes.bar(place * 0.115 - 0.35, 100 * (value / LLAMA2_7B_FLOAT - 1), 0.105, color=SHOWN[place][2])
for number, model in enumerate(named, 1):
    base = of(rows, model=model, part="floats")
    head = max(row["settings"]["block"] for row in rows if row["settings"]["model"] == model)
    for shift, (part, order, color) in enumerate(SHOWN):
        row = of(rows, model=model, part=f"keys {part}", block=head // 2, order=order)
        found = loss(row, base)
        label = f"{part}, {order}" if number == 1 else None
        error = 100 * (found.error or 0.0)
        axes.bar(number + shift * 0.115 - 0.35, 100 * expm1(found.mean), 0.105, yerr=error, color=color, label=label)
axes.set_xticks(range(len(named) + 1), ["paper, Llama2-7B", *named])
axes.set_ylabel("increase of perplexity, %")
axes.spines[["top", "right"]].set_visible(False)
axes.legend(fontsize=8, ncols=2)
