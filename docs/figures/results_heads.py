"""Lines of perplexity over the number of key and value heads, for three ways to make them, before any uptraining.

Data: ``docs/data/results/heads.json``.
"""

import json
from math import exp
from pathlib import Path

import matplotlib.pyplot as plt
from lowbit_docs.results import models, nats, of

rows = json.loads(Path("../data/results/heads.json").read_text("utf-8"))["rows"]  # the folder of a figure is its own
figure, panels = plt.subplots(1, len(models(rows)), figsize=(7, 3.4), sharey=True, squeeze=False, layout="constrained")
for axes, model in zip(panels[0], models(rows), strict=True):
    whole = exp(nats(of(rows, model=model, kv_heads=8)))
    for way, marker in zip(("mean", "first", "random"), "os^", strict=True):
        values = [exp(nats(of(rows, model=model, kv_heads=groups, way=way))) for groups in (4, 2, 1)]
        axes.plot([8, 4, 2, 1], [whole, *values], marker=marker, markersize=4, label=way)
    axes.set(title=model, xlabel="key and value heads", xscale="log", yscale="log")
    axes.set_xticks([1, 2, 4, 8], ["1", "2", "4", "8"])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
panels[0, 0].set_ylabel("perplexity of a byte")
panels[0, 0].legend(fontsize=8)
