"""Two grids of words with a line through them in the order of memory: column panels, and the Z-curve.

In panels of two columns the line goes down one panel and then starts at the top of the next. On the Z-curve it visits
quarters of the grid one after another, and leaves out what lies outside a grid that is no square.
"""

import matplotlib.pyplot as plt
import numpy as np

from lowbit.kernels.layouts import ColumnPanels, ZCurve

rows, columns = 6, 8
figure, axes = plt.subplots(1, 2, figsize=(8, 3.4), layout="constrained")
panels, curve = ColumnPanels(rows, columns, panel=2), ZCurve(rows, columns, block_rows=1, block_columns=1)
for axis, layout, title in zip(axes, (panels, curve), ("column panels, P = 2", "Z-curve of 1 × 1 blocks"), strict=True):
    order = np.array([[layout.index(row, column) for column in range(columns)] for row in range(rows)])
    path = np.column_stack(np.unravel_index(np.argsort(order, axis=None), order.shape))
    axis.imshow(order, cmap="Blues", vmax=2 * rows * columns)
    axis.plot(path[:, 1], path[:, 0], color="#a63603", linewidth=1)
    for row in range(rows):
        for column in range(columns):
            axis.text(column, row, str(order[row, column]), ha="center", va="center", fontsize=8)
    axis.set(title=title, xlabel="column", ylabel="row of words", xticks=range(columns), yticks=range(rows))
