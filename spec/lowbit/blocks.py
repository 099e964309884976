r"""One block of a decoder: attention and a feed-forward part, each added to a stream that goes through.

A decoder sends a vector of `hidden` numbers for each token through a stack of blocks. A block has two parts, and each
*adds* its result to what came in, so the vectors form a *residual stream* that every block reads and none overwrites:

.. math::

    x \leftarrow x + \mathrm{Attention}(\mathrm{norm}(x)), \qquad
    x \leftarrow x + \mathrm{FeedForward}(\mathrm{norm}(x)).

Because each block changes the stream by a little, the stream before one block resembles the stream before the next;
that resemblance is what lets the chapter `offload` guess which experts the next block will ask for.

**Norm** (RMSNorm, gain :math:`g`, a small :math:`\varepsilon` from the file):

.. math:: \mathrm{norm}(x) = g \otimes \frac{x}{\sqrt{\frac1n \sum_c x_c^2 + \varepsilon}}.

**Attention** projects to queries, keys and values, turns queries and keys by their positions (`rope`), reads the past
(`attention`) and projects back:
:math:`\mathrm{Attention}(x) = \mathrm{attend}(R\,xW_q,\; R\,xW_k,\; xW_v)\,W_o`.

**Feed-forward** is a value in a place: the same block has a dense SwiGLU there,

.. math:: \mathrm{FeedForward}(x) = (\mathrm{silu}(xW_{gate}) \otimes xW_{up})\,W_{down},

or a sparse layer that sends each token to a few of many (`routing`). Nothing else in the block knows which.

**Precision.** Nearly all weights and nearly all the time are in the linear layers, and those are what a backend
computes, in float32 as its contract says. Everything between them is float64 here: norms, rotations, softmax, the
residual stream. It costs little, and it means that two backends which agree on the linear layers agree on the
logits, because nothing else is left to differ.

Source: Llama (arXiv 2302.13971) §2.2; RMSNorm (arXiv 1910.07467) equation 4; SwiGLU (arXiv 2002.05202) equation 6;
Mixtral (arXiv 2401.04088) §2.1; GQA §2.2.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from lowbit.attention import KeyValueCache, attend, softmax
from lowbit.errors import ArgumentError
from lowbit.rope import Rotation, rotate
from lowbit.routing import Ids, silu, top_k, weights
from lowbit.weights import (
    FeedForwardWeights,
    Floats,
    LayerWeights,
    LlamaConfig,
    Matrix,
    Routing,
    SparseWeights,
    SwiGLUWeights,
)

Reals = npt.NDArray[np.float64]

Linear = Callable[[Floats], Floats]
"""A linear layer: float32, T × K, to float32, T × N."""

MakeLinear = Callable[[Matrix], Linear]
"""From a matrix to the function that multiplies by it."""

Observer = Callable[[int, Reals, Ids], None]
"""Called by a sparse layer with its number, its input (float64, T × hidden) and the experts chosen (T × k)."""


def plain_linear(matrix: Matrix) -> Linear:
    """The simplest linear layer of all, for float32 weights: numpy's product.

    Raises:
        ArgumentError: a quantised matrix; which kernel multiplies by it is the caller's choice, not a default.
    """
    if not isinstance(matrix, np.ndarray):
        raise ArgumentError("matrix", "quantised", "float32 weights (`lowbit.engine` runs quantised ones on a backend)")
    return lambda x: x @ matrix


def through(linear: Linear, x: Reals) -> Reals:
    """Through the door of a linear layer and back: float32 inside, float64 outside."""
    return linear(x.astype(np.float32)).astype(np.float64)


def rms_norm(x: Reals, gain: Reals, epsilon: float) -> Reals:
    """Scale each vector to a root mean square of 1, then each channel by its gain.

    >>> rms_norm(np.array([[3.0, 4.0]]), np.ones(2), epsilon=0.0).round(4)
    array([[0.8485, 1.1314]])
    """
    mean_square: Reals = np.mean(x * x, axis=-1, keepdims=True)
    return gain * (x / np.sqrt(mean_square + epsilon))


# **Attention** around its four linear layers. What a descendant of Llama adds here, biases after the projections or a
# norm of each head before the rotation, goes between `_heads` and `rotate`.


class Attention:
    """The attention part of one block."""

    def __init__(self, config: LlamaConfig, layer: LayerWeights, linear: MakeLinear) -> None:
        self._config = config
        self._query, self._key, self._value, self._output = map(
            linear, (layer.query, layer.key, layer.value, layer.output)
        )

    def __call__(self, x: Reals, turn: Rotation, cache: KeyValueCache) -> Reals:
        """Float64, T × hidden, for the normed stream; the T tokens are added to the cache."""
        config = self._config
        queries = self._heads(self._query, x, config.heads)
        keys = self._heads(self._key, x, config.kv_heads)
        values = self._heads(self._value, x, config.kv_heads)
        cache.append(rotate(keys, turn), values)
        mixed = attend(rotate(queries, turn), cache.keys, cache.values, config.window)
        return through(self._output, mixed.reshape(len(x), config.heads * config.head_dim))

    def _heads(self, linear: Linear, x: Reals, heads: int) -> Reals:
        """A projection as T × heads × d_h."""
        return through(linear, x).reshape(len(x), heads, self._config.head_dim)


# **Feed-forward**, dense or sparse: float64, T × hidden, to the same.


class SwiGLU:
    """A dense feed-forward part, or one expert of a sparse one."""

    def __init__(self, part: SwiGLUWeights, linear: MakeLinear) -> None:
        self._gate, self._up, self._down = linear(part.gate), linear(part.up), linear(part.down)

    def __call__(self, x: Reals) -> Reals:
        return through(self._down, silu(through(self._gate, x)) * through(self._up, x))


class Sparse:
    """Many experts, of which each token runs a few: `routing.sparse` over linear layers of any kind.

    Each expert is called once for all the tokens that chose it, in ascending order, and that is also the order in
    which a token's answers are added.
    """

    def __init__(
        self, routing: Routing, part: SparseWeights, linear: MakeLinear, observe: Callable[[Reals, Ids], None] | None
    ) -> None:
        self._routing, self._observe = routing, observe
        self._router = linear(part.router)
        self._experts = [SwiGLU(expert, linear) for expert in part.experts]

    def __call__(self, x: Reals) -> Reals:
        chosen, shares = self._route(x)
        if self._observe is not None:
            self._observe(x, chosen)
        y = np.zeros_like(x)
        for e in np.unique(chosen):
            tokens, place = np.nonzero(chosen == e)
            y[tokens] += shares[tokens, place, np.newaxis] * self._experts[e](x[tokens])
        return y

    def _route(self, x: Reals) -> tuple[Ids, Reals]:
        """The experts of each token and their weights, T × k both; the choice is made on float32 scores."""
        scores = self._router(x.astype(np.float32))
        if not np.isfinite(scores).all():
            raise ArgumentError("weights", "such that a router's score is not finite", "weights that do not overflow")
        if self._routing.softmax == "before":
            scores = softmax(scores.astype(np.float64)).astype(np.float32)
        chosen = top_k(scores, self._routing.top_k)
        return chosen, weights(scores, chosen, self._routing.softmax)


def feed_forward(
    config: LlamaConfig,
    part: FeedForwardWeights,
    linear: MakeLinear,
    observe: Callable[[Reals, Ids], None] | None = None,
) -> Callable[[Reals], Reals]:
    """The feed-forward part of a block, of the kind that its weights are."""
    if isinstance(part, SwiGLUWeights):
        return SwiGLU(part, linear)
    if config.routing is None:
        raise ArgumentError("routing", None, "a routing, where the weights are those of experts")
    return Sparse(config.routing, part, linear, observe)


# **The block** puts the two around the stream.


class Block:
    """One layer of the stack, with its linear layers made ready to be called."""

    def __init__(
        self,
        config: LlamaConfig,
        layer: LayerWeights,
        linear: MakeLinear,
        observe: Callable[[Reals, Ids], None] | None = None,
    ) -> None:
        self._epsilon = config.rms_epsilon
        self._attention_gain = layer.attention_norm.astype(np.float64)
        self._feed_forward_gain = layer.feed_forward_norm.astype(np.float64)
        self._attention = Attention(config, layer, linear)
        self._feed_forward = feed_forward(config, layer.feed_forward, linear, observe)

    def __call__(self, x: Reals, turn: Rotation, cache: KeyValueCache) -> Reals:
        """The residual stream after this block: float64, T × hidden."""
        x = x + self._attention(rms_norm(x, self._attention_gain, self._epsilon), turn, cache)
        return x + self._feed_forward(rms_norm(x, self._feed_forward_gain, self._epsilon))
