"""Two panels of lines: perplexity over the number of key and value heads, and over the training that follows pooling.

Before any training the first heads predict better than the mean. After 10 % of the steps the mean of one head is best
with one seed, and equal to the first head with the other. Models of other seeds than the first are drawn faintly. Data:
``docs/data/results/heads.json`` and ``uptraining.json``.
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
STYLES = {
    (8, "mean"): ("k-", "8 heads"),
    (4, "mean"): ("C0-", "4 heads"),
    (2, "mean"): ("C0--", "2 heads"),
    (2, "from the start"): ("C3-", "2 heads from the start"),
    (1, "mean"): ("C0:", "1 head, mean"),
    (1, "first"): ("C1:", "1 head, first"),
    (1, "random"): ("C2:", "1 head, random"),
}
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
for number, model in enumerate(models(rows)):
    whole = exp(nats(of(rows, model=model, kv_heads=8)))
    for color, (way, marker) in enumerate(zip(("mean", "first", "random"), "os^", strict=True)):
        values = [exp(nats(of(rows, model=model, kv_heads=groups, way=way))) for groups in (4, 2, 1)]
        look = {"marker": marker, "markersize": 4, "color": f"C{color}", "alpha": 0.35 if number else 1.0}
        left.plot([8, 4, 2, 1], [whole, *values], label=None if number else way, **look)
left.set(
    title="before training", xlabel="key and value heads", ylabel="perplexity of a byte", xscale="log", yscale="log"
)
left.set_xticks([1, 2, 4, 8], ["1", "2", "4", "8"])
left.xaxis.set_minor_locator(NullLocator())
left.set_yticks([4, 6, 10, 20, 40])
left.yaxis.set_major_formatter(ScalarFormatter())
left.yaxis.set_minor_locator(NullLocator())
for row in trained:
    settings, points = row["settings"], row["points"]
    style, label = STYLES[settings["kv_heads"], settings["way"]]
    first = settings["model"].endswith("-0")
    places, values = [100 * point["part"] for point in points], [exp(nats(point)) for point in points]
    look = {"marker": "o", "markersize": 4, "alpha": 1.0 if first else 0.35}
    right.plot(places, values, style, label=label if first else None, **look)
right.set(title="training on", xlabel="% of the steps of the original training")
for axes in (left, right):
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
