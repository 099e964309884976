"""GQA, figures 4 to 6: pooled models that are trained a little further, by the part of the original training.

The heads of a trained model are pooled (`experiments.heads`), and all its weights are trained on, on the same texts,
for 1, 5 and 10 % of the steps that it was trained for, at a tenth of its highest rate. A model that keeps its eight
heads is trained on in the same way, so that what pooling cost is told from what more training gave; so is a sibling
that had few heads from the start of its training. `lowbit_torch` trains, so it needs torch.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from training.models import FEW_HEADS, MODELS
from training.texts import split

from experiments.heads import GROUPS, WAYS, pooled
from experiments.measuring import DENSE, GQA, losses, subject
from experiments.running import Experiment, Row
from lowbit.model.decoder import Decoder
from lowbit.uptraining import Course

PARTS = (0.0, 0.01, 0.05, 0.1)
RATE = 0.1
"""Of the highest rate of the original training."""
OTHER_PLACES = 1000
"""Added to the seed, so that the windows are other than those of the original training."""


FROM_THE_START = "from the start"


def rows(quick: bool) -> list[Row]:
    """Of each model every number of heads, pooled by the mean, one head also by the other ways; and the siblings."""
    return [_row(*each, quick) for each in (_quick() if quick else _whole())]


def _whole() -> Iterator[tuple[str, int, str]]:
    for model in DENSE:
        for groups in GROUPS:
            for way in WAYS if groups == 1 else WAYS[:1]:  # the paper compares the ways for one head
                yield model, groups, way
    for model in GQA:
        yield model, FEW_HEADS.num_key_value_heads, FROM_THE_START


def _quick() -> Iterator[tuple[str, int, str]]:
    yield DENSE[0], 2, WAYS[0]


def _row(model: str, groups: int, way: str, quick: bool) -> Row:
    return Row({"model": model, "kv_heads": groups, "way": way}, partial(measured, model, groups, way, quick))


def measured(model: str, groups: int, way: str, quick: bool) -> dict[str, Any]:
    """The losses after each part of the training, the last of them as the row's own."""
    from lowbit_torch import Uptraining  # torch is imported only where something is trained

    name, _, seed = model.partition("-")
    told, it = MODELS[name], subject(model, quick)
    steps = [2 * number for number in range(len(PARTS))] if quick else [round(part * told.steps) for part in PARTS]
    course = Course(steps[-1], RATE * told.rate, told.tokens, seed=int(seed) + OTHER_PLACES, dtype="float16")
    texts = [split(text)[0].astype(np.int64) for text in told.texts]
    start = it.weights if way == FROM_THE_START else pooled(it.weights, groups, way)
    training, points = Uptraining(start, texts, course, tied=False), []
    for part, step in zip(PARTS, steps, strict=True):
        training.until(step)
        points.append({"part": part, **losses(Decoder(training.weights()), it.windows)})
    return {"nats": points[-1]["nats"], "counts": points[-1]["counts"], "points": points}


EXPERIMENT = Experiment(
    "uptraining", "Perplexity of pooled models by the part of the training that follows (GQA, figures 4 to 6).", rows
)
