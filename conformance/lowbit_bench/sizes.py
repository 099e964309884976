"""The sizes of a model, and numbers drawn for the arguments of its operations."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from lowbit.arrays import Array
from lowbit.linear.integer import ACTIVATIONS
from lowbit.numbers.floats import FLOATS
from lowbit.quantization import bfp
from lowbit.tensor_formats.stored import FORMATS
from lowbit_bench.inputs import USUAL, Problem, drawn_matrix


@dataclass(frozen=True)
class Model:
    """Sizes of a model: hidden state and feed-forward layer, query heads, key heads, their channels, layers, experts,
    and experts that a token needs."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    experts: int = 8
    chosen: int = 2


MODELS: Mapping[str, Model] = MappingProxyType(
    {
        "smollm2-135m": Model(576, 1536, 9, 3, 64, 30),
        "qwen2.5-0.5b": Model(896, 4864, 14, 2, 64, 24),
        "llama-7b": Model(4096, 11008, 32, 32, 128, 32),
        "mixtral-8x7b": Model(4096, 14336, 32, 8, 128, 32),
    }
)
CONTEXT = 1024


def stored_part(format: str, options: Mapping[str, int], part: str) -> tuple[str, tuple[tuple[str, int], ...]]:
    """The format of keys or values with its options, which differ for KIVI; groups have the same size in both."""
    name = format.replace("keys", part)
    known = {"bits": 4, "tokens": 32, "group_size": options.get("tokens", 32)} | dict(options)
    return name, tuple((each, known.get(each, USUAL.get(each, 1))) for each in FORMATS[name].options)


class Inputs:
    """Draws the arguments of one problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self._rng = problem, np.random.default_rng(sum(value for _, value in problem.sizes))

    def __getattr__(self, size: str) -> int:
        return self.problem.size(size)

    def normal(self, *shape: int, deviation: float = 1.0) -> Array:
        """Normal numbers of the type of the activations."""
        numbers = self._rng.normal(scale=deviation, size=shape).astype(np.float32)
        return numbers.astype(FLOATS[self.problem.activations].dtype)

    def weights(self, *shape: int) -> Array:
        """Normal numbers, scaled so that results stay near 1."""
        return self.normal(*shape, deviation=shape[-2] ** -0.5)

    def words(self, *shape: int) -> Array:
        """Random words."""
        return self._rng.integers(0, 2**32, shape, np.uint32)

    def patterns(self, count: int) -> Array:
        """Random numbers of 7 bits: finite and positive in e4m3fn, except for 0."""
        return self._rng.integers(0, 127, count, np.uint8)

    def some_experts(self) -> Array:
        """The experts that one token needs in one layer."""
        return self._rng.permutation(self.experts)[: self.chosen]

    def codes(self) -> Array:
        """Codes of 4 bits, hidden × inner."""
        return self._rng.integers(0, 16, (self.hidden, self.inner), np.uint8)

    def blocks(self, rows: int, columns: int) -> bfp.Blocks:
        return bfp.cast(self.normal(rows, columns), ACTIVATIONS)

    def cache(self, part: str) -> Any:
        """Keys or values of all heads in the format of the problem."""
        name, options = stored_part(self.problem.format, dict(self.problem.options), part)
        return drawn_matrix(name, self.kv_heads * self.head_dim, self.context, options)

    def chosen_experts(self) -> Array:
        return np.array([self.some_experts() for _ in range(self.batch)], np.int64)
