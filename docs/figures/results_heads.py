"""Two panels of lines: perplexity over the number of key and value heads, and over the training that follows pooling.

Before any training the first heads predict better than the mean. After 10 % of the steps the mean of one head is best.
Data: ``docs/data/results/heads.json`` and ``uptraining.json``.
"""

import json
from math import exp
from pathlib import Path

import matplotlib.pyplot as plt
from lowbit_docs.results import models, nats, of
from matplotlib.ticker import NullLocator, ScalarFormatter

rows, trained = (  # the folder of a figure is its own
    json.loads(Path(f"../data/results/{name}.json").read_text("utf-8"))["rows"] for name in ("heads", "uptraining")
)
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
model = models(rows)[0]
whole = exp(nats(of(rows, model=model, kv_heads=8)))
for way, marker in zip(("mean", "first", "random"), "os^", strict=True):
    values = [exp(nats(of(rows, model=model, kv_heads=groups, way=way))) for groups in (4, 2, 1)]
    left.plot([8, 4, 2, 1], [whole, *values], marker=marker, markersize=4, label=way)
left.set(
    title="before training", xlabel="key and value heads", ylabel="perplexity of a byte", xscale="log", yscale="log"
)
left.set_xticks([1, 2, 4, 8], ["1", "2", "4", "8"])
left.xaxis.set_minor_locator(NullLocator())
left.set_yticks([4, 6, 10, 20, 40])
left.yaxis.set_major_formatter(ScalarFormatter())
left.yaxis.set_minor_locator(NullLocator())
for row, style in zip(trained, ("k-", "C0-", "C0--", "C0:", "C1:", "C2:"), strict=True):
    settings, points = row["settings"], row["points"]
    label = f"{settings['kv_heads']} heads" if settings["kv_heads"] > 1 else f"1 head, {settings['way']}"
    values = [exp(nats(point)) for point in points]
    right.plot([100 * point["part"] for point in points], values, style, marker="o", markersize=4, label=label)
right.set(title="training on", xlabel="% of the steps of the original training")
for axes in (left, right):
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
