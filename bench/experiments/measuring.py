"""What experiments measure on: models, text that they were not trained on, and losses in windows of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from training.models import CANTERBURY, MODELS
from training.texts import split

from lowbit.formats.fetch import fetch, read_text
from lowbit.model.decoder import AnyDecoder
from lowbit.model.perplexity import perplexity
from lowbit.model.weights import LlamaWeights
from lowbit.runtime import open_model

DENSE, GQA = ([f"{name}-{seed}" for seed in MODELS[name].seeds] for name in ("dense", "gqa"))
"""The small Llamas that are trained here, by the seeds of their training; those of `GQA` have few key and value heads
from the start."""
SPARSE = ["mixtral", *(f"varied-{seed}" for seed in MODELS["varied"].seeds)]
"""The small Mixtrals that are trained here."""
PUBLISHED = "smollm2-135m"
WINDOW, QUICK_WINDOW = 512, 64
CALIBRATION_TOKENS = 8192


@dataclass(frozen=True, eq=False)
class Subject:
    """A model with its texts.

    Attributes:
        weights: of the model.
        windows: tokens that it is measured on; no training or calibration has seen those of a model trained here.
        calibration: tokens of another text, or of another part.
    """

    weights: LlamaWeights
    windows: tuple[list[int], ...]
    calibration: list[int]


@cache
def subject(name: str, quick: bool) -> Subject:
    """A model by name: one of `DENSE`, `GQA` or `SPARSE`, or `PUBLISHED`.

    At least 16,384 tokens are scored, or a few where it shall be quick.
    """
    size = QUICK_WINDOW if quick else WINDOW
    if name == PUBLISHED:
        opened = open_model(fetch(PUBLISHED))
        text, other = (opened.tokenizer.encode(read_text(fetch(each)), begin=False) for each in ("lcet10", "alice29"))
        count = 1 if quick else 33
        return Subject(opened.weights, tuple(cut(text, size, count)), other[: 64 if quick else CALIBRATION_TOKENS])
    model, _, seed = name.partition("-")
    texts = MODELS[model].texts
    weights = open_model(MODELS[model].folder(int(seed or 0)) / "model").weights
    windows = [w for text in texts for w in cut(split(text)[1].tolist(), size, 1 if quick else -(-33 // len(texts)))]
    train = [byte for text in texts for byte in split(text)[0][: CALIBRATION_TOKENS // len(texts)].tolist()]
    return Subject(weights, tuple(windows), train[:128] if quick else train)


def cut(tokens: list[int], size: int, count: int) -> list[list[int]]:
    """Windows from the beginning of a text.

    >>> cut([1, 2, 3, 4, 5], 2, 2)
    [[1, 2], [3, 4]]
    """
    return [tokens[start : start + size] for start in range(0, size * count, size) if start + size <= len(tokens)]


def losses(decoder: AnyDecoder, windows: Sequence[list[int]]) -> dict[str, Any]:
    """Of each window the sum of the negative log-likelihoods in nats, and how many tokens were scored."""
    found = [perplexity(decoder, window, len(window)) for window in windows]
    return {"nats": [round(each.nll, 6) for each in found], "counts": [each.count for each in found]}


__all__ = ["CANTERBURY", "DENSE", "GQA", "PUBLISHED", "WINDOW", "Subject", "cut", "losses", "subject"]
