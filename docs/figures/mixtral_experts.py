"""Three rows of squares, one a layer: which of 8 trained experts each byte uses, and which LRU keeps for k = 2.

Few gray squares lie on blue ones: of the experts that a byte uses, the byte before used 0.27, where chance is 0.25.
Data: ``bench/mixtral/routings.npz``.
"""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from lowbit.moe.offload import Arrangement, Offload, Request

SHOWN, TOKENS, SLOTS = (0, 7, 15), 64, 2
FIRST, SECOND = 0.9, 0.5  # shades of the likelier expert of a token, and of the other one
with np.load(Path("../../bench/mixtral/routings.npz")) as file:  # the folder of a figure is its own
    passage = file["chosen"][0]  # layers, tokens, 2
experts = int(passage.max()) + 1

machine = Offload(Arrangement(len(SHOWN), experts, SLOTS))
figure, rows = plt.subplots(len(SHOWN), 1, figsize=(9, 4.6), sharex=True)
active = np.zeros((len(SHOWN), experts, TOKENS))
for t in range(TOKENS):
    for row, layer in enumerate(SHOWN):
        kept = [resident.expert for resident in machine.slots[row]]
        rows[row].scatter([t] * len(kept), kept, s=14, marker="s", color="gray", zorder=3)
        pair = tuple(passage[layer, t].tolist())
        active[row, pair, t] = FIRST, SECOND
        machine.step(Request(row, pair))
for row, layer in enumerate(SHOWN):
    rows[row].imshow(active[row], cmap="Blues", aspect="auto", vmin=0, vmax=1, origin="lower")
    rows[row].set_ylabel(f"layer {layer}")
rows[-1].set_xlabel("byte (blue: active, darker the likelier one; gray squares: in a slot when the byte comes)")
