"""Two panels of lines by group size: bits for each weight of a matrix, and the size of LLaMA-7B in GiB.

Small groups cost most: at 2 bits, groups of 16 take 4.1 bits for each weight, and one group a column takes 2. LLaMA-7B
takes from 2.5 GiB at 2 bits to 9 GiB at 8 bits.
"""

import matplotlib.pyplot as plt

from lowbit.quantization.memory import GROUP_SIZES, LLAMA, float_bytes, matrix_bits, model_bytes
from lowbit.quantization.packing import BITS

shape, groups = LLAMA["7b"], (*GROUP_SIZES, None)
names = [*map(str, GROUP_SIZES), "column"]
figure, axes = plt.subplots(1, 2, figsize=(8.4, 3.6), layout="constrained")
for bits, marker in zip(BITS, "os^D", strict=True):
    each = [matrix_bits(bits, 4096, 4096, group_size) / 4096**2 for group_size in groups]
    axes[0].plot(names, each, marker=marker, label=f"{bits} bits")
    axes[1].plot(names, [model_bytes(shape, bits, size) / 2**30 for size in groups], marker=marker)
axes[0].set(title="bits for each weight of a 4096 × 4096 matrix", ylim=(0, None), xlabel="group size")
axes[1].set(title=f"LLaMA-7B in GiB (float32: {float_bytes(shape) / 2**30:.1f})", ylim=(0, None), xlabel="group size")
axes[0].legend(fontsize=8, ncols=2, loc="lower right")
