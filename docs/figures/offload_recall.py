"""Two panels of rising lines for a synthetic stream: recall of a cache by its slots, and of guesses by number.

The rules that adapt lie close together, between a static choice and the best possible rule. Guesses one layer ahead
find more than guesses two and ten layers ahead, and all find more than chance.
"""

import matplotlib.pyplot as plt

from lowbit.model.replay import RULES, guess_recall, replay_layers, residual_walk

LAYERS, EXPERTS, TOP_K = 12, 8, 2
NAMES = {"lru": "LRU", "lfu": "LFU", "lfru": "LFRU", "static": "static", "belady": "Belady (the bound)"}
walk = residual_walk(1, tokens=300, layers=LAYERS, experts=EXPERTS)

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True)
recordings = [walk.needed(layer, TOP_K).tolist() for layer in range(LAYERS)]
for rule, marker in zip(RULES, "os^vD", strict=True):
    values = [replay_layers(recordings, slots, rule).value for slots in range(1, EXPERTS + 1)]
    left.plot(range(1, EXPERTS + 1), values, marker=marker, markersize=4, label=NAMES[rule])
left.set_xlabel("slots of a layer, k")
left.set_ylabel("recall (synthetic routing)")
left.set_ylim(0, 1.02)

for ahead, style in ((1, "-"), (2, "--"), (10, ":")):
    values = []
    for count in range(1, EXPERTS + 1):
        found = [guess_recall(walk.needed(la, TOP_K), walk.guessed(la, ahead, count)) for la in range(ahead, LAYERS)]
        values.append(sum(f.resident for f in found) / sum(f.needed for f in found))
    layers = "layer" if ahead == 1 else "layers"
    right.plot(
        range(1, EXPERTS + 1), values, style, color="C0", marker="o", markersize=4, label=f"{ahead} {layers} ahead"
    )
chance = [count / EXPERTS for count in range(1, EXPERTS + 1)]
right.plot(range(1, EXPERTS + 1), chance, color="gray", linewidth=0.8, label="by chance")
right.set_xlabel("experts guessed")
for axes in (left, right):
    axes.grid(alpha=0.3)
    axes.legend()
