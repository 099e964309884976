"""The paper's figure 2 from a real routing: recall of the cache by k and rule, and of guesses by layers ahead.

The experiment ``routing`` measures all of it on each model that routes. Each passage begins with an empty cache, as a
conversation does; layers and passages are counted together (errata M9) and, where a list says so, layer by layer.
Guesses are measured in isolation from any cache.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from lowbit.model.replay import RULES, Recall, Rule, guess_recall, replay
from mixtral.recordings import AHEAD, GUESSED, Recordings

EXPERTS = 8


def together(counted: Iterable[Recall]) -> float:
    """Recall of all that was counted; not the mean of recalls."""
    listed = list(counted)
    return sum(one.resident for one in listed) / sum(one.needed for one in listed)


def cached(recordings: Recordings, layer: int, slots: int, rule: Rule) -> list[Recall]:
    """One layer's recall in each passage."""
    return [replay(recording, slots, rule) for recording in recordings.of_layer(layer)]


def guessed(recordings: Recordings, layer: int, ahead: int, count: int, renormed: bool = False) -> list[Recall]:
    """Recall of what was guessed for `layer` from `ahead` layers before it, in each passage."""
    guesses = (recordings.renormed if renormed else recordings.guesses)[ahead][:, layer - ahead]
    needed = recordings.chosen[:, layer]
    return [
        guess_recall(n.astype(np.int64), g[:, :count].astype(np.int64)) for n, g in zip(needed, guesses, strict=True)
    ]


def cache_recall(recordings: Recordings, slots: int, rule: Rule) -> float:
    """Over all layers and passages."""
    return together(one for layer in range(recordings.layers) for one in cached(recordings, layer, slots, rule))


def guesses_recall(recordings: Recordings, ahead: int, count: int, renormed: bool = False) -> float:
    """Over all layers that can be guessed for, and passages."""
    layers = range(ahead, recordings.layers)
    return together(one for layer in layers for one in guessed(recordings, layer, ahead, count, renormed))


def shares(recordings: Recordings) -> list[list[float]]:
    """Of each layer the part of all uses that each expert had."""
    counts = [np.bincount(recordings.chosen[:, layer].ravel(), minlength=EXPERTS) for layer in range(recordings.layers)]
    return [(count / count.sum()).tolist() for count in counts]


def measure(recordings: Recordings) -> dict[str, Any]:
    """All that the figure shows, and its layers one by one."""
    slots, counts = range(1, EXPERTS + 1), range(1, GUESSED + 1)
    entropy = [-sum(share * np.log2(share) for share in layer if share) for layer in shares(recordings)]
    return {
        "tokens": int(recordings.tokens.size),
        "cache": {rule: rounded(cache_recall(recordings, k, rule) for k in slots) for rule in RULES},
        "cache_by_layer": {f"lru_k{k}": rounded(lru_by_layer(recordings, k)) for k in (2, 4)},
        "guesses": {str(a): rounded(guesses_recall(recordings, a, c) for c in counts) for a in AHEAD},
        "guesses_renormed": {str(a): rounded(guesses_recall(recordings, a, c, True) for c in counts) for a in AHEAD},
        "guesses_by_layer": {
            str(a): rounded(together(guessed(recordings, layer, a, 2)) for layer in range(a, recordings.layers))
            for a in AHEAD
        },
        "shares": [rounded(layer) for layer in shares(recordings)],
        "entropy_bits": rounded(entropy),
    }


def lru_by_layer(recordings: Recordings, slots: int) -> list[float]:
    """LRU's recall of each layer."""
    return [together(cached(recordings, layer, slots, "lru")) for layer in range(recordings.layers)]


def rounded(values: Iterable[float]) -> list[float]:
    return [round(float(value), 4) for value in values]
