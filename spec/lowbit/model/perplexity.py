r"""Perplexity: how well a model predicts a text that people wrote.

At every position a model gives each token a probability. The *negative log-likelihood* of the token that does come is
large where the model gave it a small probability; *e* to the power of its mean over a text is the perplexity:

.. math:: \mathrm{PPL} = \exp\Bigl(\frac1n \sum_{i} -\ln p(t_i \mid \text{the tokens before it in its window})\Bigr).

A model that gave all tokens the same probability would have the size of its vocabulary as its perplexity. Quantisation
raises it; the increase is the price of a smaller number of bits.

Perplexities can be compared only if they are counted alike. They are counted here as follows:

- The first N tokens of the text are cut into *windows* of W tokens that do not overlap; the last may be shorter.
- Each window is read on its own, from position 0, with nothing before it.
- **Without BOS** (the model's tokenizer has no mark for the beginning of a sequence) nothing predicts the first token
  of a window, so it is not scored: a window of L tokens adds L − 1 terms.
- **With BOS** the mark is put before each window and every one of its L tokens is scored.

Logarithms are natural and the sums are float64.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lowbit.arrays import F32, F64
from lowbit.contract.checks import check_integer
from lowbit.errors import ArgumentError
from lowbit.model.decoder import AnyDecoder
from lowbit.model.weights import Progress

LOGIT_ROWS = 64
"""Logits are made for this many positions at a time: a row is as long as the vocabulary."""


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
        """exp(nll / count)."""
        return float(np.exp(self.nll / self.count))


def perplexity(
    decoder: AnyDecoder,
    tokens: Sequence[int],
    window: int,
    *,
    bos: int | None = None,
    progress: Progress | None = None,
) -> Perplexity:
    """Perplexity of a model on the tokens of a text.

    Args:
        decoder: the model.
        tokens: the first N tokens of the text, without BOS.
        window: W; with BOS at least 1, otherwise at least 2; it fits the model's context.
        bos: the token that begins a sequence, or None where the model has none.
        progress: called with the tokens read so far and N.

    Raises:
        ArgumentError: wrong window; too few tokens to score one.
    """
    prefix = [] if bos is None else [bos]
    shortest = 2 - len(prefix)
    check_integer("window", window, shortest, decoder.config.context - len(prefix))
    if len(tokens) < shortest:
        raise ArgumentError("number of tokens", len(tokens), f"at least {shortest}")
    nll, count = 0.0, 0
    for start in range(0, len(tokens), window):
        piece = [*prefix, *tokens[start : start + window]]
        if len(piece) > 1:
            state = decoder.new_state(len(piece) - 1)
            hidden = decoder.hidden(piece[:-1], state, _part_of(progress, start, len(tokens), window))
            for i in range(0, len(hidden), LOGIT_ROWS):
                followers = piece[1:][i : i + LOGIT_ROWS]
                nll += negative_log_likelihood(decoder.logits(hidden[i : i + LOGIT_ROWS]), followers)
            count += len(piece) - 1
        if progress is not None:
            progress(min(start + window, len(tokens)), len(tokens))
    return Perplexity(nll, count)


def _part_of(progress: Progress | None, start: int, total: int, window: int) -> Progress | None:
    """Progress inside one window, as tokens of the whole text."""
    if progress is None:
        return None
    size = min(window, total - start)
    return lambda done, whole: progress(start + size * done // whole, total)


def negative_log_likelihood(logits: F32, followers: Sequence[int]) -> float:
    r"""The sum of :math:`-\ln \mathrm{softmax}(\mathrm{logits}_i)[t_i]` over the rows, in nats.

    Two tokens that are equally likely, seen once each:

    >>> round(negative_log_likelihood(np.zeros((2, 2), np.float32), [0, 1]), 6)
    1.386294

    Args:
        logits: float32, T × vocabulary.
        followers: the T tokens that came.
    """
    scores: F64 = logits.astype(np.float64)
    top = scores.max(axis=-1)
    log_sum = top + np.log(np.exp(scores - top[:, np.newaxis]).sum(axis=-1))
    return float((log_sum - scores[np.arange(len(followers)), followers]).sum())
