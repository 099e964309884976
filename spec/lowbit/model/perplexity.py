r"""Perplexity: how well a model predicts a text that people wrote.

At every position a model gives each token a probability. The *negative log-likelihood* of the actual token is large
where the model gave it a small probability; *e* to the power of its mean over a text is the perplexity:

.. math:: \mathrm{PPL} = \exp\Bigl(\frac1n \sum_{i} -\ln p(t_i \mid \text{the tokens before it in its window})\Bigr).

A model that gave all tokens the same probability would have a perplexity equal to the size of its vocabulary.
Quantisation raises it; the increase is the price of fewer bits.

**Protocols.** Perplexities can be compared only if they are counted alike: the length of the windows in which a text is
read, their overlap, the place of the beginning mark (BOS), which tokens of a window are scored, and the treatment of a
short last window. Published numbers differ in these, which changes a perplexity by more than most quantisers do. So a
protocol is a value, `Protocol`, and those of this table have names. W is the length of a window:

================ ==== ======= ===================== ================================= ===================
protocol         W    windows BOS, if the model has which tokens of a window are      a short last window
                                                    scored
================ ==== ======= ===================== ================================= ===================
``lowbit``       512  W apart before every window   all; without BOS all but the      read like the others
                                                    first
``gptq``         2048 W apart before the text       all but the first                 not read
``llama.cpp``    512  W apart the first token of    those after the first W/2 + 1     not read
                              every window
``transformers`` 1024 512     before the text       those in no window before; of the read like the others
                      apart                         first window all but its first
================ ==== ======= ===================== ================================= ===================

Each window is read on its own, from position 0, with nothing before it. Where BOS takes the place of a token, as for
``llama.cpp``, that token is neither seen nor scored. The number is :math:`e` to the power of the mean over all scored
tokens. GPTQ's code takes the mean of the windows' means, which is the same, since its windows are equal. llama.cpp also
asks for a text of at least 2 W tokens.

Logarithms are natural and the sums are float64.

Source: GPTQ's ``llama_eval``; ``perplexity`` in llama.cpp's program of that name; the guide *Perplexity of fixed-length
models* of transformers; errata Q13.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np

from lowbit.arrays import F32, F64
from lowbit.contract.checks import check_choice, check_integer
from lowbit.errors import ArgumentError
from lowbit.model.config import LlamaConfig
from lowbit.model.decoder import AnyDecoder
from lowbit.model.weights import Progress

LOGIT_ROWS = 64
"""Logits are computed for this many positions at a time, because a row is as long as the vocabulary."""


@dataclass(frozen=True)
class Protocol:
    """How the tokens of a text are counted.

    Attributes:
        window: W, the default number of tokens of a window.
        bos: where the BOS token goes: ``windows``, before every window and not counted in W; ``text``, once before the
            text; ``replaces``, before the text, and in place of the first token of every window.
        scored: ``all`` that have a token before them in their window; ``half``, those after the first ⌊W/2⌋ + 1.
        stride: from the start of a window to that of the next, less than W; a token is scored in the first window that
            contains it. None for W.
        short: whether a shorter last window is read.
        least: the least number of windows' worth of tokens in a text.
    """

    window: int
    bos: Literal["windows", "text", "replaces"] = "text"
    scored: Literal["all", "half"] = "all"
    stride: int | None = None
    short: bool = False
    least: int = 1

    def pieces(self, tokens: Sequence[int], window: int, bos: int | None) -> Iterator[tuple[list[int], int, int]]:
        """The windows of a text.

        >>> list(PROTOCOLS["llama.cpp"].pieces([5, 6, 7, 8, 9], 4, bos=1))
        [([1, 5, 6, 7], 3, 3)]
        >>> list(PROTOCOLS["lowbit"].pieces([5, 6, 7], 2, bos=1))
        [([1, 5, 6], 1, 2), ([1, 7], 1, 3)]

        Args:
            tokens: of the text, without BOS.
            window: W.
            bos: the BOS token, or None if the model has none.

        Yields:
            the tokens of a window, the index of the first scored one, and how many tokens of the text have been read
            including it.
        """
        mark = [] if bos is None else [bos]
        before = mark if self.bos == "windows" else []
        whole = [*tokens] if self.bos == "windows" else [*mark, *tokens]
        added, seen = len(whole) - len(tokens), 0
        for start in range(0, len(whole), self.stride or window):
            piece = whole[start : start + window]
            if len(piece) < window and not self.short:
                return
            if self.bos == "replaces":
                piece[: len(mark)] = mark
            first = max(1, len(before) + seen - start)
            if self.scored == "half":
                first = window // 2 + 1
            seen = start + len(piece)
            yield [*before, *piece], first, max(0, seen - added)
            if seen == len(whole):
                return


ProtocolName = Literal["lowbit", "gptq", "llama.cpp", "transformers"]
PROTOCOLS: Mapping[ProtocolName, Protocol] = MappingProxyType(
    {
        "lowbit": Protocol(512, bos="windows", short=True),
        "gptq": Protocol(2048),
        "llama.cpp": Protocol(512, bos="replaces", scored="half", least=2),
        "transformers": Protocol(1024, stride=512, short=True),
    }
)
DEFAULT_PROTOCOL: ProtocolName = "lowbit"


def named(protocol: ProtocolName | Protocol) -> Protocol:
    """The protocol of this name; a `Protocol` is returned unchanged.

    Raises:
        ArgumentError: there is no such name.
    """
    if isinstance(protocol, Protocol):
        return protocol
    return PROTOCOLS[check_choice("protocol", protocol, tuple(PROTOCOLS))]


@dataclass(frozen=True)
class Perplexity:
    """The result.

    Attributes:
        nll: the sum of the negative log-likelihoods, in nats.
        count: n, how many tokens were scored.
    """

    nll: float
    count: int

    @property
    def value(self) -> float:
        """exp(nll / count); infinity if that is beyond float64."""
        return exponential(self.nll / self.count)


def exponential(logarithm: float) -> float:
    """*e* to the power of a number; infinity if that is beyond float64.

    >>> exponential(0.0), exponential(710.0)
    (1.0, inf)
    """
    with np.errstate(over="ignore"):
        return float(np.exp(logarithm))


def perplexity(
    decoder: AnyDecoder,
    tokens: Sequence[int],
    window: int | None = None,
    *,
    bos: int | None = None,
    protocol: ProtocolName | Protocol = DEFAULT_PROTOCOL,
    progress: Progress | None = None,
) -> Perplexity:
    """Perplexity of a model on the tokens of a text.

    Args:
        decoder: the model.
        tokens: the first N tokens of the text, without BOS.
        window: W; it fits the model's context and has a token to score. None for the protocol's own.
        bos: the token that begins a sequence, or None if the model has none.
        protocol: how tokens are counted: the name of one of `PROTOCOLS`, or a value.
        progress: called with the tokens read so far and N.

    Raises:
        ArgumentError: wrong window or protocol; too few tokens to score one; a context too short for the protocol.
    """
    chosen = named(protocol)
    window = chosen.window if window is None else window
    check_text(decoder.config, len(tokens), window, bos, chosen)
    found, read = list[Score](), 0
    for piece, first, end in chosen.pieces(tokens, window, bos):
        found.append(score(decoder, piece, first, _part_of(progress, read, end, len(tokens))))
        read = end
        if progress is not None:
            progress(end, len(tokens))
    return total(found)


Score = tuple[float, ...]
"""The scores of a window: the sum of the negative log-likelihoods of each `LOGIT_ROWS` scored tokens, in nats, followed
by the number of scored tokens."""


def score(decoder: AnyDecoder, piece: Sequence[int], first: int, progress: Progress | None = None) -> Score:
    """Read a window and score its tokens.

    Args:
        decoder: the model.
        piece: the tokens of the window.
        first: the index of the first scored token.
        progress: called while the window is read.
    """
    if len(piece) <= first:
        return (0,)
    hidden = decoder.hidden(piece[:-1], decoder.new_state(len(piece) - 1), progress)
    sums = [
        negative_log_likelihood(decoder.logits(hidden[i : i + LOGIT_ROWS]), piece[1:][i : i + LOGIT_ROWS])
        for i in range(first - 1, len(hidden), LOGIT_ROWS)
    ]
    return *sums, len(piece) - first


def total(scores: Iterable[Score]) -> Perplexity:
    """The perplexity of a text from the scores of its windows, in their order.

    >>> total([(1.0, 2.0, 100), (3.0, 60)])
    Perplexity(nll=6.0, count=160)
    """
    nll, count = 0.0, 0
    for *sums, scored in scores:
        for each in sums:
            nll += each
        count += int(scored)
    return Perplexity(nll, count)


def check_text(config: LlamaConfig, count: int, window: int, bos: int | None, protocol: Protocol) -> None:
    """Refuse a window that does not fit a model, or a text of too few tokens.

    Args:
        config: of the model.
        count: N, the tokens of the text.
        window: W.
        bos: as in `perplexity`.
        protocol: how tokens are counted.

    Raises:
        ArgumentError: names the window, the number of tokens, or a context in which no window of the protocol fits.
    """
    prefixed = bos is not None and protocol.bos == "windows"
    shortest = 3 if protocol.scored == "half" else 1 if prefixed else 2
    if protocol.stride is not None:
        shortest = max(shortest, protocol.stride + 1)
    if config.context < (least := shortest + prefixed):
        sentence = f"this protocol needs a context of at least {least} tokens, and the model has {config.context}"
        raise ArgumentError("context", config.context, f"at least {least}", sentence)
    check_integer("window", window, shortest, config.context - prefixed)
    _check_length(count, window, protocol, bos, prefixed)


def _check_length(count: int, window: int, protocol: Protocol, bos: int | None, prefixed: bool) -> None:
    """Refuse a text of too few tokens."""
    least = 1 if prefixed else 2
    if not protocol.short:
        least = protocol.least * window
    if protocol.bos != "windows" and bos is not None:
        least -= 1
    if count < least:
        raise ArgumentError("number of tokens", count, f"at least {least}")


def _part_of(progress: Progress | None, read: int, end: int, total: int) -> Progress | None:
    """Progress inside one window, as tokens of the whole text."""
    if progress is None:
        return None
    return lambda done, whole: progress(read + (end - read) * done // whole, total)


def negative_log_likelihood(logits: F32, followers: Sequence[int]) -> float:
    r"""The sum of :math:`-\ln \mathrm{softmax}(\mathrm{logits}_i)[t_i]` over the rows, in nats.

    Two equally likely tokens, each occurring once:

    >>> round(negative_log_likelihood(np.zeros((2, 2), np.float32), [0, 1]), 6)
    1.386294

    Args:
        logits: float32, T × vocabulary.
        followers: the T tokens that follow.
    """
    scores: F64 = logits.astype(np.float64)
    top = scores.max(axis=-1)
    log_sum = top + np.log(np.exp(scores - top[:, np.newaxis]).sum(axis=-1))
    return float((log_sum - scores[np.arange(len(followers)), followers]).sum())
