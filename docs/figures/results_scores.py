"""Loss of perplexity beside the error of attention and beside that of the keys, for each place, block and order.

Data: ``docs/data/results/scores.json`` and ``ksort.json``, of one model.
"""

import json
from math import expm1
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from lowbit_docs.results import loss, models, of

results = Path("../data/results")  # the folder of a figure is its own
errors, losses = (json.loads((results / f"{name}.json").read_text("utf-8"))["rows"] for name in ("scores", "ksort"))
(model,) = models(errors)
base = of(losses, model=model, part="floats")
figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained", sharey=True)
for row in errors:
    settings = row["settings"]
    if settings["part"] == "channels" or settings["change"]:
        continue
    told = {name: settings[name] for name in ("part", "block", "order")}
    grown = 100 * expm1(loss(of(losses, model=model, **told), base).mean)
    color = "#c44e52" if "before" in told["part"] else "#4c72b0"
    marker = {"unsorted": "o", "calibrated": "^", "Hadamard": "*", "keys over queries": "D"}.get(told["order"], "s")
    for axis, name in zip(axes, ("errors", "key_errors"), strict=True):
        axis.scatter(np.mean(row[name]), grown, 48, color, marker=marker, alpha=1.0 if told["block"] == 32 else 0.45)
for marker, said in (
    ("o", "unsorted"),
    ("s", "norm"),
    ("^", "calibrated"),
    ("D", "keys over queries"),
    ("*", "Hadamard"),
):
    axes[1].scatter([], [], 48, "#6b7785", marker=marker, label=said)
axes[1].legend(fontsize=8, title="red: before RoPE; pale: blocks of 16", title_fontsize=8)
axes[0].set_xlabel("divergence of attention, nats")
axes[1].set_xlabel("squared error of the keys over their squares")
axes[0].set_ylabel("increase of perplexity, %")
for axis in axes:
    axis.spines[["top", "right"]].set_visible(False)
