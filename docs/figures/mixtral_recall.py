"""Two panels of rising lines for a trained model: recall of a cache by its slots, and of guesses by their number.

LRU, LFU and LFRU lie close together, at most 0.2 below the best possible rule. Guesses one layer ahead find about half
of the experts with one guess and more than 0.9 with three, far above chance. Data: ``docs/data/results/routing.json``.
"""

import json
from pathlib import Path

import matplotlib.pyplot as plt

NAMES = {"lru": "LRU", "lfu": "LFU", "lfru": "LFRU", "static": "static", "belady": "Belady (the bound)"}
told = json.loads(Path("../data/results/routing.json").read_text("utf-8"))["rows"][0]  # a figure's folder is its own
experts = len(told["shares"][0])

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True)
for (rule, values), marker in zip(told["cache"].items(), "os^vD", strict=True):
    left.plot(range(1, experts + 1), values, marker=marker, markersize=4, label=NAMES[rule])
left.set_xlabel("slots of a layer, k")
left.set_ylabel("recall (trained model)")
left.set_ylim(0, 1.02)

for color, kind, note in (("C0", "guesses", ""), ("C1", "guesses_renormed", ", re-normalised")):
    for (ahead, values), style in zip(told[kind].items(), ("-", "--", ":"), strict=True):
        label = f"{ahead} layer{'s' if ahead != '1' else ''} ahead{note}"
        right.plot(range(1, len(values) + 1), values, style, color=color, marker="o", markersize=4, label=label)
counts = range(1, len(told["guesses"]["1"]) + 1)
right.plot(counts, [count / experts for count in counts], color="gray", linewidth=0.8, label="by chance")
right.set_xlabel("experts guessed")
right.set_xticks(list(counts))
for axes in (left, right):
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
