"""Lines of the increase of perplexity over the bits of a weight, one for each quantiser.

Data: ``docs/data/results/qigen.json``; the paper's LLaMA-7B is drawn in grey.
"""

import json
from math import expm1
from pathlib import Path

import matplotlib.pyplot as plt
from lowbit_docs.results import LLAMA_7B, LLAMA_7B_FLOAT, loss, models, of

rows = json.loads(Path("../data/results/qigen.json").read_text("utf-8"))["rows"]  # the folder of a figure is its own
methods = list(dict.fromkeys(row["settings"]["method"] for row in rows if row["settings"]["group"]))
figure, panels = plt.subplots(1, len(models(rows)), figsize=(7, 3.8), sharey=True, squeeze=False, layout="constrained")
for axes, model in zip(panels[0], models(rows), strict=True):
    base = of(rows, model=model, method="floats")
    for method, marker in zip(methods, "os^D", strict=True):
        points = []
        for row in rows:
            bits, group = row["settings"]["bits"], row["settings"]["group"]
            if group and row["settings"]["model"] == model and row["settings"]["method"] == method:
                points.append((bits + 32 / group, 100 * expm1(loss(row, base).mean)))
        axes.plot(*zip(*sorted(points), strict=True), marker=marker, markersize=4, linewidth=0.9, label=method)
    paper = [(bits + 32 / group, 100 * (value / LLAMA_7B_FLOAT - 1)) for (group, bits), value in LLAMA_7B.items()]
    axes.plot(*zip(*sorted(paper), strict=True), "x", color="0.5", label="paper, LLaMA-7B, GPTQ")
    axes.set(title=model, xlabel="bits of a weight, with scale and zero", yscale="log")
    axes.grid(alpha=0.3)
panels[0, 0].set_ylabel("increase of perplexity, %")
panels[0, 0].legend(fontsize=8)
