"""Points of size and perplexity of the small Mixtral, a line for each width of attention, along the widths of experts.

Data: ``docs/data/results/mixed.json``; beside it the paper's Mixtral-8x7B.
"""

import json
from math import expm1
from pathlib import Path

import matplotlib.pyplot as plt
from lowbit_docs.results import MIXTRAL_WIKI2, loss, of

rows = json.loads(Path("../data/results/mixed.json").read_text("utf-8"))["rows"]  # the folder of a figure is its own
base, widths = of(rows, attention=16, experts=16), (16, 4, 3, 2)
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
for attention, marker in zip(widths, "os^D", strict=True):
    own = [of(rows, attention=attention, experts=experts) for experts in widths]
    grown = [100 * expm1(loss(row, base).mean) for row in own]
    paper = [100 * (MIXTRAL_WIKI2[attention, experts] / MIXTRAL_WIKI2[16, 16] - 1) for experts in widths]
    for axes, values in ((left, grown), (right, paper)):
        axes.plot([str(each) for each in widths], values, marker=marker, markersize=4, label=f"attention {attention}")
for axes, title in ((left, "the small Mixtral"), (right, "the paper, Mixtral-8x7B, WikiText-2")):
    axes.set(title=title, xlabel="bits of the experts")
    axes.grid(alpha=0.3)
left.set_ylabel("increase of perplexity, %")
left.legend(fontsize=8)
