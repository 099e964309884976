r"""A decoder: from tokens to the scores of the next token.

A decoder turns a sequence of tokens into a score for every token that could come next. It looks each token up in a
table, which gives a vector of `hidden` numbers, sends the vectors through a stack of blocks (`block`), applies one more
norm, and multiplies by the *head*, a matrix with a column for each token. The results are the *logits*. A tied head is
the transpose of the table.

**One decoder, several models.** Llama is all defaults. Mixtral puts a sparse layer where Llama has a dense
feed-forward part, and may see the past through a sliding window. Qwen2 adds biases to queries, keys and values. Gemma 3
norms the heads of queries and keys and the result of each part of a block, lets most layers see only a window, and
scales the embedding. All of these are values of the configuration (`config`) or vectors among the weights (`weights`);
the decoder itself is the same.

Source: Llama (arXiv 2302.13971) §2.2; Mixtral (arXiv 2401.04088) §2; Mistral (arXiv 2310.06825) §2 for the window;
Qwen2 (arXiv 2407.10671) §2.2; Gemma 3 (arXiv 2503.19786) §2.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from lowbit.arrays import F32, F64, I64
from lowbit.attention.attention import KeyValueCache
from lowbit.attention.rope import Rotation, half_split, rotation
from lowbit.contract.checks import check_integer
from lowbit.errors import ArgumentError
from lowbit.model.block import FORMULAS, DecoderBlock, MakeLinear, Observer, plain_linear
from lowbit.model.config import LlamaConfig
from lowbit.model.elementwise import ElementwiseOps
from lowbit.model.weights import LlamaWeights, Progress

PREFILL_TOKENS = 256
"""A prompt goes through the blocks this many tokens at a time, so that its scores stay small in memory."""


# **The decoder** is the table, the blocks, the last norm and the head.


class Decoder:
    """A decoder whose linear layers are whatever `linear` makes of each matrix.

    Tokens go in with a *state*, which remembers the ones before them; the state belongs to the caller, so one
    decoder serves many sequences.
    """

    def __init__(
        self,
        weights: LlamaWeights,
        linear: MakeLinear = plain_linear,
        observe: Observer | None = None,
        ops: ElementwiseOps = FORMULAS,
    ) -> None:
        """Make every linear layer ready.

        Args:
            weights: the model.
            linear: from a matrix to the function that multiplies by it, called once for each matrix.
            observe: called by every sparse layer with its input and the experts that it chose.
            ops: the elementwise operations.
        """
        self.config, self._cache = weights.config, ops.cache
        self._embedding = weights.embedding
        self._blocks = [
            DecoderBlock(
                weights.config, number, layer, linear, None if observe is None else partial(observe, number), ops
            )
            for number, layer in enumerate(weights.layers)
        ]
        self._norm = ops.norm(weights.norm, weights.config.rms_epsilon)
        self._head = linear(weights.head)
        self._layout = half_split(weights.config.head_dim)

    def new_state(self, capacity: int = 64) -> list[KeyValueCache]:
        """The state of an empty sequence: one cache for each block, with room for `capacity` tokens at first."""
        config = self.config
        return [self._cache(config.kv_heads, config.head_dim, capacity) for _ in range(config.layers)]

    def hidden(self, tokens: Sequence[int], state: list[KeyValueCache], progress: Progress | None = None) -> F64:
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
        ids, parts, work = token_ids(tokens, self.config, already=len(state[0])), [], 0
        for start in range(0, len(ids), PREFILL_TOKENS):
            part = ids[start : start + PREFILL_TOKENS]
            rotations = self._rotations(start=len(state[0]), count=len(part))
            x = self.config.embedding_scale * self._embedding[part].astype(np.float64)
            for block, cache in zip(self._blocks, state, strict=True):
                with np.errstate(over="ignore", invalid="ignore"):  # what overflows here is refused by `logits`
                    x = block(x, rotations[block.rope_base], cache)
                work += len(part)
                if progress is not None:
                    progress(work, len(ids) * len(state))
            parts.append(self._norm(x))
        return np.concatenate(parts)

    def logits(self, hidden: F64) -> F32:
        """The score of every token: float32, T × vocabulary, for float64, T × hidden.

        Raises:
            ArgumentError: a logit is not finite, because the weights are too large, as those of a damaged file may be.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            scores = self._head(hidden.astype(np.float32))
        check_logits(scores)
        return scores

    def _rotations(self, start: int, count: int) -> dict[float, Rotation]:
        """The rotation of these positions for every base that a block asks for; a Llama has one."""
        bases = {block.rope_base for block in self._blocks}
        return {base: rotation(self._layout, base, start, count) for base in bases}


def check_logits(scores: F32) -> None:
    """Refuse logits that are not finite.

    Raises:
        ArgumentError: one is not.
    """
    if not np.isfinite(scores).all():
        sentence = "a logit is not finite: the weights overflow float32; the model file may be damaged"
        raise ArgumentError("weights", "too large", "weights that do not overflow float32", sentence)


def token_ids(tokens: Sequence[int], config: LlamaConfig, already: int) -> I64:
    """Tokens as an array, after `already` others.

    Raises:
        ArgumentError: no tokens, a token outside the vocabulary, or more tokens than the context.
    """
    if not 1 <= len(tokens) <= config.context - already:
        allowed = f"1 to {config.context - already} (context {config.context})"
        raise ArgumentError("number of tokens", len(tokens), allowed)
    for position, token in enumerate(tokens):
        check_integer(f"tokens[{position}]", token, 0, config.vocabulary - 1)
    return np.array(tokens, np.int64)


# **Any decoder.** Generation and perplexity need no more of a decoder than this. The decoder above is one; a
# backend that runs whole models brings another (`lowbit.backend.whole_model`).


class AnyDecoder(Protocol):
    """What turns tokens into logits."""

    @property
    def config(self) -> LlamaConfig:
        """Its shape; only the vocabulary and the context are used here."""

    def new_state(self) -> Any:
        """The state of an empty sequence; its type is the model's own."""

    def hidden(self, tokens: Sequence[int], state: Any, progress: Progress | None = None) -> F64:
        """Read tokens after those that `state` holds: float64, T × hidden, for `logits`; see `Decoder.hidden`."""

    def logits(self, hidden: F64) -> F32:
        """The score of every token: float32, T × vocabulary; see `Decoder.logits`."""


# **Generation** feeds the decoder with its own choices. Greedy: always the token with the highest logit, and of equals
# the one with the lowest number.


@dataclass(frozen=True, eq=False)
class Step:
    """One generated token, and the logits (float32, vocabulary) from which it was chosen."""

    token: int
    logits: F32


def next_logits(decoder: AnyDecoder, tokens: Sequence[int], progress: Progress | None = None) -> F32:
    """The logits of the token that follows `tokens`: float32, vocabulary."""
    hidden = decoder.hidden(tokens, decoder.new_state(), progress)
    return decoder.logits(hidden[-1:]).reshape(-1)


def generate(
    decoder: AnyDecoder,
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
        forced: tokens to continue with instead of the chosen ones, at least ``count - 1``. Two decoders that are forced
            along the same sequence can be compared at every step, even after their choices differ.
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
    """Where two greedy continuations first differ.

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
