"""The weights of a decoder: what a file reader makes and what a decoder is built from.

The names are Llama's, from which the others descend. What a descendant changes is an option of the configuration with
Llama's choice as its default, or another kind of value in the same place: the feed-forward part of a block is dense in
Llama, and in Mixtral it is a router and many experts.

A linear layer's weights come in two kinds, and a `Matrix` is either: codes with scales and zeros, as a low-bit file
stores them, or plain float32 where the file stores something that `affine` does not describe. Both are K × N, with
K the features that go in and N those that come out, so that ``y = x W`` reads the same for both.

`requantize` makes a second model out of the first, with fewer bits or other groups; `weight_bytes` says what each
costs. Weights that went through 4 bits once and are quantised again have lost twice: a perplexity measured on them
says *re-quantised*, or it misleads.

Source: lowbit's own.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from lowbit.affine import Convention, QuantizedMatrix, ScaleDtype, dequantize, quantize
from lowbit.check import check_array, check_choice, check_finite, check_integer
from lowbit.errors import ArgumentError
from lowbit.routing import SOFTMAXES, Softmax

Floats = npt.NDArray[np.float32]
Matrix = QuantizedMatrix | Floats
"""K × N weights: quantised, or float32."""

Progress = Callable[[int, int], None]
"""Called with what is done and what there is in all."""


def to_float(matrix: Matrix) -> Floats:
    """The float32 weights, K × N; exact for either kind."""
    return dequantize(matrix) if isinstance(matrix, QuantizedMatrix) else matrix


def select_columns(matrix: Matrix, index: npt.NDArray[np.integer]) -> Matrix:
    """Column ``index[n]`` of the matrix as column n; codes, scales and zeros move together, so nothing is rounded.

    >>> select_columns(np.array([[10, 20, 30]], np.float32), np.array([2, 0, 1]))
    array([[30., 10., 20.]], dtype=float32)
    """
    if not isinstance(matrix, QuantizedMatrix):
        return np.ascontiguousarray(matrix[:, index])
    words, scales, zeros = (
        np.ascontiguousarray(part[:, index]) for part in (matrix.words, matrix.scales, matrix.zeros)
    )
    return replace(matrix, words=words, scales=scales, zeros=zeros)


# **The shape of a model**, as a file's metadata give it.


@dataclass(frozen=True)
class Routing:
    """How the sparse layers of a model choose among their experts (`lowbit.routing`).

    Attributes:
        experts: E, the experts of a layer.
        top_k: how many of them each token runs, 1 to E.
        softmax: whether the gate's softmax comes ``before`` or ``after`` the choice.

    Raises:
        ArgumentError: a number that no model can have.
    """

    experts: int
    top_k: int
    softmax: Softmax = "after"

    def __post_init__(self) -> None:
        check_integer("experts", self.experts, least=1)
        check_integer("top_k", self.top_k, 1, self.experts)
        check_choice("softmax", self.softmax, SOFTMAXES)


@dataclass(frozen=True)
class LlamaConfig:
    """The numbers that say how a decoder is put together: Llama's, and after them the options of its descendants.

    Attributes:
        layers: how many blocks of attention and feed-forward.
        hidden: width of the residual stream.
        feed_forward: width inside the feed-forward part, or inside each expert.
        heads: H, query heads.
        kv_heads: G, key-value heads; divides `heads`.
        head_dim: d_h, channels of a head; even.
        vocabulary: number of tokens.
        context: the longest sequence the model was made for.
        rope_base: base of the rotary frequencies.
        rms_epsilon: added under the root of the norm.
        routing: how experts are chosen, in a model whose blocks have them; None for a dense model.
        window: how many tokens a token sees, itself included; None for all of them.

    Raises:
        ArgumentError: a number that no model can have.
    """

    layers: int
    hidden: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context: int
    rope_base: float
    rms_epsilon: float
    routing: Routing | None = None
    window: int | None = None

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "feed_forward", "heads", "kv_heads", "head_dim", "vocabulary", "context"):
            check_integer(name, getattr(self, name), least=1)
        if self.window is not None:
            check_integer("window", self.window, least=1)
        if self.heads % self.kv_heads != 0:
            raise ArgumentError("heads", self.heads, f"a multiple of the {self.kv_heads} key-value heads")
        if self.head_dim % 2 != 0:
            raise ArgumentError("head_dim", self.head_dim, "an even number: channels rotate in pairs")
        for name, value in (("rope_base", self.rope_base), ("rms_epsilon", self.rms_epsilon)):
            if not (np.isfinite(value) and value > 0):
                raise ArgumentError(name, value, "a finite number above 0")


@dataclass(frozen=True, eq=False)
class SwiGLUWeights:
    """A SwiGLU: the feed-forward part of a dense block, or one expert.

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

    def changed(self, change: Callable[[Matrix], Matrix]) -> Self:
        """The same with every quantisable matrix replaced."""
        return replace(self, gate=change(self.gate), up=change(self.up), down=change(self.down))


@dataclass(frozen=True, eq=False)
class SparseWeights:
    """The feed-forward part of a sparse block.

    Attributes:
        router: float32, hidden × E: the gate that scores the experts. It is small and its errors change the choice,
            so it is never quantised.
        experts: E of them.
    """

    router: Floats
    experts: tuple[SwiGLUWeights, ...]

    def linears(self) -> dict[str, Matrix]:
        """Its matrices by name, the router first."""
        named = {
            f"experts[{number}].{name}": matrix
            for number, expert in enumerate(self.experts)
            for name, matrix in expert.linears().items()
        }
        return {"router": self.router} | named

    def changed(self, change: Callable[[Matrix], Matrix]) -> Self:
        """The same with every quantisable matrix replaced."""
        return replace(self, experts=tuple(expert.changed(change) for expert in self.experts))


FeedForwardWeights = SwiGLUWeights | SparseWeights


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """One block: two norm gains (float32, hidden), the four matrices of attention, and the feed-forward part.

    Attributes:
        attention_norm: gain before attention.
        query: hidden × H·d_h, half-split channels.
        key: hidden × G·d_h, half-split channels.
        value: hidden × G·d_h.
        output: H·d_h × hidden.
        feed_forward_norm: gain before the feed-forward part.
        feed_forward: dense, or sparse where the configuration has a routing.
    """

    attention_norm: Floats
    query: Matrix
    key: Matrix
    value: Matrix
    output: Matrix
    feed_forward_norm: Floats
    feed_forward: FeedForwardWeights

    def linears(self) -> dict[str, Matrix]:
        """Its matrices by the names of `linear_shapes`."""
        inner = {f"feed_forward.{name}": matrix for name, matrix in self.feed_forward.linears().items()}
        return {name: getattr(self, name) for name in ATTENTION} | inner

    def changed(self, change: Callable[[Matrix], Matrix]) -> Self:
        """The same with every quantisable matrix replaced."""
        attention: dict[str, Any] = {name: change(getattr(self, name)) for name in ATTENTION}
        return replace(self, **attention, feed_forward=self.feed_forward.changed(change))


ATTENTION = ("query", "key", "value", "output")


@dataclass(frozen=True, eq=False)
class LlamaWeights:
    """A whole model.

    Attributes:
        config: its shape.
        embedding: float32, vocabulary × hidden: the row of each token.
        layers: the blocks, in order.
        norm: float32, hidden: gain of the last norm.
        head: hidden × vocabulary; where the file ties it to the embedding, the same tensor as it is stored.

    Raises:
        ArgumentError: a part whose shape is not the one that `config` asks for.
    """

    config: LlamaConfig
    embedding: Floats
    layers: tuple[LayerWeights, ...]
    norm: Floats
    head: Matrix

    def __post_init__(self) -> None:
        config = self.config
        check_array("embedding", self.embedding, np.float32, (config.vocabulary, config.hidden))
        check_array("norm", self.norm, np.float32, (config.hidden,))
        _check_matrix("head", self.head, (config.hidden, config.vocabulary))
        if len(self.layers) != config.layers:
            raise ArgumentError("number of layers", len(self.layers), str(config.layers))
        shapes = linear_shapes(config)
        for number, layer in enumerate(self.layers):
            linears = layer.linears()
            if linears.keys() != shapes.keys():
                name = min(linears.keys() ^ shapes.keys())
                given = "missing" if name in shapes else "present"
                kind = "a dense block" if config.routing is None else f"a block of {config.routing.experts} experts"
                raise ArgumentError(f"layers[{number}].{name}", given, f"the matrices of {kind}")
            for name, shape in shapes.items():
                _check_matrix(f"layers[{number}].{name}", linears[name], shape)
            for name in ("attention_norm", "feed_forward_norm"):
                check_array(f"layers[{number}].{name}", getattr(layer, name), np.float32, (config.hidden,))


def linear_shapes(config: LlamaConfig) -> dict[str, tuple[int, int]]:
    """K and N of the matrices of a block, by the names of `LayerWeights.linears`."""
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    attention = {
        "query": (config.hidden, queries),
        "key": (config.hidden, keys),
        "value": (config.hidden, keys),
        "output": (queries, config.hidden),
    }
    swiglu = {
        "gate": (config.hidden, config.feed_forward),
        "up": (config.hidden, config.feed_forward),
        "down": (config.feed_forward, config.hidden),
    }
    if config.routing is None:
        return attention | {f"feed_forward.{name}": shape for name, shape in swiglu.items()}
    experts = {
        f"feed_forward.experts[{number}].{name}": shape
        for number in range(config.routing.experts)
        for name, shape in swiglu.items()
    }
    return attention | {"feed_forward.router": (config.hidden, config.routing.experts)} | experts


def _check_matrix(name: str, matrix: Matrix, shape: tuple[int, int]) -> None:
    if not isinstance(matrix, QuantizedMatrix):
        check_array(name, matrix, np.float32, shape)
        check_finite(name, matrix)
    elif (matrix.rows, matrix.columns) != shape:
        raise ArgumentError(f"shape of {name}", (matrix.rows, matrix.columns), f"{shape[0]} x {shape[1]}")


# **Quantise a model again**, and count what it weighs.


def requantize(
    weights: LlamaWeights,
    *,
    bits: int,
    group_size: int,
    convention: Convention = "minimum",
    scale_dtype: ScaleDtype = "float16",
    progress: Progress | None = None,
) -> LlamaWeights:
    """The same model with every linear layer of its blocks dequantised exactly and quantised anew.

    Embedding, head, norms and routers stay as they are.

    Args:
        weights: the model.
        bits: 2, 3, 4 or 8.
        group_size: 1 to the smallest K of the model.
        convention: ``minimum`` or ``zero_point``.
        scale_dtype: ``float16``, which the formats in use store, or ``float32``.
        progress: called after each block.

    Raises:
        ArgumentError: see `lowbit.affine.quantize`.
    """

    def again(matrix: Matrix) -> QuantizedMatrix:
        return quantize(
            to_float(matrix), bits=bits, group_size=group_size, convention=convention, scale_dtype=scale_dtype
        )

    layers = []
    for layer in weights.layers:
        layers.append(layer.changed(again))
        if progress is not None:
            progress(len(layers), len(weights.layers))
    return replace(weights, layers=tuple(layers))


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
    """What the matrices of a model occupy as they are held: words, scales and zeros, or float32.

    A token of a dense model reads all of them; one of a sparse model reads the experts that it is sent to.
    """
    sizes = {name: matrix.nbytes for name, matrix in matrices(weights)}
    head = sizes.pop("head")
    return WeightBytes(sum(sizes.values()), head)
