"""The models that are trained here: their shapes, their texts, and how long they train."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

BENCH = Path(__file__).parent.parent

CANTERBURY = ("alice29", "asyoulik", "lcet10", "plrabn12")
"""The four texts of the Canterbury corpus that are prose, drama, a report and verse."""


@dataclass(frozen=True)
class Shape:
    """The numbers of a model, by the names of `config.json`.

    Attributes:
        num_local_experts: experts of a layer; 0 for one dense feed-forward part.
        num_experts_per_tok: experts that a token goes to.
    """

    num_hidden_layers: int = 16
    hidden_size: int = 64
    intermediate_size: int = 128
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 16
    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    vocab_size: int = 256
    max_position_embeddings: int = 512
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5

    @property
    def sparse(self) -> bool:
        """Whether tokens are routed to experts."""
        return self.num_local_experts > 0

    def numbers(self) -> dict[str, Any]:
        """Those that `config.json` has."""
        return {name: value for name, value in asdict(self).items() if self.sparse or "experts" not in name}


@dataclass(frozen=True)
class Model:
    """A model that is trained here.

    Attributes:
        shape: its numbers.
        texts: names of `lowbit.formats.fetch`; the last tenth of each is kept from training.
        steps: of training.
        tokens: of a step.
        rate: the highest learning rate.
        place: the folder that gets `model` and training.json, in ``bench``, for a seed.
        seeds: those whose models are kept in the repository.
    """

    shape: Shape
    texts: tuple[str, ...]
    steps: int
    tokens: int
    rate: float
    place: str
    seeds: tuple[int, ...] = (0,)

    def folder(self, seed: int) -> Path:
        """The folder that gets `model` and training.json."""
        return BENCH / self.place.format(seed=seed)


DENSE = Shape(
    num_hidden_layers=8,
    hidden_size=256,
    intermediate_size=384,
    num_attention_heads=8,
    num_key_value_heads=8,
    head_dim=32,
    num_local_experts=0,
    num_experts_per_tok=0,
)
FEW_HEADS = replace(DENSE, num_key_value_heads=2)

MODELS: Mapping[str, Model] = MappingProxyType(
    {
        "mixtral": Model(Shape(), ("alice29", "lcet10"), 2000, 2048, 3e-3, "mixtral"),
        "dense": Model(DENSE, CANTERBURY, 1200, 4096, 2e-3, "trained/dense-{seed}", seeds=(0, 1)),
        "gqa": Model(FEW_HEADS, CANTERBURY, 1200, 4096, 2e-3, "trained/gqa-{seed}", seeds=(0, 1)),
        "varied": Model(Shape(), (*CANTERBURY, "brotli-c"), 3000, 2048, 3e-3, "trained/varied-{seed}"),
    }
)
"""By name.

- ``mixtral``: its routing is recorded;
- ``dense``: a Llama with as many key and value heads as query heads;
- ``gqa``: the same with two key and value heads from the start of its training;
- ``varied``: the Mixtral of ``mixtral``, trained for longer on more texts, one of them source code.
"""
