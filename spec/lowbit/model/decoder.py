r"""A decoder: from tokens to the scores of the next token.

A decoder turns a sequence of tokens into a score for every token that could come next. It looks up each token in a
table, which gives a vector of `hidden` numbers, sends the vectors through a stack of blocks (`block`), applies one more
norm, and multiplies by the *head*, a matrix with a column for each token. The results are the *logits*. A tied head is
the transpose of the table.

**One decoder, several models.** Llama is all defaults. Mixtral puts a sparse layer where Llama has a dense
feed-forward part, and may see the past through a sliding window. Llama 3.1 scales its rotation, and SmolLM3 leaves it
out of some layers. Qwen2 adds biases to queries, keys and values; Qwen3 norms the heads of queries and keys instead.
Gemma 3 norms these heads and the result of each part of a block, lets most layers see only a window, and scales the
embedding. Gemma 2 caps its scores and its logits; GPT-OSS has sinks, biases of its experts and clamped units in them.
Granite multiplies the embedding, the scores, what each part of a block adds and the logits by factors.
All of these are values of the configuration (`config`) or vectors among the weights (`weights`), from which the program
of the step follows (`step`); the decoder itself is the same.

Source: Llama (arXiv 2302.13971) §2.2; Mixtral (arXiv 2401.04088) §2; Mistral (arXiv 2310.06825) §2 for the window;
Qwen2 (arXiv 2407.10671) §2.2; Qwen3 (arXiv 2505.09388) §2; Gemma 3 (arXiv 2503.19786) §2.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from lowbit.arrays import F32, F64, I64
from lowbit.attention.attention import KeyValueCache
from lowbit.attention.rope import Frequencies, Rotation
from lowbit.contract.checks import check_integer
from lowbit.errors import ArgumentError
from lowbit.model.block import (
    FORMULAS,
    Interpreter,
    MakeLinear,
    Observer,
    Place,
    check_scores,
    parameters_of,
    plain_linear,
)
from lowbit.model.config import LlamaConfig
from lowbit.model.elementwise import ElementwiseOps
from lowbit.model.step import step_of
from lowbit.model.weights import LlamaWeights, Progress

PREFILL_TOKENS = 256
"""A prompt goes through the blocks this many tokens at a time, so that its scores stay small in memory."""

Watch = Callable[[int, F64], None]
"""Called with the number of a block and the residual stream after it: float64, T × hidden."""


# **The decoder** is the table, the blocks, the last norm and the head.


class Decoder:
    """A decoder whose linear layers are made by `linear`.

    Tokens are read with a *state*, which holds the keys and values of those before them. The state belongs to the
    caller, so one decoder serves many sequences.

    Attributes:
        config: of the model.
        step: its program.
        ops: the elementwise operations.
        embedding: vocabulary × hidden; returns the rows of tokens as float32.
        blocks: an interpreter for the program of each block.
        norm: an interpreter for the last norm.
        scores: an interpreter for the rest: the head, and the factor and soft cap of the logits, if any.
    """

    def __init__(
        self,
        weights: LlamaWeights,
        linear: MakeLinear = plain_linear,
        observe: Observer | None = None,
        ops: ElementwiseOps = FORMULAS,
    ) -> None:
        """Prepare every linear layer.

        Args:
            weights: the model.
            linear: makes the function that multiplies by a matrix, called once for each matrix.
            observe: called by every sparse layer with its input and the experts that it chose.
            ops: the elementwise operations.
        """
        config = weights.config
        self.config, self.ops, self.step = config, ops, step_of(weights)
        self.embedding: Rows = weights.embedding
        self.blocks = [
            Interpreter(
                program,
                parameters_of(layer),
                linear,
                ops,
                None if observe is None else partial(observe, number),
            )
            for number, (program, layer) in enumerate(zip(self.step.blocks, weights.layers, strict=True))
        ]
        (self._embed,), (norm, *scores) = self.step.first, self.step.last
        self.norm = Interpreter((norm,), {"norm": weights.norm}, linear, ops)
        # The head returns float32. It is widened only if something follows, because there are many logits.
        plain = all(line.kind == "product" for line in scores)
        wide = replace(ops, dtype=np.dtype(np.float32)) if plain else ops
        self.scores = Interpreter(tuple(scores), {"head": weights.head}, linear, wide)
        self._frequencies = config.frequencies

    def new_state(self, capacity: int = 64) -> list[KeyValueCache]:
        """The state of an empty sequence: one cache for each block, with room for `capacity` tokens at first."""
        config = self.config
        return [self.ops.cache(config.kv_heads, config.head_dim, capacity) for _ in range(config.layers)]

    def hidden(
        self,
        tokens: Sequence[int],
        state: list[KeyValueCache],
        progress: Progress | None = None,
        watch: Watch | None = None,
    ) -> F64:
        """Run T tokens through the blocks, after those in `state`, and add them to it.

        Args:
            tokens: at least one.
            state: from `new_state`, of this decoder.
            progress: called after each block; the work is counted in tokens times blocks.
            watch: called after each block with its number and the residual stream of the tokens that it read.

        Returns:
            float64, T × hidden, after the last norm: the input of the head.

        Raises:
            ArgumentError: no tokens, a token outside the vocabulary, or more tokens than the context.
        """
        ids, parts, work = token_ids(tokens, self.config, already=len(state[0])), [], 0
        for start in range(0, len(ids), PREFILL_TOKENS):
            part = ids[start : start + PREFILL_TOKENS]
            rotations = self._rotations(start=len(state[0]), count=len(part))
            x = embedded(self.embedding, part, self._embed.setting("scale")).astype(self.ops.dtype)
            for number, (block, cache) in enumerate(zip(self.blocks, state, strict=True)):
                x = block(x, Place(rotations, [cache]))
                if watch is not None:
                    watch(number, x)
                work += len(part)
                if progress is not None:
                    progress(work, len(ids) * len(state))
            parts.append(self.norm(x))
        return np.concatenate(parts).astype(np.float64, copy=False)

    def hidden_batch(self, tokens: Sequence[int], states: Sequence[list[KeyValueCache]]) -> F64:
        """Run one token of each of several sequences through the blocks, and add it to its sequence.

        Every matrix is read once for all of them, so a batch costs less than its sequences one by one.

        Args:
            tokens: B of them.
            states: B different states, of sequences of any lengths.

        Returns:
            float64, B × hidden, after the last norm.

        Raises:
            ArgumentError: no tokens, or not as many as states; a repeated state; a token outside the vocabulary, or one
                that does not fit the context.
        """
        ids = batch_ids(tokens, states, [len(state[0]) for state in states], self.config)
        places = [self._rotations(len(state[0]), 1) for state in states]
        rotations = {each: stacked([place[each] for place in places]) for each in self._frequencies}
        x = embedded(self.embedding, ids, self._embed.setting("scale")).astype(self.ops.dtype)
        for number, block in enumerate(self.blocks):
            x = block(x, Place(rotations, [state[number] for state in states]))
        hidden: F64 = self.norm(x).astype(np.float64, copy=False)
        return hidden

    def logits(self, hidden: F64) -> F32:
        """The score of every token: float32, T × vocabulary, for float64, T × hidden.

        Raises:
            ArgumentError: a logit is not finite (`lowbit.model.block.check_scores`).
        """
        with np.errstate(over="ignore"):
            scores: F32 = self.scores(hidden).astype(np.float32, copy=False)
        check_scores(scores, "a logit")
        return scores

    def _rotations(self, start: int, count: int) -> dict[Frequencies, Rotation]:
        """The rotation of these positions for all frequencies that blocks use; a Llama has one."""
        return {each: each.rotation(self.config.head_dim, start, count) for each in self._frequencies}


class Rows(Protocol):
    """A table whose rows are read, such as an array."""

    def __getitem__(self, ids: I64, /) -> F32:
        """The rows of tokens: float32, T × hidden."""


def embedded(embedding: Rows, ids: I64, scale: float) -> F64:
    """The rows of the tokens times a factor: float64, T × hidden."""
    return scale * embedding[ids].astype(np.float64)


def token_ids(tokens: Sequence[int], config: LlamaConfig, already: int) -> I64:
    """Tokens as an array, to follow `already` others.

    Raises:
        ArgumentError: no tokens, a token outside the vocabulary, or more tokens than the context.
    """
    if not 1 <= len(tokens) <= config.context - already:
        allowed = f"1 to {config.context - already} (context {config.context})"
        raise ArgumentError("number of tokens", len(tokens), allowed)
    for position, token in enumerate(tokens):
        check_integer(f"tokens[{position}]", token, 0, config.vocabulary - 1)
    return np.array(tokens, np.int64)


def batch_ids(tokens: Sequence[int], states: Sequence[object], lengths: Sequence[int], config: LlamaConfig) -> I64:
    """The next tokens of several sequences as an array.

    Raises:
        ArgumentError: as `Decoder.hidden_batch`.
    """
    if not tokens or len(tokens) != len(states):
        raise ArgumentError("number of tokens", len(tokens), f"one for each of {len(states)} states, and at least one")
    if len({id(state) for state in states}) < len(states):
        raise ArgumentError("states", "one of them twice", "a state of its own for each token")
    return np.concatenate([token_ids([token], config, length) for token, length in zip(tokens, lengths, strict=True)])


def stacked(rotations: Sequence[Rotation]) -> Rotation:
    """The rotations of tokens at different positions, as one."""
    cos, sin = (np.concatenate([getattr(each, name) for each in rotations]) for name in ("cos", "sin"))
    return Rotation(rotations[0].layout, cos, sin)


# **Any decoder.** Generation and perplexity require only this protocol of a decoder. The decoder above fulfils it; a
# backend that runs whole models has its own (`lowbit.backend.whole_model`).


class AnyDecoder(Protocol):
    """A decoder: from tokens to logits."""

    @property
    def config(self) -> LlamaConfig:
        """Its shape; only the vocabulary and the context are used here."""

    def new_state(self, capacity: int = 64) -> Any:
        """The state of an empty sequence, with room for `capacity` tokens at first; each decoder has its own type."""

    def hidden(self, tokens: Sequence[int], state: Any, progress: Progress | None = None) -> F64:
        """Read tokens after those that `state` holds: float64, T × hidden, for `logits`; see `Decoder.hidden`."""

    def logits(self, hidden: F64) -> F32:
        """The score of every token: float32, T × vocabulary; see `Decoder.logits`."""


def next_logits(decoder: AnyDecoder, tokens: Sequence[int], progress: Progress | None = None) -> F32:
    """The logits of the token that follows `tokens`: float32, vocabulary."""
    hidden = decoder.hidden(tokens, decoder.new_state(max(1, len(tokens))), progress)
    return decoder.logits(hidden[-1:]).reshape(-1)
