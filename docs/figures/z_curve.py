"""Three grids of words with a line through them in the order of memory: column panels, the Z-curve, nested panels.

In panels of two columns the line goes down one panel and then starts at the top of the next. On the Z-curve it visits
quarters of the grid one after another, and leaves out what lies outside a grid that is no square. In nested panels it
fills a block of 3 × 8 words row by row, then the block to its right in the same panel, then the blocks below.
"""

import matplotlib.pyplot as plt
import numpy as np

from lowbit.kernels.layouts import ColumnPanels, NestedPanels, ZCurve

figure, axes = plt.subplots(1, 3, figsize=(13, 3.4), width_ratios=(1, 1, 2.6), layout="constrained")
drawn = {
    "column panels, P = 2": ColumnPanels(6, 8, panel=2),
    "Z-curve of 1 × 1 blocks": ZCurve(6, 8, block_rows=1, block_columns=1),
    "nested panels, P = 16": NestedPanels(6, 24, panel=16),
}
for axis, (title, layout) in zip(axes, drawn.items(), strict=True):
    rows, columns = layout.rows, layout.columns
    order = np.array([[layout.index(row, column) for column in range(columns)] for row in range(rows)])
    path = np.column_stack(np.unravel_index(np.argsort(order, axis=None), order.shape))
    axis.imshow(order, cmap="Blues", vmax=2 * rows * columns)
    axis.plot(path[:, 1], path[:, 0], color="#a63603", linewidth=1)
    for row in range(rows):
        for column in range(columns):
            axis.text(column, row, str(order[row, column]), ha="center", va="center", fontsize=8)
    axis.set(title=title, xlabel="column", ylabel="row of words", xticks=range(columns), yticks=range(rows))
