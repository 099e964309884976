"""Two areas: the blocks of 4-bit codes that fit a cache of 32 KiB by equation 3, and with scales and zeros of groups.

Both are bounded by falling curves of columns over codes. The second lies inside the first and is about half as large. A
point marks the block that equation 5 chooses, 312 × 197, and another the block of the extended model, 16 × 1632.
"""

import matplotlib.pyplot as plt
import numpy as np

from lowbit.kernels.blocking import equation_3, equation_3_extended, solve, solve_extended

BITS, CACHE, GROUP = 4, 32 * 1024 * 8, 16
m_b = np.unique(np.geomspace(8, 8000, 400).astype(int))


def widest(model):
    """The widest block of each height that fits, by a model of its size."""
    return np.array([(CACHE - model(m, 0)) / (model(m, 1) - model(m, 0)) for m in m_b])


printed = widest(lambda m, t: equation_3(BITS, m, t))
extended = widest(lambda m, t: equation_3_extended(BITS, m, t, GROUP))
figure, axis = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
axis.fill_between(m_b, printed, 8, color="#deebf7", label="fits by equation 3")
axis.fill_between(m_b, extended, 8, color="#9ecae1", label=f"fits with groups of {GROUP}")
axis.plot(m_b, printed, color="#3182bd")
axis.plot(m_b, extended, color="#08519c")

one = solve(BITS, CACHE, m_u=1, t_u=1)
tiled = solve_extended(BITS, CACHE, GROUP, m_u=8, t_u=4, lanes=8, rows=4096, columns=11008)
for block, marker, name in ((one, "o", "equation 5"), (tiled, "s", "extended, whole tiles of 8 × 32")):
    axis.plot(block.m_b, block.t_b, marker, color="#a63603", label=f"{name}: {block.m_b} × {block.t_b}")
axis.set(
    xscale="log", yscale="log", xlim=(8, 8000), ylim=(8, 8000), xlabel="$m_b$, codes down", ylabel="$t_b$, columns"
)
axis.legend(loc="lower left", fontsize=8)
