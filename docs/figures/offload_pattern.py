"""Three rows of squares, one a layer: which of 8 experts each token uses, and which LRU keeps for k = 2.

Experts that are used by one token are often used by the next ones, so the marks of the cache mostly lie on squares that
are used again. The stream is synthetic.
"""

import matplotlib.pyplot as plt
import numpy as np

from lowbit.model.replay import residual_walk
from lowbit.moe.offload import Arrangement, Offload, Request
from lowbit.moe.routing import gate, top_k, weights

LAYERS, EXPERTS, TOKENS, SLOTS = 3, 8, 48, 2
walk = residual_walk(4, tokens=TOKENS, layers=LAYERS, experts=EXPERTS)
scores = [gate(x, router).astype(np.float32) for x, router in zip(walk.inputs, walk.routers, strict=True)]
chosen = [top_k(logits, 2) for logits in scores]
shares = [weights(logits, experts) for logits, experts in zip(scores, chosen, strict=True)]

machine = Offload(Arrangement(LAYERS, EXPERTS, SLOTS))
figure, rows = plt.subplots(LAYERS, 1, figsize=(9, 4.6), sharex=True)
for t in range(TOKENS):
    for layer in range(LAYERS):
        kept = [resident.expert for resident in machine.slots[layer]]
        rows[layer].scatter([t] * len(kept), kept, s=14, marker="s", color="gray", zorder=3)
        machine.step(Request(layer, tuple(chosen[layer][t].tolist())))
for layer, axes in enumerate(rows):
    active = np.zeros((EXPERTS, TOKENS))
    for t in range(TOKENS):
        active[chosen[layer][t], t] = shares[layer][t]
    axes.imshow(active, cmap="Blues", aspect="auto", vmin=0, vmax=1, origin="lower")
    axes.set_ylabel(f"layer {layer}")
rows[-1].set_xlabel("token (blue: weight of an active expert; gray squares: in a slot when the token comes)")
