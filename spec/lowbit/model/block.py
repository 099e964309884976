r"""One block of a decoder: attention and a feed-forward part, each added to the residual stream.

A decoder sends a vector of `hidden` numbers for each token through a stack of blocks. A block has two parts, and each
*adds* its result to what came in, so the vectors form a *residual stream* that every block reads and none overwrites:

.. math::

    x \leftarrow x + \mathrm{Attention}(\mathrm{norm}(x)), \qquad
    x \leftarrow x + \mathrm{FeedForward}(\mathrm{norm}(x)).

Because each block changes the stream by a little, the stream before one block resembles the stream before the next;
that resemblance is what lets the chapter `offload` guess which experts the next block will ask for. The norm is that of
the chapter `layers`. Gemma puts a second norm behind each part, before the sum.

**Attention** projects to queries, keys and values, rotates queries and keys by their positions (`rope`), reads the past
(`attention`) and projects back:
:math:`\mathrm{Attention}(x) = \mathrm{attend}(R\,xW_q,\; R\,xW_k,\; xW_v)\,W_o`. Qwen2 adds a bias to each of the three
projections. Gemma 3 norms every query head and every key head, with one gain for all heads, before they are rotated;
scores then stay within bounds, however large the weights grow.

**Feed-forward** is either a dense gated linear unit,

.. math:: \mathrm{FeedForward}(x) = (\mathrm{act}(xW_{gate}) \otimes xW_{up})\,W_{down},

with act = silu (SwiGLU) or gelu (GeGLU), or a sparse layer that sends each token to a few of many such units
(`routing`). The rest of the block is the same for both.

**Precision.** The linear layers hold nearly all weights and take nearly all the time. A backend computes them, in
float32 as its contract says. The elementwise operations around them are float64 here: norms, rotations, softmax, the
residual stream. That costs little, and two backends that agree on the linear layers agree on the logits, because
nothing else differs. A backend that also computes the elementwise operations does so in float32; the operations of the
chapters `layers`, `rope` and `attention` say what it promises then.

Source: Llama (arXiv 2302.13971) §2.2; Mixtral (arXiv 2401.04088) §2.1; GQA §2.2; Gemma 3 (arXiv 2503.19786) §2.
"""

from collections.abc import Callable

import numpy as np

from lowbit.arrays import F32, F64
from lowbit.attention.attention import KeyValueCache, attend
from lowbit.attention.rope import Rotation, rotate
from lowbit.errors import ArgumentError
from lowbit.linear.elementary import silu, softmax
from lowbit.model.config import Activation, LlamaConfig, Routing
from lowbit.model.elementwise import ElementwiseOps
from lowbit.model.layers import gelu, norm
from lowbit.model.weights import FeedForwardWeights, GatedWeights, LayerWeights, Matrix, SparseWeights
from lowbit.moe.routing import Ids, top_k, weights

Linear = Callable[[F32], F32]
"""A linear layer: float32, T × K, to float32, T × N."""

MakeLinear = Callable[[Matrix], Linear]
"""From a matrix to the function that multiplies by it."""

Observer = Callable[[int, F64, Ids], None]
"""Called by a sparse layer with its number, its input (float64, T × hidden) and the experts chosen (T × k)."""


def plain_linear(matrix: Matrix) -> Linear:
    """The simplest linear layer of all, for float32 weights: numpy's product.

    Raises:
        ArgumentError: a quantised matrix; which kernel multiplies by it is the caller's choice, not a default.
    """
    if not isinstance(matrix, np.ndarray):
        raise ArgumentError(
            "matrix", "quantised", "float32 weights (`lowbit.runtime` runs quantised ones on a backend)"
        )
    return lambda x: x @ matrix


def through(linear: Linear, x: F64) -> F64:
    """A linear layer on a float64 stream: float32 inside, float64 outside."""
    return linear(x.astype(np.float32)).astype(np.float64)


FORMULAS = ElementwiseOps(
    norm,
    swiglu=lambda gate, up: silu(gate) * up,
    rotate=rotate,
    attend=lambda queries, cache, window: attend(queries, cache.keys, cache.values, window),
    cache=KeyValueCache,
)
"""The elementwise operations in float64, by the formulas of the specification."""


# **Attention** around its four linear layers.


class Projection:
    """From the stream to heads: a linear layer and, where the model has them, a bias and a norm of each head."""

    def __init__(self, linear: Linear, head_dim: int, bias: F32 | None, norm: Callable[[F64], F64]) -> None:
        self._linear, self._head_dim, self._norm = linear, head_dim, norm
        self._bias = None if bias is None else bias.astype(np.float64)

    def __call__(self, x: F64) -> F64:
        """Float64, T × heads × d_h."""
        y = through(self._linear, x)
        if self._bias is not None:
            y += self._bias
        return self._norm(y.reshape(len(x), -1, self._head_dim))


class Attention:
    """The attention part of one block."""

    def __init__(
        self, config: LlamaConfig, layer: LayerWeights, linear: MakeLinear, window: int | None, ops: ElementwiseOps
    ) -> None:
        def projection(matrix: Matrix, bias: F32 | None, gain: F32 | None) -> Projection:
            return Projection(linear(matrix), config.head_dim, bias, ops.norm(gain, config.rms_epsilon))

        self._query = projection(layer.query, layer.query_bias, layer.query_norm)
        self._key = projection(layer.key, layer.key_bias, layer.key_norm)
        self._value = projection(layer.value, layer.value_bias, None)
        self._output = linear(layer.output)
        self._window, self._ops = window, ops

    def __call__(self, x: F64, rotation: Rotation, cache: KeyValueCache) -> F64:
        """Float64, T × hidden, for the normed stream; the T tokens are added to the cache."""
        cache.append(self._ops.rotate(self._key(x), rotation), self._value(x))
        mixed = self._ops.attend(self._ops.rotate(self._query(x), rotation), cache, self._window)
        return through(self._output, mixed.reshape(len(x), -1))


# **Feed-forward**, dense or sparse: float64, T × hidden, to the same.


class Gated:
    """A gated linear unit: a dense feed-forward part, or one expert of a sparse one."""

    def __init__(self, activation: Activation, part: GatedWeights, linear: MakeLinear, ops: ElementwiseOps) -> None:
        self._joined = ops.swiglu if activation == "silu" else lambda gate, up: gelu(gate) * up
        self._gate, self._up, self._down = linear(part.gate), linear(part.up), linear(part.down)

    def __call__(self, x: F64) -> F64:
        return through(self._down, self._joined(through(self._gate, x), through(self._up, x)))


def routes(scores: F32, routing: Routing) -> tuple[Ids, F64]:
    """The experts of each token and their weights, T × k both, for a router's scores (float32, T × E).

    >>> routes(np.array([[0, 2, 1, 2]], np.float32), Routing(experts=4, top_k=2))
    (array([[1, 3]]), array([[0.5, 0.5]]))

    Raises:
        ArgumentError: a score that is not finite.
    """
    if not np.isfinite(scores).all():
        sentence = "a router's score is not finite: the weights overflow float32"
        raise ArgumentError("weights", "too large", "weights that do not overflow float32", sentence=sentence)
    if routing.softmax == "before":
        scores = softmax(scores.astype(np.float64)).astype(np.float32)
    chosen = top_k(scores, routing.top_k)
    return chosen, weights(scores, chosen, routing.softmax)


class Sparse:
    """Many experts, of which each token runs a few: `routing.sparse` over linear layers of any kind.

    Each expert is called once for all the tokens that chose it, in ascending order, and that is also the order in
    which a token's answers are added.
    """

    def __init__(
        self,
        routing: Routing,
        activation: Activation,
        part: SparseWeights,
        linear: MakeLinear,
        observe: Callable[[F64, Ids], None] | None,
        ops: ElementwiseOps,
    ) -> None:
        self._routing, self._observe = routing, observe
        self._router = linear(part.router)
        self._experts = [Gated(activation, expert, linear, ops) for expert in part.experts]

    def __call__(self, x: F64) -> F64:
        chosen, factors = routes(self._router(x.astype(np.float32)), self._routing)
        if self._observe is not None:
            self._observe(x, chosen)
        y = np.zeros_like(x)
        for e in np.unique(chosen):
            tokens, place = np.nonzero(chosen == e)
            y[tokens] += factors[tokens, place, np.newaxis] * self._experts[e](x[tokens])
        return y


def feed_forward(
    config: LlamaConfig,
    part: FeedForwardWeights,
    linear: MakeLinear,
    observe: Callable[[F64, Ids], None] | None = None,
    ops: ElementwiseOps = FORMULAS,
) -> Callable[[F64], F64]:
    """The feed-forward part of a block, of the kind that its weights are."""
    if isinstance(part, GatedWeights):
        return Gated(config.activation, part, linear, ops)
    if config.routing is None:
        raise ArgumentError("routing", None, "a routing, where the weights are those of experts")
    return Sparse(config.routing, config.activation, part, linear, observe, ops)


# **The block** puts the two around the stream.


class DecoderBlock:
    """One layer of the stack, with its linear layers made ready to be called.

    Attributes:
        rope_base: base of the rotation that it expects.
    """

    def __init__(
        self,
        config: LlamaConfig,
        number: int,
        layer: LayerWeights,
        linear: MakeLinear,
        observe: Callable[[F64, Ids], None] | None = None,
        ops: ElementwiseOps = FORMULAS,
    ) -> None:
        self.rope_base = config.layer_rope_base(number)
        self._attention = Attention(config, layer, linear, config.layer_window(number), ops)
        self._feed_forward = feed_forward(config, layer.feed_forward, linear, observe, ops)
        norm_of, epsilon = ops.norm, config.rms_epsilon
        self._before_attention = norm_of(layer.attention_norm, epsilon)
        self._after_attention = norm_of(layer.attention_post_norm, epsilon)
        self._before_feed_forward = norm_of(layer.feed_forward_norm, epsilon)
        self._after_feed_forward = norm_of(layer.feed_forward_post_norm, epsilon)

    def __call__(self, x: F64, rotation: Rotation, cache: KeyValueCache) -> F64:
        """The residual stream after this block: float64, T × hidden."""
        x = x + self._after_attention(self._attention(self._before_attention(x), rotation, cache))
        return x + self._after_feed_forward(self._feed_forward(self._before_feed_forward(x)))
