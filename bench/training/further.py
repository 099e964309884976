"""Training on from weights that are there, at a constant rate."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from training.models import Model, Shape
from training.network import forward
from training.texts import split
from training.train import BALANCE, CLIP, DECAY
from training.writing import write_model

LENGTH = 256


class Further:
    """Weights that are trained on.

    The data of a step is drawn from (seed, step) alone, and from other places than those of the first training.
    """

    def __init__(self, model: Model, seed: int, tensors: Mapping[str, Any], shape: Shape, *, rate: float) -> None:
        torch.use_deterministic_algorithms(True)
        self.model, self.shape, self.seed, self.step = model, shape, seed, 0
        self.parameters = {name: torch.from_numpy(value.copy()).requires_grad_() for name, value in tensors.items()}
        self.texts = [split(name)[0] for name in model.texts]
        matrices = [each for each in self.parameters.values() if each.dim() > 1]
        vectors = [each for each in self.parameters.values() if each.dim() == 1]
        groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=True)

    def until(self, step: int) -> None:
        """Train until `step` steps are done in all."""
        while self.step < step:
            rng = np.random.default_rng([self.seed + 1000, self.step])
            sizes = np.array([text.size for text in self.texts])
            pieces = []
            for _ in range(self.model.tokens // LENGTH):
                text = self.texts[rng.choice(len(sizes), p=sizes / sizes.sum())]
                start = int(rng.integers(text.size - LENGTH))
                pieces.append(text[start : start + LENGTH + 1])
            tokens = torch.from_numpy(np.stack(pieces).astype(np.int64))
            logits = forward(self.parameters, self.shape, tokens[:, :-1]).logits
            self.optimizer.zero_grad()
            functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            torch.nn.utils.clip_grad_norm_(self.parameters.values(), CLIP)
            self.optimizer.step()
            self.step += 1

    def write(self, folder: Path) -> None:
        """Write the directory of the model, in float16."""
        write_model(folder, self.parameters, self.shape, BALANCE)
