"""Rows of boxes, one for each word of a unit: where each code lies from bit 31 to bit 0, for each width.

Codes that one mask takes are marked: one in each quarter of the word for 2 and 3 bits, every second code for 4 bits,
and all four for 8 bits.
"""

import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

from lowbit.quantization.packing import BITS, CODES_PER_UNIT
from lowbit_cppyy.layout.interleaving import fields

rows = [(bits, word) for bits in BITS for word in range(3 if bits == 3 else 1)]
figure, axis = plt.subplots(figsize=(9, 3.2), layout="constrained")
for height, (bits, word) in enumerate(reversed(rows)):
    for code in range(CODES_PER_UNIT[bits]):
        for field in (field for field in fields(bits, code) if field.word == word):
            left = 32 - field.position - field.width  # the lowest bit stands on the right, as in writing
            colour = "#9ecae1" if code < 4 else "#f0f0f0"
            axis.add_patch(
                Rectangle((left, height), field.width, 0.8, facecolor=colour, edgecolor="0.3", linewidth=0.6)
            )
            axis.text(left + field.width / 2, height + 0.4, str(code), ha="center", va="center", fontsize=6.5)
for byte in range(1, 4):
    axis.axvline(8 * byte, color="#a63603", linewidth=1)
names = [f"{bits} bits" if bits != 3 else f"3 bits, word {word}" for bits, word in reversed(rows)]
axis.set(xlim=(0, 32), ylim=(-0.1, len(rows)), yticks=[n + 0.4 for n in range(len(rows))], yticklabels=names)
axis.set_xticks(range(0, 33, 8), ["31", "byte 3 | 2", "byte 2 | 1", "byte 1 | 0", "bit 0"])
axis.spines[:].set_visible(False)
axis.tick_params(length=0)
