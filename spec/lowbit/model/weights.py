"""The weights of a decoder: what a file reader makes and what a decoder is built from.

The names are Llama's, from which the others descend. A vector that only a descendant has, such as Qwen2's biases and
Gemma's further norms, is None where it is absent. The feed-forward part of a block is dense in Llama; in Mixtral it is
a router and many experts.

A linear layer's weights are a `Matrix` of the chapter `matrices`, K × N.

**Layer by layer.** A model need not fit in memory to be used: a `LayeredWeights` provides one block after another, from
memory or from disk. A `LlamaWeights`, which holds all of them, is also one.

A plan (`quantization_plan`) makes a second model from the first, with fewer bits or other groups; `weight_bytes` counts
the bytes of each. Weights that were stored in 4 bits and are quantised again have lost accuracy twice, so a perplexity
measured on them must be reported as *re-quantised*.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import numpy as np

from lowbit.arrays import F32
from lowbit.attention.ksort import LayerOrders
from lowbit.contract.checks import check_array, check_finite, check_integer
from lowbit.errors import ArgumentError
from lowbit.model.config import LlamaConfig
from lowbit.model.matrices import Embedding, Matrix, shape_of
from lowbit.model.program import Program

Change = Callable[[str, Matrix], Matrix]
"""Returns the replacement of a matrix, given its name, as in `LayerWeights.linears`, and the matrix."""

Progress = Callable[[int, int], None]
"""Called with the work done and the total work."""


@dataclass(frozen=True, eq=False)
class GatedWeights:
    """A gated linear unit: the feed-forward part of a dense block, or one expert.

    Attributes:
        gate: hidden × feed_forward.
        up: hidden × feed_forward.
        down: feed_forward × hidden.
    """

    gate: Matrix
    up: Matrix
    down: Matrix

    def linears(self) -> dict[str, Matrix]:
        """Its matrices by name."""
        return {"gate": self.gate, "up": self.up, "down": self.down}

    def changed(self, change: Change, prefix: str = "") -> Self:
        """The same with every matrix replaced; names begin with the prefix."""
        parts: dict[str, Any] = {name: change(prefix + name, matrix) for name, matrix in self.linears().items()}
        return replace(self, **parts)


@dataclass(frozen=True, eq=False)
class SparseWeights:
    """The feed-forward part of a sparse block.

    Attributes:
        router: float32, hidden × E: the gate that scores the experts. It is small, and errors in it change the choice
            of experts, so it is never quantised.
        experts: E of them.
    """

    router: F32
    experts: tuple[GatedWeights, ...]

    def linears(self) -> dict[str, Matrix]:
        """Its matrices by name, the router first."""
        named = {
            f"experts[{number}].{name}": matrix
            for number, expert in enumerate(self.experts)
            for name, matrix in expert.linears().items()
        }
        return {"router": self.router} | named

    def changed(self, change: Change, prefix: str = "") -> Self:
        """The same with every matrix of the experts replaced; names begin with the prefix."""
        experts = enumerate(self.experts)
        return replace(
            self, experts=tuple(expert.changed(change, f"{prefix}experts[{number}].") for number, expert in experts)
        )


FeedForwardWeights = GatedWeights | SparseWeights


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """One block: the four matrices of attention, the feed-forward part, and vectors of float32.

    Attributes:
        attention_norm: hidden: gain before attention; None for no norm, as OLMo 2 has it.
        query: hidden × H·d_h, half-split channels.
        key: hidden × G·d_h, half-split channels.
        value: hidden × G·d_h.
        output: H·d_h × hidden.
        feed_forward_norm: hidden: gain before the feed-forward part; None likewise.
        feed_forward: dense, or sparse if the configuration has a routing.
        query_bias: H·d_h, half-split channels: added to the queries; None for no bias, as for those that follow.
        key_bias: G·d_h, half-split channels.
        value_bias: G·d_h.
        query_norm: d_h: gain of a norm of each query head before it is rotated; None for no norm, as below. If the
            configuration norms heads together, H·d_h: gain of one norm of all query heads.
        key_norm: d_h, or G·d_h: the same for key heads.
        output_bias: hidden: added to the output of attention.
        sinks: H: the score of each query head's sink, if the configuration has sinks.
        router_bias: E: added to the scores of the experts.
        expert_gate_bias: E·feed_forward: added to the gates of the experts, one after another.
        expert_up_bias: E·feed_forward: the same for the other side of their units.
        expert_down_bias: E·hidden: the same for their results.
        attention_post_norm: hidden: gain after attention; a part has a norm before or after it, or both.
        feed_forward_post_norm: hidden: gain after the feed-forward part.
        key_order: G·d_h: whole numbers, the orders of the channels of key heads, as
            `lowbit.attention.ksort.LayerOrders.of` reads them; None for half-split channels. Queries, keys and their
            biases are in this order.
        program: of the block (`lowbit.model.step`); None for the one that `lowbit.model.step.block` writes.
    """

    attention_norm: F32 | None
    query: Matrix
    key: Matrix
    value: Matrix
    output: Matrix
    feed_forward_norm: F32 | None
    feed_forward: FeedForwardWeights
    query_bias: F32 | None = None
    key_bias: F32 | None = None
    value_bias: F32 | None = None
    query_norm: F32 | None = None
    key_norm: F32 | None = None
    output_bias: F32 | None = None
    sinks: F32 | None = None
    router_bias: F32 | None = None
    expert_gate_bias: F32 | None = None
    expert_up_bias: F32 | None = None
    expert_down_bias: F32 | None = None
    attention_post_norm: F32 | None = None
    feed_forward_post_norm: F32 | None = None
    key_order: F32 | None = None
    program: Program | None = None

    def linears(self) -> dict[str, Matrix]:
        """Its matrices by the names of `linear_shapes`."""
        inner = {f"feed_forward.{name}": matrix for name, matrix in self.feed_forward.linears().items()}
        return {name: getattr(self, name) for name in ATTENTION} | inner

    def changed(self, change: Change) -> Self:
        """The same with every quantisable matrix replaced: all of `linears` except the router."""
        attention: dict[str, Any] = {name: change(name, getattr(self, name)) for name in ATTENTION}
        return replace(self, **attention, feed_forward=self.feed_forward.changed(change, "feed_forward."))


class LayeredWeights(Protocol):
    """A model that provides its blocks one at a time and need not hold them in memory.

    Each access may build a part anew; callers that need it twice keep it.
    """

    @property
    def config(self) -> LlamaConfig:
        """Its shape."""

    @property
    def embedding(self) -> F32 | Embedding:
        """Vocabulary × hidden: the row of each token."""

    @property
    def norm(self) -> F32:
        """Float32, hidden: gain of the last norm."""

    @property
    def head(self) -> Matrix:
        """Hidden × vocabulary."""

    def layer(self, number: int) -> LayerWeights:
        """One block, counted from 0."""


ATTENTION = ("query", "key", "value", "output")
NORMS = ("attention_norm", "feed_forward_norm")


@dataclass(frozen=True, eq=False)
class LlamaWeights:
    """A whole model.

    Attributes:
        config: its shape.
        embedding: vocabulary × hidden: the row of each token, a float32 array or decoded on access.
        layers: the blocks, in order.
        norm: float32, hidden: gain of the last norm.
        head: hidden × vocabulary; if the file ties it to the embedding, the same tensor as stored.

    Raises:
        ArgumentError: a part whose shape does not match `config`.
    """

    config: LlamaConfig
    embedding: F32 | Embedding
    layers: tuple[LayerWeights, ...]
    norm: F32
    head: Matrix

    def __post_init__(self) -> None:
        config = self.config
        if not isinstance(self.embedding, Embedding):
            check_array("embedding", self.embedding, np.float32, (config.vocabulary, config.hidden))
        elif self.embedding.shape != (config.vocabulary, config.hidden):
            raise ArgumentError("shape of embedding", self.embedding.shape, f"{config.vocabulary} x {config.hidden}")
        check_array("norm", self.norm, np.float32, (config.hidden,))
        _check_matrix("head", self.head, (config.hidden, config.vocabulary))
        if len(self.layers) != config.layers:
            raise ArgumentError("number of layers", len(self.layers), str(config.layers))
        for number, layer in enumerate(self.layers):
            _check_layer(f"layers[{number}]", layer, config)

    def layer(self, number: int) -> LayerWeights:
        """One block, counted from 0.

        Raises:
            ArgumentError: there is no such block.
        """
        check_integer("layer", number, 0, len(self.layers) - 1)
        return self.layers[number]

    def changed(self, change: Change, progress: Progress | None = None) -> Self:
        """The same with every quantisable matrix of the blocks replaced; `progress` is called after each block."""
        layers = []
        for layer in self.layers:
            layers.append(layer.changed(change))
            if progress is not None:
                progress(len(layers), len(self.layers))
        return replace(self, layers=tuple(layers))


class DeferredWeights:
    """The weights of a file, which are read on first access.

    Attributes:
        config: the shape of the model.
        digest: the SHA-256 of the file, in hexadecimal digits.
        held: all of them, once they have been read.
    """

    def __init__(
        self, config: LlamaConfig, read: Callable[[Progress | None], LlamaWeights], digest: Callable[[], str]
    ) -> None:
        self.config, self.digest, self._read = config, digest, read
        self.held: LlamaWeights | None = None

    def read(self, progress: Progress | None = None) -> LlamaWeights:
        """All of them, in memory.

        Args:
            progress: called after each block, if they are read now.

        Raises:
            FormatError: the file is damaged, or has changed.
        """
        if self.held is None:
            self.held = self._read(progress)
        return self.held

    @property
    def embedding(self) -> F32 | Embedding:
        """Vocabulary × hidden."""
        return self.read().embedding

    @property
    def norm(self) -> F32:
        """Float32, hidden."""
        return self.read().norm

    @property
    def head(self) -> Matrix:
        """Hidden × vocabulary."""
        return self.read().head

    def layer(self, number: int) -> LayerWeights:
        """One block, counted from 0."""
        return self.read().layer(number)


def in_memory(weights: LayeredWeights, progress: Progress | None = None) -> LlamaWeights:
    """All of a model: the same object if it is already in memory.

    Args:
        weights: the model.
        progress: called after each block.

    Raises:
        ArgumentError: parts that do not fit together.
    """
    if isinstance(weights, LlamaWeights):
        return weights
    if isinstance(weights, DeferredWeights):
        return weights.read(progress)
    layers = []
    for number in range(weights.config.layers):
        layers.append(weights.layer(number))
        if progress is not None:
            progress(len(layers), weights.config.layers)
    return LlamaWeights(weights.config, weights.embedding, tuple(layers), weights.norm, weights.head)


def vector_sizes(config: LlamaConfig) -> dict[str, int]:
    """The lengths of the vectors of a block, by their names in `LayerWeights`.

    Any may be absent. But each part has a norm before or after it, unless the block has a program of its own.
    """
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    biases = {"query_bias": queries, "key_bias": keys, "value_bias": keys, "output_bias": config.hidden}
    biases["key_order"] = keys
    if config.sinks:
        biases["sinks"] = config.heads
    if (routing := config.routing) is not None:
        inner = routing.experts * config.feed_forward
        biases |= {"router_bias": routing.experts, "expert_gate_bias": inner, "expert_up_bias": inner}
        biases["expert_down_bias"] = routing.experts * config.hidden
    alone = not config.heads_normed_together
    head_norms = {"query_norm": config.head_dim if alone else queries, "key_norm": config.head_dim if alone else keys}
    return dict.fromkeys((*NORMS, "attention_post_norm", "feed_forward_post_norm"), config.hidden) | head_norms | biases


def linear_shapes(config: LlamaConfig) -> dict[str, tuple[int, int]]:
    """K and N of the matrices of a block, by the names of `LayerWeights.linears`."""
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    attention = {
        "query": (config.hidden, queries),
        "key": (config.hidden, keys),
        "value": (config.hidden, keys),
        "output": (queries, config.hidden),
    }
    gated = {
        "gate": (config.hidden, config.feed_forward),
        "up": (config.hidden, config.feed_forward),
        "down": (config.feed_forward, config.hidden),
    }
    if config.routing is None:
        return attention | {f"feed_forward.{name}": shape for name, shape in gated.items()}
    experts = {
        f"feed_forward.experts[{number}].{name}": shape
        for number in range(config.routing.experts)
        for name, shape in gated.items()
    }
    return attention | {"feed_forward.router": (config.hidden, config.routing.experts)} | experts


def assembled(config: LlamaConfig, vectors: dict[str, F32], linears: dict[str, Matrix]) -> LayerWeights:
    """A block from its vectors and its linear layers, by the names of `LayerWeights.linears`."""

    def gated(prefix: str) -> GatedWeights:
        return GatedWeights(*(linears[f"{prefix}.{name}"] for name in ("gate", "up", "down")))

    feed_forward: GatedWeights | SparseWeights
    if config.routing is None:
        feed_forward = gated("feed_forward")
    else:
        router = linears["feed_forward.router"]
        if not isinstance(router, np.ndarray):
            raise ArgumentError("router", "quantised", "float32 weights")
        experts = tuple(gated(f"feed_forward.experts[{number}]") for number in range(config.routing.experts))
        feed_forward = SparseWeights(router, experts)
    parts: dict[str, Any] = dict.fromkeys(NORMS) | vectors | {name: linears[name] for name in ATTENTION}
    return LayerWeights(**parts, feed_forward=feed_forward)


def _check_layer(where: str, layer: LayerWeights, config: LlamaConfig) -> None:
    linears, shapes = layer.linears(), linear_shapes(config)
    if linears.keys() != shapes.keys():
        name = min(linears.keys() ^ shapes.keys())
        kind = "a dense block" if config.routing is None else f"a block of {config.routing.experts} experts"
        given, allowed = ("missing", "one of") if name in shapes else ("given", "absent: it is none of")
        raise ArgumentError(f"{where}.{name}", given, f"{allowed} the matrices of {kind}")
    for name, shape in shapes.items():
        _check_matrix(f"{where}.{name}", linears[name], shape)
    for name, size in vector_sizes(config).items():
        vector = getattr(layer, name)
        replaced = name in NORMS and getattr(layer, name.replace("_norm", "_post_norm")) is not None
        usual = layer.program is None and ((name in NORMS and not replaced) or name == "sinks")
        if vector is not None or usual:
            check_array(f"{where}.{name}", vector, np.float32, (size,))
    if layer.key_order is not None:
        LayerOrders.of(layer.key_order, config.head_dim, config.heads)


def _check_matrix(name: str, matrix: Matrix, shape: tuple[int, int]) -> None:
    if isinstance(matrix, np.ndarray):
        check_array(name, matrix, np.float32, shape)
        check_finite(name, matrix)
    elif shape_of(matrix) != shape:
        raise ArgumentError(f"shape of {name}", shape_of(matrix), f"{shape[0]} x {shape[1]}")


# **The bytes of a model.**


def matrices(weights: LlamaWeights) -> Iterator[tuple[str, Matrix]]:
    """Every matrix that a decoder multiplies by, with its name: the blocks in order, then the head."""
    for number, layer in enumerate(weights.layers):
        for name, matrix in layer.linears().items():
            yield f"layers[{number}].{name}", matrix
    yield "head", weights.head


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of weights: the linear layers of the blocks, every expert included, and the head."""

    blocks: int
    head: int

    @property
    def total(self) -> int:
        """Both together."""
        return self.blocks + self.head


def weight_bytes(weights: LlamaWeights) -> WeightBytes:
    """The bytes of a model's matrices as they are held in memory: words, scales and zeros, or float32.

    A token reads all matrices of a dense model; of a sparse model's experts it reads only those chosen for it.
    """
    sizes = {name: matrix.nbytes for name, matrix in matrices(weights)}
    head = sizes.pop("head")
    return WeightBytes(sum(sizes.values()), head)
