"""Two long bars: the streams of two panels of a 4-bit matrix in the order of addresses.

In each, a group is a run of units of words, then its scales, then its zeros; the next group follows without a gap.
"""

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Patch

from lowbit.quantization.affine import quantize
from lowbit_cppyy.layout.panels import LINE, PanelLayout

matrix = quantize(
    np.random.default_rng(0).normal(size=(64, 128)).astype(np.float32),
    bits=4, group_size=32, convention="zero_point", scale_dtype="float16",
)  # fmt: skip
layout = PanelLayout.of(matrix, 64)
colours = {"a unit: 64 words": "#9ecae1", "64 scales": "#a1d99b", "64 zeros": "#fdae6b"}

figure, axis = plt.subplots(figsize=(9, 2.2), layout="constrained")
for panel in range(layout.panels):
    for group in range(layout.groups):
        start = layout.group_start(group, panel)
        units = [start + unit * layout.unit_elements for unit in range(layout.group_units(group))]
        scales = layout.index_scale(group, panel)
        zeros = scales + layout.scale_elements
        parts = [(at, layout.unit_elements, "a unit: 64 words") for at in units]
        parts += [(scales, layout.scale_elements, "64 scales"), (zeros, layout.zero_elements, "64 zeros")]
        for at, size, kind in parts:
            left = (at - panel * layout.panel_elements) / LINE
            axis.barh(-panel, size / LINE, left=left, height=0.6, color=colours[kind], edgecolor="0.3", linewidth=0.6)
        middle = (
            start - panel * layout.panel_elements + zeros + layout.zero_elements - panel * layout.panel_elements
        ) / 2
        axis.text(middle / LINE, 0.42 - panel, f"group {group}", ha="center", va="bottom", fontsize=8)
lines = layout.panel_elements // LINE
axis.set(xlim=(0, lines), ylim=(1 - layout.panels - 0.4, 0.75), xlabel="lines of 64 bytes from where the panel begins")
axis.set_yticks([-panel for panel in range(layout.panels)], [f"panel {panel}" for panel in range(layout.panels)])
axis.spines[["top", "right", "left"]].set_visible(False)
axis.tick_params(axis="y", length=0)
figure.legend(
    [Patch(color=colour) for colour in colours.values()], list(colours), loc="outside upper center", ncols=3, fontsize=8
)
