r"""One block of a decoder: attention and a feed-forward part, each added to a stream that goes through.

A decoder sends a vector of `hidden` numbers for each token through a stack of blocks. A block has two parts, and each
*adds* its result to what came in, so the vectors form a *residual stream* that every block reads and none overwrites:

.. math::

    x \leftarrow x + \mathrm{Attention}(\mathrm{norm}(x)), \qquad
    x \leftarrow x + \mathrm{FeedForward}(\mathrm{norm}(x)).

Because each block changes the stream by a little, the stream before one block resembles the stream before the next;
that resemblance is what lets the chapter `offload` guess which experts the next block will ask for. Gemma puts a second
norm behind each part, before the sum.

**Norm** (RMSNorm, gain :math:`g`, a small :math:`\varepsilon` from the file):

.. math:: \mathrm{norm}(x) = g \otimes \frac{x}{\sqrt{\frac1n \sum_c x_c^2 + \varepsilon}}.

**Attention** projects to queries, keys and values, turns queries and keys by their positions (`rope`), reads the past
(`attention`) and projects back:
:math:`\mathrm{Attention}(x) = \mathrm{attend}(R\,xW_q,\; R\,xW_k,\; xW_v)\,W_o`. Qwen2 adds a bias to each of the three
projections. Gemma 3 norms every query head and every key head, with one gain for all heads, before they are turned;
scores then stay within bounds, however large the weights grow.

**Feed-forward** is a value in a place: the same block has a dense gated linear unit there,

.. math:: \mathrm{FeedForward}(x) = (\mathrm{act}(xW_{gate}) \otimes xW_{up})\,W_{down},

with act = silu (SwiGLU) or gelu (GeGLU), or a sparse layer that sends each token to a few of many (`routing`). Nothing
else in the block knows which.

**Precision.** Nearly all weights and nearly all the time are in the linear layers, and those are what a backend
computes, in float32 as its contract says. Everything between them is float64 here: norms, rotations, softmax, the
residual stream. It costs little, and it means that two backends which agree on the linear layers agree on the
logits, because nothing else is left to differ. A backend that keeps a token on its own side from one linear layer to
the next computes what lies between as well, in float32; the operations at the end of the chapter say what it promises
then, for the norm and for the gated unit.

Source: Llama (arXiv 2302.13971) §2.2; RMSNorm (arXiv 1910.07467) equation 4; SwiGLU and GeGLU (arXiv 2002.05202)
equation 6; Mixtral (arXiv 2401.04088) §2.1; GQA §2.2; Gemma 3 (arXiv 2503.19786) §2.
"""

from collections.abc import Callable

import numpy as np

from lowbit.arrays import F32, F64
from lowbit.attention.attention import KeyValueCache, attend, softmax
from lowbit.attention.rope import Rotation, rotate
from lowbit.contract.checks import check_array
from lowbit.contract.operation import BOUNDED, operation
from lowbit.errors import ArgumentError
from lowbit.model.config import Activation, LlamaConfig, Routing
from lowbit.model.elementwise import Between
from lowbit.model.weights import FeedForwardWeights, GatedWeights, LayerWeights, Matrix, SparseWeights
from lowbit.moe.routing import Ids, silu, top_k, weights

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
    """Through the door of a linear layer and back: float32 inside, float64 outside."""
    return linear(x.astype(np.float32)).astype(np.float64)


def rms_norm(x: F64, gain: F64, epsilon: float) -> F64:
    """Scale each vector to a root mean square of 1, then each channel by its gain.

    >>> rms_norm(np.array([[3.0, 4.0]]), np.ones(2), epsilon=0.0).round(4)
    array([[0.8485, 1.1314]])
    """
    mean_square: F64 = np.mean(x * x, axis=-1, keepdims=True)
    return gain * (x / np.sqrt(mean_square + epsilon))


def norm(gain: F32 | None, epsilon: float) -> Callable[[F64], F64]:
    """The norm with this gain, or nothing at all where a model has no gain for it.

    >>> norm(None, epsilon=0.0)(np.array([[3.0, 4.0]]))
    array([[3., 4.]])
    """
    if gain is None:
        return lambda x: x
    wide = gain.astype(np.float64)
    return lambda x: rms_norm(x, wide, epsilon)


FORMULAS = Between(
    norm,
    swiglu=lambda gate, up: silu(gate) * up,
    rotate=rotate,
    attend=lambda queries, cache, window: attend(queries, cache.keys, cache.values, window),
    cache=KeyValueCache,
)
"""What lies between linear layers, as this chapter has it."""


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
        self, config: LlamaConfig, layer: LayerWeights, linear: MakeLinear, window: int | None, between: Between
    ) -> None:
        def projection(matrix: Matrix, bias: F32 | None, gain: F32 | None) -> Projection:
            return Projection(linear(matrix), config.head_dim, bias, between.norm(gain, config.rms_epsilon))

        self._query = projection(layer.query, layer.query_bias, layer.query_norm)
        self._key = projection(layer.key, layer.key_bias, layer.key_norm)
        self._value = projection(layer.value, layer.value_bias, None)
        self._output = linear(layer.output)
        self._window, self._between = window, between

    def __call__(self, x: F64, turn: Rotation, cache: KeyValueCache) -> F64:
        """Float64, T × hidden, for the normed stream; the T tokens are added to the cache."""
        cache.append(self._between.rotate(self._key(x), turn), self._value(x))
        mixed = self._between.attend(self._between.rotate(self._query(x), turn), cache, self._window)
        return through(self._output, mixed.reshape(len(x), -1))


# **Feed-forward**, dense or sparse: float64, T × hidden, to the same.


def gelu(a: F64) -> F64:
    r"""About :math:`a\,\Phi(a)`: a where it is large, 0 where it is very negative.

    :math:`\Phi`, the distribution function of the normal distribution, is replaced by a tanh that comes close to it;
    models that are trained with the approximation want the approximation.

    >>> gelu(np.array([-100.0, 0.0, 1.0, 100.0])).round(4)
    array([ -0.    ,   0.    ,   0.8412, 100.    ])

    Source: GELU (arXiv 1606.08415) §2.
    """
    share: F64 = (1 + np.tanh(np.sqrt(2 / np.pi) * (a + 0.044715 * a * a * a))) / 2
    return a * share


class Gated:
    """A gated linear unit: a dense feed-forward part, or one expert of a sparse one."""

    def __init__(self, activation: Activation, part: GatedWeights, linear: MakeLinear, between: Between) -> None:
        self._joined = between.swiglu if activation == "silu" else lambda gate, up: gelu(gate) * up
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
        raise ArgumentError("weights", "such that a router's score is not finite", "weights that do not overflow")
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
        between: Between,
    ) -> None:
        self._routing, self._observe = routing, observe
        self._router = linear(part.router)
        self._experts = [Gated(activation, expert, linear, between) for expert in part.experts]

    def __call__(self, x: F64) -> F64:
        chosen, shares = routes(self._router(x.astype(np.float32)), self._routing)
        if self._observe is not None:
            self._observe(x, chosen)
        y = np.zeros_like(x)
        for e in np.unique(chosen):
            tokens, place = np.nonzero(chosen == e)
            y[tokens] += shares[tokens, place, np.newaxis] * self._experts[e](x[tokens])
        return y


def feed_forward(
    config: LlamaConfig,
    part: FeedForwardWeights,
    linear: MakeLinear,
    observe: Callable[[F64, Ids], None] | None = None,
    between: Between = FORMULAS,
) -> Callable[[F64], F64]:
    """The feed-forward part of a block, of the kind that its weights are."""
    if isinstance(part, GatedWeights):
        return Gated(config.activation, part, linear, between)
    if config.routing is None:
        raise ArgumentError("routing", None, "a routing, where the weights are those of experts")
    return Sparse(config.routing, config.activation, part, linear, observe, between)


# **The block** puts the two around the stream.


class Block:
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
        between: Between = FORMULAS,
    ) -> None:
        self.rope_base = config.layer_rope_base(number)
        self._attention = Attention(config, layer, linear, config.layer_window(number), between)
        self._feed_forward = feed_forward(config, layer.feed_forward, linear, observe, between)
        norm_of, epsilon = between.norm, config.rms_epsilon
        self._before_attention = norm_of(layer.attention_norm, epsilon)
        self._after_attention = norm_of(layer.attention_post_norm, epsilon)
        self._before_feed_forward = norm_of(layer.feed_forward_norm, epsilon)
        self._after_feed_forward = norm_of(layer.feed_forward_post_norm, epsilon)

    def __call__(self, x: F64, turn: Rotation, cache: KeyValueCache) -> F64:
        """The residual stream after this block: float64, T × hidden."""
        x = x + self._after_attention(self._attention(self._before_attention(x), turn, cache))
        return x + self._after_feed_forward(self._feed_forward(self._before_feed_forward(x)))


# **What a backend promises.** A backend computes in float32; the functions above, given its float32 inputs, are what it
# is measured against. The bounds are derived in the chapter `lowbit.model.bounds`. A zero ε is refused: a row of zeros
# would have no norm.

LEAST_EPSILON, LARGEST = 2.0**-126, float(np.finfo(np.float32).max)


def check_rms_norm(x: F32, gain: F32, epsilon: float) -> None:
    """The checks of `blocks.rms_norm`; numbers that are not finite are welcome."""
    check_array("x", x, np.float32, (None, None))
    check_array("gain", gain, np.float32, (x.shape[1],))
    if not isinstance(epsilon, int | float) or isinstance(epsilon, bool) or not LEAST_EPSILON <= epsilon <= LARGEST:
        raise ArgumentError("epsilon", repr(epsilon), "a number from 2^-126 to the largest float32")


def check_swiglu(gate: F32, up: F32) -> None:
    """The checks of `blocks.swiglu`; numbers that are not finite are welcome."""
    check_array("gate", gate, np.float32, (None, None))
    check_array("up", up, np.float32, gate.shape)


def rms_norm_of(x: F32, gain: F32, epsilon: float) -> F64:
    """`rms_norm` of float32 rows, in float64: the reference of `blocks.rms_norm`.

    >>> rms_norm_of(np.array([[1, -1, 1, 1]], np.float32), np.array([1, 2, 3, 4], np.float32), 3.0)
    array([[ 0.5, -1. ,  1.5,  2. ]])

    Args:
        x: float32, T × n.
        gain: float32, n.
        epsilon: above 0.

    Returns:
        float64, T × n.

    Raises:
        ArgumentError: wrong dtype, shape or layout; an ε that is not a number from 2^-126 to the largest float32.

    Source: RMSNorm (arXiv 1910.07467) equation 4; ε as in Llama.
    """
    check_rms_norm(x, gain, epsilon)
    with np.errstate(invalid="ignore"):
        return rms_norm(x.astype(np.float64), gain.astype(np.float64), epsilon)


def swiglu_of(gate: F32, up: F32) -> F64:
    """silu(gate) ⊗ up for float32 inputs, in float64: the reference of `blocks.swiglu`.

    >>> swiglu_of(np.array([[2, -1000]], np.float32), np.array([[2, 5]], np.float32)).round(4)
    array([[ 3.5232, -0.    ]])

    Args:
        gate: float32, T × m: what the gate's linear layer gave.
        up: float32, T × m: what the other one gave.

    Returns:
        float64, T × m.

    Raises:
        ArgumentError: wrong dtype, shape or layout.

    Source: arXiv 2002.05202, equation 6.
    """
    check_swiglu(gate, up)
    with np.errstate(invalid="ignore"):
        return silu(gate.astype(np.float64)) * up


RMS_NORM = operation(
    "blocks.rms_norm",
    "Rows scaled to a root mean square of 1",
    promise=BOUNDED,
    source="arXiv 1910.07467 equation 4; arXiv 2302.13971 §2.2",
    reference=rms_norm_of,
    check=check_rms_norm,
    parameters=lambda x, gain, epsilon: {},
    clauses={
        "C1": "Where n is a power of two, the squares have an exactly representable sum in any order, and their mean "
        "plus ε is a power of four, the result equals the formula's.",
        "C2": "Where only the sum of the squares is exact, in any order, each element differs from the formula by at "
        "most the bound of the single roundings that follow it.",
        "C3": "For finite inputs without overflow, each element differs from the formula by at most the bound derived "
        "from the declared arithmetic.",
        "C4": "A row of zeros gives zeros.",
        "C5": "The result is float32, T × n; row t depends on nothing but row t of x, the gain and ε; the same call "
        "gives the same bits.",
        "C6": "A NaN in row t leaves no finite element in row t; an infinity leaves none at its place, and nothing "
        "but zeros and NaN beside it; neither changes another row. What is not finite in the gain leaves no finite "
        "element in its column, unless x is 0 there, and changes no other.",
        "C7": "Where the squares of finite numbers sum to more than float32 holds, the row is within the bound of C3, "
        "or has no finite element: the overflow is not passed off as zeros.",
        "C8": "Wrong dtypes, shapes or layouts, and an ε that is not from 2^-126 to the largest float32, are refused "
        "with an ArgumentError.",
    },
)

SWIGLU = operation(
    "blocks.swiglu",
    "The activation of a gated linear unit",
    promise=BOUNDED,
    source="arXiv 2002.05202 equation 6",
    reference=swiglu_of,
    check=check_swiglu,
    parameters=lambda gate, up: {},
    clauses={
        "C1": "Where silu(gate) is gate or 0 to the bit, that is from 40 upwards, from −760 downwards and at 0, and "
        "gate · up is exact, the result equals the formula's.",
        "C2": "For finite inputs whose product gate · up does not overflow, each element differs from the formula by "
        "at most the bound derived from the declared arithmetic.",
        "C3": "There the result is finite, however large the gate is: an exponential that overflows is not seen.",
        "C4": "The result is float32, T × m; an element depends on nothing but the gate and the up at its own place; "
        "the same call gives the same bits.",
        "C5": "What is not finite in gate or up leaves an element that is not finite at its place, and changes no "
        "other.",
        "C6": "Wrong dtypes, shapes or layouts are refused with an ArgumentError.",
    },
)
