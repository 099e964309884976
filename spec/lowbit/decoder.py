r"""A Llama decoder: the chapters put together until they speak.

A decoder turns a sequence of tokens into a score for every token that could come next. It looks each token up in a
table, which gives a vector of `hidden` numbers, and sends the vectors through a stack of blocks. A block has two
parts, and each *adds* its result to what came in, so the vectors form a *residual stream* that every block reads and
none overwrites:

.. math::

    x \leftarrow x + \mathrm{Attention}(\mathrm{norm}(x)), \qquad
    x \leftarrow x + \mathrm{FeedForward}(\mathrm{norm}(x)).

**Norm** (RMSNorm, gain :math:`g`, a small :math:`\varepsilon` from the file):

.. math:: \mathrm{norm}(x) = g \otimes \frac{x}{\sqrt{\frac1n \sum_c x_c^2 + \varepsilon}}.

**Attention** projects to queries, keys and values, turns queries and keys by their positions (`rope`), reads the past
(`attention`) and projects back:
:math:`\mathrm{Attention}(x) = \mathrm{attend}(R\,xW_q,\; R\,xW_k,\; xW_v)\,W_o`.

**Feed-forward** (SwiGLU): :math:`\mathrm{FeedForward}(x) = (\mathrm{silu}(xW_{gate}) \otimes xW_{up})\,W_{down}` with
:math:`\mathrm{silu}(a) = a / (1 + e^{-a})`.

After the last block one more norm and the *head*, a matrix with a column for each token, give the *logits*. Where
the head is tied, it is the table of the first step over again.

**Precision.** Nearly all weights and nearly all the time are in the linear layers, and those are what a backend
computes, in float32 as its contract says. Everything between them is float64 here: norms, rotations, softmax, the
residual stream. It costs little, and it means that two backends which agree on the linear layers agree on the
logits, because nothing else is left to differ.

Source: Llama (arXiv 2302.13971) §2.2; RMSNorm (arXiv 1910.07467) equation 4; SwiGLU (arXiv 2002.05202) equation 6;
GQA §2.2.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lowbit.attention import KeyValueCache, attend
from lowbit.check import check_integer
from lowbit.errors import ArgumentError
from lowbit.rope import Rotation, half_split, rotate, rotation
from lowbit.weights import Floats, LayerWeights, LlamaConfig, LlamaWeights, Matrix, Progress, linear_shapes

Reals = npt.NDArray[np.float64]

Linear = Callable[[Floats], Floats]
"""A linear layer: float32, T × K, to float32, T × N."""

PREFILL_TOKENS = 256
"""A prompt goes through the blocks this many tokens at a time, so that its scores stay small in memory."""


def plain_linear(matrix: Matrix) -> Linear:
    """The simplest linear layer of all, for float32 weights: numpy's product.

    Raises:
        ArgumentError: a quantised matrix; which kernel multiplies by it is the caller's choice, not a default.
    """
    if not isinstance(matrix, np.ndarray):
        raise ArgumentError("matrix", "quantised", "float32 weights (`lowbit.engine` runs quantised ones on a backend)")
    return lambda x: x @ matrix


def rms_norm(x: Reals, gain: Reals, epsilon: float) -> Reals:
    """Scale each vector to a root mean square of 1, then each channel by its gain.

    >>> rms_norm(np.array([[3.0, 4.0]]), np.ones(2), epsilon=0.0).round(4)
    array([[0.8485, 1.1314]])
    """
    mean_square: Reals = np.mean(x * x, axis=-1, keepdims=True)
    return gain * (x / np.sqrt(mean_square + epsilon))


def silu(a: Reals) -> Reals:
    """a / (1 + e^−a), close to a for large a and to 0 for very negative a.

    >>> silu(np.array([-1000.0, 0.0, 1000.0]))
    array([  -0.,    0., 1000.])
    """
    with np.errstate(over="ignore"):  # e^1000 is infinite, and a / infinity is the 0 that is meant
        return a / (1.0 + np.exp(-a))


# **A block.** Attention and feed-forward, each around its linear layers.


class Block:
    """One layer of the stack, with its linear layers made ready to be called."""

    def __init__(self, config: LlamaConfig, layer: LayerWeights, linear: Callable[[Matrix], Linear]) -> None:
        self._config = config
        self._attention_gain = layer.attention_norm.astype(np.float64)
        self._feed_forward_gain = layer.feed_forward_norm.astype(np.float64)
        self._linears = {name: linear(getattr(layer, name)) for name in linear_shapes(config)}

    def __call__(self, x: Reals, turn: Rotation, cache: KeyValueCache) -> Reals:
        """The residual stream after this block: float64, T × hidden."""
        epsilon = self._config.rms_epsilon
        x = x + self._attention(rms_norm(x, self._attention_gain, epsilon), turn, cache)
        return x + self._feed_forward(rms_norm(x, self._feed_forward_gain, epsilon))

    def _attention(self, x: Reals, turn: Rotation, cache: KeyValueCache) -> Reals:
        config, tokens = self._config, len(x)
        queries = self._linear("query", x).reshape(tokens, config.heads, config.head_dim)
        keys = self._linear("key", x).reshape(tokens, config.kv_heads, config.head_dim)
        values = self._linear("value", x).reshape(tokens, config.kv_heads, config.head_dim)
        cache.append(rotate(keys, turn), values)
        mixed = attend(rotate(queries, turn), cache.keys, cache.values)
        return self._linear("output", mixed.reshape(tokens, config.heads * config.head_dim))

    def _feed_forward(self, x: Reals) -> Reals:
        return self._linear("down", silu(self._linear("gate", x)) * self._linear("up", x))

    def _linear(self, name: str, x: Reals) -> Reals:
        """Through the door of a linear layer and back: float32 inside, float64 outside."""
        return self._linears[name](x.astype(np.float32)).astype(np.float64)


# **The decoder** is the table, the blocks, the last norm and the head.


class Decoder:
    """A Llama decoder whose linear layers are whatever `linear` makes of each matrix.

    Tokens go in with a *state*, which remembers the ones before them; the state belongs to the caller, so one
    decoder serves many sequences.
    """

    def __init__(self, weights: LlamaWeights, linear: Callable[[Matrix], Linear] = plain_linear) -> None:
        """Make every linear layer ready.

        Args:
            weights: the model.
            linear: from a matrix to the function that multiplies by it, called once for each matrix.
        """
        self.config = weights.config
        self._embedding = weights.embedding
        self._blocks = [Block(weights.config, layer, linear) for layer in weights.layers]
        self._gain = weights.norm.astype(np.float64)
        self._head = linear(weights.head)
        self._layout = half_split(weights.config.head_dim)

    def new_state(self, capacity: int = 64) -> list[KeyValueCache]:
        """The state of an empty sequence: one cache for each block, with room for `capacity` tokens at first."""
        config = self.config
        return [KeyValueCache(config.kv_heads, config.head_dim, capacity) for _ in range(config.layers)]

    def hidden(self, tokens: Sequence[int], state: list[KeyValueCache], progress: Progress | None = None) -> Reals:
        """Send T tokens through the blocks, after the ones that `state` holds, and add them to it.

        Args:
            tokens: at least one.
            state: from `new_state`, of this decoder.
            progress: called after each block, with tokens times blocks.

        Returns:
            float64, T × hidden, after the last norm: what the head reads.

        Raises:
            ArgumentError: no tokens, a token outside the vocabulary, or more tokens than the context.
        """
        ids, parts, work = self._checked(tokens, already=len(state[0])), [], 0
        for start in range(0, len(ids), PREFILL_TOKENS):
            part = ids[start : start + PREFILL_TOKENS]
            turn = rotation(self._layout, self.config.rope_base, start=len(state[0]), count=len(part))
            x = self._embedding[part].astype(np.float64)
            for block, cache in zip(self._blocks, state, strict=True):
                with np.errstate(over="ignore", invalid="ignore"):  # what overflows here is refused by `logits`
                    x = block(x, turn, cache)
                work += len(part)
                if progress is not None:
                    progress(work, len(ids) * len(state))
            parts.append(rms_norm(x, self._gain, self.config.rms_epsilon))
        return np.concatenate(parts)

    def logits(self, hidden: Reals) -> Floats:
        """The score of every token: float32, T × vocabulary, for float64, T × hidden.

        Raises:
            ArgumentError: a logit that is not finite; weights as large as only a damaged file has them overflow.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            scores = self._head(hidden.astype(np.float32))
        if not np.isfinite(scores).all():
            raise ArgumentError("weights", "such that a logit is not finite", "weights that do not overflow float32")
        return scores

    def _checked(self, tokens: Sequence[int], already: int) -> npt.NDArray[np.int64]:
        config = self.config
        if not 1 <= len(tokens) <= config.context - already:
            raise ArgumentError(
                "number of tokens", len(tokens), f"1 to {config.context - already} (context {config.context})"
            )
        for position, token in enumerate(tokens):
            check_integer(f"tokens[{position}]", token, 0, config.vocabulary - 1)
        return np.array(tokens, np.int64)


# **Generation** is the decoder fed with its own answer. Greedy: always the token with the highest logit, and of equals
# the one with the lowest number.


@dataclass(frozen=True, eq=False)
class Step:
    """One generated token, and the logits (float32, vocabulary) from which it was chosen."""

    token: int
    logits: Floats


def next_logits(decoder: Decoder, tokens: Sequence[int], progress: Progress | None = None) -> Floats:
    """The logits of the token that follows `tokens`: float32, vocabulary."""
    hidden = decoder.hidden(tokens, decoder.new_state(), progress)
    return decoder.logits(hidden[-1:]).reshape(-1)


def generate(
    decoder: Decoder,
    prompt: Sequence[int],
    count: int,
    *,
    stop: Sequence[int] = (),
    forced: Sequence[int] | None = None,
    progress: Progress | None = None,
) -> Iterator[Step]:
    """Continue a prompt greedily, yielding each token as soon as it is known.

    Args:
        decoder: the model.
        prompt: at least one token.
        count: the most tokens to generate, at least 1.
        stop: tokens that end the sequence; the one that does is yielded too.
        forced: tokens to go on with instead of the chosen ones, at least ``count - 1``. Two decoders that are forced
            along the same sequence can be compared at every step, also after their choices have parted.
        progress: called while the prompt is read, which is all the work before the first token.

    Raises:
        ArgumentError: wrong arguments; raised by the first step.
    """
    check_integer("count", count, least=1)
    room = decoder.config.context - len(prompt)
    if count - 1 > room:  # the last token is yielded, not read
        raise ArgumentError("count", count, f"at most {room + 1} after a prompt of {len(prompt)} tokens")
    if forced is not None and len(forced) < count - 1:
        raise ArgumentError("number of forced tokens", len(forced), f"at least {count - 1}")
    state = decoder.new_state()
    hidden = decoder.hidden(prompt, state, progress)[-1:]
    for number in range(count):
        logits = decoder.logits(hidden).reshape(-1)
        token = int(np.argmax(logits))
        yield Step(token, logits)
        if token in stop or number == count - 1:
            return
        hidden = decoder.hidden([token if forced is None else forced[number]], state)


@dataclass(frozen=True)
class Difference:
    """Where two greedy continuations part.

    Attributes:
        position: the first step at which they differ, from 0.
        tokens: what each of them chose there.
        logits: two rows, one for each run: its logit for the first's token and for the second's.
    """

    position: int
    tokens: tuple[int, int]
    logits: tuple[tuple[float, float], tuple[float, float]]

    @property
    def gaps(self) -> tuple[float, float]:
        """By how much each run prefers its own token; a near-tie shows as two small gaps."""
        (first_own, first_other), (second_other, second_own) = self.logits
        return first_own - first_other, second_own - second_other


def first_difference(first: Sequence[Step], second: Sequence[Step]) -> Difference | None:
    """Compare two greedy continuations of one prompt: None where every token is the same.

    Up to the first difference both runs have read the same tokens, so their logits there answer the same question.
    """
    for position, (a, b) in enumerate(zip(first, second, strict=False)):
        if a.token != b.token:
            rows = tuple((float(step.logits[a.token]), float(step.logits[b.token])) for step in (a, b))
            return Difference(position, (a.token, b.token), (rows[0], rows[1]))
    return None
