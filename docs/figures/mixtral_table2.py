"""Eight panels of bars: seconds a token by the paper's Table 2 and in virtual time, for four GPUs and two widths.

In both, the naive way is the slowest, and the full method the fastest or nearly so. Virtual time is shorter than the
measured time in most places. Data: ``bench/mixtral/table2.json``.
"""

import json
from pathlib import Path

import matplotlib.pyplot as plt

ROWS = ("full, one guess", "without pre-loading", "without LRU and pre-loading", "naive")
told = json.loads(Path("../../bench/mixtral/table2.json").read_text("utf-8"))  # the folder of a figure is its own

figure, panels = plt.subplots(2, 4, figsize=(9, 5), sharex=True, layout="constrained")
for place, column in enumerate(told["columns"]):
    axes = panels[place % 2][place // 2]
    found = {row["row"]: row for row in column["rows"]}
    for height, name in enumerate(reversed(ROWS)):
        row = found[name]
        axes.barh(
            height + 0.2, 1 / row["paper"], 0.36, color="0.75", label="the paper, measured" if not height else None
        )
        axes.barh(height - 0.2, row["seconds"], 0.36, color="C0", label="virtual time" if not height else None)
        axes.plot([row["link_seconds"]] * 2, [height - 0.4, height], color="k", linewidth=1)
    axes.set_title(f"{column['machine']}, {column['bits']}-bit", fontsize=9)
    axes.set_yticks(range(len(ROWS)), reversed(ROWS) if place < 2 else [""] * len(ROWS), fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
for axes in panels[1]:
    axes.set_xlabel("seconds a token", fontsize=8)
figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8)
