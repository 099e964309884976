"""Two lines: the time of attention for one token over the number of key and value heads, for two lengths of the cache.

From 32 heads to 4 the time falls with the bytes of the cache; with fewer it hardly falls, or no longer.
Data: ``docs/data/results/groups.json``.
"""

import json
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.ticker import NullLocator

rows = json.loads(Path("../data/results/groups.json").read_text("utf-8"))["rows"]
figure, axes = plt.subplots(figsize=(5.5, 3.4), layout="constrained")
for row, marker in zip(rows, "os", strict=True):
    heads = [each["kv_heads"] for each in row["groups"]]
    times = [1e3 * each["median"] for each in row["groups"]]
    spread = [[1e3 * abs(each["quartiles"][n] - each["median"]) for each in row["groups"]] for n in (0, 1)]
    axes.errorbar(heads, times, spread, marker=marker, markersize=4, label=f"{row['settings']['context']} tokens")
axes.set(xlabel="key and value heads", ylabel="ms", xscale="log", yscale="log", ylim=(0.1, 10))
axes.set_xticks([1, 2, 4, 8, 16, 32], ["1", "2", "4", "8", "16", "32"])
axes.xaxis.set_minor_locator(NullLocator())
axes.grid(alpha=0.3)
axes.legend(fontsize=8)
