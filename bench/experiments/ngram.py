r"""An n-gram model of bytes: what a model of language has to beat before anything is claimed about it.

The probability of a byte after a context is mixed with that after the context without its first byte, by the rule of
Witten and Bell: a context that was seen c times, with t different followers, gives

.. math:: p(x \mid \text{context}) = \frac{c(x) + t\, p(x \mid \text{shorter context})}{c + t} .

Source: I. Witten and T. Bell (1991), The zero-frequency problem, method C.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import partial
from math import log
from typing import Any

from training.models import MODELS
from training.texts import split

from experiments.running import Experiment, Row

ORDERS = (4, 5, 6)
QUICK_BYTES = 1000


class NGrams:
    """Counts of the followers of every context of up to ``order - 1`` bytes."""

    def __init__(self, order: int, texts: Iterable[bytes]) -> None:
        self.order, self.followers = order, defaultdict[bytes, Counter[int]](Counter)
        for text in texts:
            for end in range(len(text)):
                for length in range(min(order, end + 1)):
                    self.followers[text[end - length : end]][text[end]] += 1

    def probability(self, context: bytes, byte: int) -> float:
        """Of a byte after a context.

        >>> NGrams(2, [b"abab"]).probability(b"a", ord("b"))
        0.8339843750000001
        """
        found = 1 / 256
        for length in range(min(self.order - 1, len(context)) + 1):
            seen = self.followers.get(context[len(context) - length :])
            if seen is None:
                break
            found = (seen[byte] + len(seen) * found) / (seen.total() + len(seen))
        return found

    def nats(self, text: bytes) -> float:
        """The negative log-likelihood of a text without its first byte."""
        most = self.order - 1
        return -sum(log(self.probability(text[max(0, end - most) : end], text[end])) for end in range(1, len(text)))


def rows(quick: bool) -> list[Row]:
    """Each order for the texts of each model, once where models have the same; a text is a window."""
    first: dict[tuple[str, ...], str] = {}
    for name, model in MODELS.items():
        first.setdefault(model.texts, name)
    return [
        Row({"texts of": model, "order": order}, partial(measured, model, order, quick))
        for model in first.values()
        for order in (ORDERS[:1] if quick else ORDERS)
    ]


def measured(model: str, order: int, quick: bool) -> dict[str, Any]:
    """The losses on the last tenth of each text, after the other nine tenths of all of them."""
    parts = [[part.tobytes()[: QUICK_BYTES if quick else None] for part in split(text)] for text in MODELS[model].texts]
    counts = NGrams(order, [train for train, _ in parts])
    held = [kept for _, kept in parts]
    nats = [round(counts.nats(text), 3) for text in held]
    return {"texts": list(MODELS[model].texts), "nats": nats, "counts": [len(text) - 1 for text in held]}


EXPERIMENT = Experiment("ngram", "Bits a byte of n-gram models, which a model of language has to beat.", rows)
