"""Errors of the layers of the float32 encoder over the bits of a weight, one line for each quantiser and width.

Data: ``docs/data/results/encoder.json``.
"""

import json
from math import exp
from pathlib import Path

import matplotlib.pyplot as plt
from lowbit_docs.results import logarithms

rows = json.loads(Path("../data/results/encoder.json").read_text("utf-8"))["rows"]  # the folder of a figure is its own
methods = list(dict.fromkeys(row["settings"]["method"] for row in rows))
figure, axes = plt.subplots(figsize=(6, 3.8), layout="constrained")
for number, (method, marker) in enumerate(zip(methods, "os^D", strict=True)):
    for bits in (4, 3, 2):
        found = {"method": method, "bits": bits}.items()
        here = [row for row in rows if found <= row["settings"].items() and row["settings"]["group"]]
        sizes = [bits + 32 / row["settings"]["group"] for row in here]
        errors = [exp(logarithms(row).mean) for row in here]
        label = method if bits == 4 else None
        axes.plot(sizes, errors, marker=marker, markersize=4, linewidth=0.9, color=f"C{number}", label=label)
axes.set(xlabel="bits of a weight, with scale and zero", ylabel="squared error / squared results", yscale="log")
axes.grid(alpha=0.3)
axes.legend(fontsize=8)
