"""Generation: continue a prompt, a token at a time.

The decoder reads the prompt, and its logits after the last token decide the next one: the token with the highest logit,
ties by lowest number, or one that is sampled (`sampling`). The decoder reads this token in turn, and so on, until a
stop token or the wanted number. The state of the sequence holds the keys and values of all tokens read so far, so each
token is read once.

**Several sequences** may be continued together. Each has a state of its own, and in each round the decoder reads one
token of every sequence that has not ended.

**A decoder may choose tokens itself.** Sampling is specified to the bit, so a backend that runs whole models may choose
the same tokens, and several of them in one call. It then has methods with the names `choose`, `follow` or
`follow_batch`; this chapter uses them where they exist and its own functions elsewhere.

Source: our own; sampling as the chapter `lowbit.model.sampling`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from lowbit.arrays import F32, F64
from lowbit.contract.checks import check_integer
from lowbit.errors import ArgumentError
from lowbit.model.decoder import AnyDecoder
from lowbit.model.sampling import GREEDY, Sampling, choose
from lowbit.model.weights import Progress


@dataclass(frozen=True, eq=False)
class Step:
    """One generated token, and the logits (float32, vocabulary) from which it was chosen."""

    token: int
    logits: F32


class Choose(Protocol):
    """`lowbit.model.sampling.choose`."""

    def __call__(self, logits: F32, sampling: Sampling, position: int, sequence: int = 0) -> int: ...


def choice_of(decoder: AnyDecoder) -> Choose:
    """The function that chooses a decoder's tokens: its own `choose`, or that of the chapter `sampling`."""
    own: Choose = getattr(decoder, "choose", choose)
    return own


def chosen(decoder: AnyDecoder, hidden: F64, sampling: Sampling, position: int) -> Step:
    """The token after a hidden state (float64, 1 × hidden), and its logits."""
    logits = decoder.logits(hidden).reshape(-1)
    return Step(choice_of(decoder)(logits, sampling, position), logits)


def follow(
    decoder: AnyDecoder,
    token: int,
    state: Any,
    sampling: Sampling,
    position: int,
    most: int = 1,
    stop: Sequence[int] = (),
) -> Sequence[Step]:
    """Read a token after those in `state`, choose the next one, and perhaps go on with that one.

    This function chooses one token. A decoder may have a function of this name that chooses several in one call, with
    the same tokens and logits. It decides how many, and chooses none after a token of `stop`.

    Args:
        decoder: the model.
        token: the token to read.
        state: that of the sequence; afterwards it holds all tokens but the last that was chosen.
        sampling: how a token is chosen.
        position: that of the first token to choose.
        most: the most tokens to choose, at least 1.
        stop: tokens that end the sequence.

    Raises:
        ArgumentError: as `hidden`, `logits` and `lowbit.model.sampling.choose`.
    """
    own: Callable[..., Sequence[Step]] | None = getattr(decoder, "follow", None)
    if own is not None:
        return own(token, state, sampling, position, most, stop)
    return [chosen(decoder, decoder.hidden([token], state), sampling, position)]


def generate(
    decoder: AnyDecoder,
    prompt: Sequence[int],
    count: int,
    *,
    sampling: Sampling = GREEDY,
    stop: Sequence[int] = (),
    forced: Sequence[int] | None = None,
    progress: Progress | None = None,
) -> Iterator[Step]:
    """Continue a prompt, yielding tokens as they become known: each by itself, or a few that a decoder generates in one
    call (`follow`).

    Args:
        decoder: the model.
        prompt: at least one token.
        count: the most tokens to generate, at least 1.
        sampling: how a token is chosen.
        stop: tokens that end the sequence; the ending token is yielded too.
        forced: tokens to continue with instead of the chosen ones, at least ``count - 1``. Two decoders forced along
            the same sequence can be compared at every step, even after their choices differ.
        progress: called while the prompt is read, which is all the work before the first token.

    Raises:
        ArgumentError: wrong arguments; raised by the first step.
    """
    check_integer("count", count, least=1)
    room = decoder.config.context - len(prompt)
    if count - 1 > room:  # the last token is yielded but not read
        raise ArgumentError("count", count, f"at most {room + 1} after a prompt of {len(prompt)} tokens")
    if forced is not None and len(forced) < count - 1:
        raise ArgumentError("number of forced tokens", len(forced), f"at least {count - 1}")
    state = decoder.new_state(max(1, len(prompt) + count - 1))  # so that it never has to grow
    steps: Sequence[Step] = [chosen(decoder, decoder.hidden(prompt, state, progress)[-1:], sampling, len(prompt))]
    number = 0
    while True:
        for step in steps:
            yield step
            number += 1
            if step.token in stop or number == count:
                return
        token, most = (step.token, count - number) if forced is None else (forced[number - 1], 1)
        steps = follow(decoder, token, state, sampling, len(prompt) + number, most, stop)


class BatchDecoder(AnyDecoder, Protocol):
    """A decoder that also reads one token of each of several sequences at once."""

    def hidden_batch(self, tokens: Sequence[int], states: Sequence[Any]) -> F64:
        """See `Decoder.hidden_batch`."""


def choose_each(
    decoder: AnyDecoder, logits: F32, sampling: Sampling, places: Sequence[tuple[int, int]]
) -> Sequence[int]:
    """A token for each row of logits, with the position and the number of its sequence."""
    choose = choice_of(decoder)
    return [choose(row, sampling, *place) for row, place in zip(logits, places, strict=True)]


def follow_batch(
    decoder: BatchDecoder,
    tokens: Sequence[int],
    states: Sequence[Any],
    sampling: Sampling,
    places: Sequence[tuple[int, int]],
    most: int = 1,
    stop: Sequence[int] = (),
) -> Sequence[Sequence[int]]:
    """As `follow`, for several sequences: in each round, one token of each. The round in which one stops is the last.

    This function makes one round. A decoder may have a function of this name that makes several, with the same tokens.

    Args:
        decoder: the model.
        tokens: the token to read in each sequence.
        states: those of the sequences.
        sampling: how tokens are chosen.
        places: for each sequence, the position of the first token to choose, and the number of the sequence.
        most: the most rounds, at least 1.
        stop: tokens that end a sequence.

    Returns:
        The tokens of each round, one for each sequence.

    Raises:
        ArgumentError: as `Decoder.hidden_batch`, `logits` and `lowbit.model.sampling.choose`.
    """
    own: Callable[..., Sequence[Sequence[int]]] | None = getattr(decoder, "follow_batch", None)
    if own is not None:
        return own(tokens, states, sampling, places, most, stop)
    return [choose_each(decoder, decoder.logits(decoder.hidden_batch(tokens, states)), sampling, places)]


def generate_batch(
    decoder: BatchDecoder,
    prompts: Sequence[Sequence[int]],
    count: int,
    *,
    sampling: Sampling = GREEDY,
    stop: Sequence[int] = (),
) -> list[list[int]]:
    """Continue several prompts, a token of each at a time.

    A sequence that has ended leaves the batch. A batch may use other kernels, which round differently, so a token may
    differ from that of `generate` if two are almost equally likely.

    Args:
        decoder: the model.
        prompts: of any lengths, each at least one token.
        count: the most tokens to generate for each, at least 1.
        sampling: how a token is chosen; each prompt has its own random numbers.
        stop: tokens that end a sequence.

    Returns:
        The tokens that follow each prompt, including the one that ended it.

    Raises:
        ArgumentError: no prompts, a count that does not fit the context, tokens outside the vocabulary.
    """
    if not prompts:
        raise ArgumentError("number of prompts", 0, "at least 1")
    check_integer("count", count, least=1)
    longest = max(map(len, prompts))
    if count - 1 > (room := decoder.config.context - longest):
        raise ArgumentError("count", count, f"at most {room + 1} after a prompt of {longest} tokens")
    states = [decoder.new_state(max(1, len(prompt) + count - 1)) for prompt in prompts]
    hidden = np.concatenate([decoder.hidden(*each)[-1:] for each in zip(prompts, states, strict=True)])
    answers: list[list[int]] = [[] for _ in prompts]
    running = list(range(len(prompts)))
    places = [(len(prompt), number) for number, prompt in enumerate(prompts)]
    chosen: Sequence[Sequence[int]] = [choose_each(decoder, decoder.logits(hidden), sampling, places)]
    while True:
        for tokens in chosen:
            for number, token in zip(running, tokens, strict=True):
                answers[number].append(token)
        running = [n for n in running if answers[n][-1] not in stop and len(answers[n]) < count]
        if not running:
            return answers
        last, own = [answers[n][-1] for n in running], [states[n] for n in running]
        places = [(len(prompts[n]) + len(answers[n]), n) for n in running]
        chosen = follow_batch(decoder, last, own, sampling, places, count - len(answers[running[0]]), stop)


@dataclass(frozen=True)
class Difference:
    """Where two greedy continuations first differ.

    Attributes:
        position: the first step at which they differ, from 0.
        tokens: the token that each chose there.
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

    Up to the first difference both runs have read the same tokens, so their logits there are comparable.
    """
    for position, (a, b) in enumerate(zip(first, second, strict=False)):
        if a.token != b.token:
            rows = tuple((float(step.logits[a.token]), float(step.logits[b.token])) for step in (a, b))
            return Difference(position, (a.token, b.token), (rows[0], rows[1]))
    return None
