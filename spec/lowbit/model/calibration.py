"""Calibration: the inputs that the matrices of a block see while the model reads a text.

GPTQ needs them. The text is cut into windows, and their residual streams go through the model one block at a time. A
block first runs with its original weights, and the inputs of its matrices are kept; then it is quantised; then it runs
again with its quantised weights, so that the next block is calibrated on what it will see. Memory holds only the
weights of one block and its inputs: tokens × (3 hidden + feed-forward) float32 numbers.

Matrices that read the same value, such as query, key and value, share their inputs. An expert sees only the tokens that
are routed to it.

Source: GPTQ (arXiv 2210.17323) §4, Setup: a block at a time, on the inputs of the partly quantised model.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lowbit.arrays import F32, F64
from lowbit.contract.checks import check_integer
from lowbit.model.block import FORMULAS, Interpreter, Linear, Place, check_scores, parameters_of
from lowbit.model.config import LlamaConfig
from lowbit.model.decoder import embedded
from lowbit.model.matrices import Embedding, Matrix, to_float
from lowbit.model.step import block_of
from lowbit.model.weights import LayerWeights

SHARED = {"key": "query", "value": "query", "up": "gate"}
"""Matrices with the same inputs as another one."""


def source_of(name: str) -> str:
    """The matrix whose inputs are kept for this one.

    >>> source_of("feed_forward.experts[3].up"), source_of("value")
    ('feed_forward.experts[3].gate', 'query')
    """
    before, dot, part = name.rpartition(".")
    return before + dot + SHARED.get(part, part)


@dataclass(frozen=True)
class CalibrationText:
    """A text to calibrate on.

    Attributes:
        tokens: at least one.
        window: the number of tokens read together.

    Raises:
        ArgumentError: no tokens; a window below 1.
    """

    tokens: tuple[int, ...]
    window: int = 512

    def __post_init__(self) -> None:
        check_integer("tokens of the calibration text", len(self.tokens), least=1)
        check_integer("window of the calibration text", self.window, least=1)

    def fields(self) -> dict[str, Any]:
        """What determines the inputs of a model's matrices, in types that JSON has.

        >>> CalibrationText((1, 2), 512).fields()["tokens"]
        2
        """
        digest = hashlib.sha256(np.array(self.tokens, "<i8").tobytes()).hexdigest()
        return {"tokens": len(self.tokens), "window": self.window, "sha256": digest}

    def streams(self, config: LlamaConfig, embedding: F32 | Embedding) -> "Streams":
        """The residual streams of its windows before the first block of a model."""
        return Streams.of(config, embedding, self.tokens, self.window)


@dataclass
class Seen:
    """The inputs of the matrices of a block.

    Attributes:
        parts: for a matrix of `source_of`, the inputs of its calls: float32, T × K each.
    """

    parts: dict[str, list[F32]] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """The numbers of all inputs."""
        return sum(part.size for parts in self.parts.values() for part in parts)

    def of(self, name: str) -> "Seen":
        """The inputs of one matrix alone."""
        return Seen({source_of(name): self.parts.get(source_of(name), [])})

    def hessian(self, name: str) -> F64 | None:
        """X^T X of a matrix: float64, K × K, symmetric; None if all its inputs were zero."""
        found = self.parts.get(source_of(name), [])
        if not any(part.any() for part in found):
            return None
        total = np.zeros((found[0].shape[1],) * 2)
        for part in found:
            wide = part.astype(np.float64)
            total += wide.T @ wide  # numpy multiplies a matrix by itself symmetrically
        return total


class Streams:
    """The residual streams of the windows of a text, before one block.

    Attributes:
        config: of the model.
        windows: float64, T × hidden each.
    """

    def __init__(self, config: LlamaConfig, windows: Sequence[F64]) -> None:
        self.config, self.windows = config, list(windows)

    @classmethod
    def of(cls, config: LlamaConfig, embedding: F32 | Embedding, tokens: Sequence[int], window: int) -> "Streams":
        """The streams before the first block.

        Args:
            config: of the model.
            embedding: of the model.
            tokens: of the text.
            window: tokens of a window; the last may be short.
        """
        ids = np.array(tokens, np.int64)
        parts = [ids[start : start + window] for start in range(0, len(ids), window)]
        return cls(config, [embedded(embedding, part, config.embedding_scale) for part in parts])

    def seen(self, number: int, layer: LayerWeights) -> Seen:
        """The inputs of the matrices of a block."""
        return self.passed(number, layer)[0]

    def passed(self, number: int, layer: LayerWeights) -> tuple[Seen, "Streams"]:
        """The inputs of the matrices of a block, and the streams after it."""
        seen = Seen()

        def watch(name: str, matrix: F32) -> Linear:
            if source_of(name) != name:
                return lambda x: x @ matrix
            kept = seen.parts.setdefault(name, [])

            def linear(x: F32) -> F32:
                kept.append(x)
                return x @ matrix

            return linear

        return seen, Streams(self.config, self._run(number, layer, watch))

    def through(self, number: int, layer: LayerWeights) -> "Streams":
        """The streams after a block."""
        return Streams(self.config, self._run(number, layer, lambda name, matrix: lambda x: x @ matrix))

    def _run(self, number: int, layer: LayerWeights, make: Callable[[str, F32], Linear]) -> list[F64]:
        """The windows after a block.

        Raises:
            ArgumentError: a number is not finite, because the weights are too large.
        """
        names = {id(matrix): name for name, matrix in layer.linears().items()}

        def linear(matrix: Matrix) -> Linear:
            return make(names[id(matrix)], to_float(matrix))

        block = Interpreter(block_of(self.config, number, layer), parameters_of(layer), linear, FORMULAS)
        results = []
        for x in self.windows:
            results.append(block(x, self._place(len(x))))
            check_scores(results[-1], "a number of the residual stream")
        return results

    def _place(self, count: int) -> Place:
        config = self.config
        rotations = {each: each.rotation(config.head_dim, 0, count) for each in config.frequencies}
        return Place(rotations, [FORMULAS.cache(config.kv_heads, config.head_dim, count)])

    def tensors(self) -> Mapping[str, F64]:
        """The windows by name, for a file."""
        return {f"window{number:06}": x for number, x in enumerate(self.windows)}
