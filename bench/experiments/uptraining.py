"""GQA, figures 4 to 6: pooled models that are trained a little further, by the part of the original training.

The heads of a trained model are pooled (`experiments.heads`), and all its weights are trained on, on the same texts,
for 1, 5 and 10 % of the steps that it was trained for, at a tenth of its highest rate. A model that keeps its eight
heads is trained on in the same way, so that what pooling cost is told from what more training gave. Needs torch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from safetensors.numpy import load_file
from training.models import MODELS, Shape

from experiments.heads import GROUPS, WAYS, made_heads
from experiments.measuring import DENSE, losses, subject
from experiments.running import Experiment, Row
from lowbit.model.decoder import Decoder
from lowbit.runtime import open_model

PARTS = (0.0, 0.01, 0.05, 0.1)
RATE = 0.1
"""Of the highest rate of the original training."""


def rows(quick: bool) -> list[Row]:
    """Every number of heads, pooled by the mean; one head also by the other ways."""
    return list(_rows(quick))


def _rows(quick: bool) -> Iterator[Row]:
    for groups in GROUPS[2:3] if quick else GROUPS:
        for way in WAYS if groups == 1 else WAYS[:1]:  # the paper compares the ways for one head
            settings: dict[str, str | int] = {"model": DENSE[0], "kv_heads": groups, "way": way}
            yield Row(settings, partial(measured, DENSE[0], groups, way, quick))


def measured(model: str, groups: int, way: str, quick: bool) -> dict[str, Any]:
    """The losses after each part of the training, the last of them as the row's own."""
    from training.further import Further  # torch is imported only where something is trained

    name, _, seed = model.partition("-")
    told, windows = MODELS[name], subject(model, quick).windows
    steps = [2 * number for number in range(len(PARTS))] if quick else [round(part * told.steps) for part in PARTS]
    training = Further(told, int(seed), *start(model, groups, way), rate=RATE * told.rate)
    points = []
    with TemporaryDirectory() as folder:
        for part, step in zip(PARTS, steps, strict=True):
            training.until(step)
            training.write(Path(folder))
            points.append({"part": part, **losses(Decoder(open_model(Path(folder)).weights), windows)})
    return {"nats": points[-1]["nats"], "counts": points[-1]["counts"], "points": points}


def start(model: str, groups: int, way: str) -> tuple[Mapping[str, Any], Shape]:
    """The tensors of a model with pooled heads by their names in a checkpoint, and its shape."""
    name, _, seed = model.partition("-")
    told, rng = MODELS[name], np.random.default_rng(0)
    files = sorted((told.folder(int(seed)) / "model").glob("*.safetensors"))
    tensors = {key: value.astype(np.float32) for file in files for key, value in load_file(file).items()}
    for number in range(told.shape.num_hidden_layers):
        for part in ("k", "v"):
            key = f"model.layers.{number}.self_attn.{part}_proj.weight"
            heads = told.shape.num_key_value_heads
            tensors[key] = np.ascontiguousarray(made_heads(tensors[key].T, heads, groups, way, rng).T)
    return tensors, replace(told.shape, num_key_value_heads=groups)


EXPERIMENT = Experiment(
    "uptraining", "Perplexity of pooled models by the part of the training that follows (GQA, figures 4 to 6).", rows
)
