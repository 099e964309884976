"""Lines of the increase of perplexity over the bits of a weight, one for each quantiser and width.

Data: ``docs/data/results/qigen.json``; the paper's LLaMA-7B is drawn in grey.
"""

import json
from math import expm1
from pathlib import Path

import matplotlib.pyplot as plt
from lowbit_docs.results import LLAMA_7B, LLAMA_7B_FLOAT, loss, models, of

rows = json.loads(Path("../data/results/qigen.json").read_text("utf-8"))["rows"]  # the folder of a figure is its own
methods = list(dict.fromkeys(row["settings"]["method"] for row in rows if row["settings"]["group"]))
figure, panels = plt.subplots(1, len(models(rows)), figsize=(9, 3.8), sharey=True, squeeze=False, layout="constrained")
for axes, model in zip(panels[0], models(rows), strict=True):
    base = of(rows, model=model, method="floats")
    for number, (method, marker) in enumerate(zip(methods, "os^D", strict=True)):
        for bits in (4, 3, 2):
            found = {"model": model, "method": method, "bits": bits}.items()
            here = [row for row in rows if found <= row["settings"].items() and row["settings"]["group"]]
            sizes = [bits + 32 / row["settings"]["group"] for row in here]
            grown = [100 * expm1(loss(row, base).mean) for row in here]
            label = method if bits == 4 else None
            axes.plot(sizes, grown, marker=marker, markersize=4, linewidth=0.9, color=f"C{number}", label=label)
    paper = [(bits + 32 / group, 100 * (value / LLAMA_7B_FLOAT - 1)) for (group, bits), value in LLAMA_7B.items()]
    axes.plot(*zip(*sorted(paper), strict=True), "x", color="0.5", label="paper, LLaMA-7B, GPTQ")
    axes.set(title=model, xlabel="bits of a weight, with scale and zero", yscale="log")
    axes.grid(alpha=0.3)
panels[0, 0].set_ylabel("increase of perplexity, %")
panels[0, 0].legend(fontsize=8)
