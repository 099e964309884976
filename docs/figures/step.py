"""Two columns of lines of code, a block of Llama on the left and one of Gemma 3 on the right. Coloured bands join the
lines that the threads of a compiled step run between two waits: products with what follows in the same columns, what is
done to single heads, attention, and norms.
"""

from dataclasses import replace

import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

from lowbit.model.config import LlamaConfig
from lowbit.model.program import Line
from lowbit.model.step import block
from lowbit_cppyy.step.phases import Norm, lines_of, phases_of

COLOURS = {"Norm": "#f0f0f0", "Multiply": "#9ecae1", "PerHead": "#c7e9c0", "Attend": "#fdd0a2", "Add": "#dadaeb"}
LLAMA = LlamaConfig(30, 576, 1536, 9, 3, 64, 49152, 2048, 1e5, 1e-5)
GEMMA = replace(LLAMA, activation="gelu", window=512, full_every=6, local_rope_base=1e4)
NORMS = ["attention_norm", "feed_forward_norm"]
MODELS = {
    "Llama": (LLAMA, NORMS),
    "Gemma 3": (
        GEMMA,
        [*NORMS, "query_norm", "key_norm", "attention_post_norm", "feed_forward_post_norm"],
    ),
}


def short(line: Line) -> str:
    """A line without its settings."""
    inside = ", ".join(line.inputs) + (f"; {line.parameter}" if line.parameter else "")
    return f"{line.out} = {line.kind}({inside})" if line.out else f"{line.kind}({inside})"


figure, axes = plt.subplots(1, 2, figsize=(9, 5), layout="constrained", sharey=True)
for axis, (name, (config, vectors)) in zip(axes, MODELS.items(), strict=True):
    height = 0.0
    for phase in phases_of(block(config, 0, vectors), config):
        lines = lines_of(phase)
        band = Rectangle((0, -height - len(lines)), 1, len(lines), facecolor=COLOURS[type(phase).__name__], linewidth=0)
        axis.add_patch(band)
        for number, line in enumerate(lines):
            place = -height - number - 0.5
            axis.text(0.02, place, short(line), va="center", fontsize=7, family="monospace", color="black")
        height += len(lines)
        if not isinstance(phase, Norm):
            axis.plot([0, 1], [-height, -height], color="#a63603", linewidth=1.5)
    axis.set(xlim=(0, 1), ylim=(-20.2, 0), xticks=[], yticks=[], title=name)
    axis.spines[:].set_visible(False)
