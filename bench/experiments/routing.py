"""MoE offloading, figures 1 and 2: which experts neighbouring tokens share, what a cache keeps, what can be guessed.

Each model reads passages that it was not trained on, token by token (`mixtral.record`). The routing of ``mixtral`` was
recorded once and is kept, because table 2 is simulated on it too.
"""

from functools import partial
from typing import Any

from mixtral.recall import measure
from mixtral.record import passages, record
from mixtral.recordings import Recordings
from training.models import MODELS

from experiments.measuring import QUICK_WINDOW, SPARSE, subject
from experiments.running import Experiment, Row


def rows(quick: bool) -> list[Row]:
    """One for each model."""
    return [Row({"model": model}, partial(measured, model, quick)) for model in (SPARSE[:1] if quick else SPARSE)]


def measured(model: str, quick: bool) -> dict[str, Any]:
    """The tables of `mixtral.recall`."""
    if model == "mixtral" and not quick:
        return measure(Recordings.load())
    weights = subject(model, quick).weights
    name = model.partition("-")[0]
    read = passages(QUICK_WINDOW if quick else MODELS[name].shape.max_position_embeddings, name)
    return measure(record(weights, read[:1] if quick else read, {}))


EXPERIMENT = Experiment(
    "routing", "Recall of an expert cache and of guesses on real routings (MoE offloading, figures 1 and 2).", rows
)
