r"""Comparing two models on a text: what a change of the weights costs, and where it arises.

Both models read the same tokens in the windows of the chapter `perplexity`. Model A is the reference, such as the
weights before they were quantised; model B is compared with it. At each position i that is scored, :math:`p_i` and
:math:`q_i` are the probabilities that A and B give to all tokens, and :math:`t_i` is the actual token.

**Perplexity** of each, and the mean of the difference of their losses,

.. math:: \bar d = \frac1n \sum_i \bigl(\ln p_i(t_i) - \ln q_i(t_i)\bigr), \qquad
   \frac{\mathrm{PPL}_B}{\mathrm{PPL}_A} = e^{\bar d}.

**Divergence** counts all tokens and not only the actual one. It is the mean of the Kullback-Leibler divergence
:math:`D(p_i \| q_i) = \sum_t p_i(t) \ln \bigl(p_i(t) / q_i(t)\bigr)`, which is 0 only where both models agree in every
probability. **Agreement** is the fraction of positions at which both give the highest logit to the same token; among
equal logits, the lowest token counts.

**Standard errors.** The losses of tokens in one window depend on one another, so a window is one observation. With
:math:`s_w` the sum over window w and :math:`n_w` its positions, the mean :math:`m = \sum s_w / \sum n_w` of W windows
has the standard error of a ratio,

.. math:: \frac{1}{\sum_w n_w} \sqrt{\frac{W}{W - 1} \sum_w (s_w - m\, n_w)^2}.

Both models find the same windows hard, so the error of the *difference* is much smaller than that of either loss: the
comparison is paired. One window gives no standard error.

**Error by layer.** After each block the residual streams a and b of the two models are compared. The number is
:math:`\sqrt{\sum \|b - a\|^2 / \sum \|a\|^2}` over all positions that were read. It contains the errors of all blocks
before. It is left out where the models differ in width or in their number of blocks.

Logarithms are natural. Logits are float32; everything derived from them is float64.

Source: the ratio estimator and its variance: Cochran, Sampling Techniques, 3rd ed., §2.11 and §6.4.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import isfinite, sqrt

import numpy as np

from lowbit.arrays import F32, F64
from lowbit.contract.checks import check_integer
from lowbit.errors import ArgumentError
from lowbit.model.decoder import Decoder
from lowbit.model.perplexity import LOGIT_ROWS, exponential
from lowbit.model.weights import Progress

Pair = tuple[Decoder, Decoder]


@dataclass(frozen=True)
class Estimate:
    """A mean over positions, and its standard error; None if there is only one window."""

    mean: float
    error: float | None


def estimate(sums: Sequence[float], counts: Sequence[int]) -> Estimate:
    """The mean of a quantity from its sums over windows, and the standard error of that mean.

    >>> estimate([2.0, 4.0], [2, 2])
    Estimate(mean=1.5, error=0.5)
    >>> estimate([2.0], [2])
    Estimate(mean=1.0, error=None)

    Args:
        sums: one for each window.
        counts: positions of each window, in the same order.
    """
    s, n = np.asarray(sums, np.float64), np.asarray(counts, np.float64)
    total, windows = float(n.sum()), len(s)
    mean = float(s.sum()) / total
    if windows < 2:
        return Estimate(mean, None)
    spread = windows / (windows - 1) * float(np.sum((s - mean * n) ** 2))
    return Estimate(mean, sqrt(spread) / total)


@dataclass(frozen=True)
class Window:
    """The measurements of one window, summed over its positions.

    Attributes:
        count: positions that were scored.
        losses: the negative log-likelihoods of A and of B, in nats.
        divergence: the divergence of B from A, in nats.
        agreed: positions at which both have the same likeliest token.
    """

    count: int
    losses: tuple[float, float]
    divergence: float
    agreed: int


@dataclass(frozen=True)
class Comparison:
    """Two models on a text.

    Attributes:
        windows: in the order of the text.
        layers: the relative error of the residual stream after each block; None where the streams cannot be compared.
    """

    windows: tuple[Window, ...]
    layers: tuple[float, ...] | None

    @property
    def count(self) -> int:
        """Positions that were scored."""
        return sum(self._counts)

    @property
    def losses(self) -> tuple[Estimate, Estimate]:
        """Nats a token of A and of B."""
        a, b = (estimate([window.losses[model] for window in self.windows], self._counts) for model in (0, 1))
        return a, b

    @property
    def perplexities(self) -> tuple[Estimate, Estimate]:
        """Of A and of B; the error of a perplexity is that of its logarithm times the perplexity.

        A perplexity beyond float64 is infinite, and so is its error.
        """
        a, b = map(_exponential, self.losses)
        return a, b

    @property
    def difference(self) -> Estimate:
        """The mean paired difference of losses, B minus A, in nats a token."""
        return estimate([window.losses[1] - window.losses[0] for window in self.windows], self._counts)

    @property
    def divergence(self) -> Estimate:
        """Nats a token."""
        return estimate([window.divergence for window in self.windows], self._counts)

    @property
    def agreement(self) -> Estimate:
        """The fraction of positions with the same likeliest token."""
        return estimate([window.agreed for window in self.windows], self._counts)

    @property
    def _counts(self) -> list[int]:
        return [window.count for window in self.windows]


def _exponential(logarithm: Estimate) -> Estimate:
    value = exponential(logarithm.mean)
    if logarithm.error is None:
        return Estimate(value, None)
    return Estimate(value, value * logarithm.error if isfinite(value) else value)  # infinity times 0 is NaN


def compare(
    models: Pair, tokens: Sequence[int], window: int, *, bos: int | None = None, progress: Progress | None = None
) -> Comparison:
    """Compare two models on the tokens of a text.

    Args:
        models: A and B, with the same vocabulary.
        tokens: the first tokens of the text, without BOS.
        window: as in `lowbit.model.perplexity.perplexity`; it fits the context of both models.
        bos: the token that begins a sequence, or None.
        progress: called with the tokens read so far and their number.

    Raises:
        ArgumentError: different vocabularies; a wrong window; too few tokens to score one; a logit that is not finite.
    """
    a, b = (model.config for model in models)
    if a.vocabulary != b.vocabulary:
        raise ArgumentError("vocabulary of B", b.vocabulary, f"that of A, {a.vocabulary}")
    prefix = [] if bos is None else [bos]
    shortest = 2 - len(prefix)
    check_integer("window", window, shortest, min(a.context, b.context) - len(prefix))
    if len(tokens) < shortest:
        raise ArgumentError("number of tokens", len(tokens), f"at least {shortest}")
    found, read = list[Measured](), 0
    for piece in pieces(tokens, window, bos):
        found.append(measure(models, piece))
        read += window
        if progress is not None:
            progress(min(read, len(tokens)), len(tokens))
    return together(found)


def pieces(tokens: Sequence[int], window: int, bos: int | None) -> Iterator[list[int]]:
    """The windows of a text that have a token to score.

    >>> list(pieces([5, 6, 7], 2, bos=1)), list(pieces([5, 6, 7], 2, bos=None))
    ([[1, 5, 6], [1, 7]], [[5, 6]])
    """
    prefix = [] if bos is None else [bos]
    for start in range(0, len(tokens), window):
        piece = [*prefix, *tokens[start : start + window]]
        if len(piece) > 1:
            yield piece


@dataclass(frozen=True)
class Measured:
    """The measurements of one window, with the residual streams.

    Attributes:
        window: the sums over its positions.
        streams: of each block, for each part of the window that was read at a time, the sum of squares of B − A, and
            that of A; None where the streams cannot be compared.
    """

    window: Window
    streams: tuple[tuple[tuple[float, float], ...], ...] | None


def measure(models: Pair, piece: Sequence[int]) -> Measured:
    """Read a window with both models.

    Args:
        models: A and B.
        piece: the tokens of the window.

    Raises:
        ArgumentError: a logit is not finite.
    """
    a, b = models
    alike = (a.config.hidden, a.config.layers) == (b.config.hidden, b.config.layers)
    streams = Streams(a.config.layers if alike else 0)
    watches = (streams.keep, streams.compare) if alike else (None, None)
    of_a, of_b = (
        model.hidden(piece[:-1], model.new_state(len(piece) - 1), watch=watch)
        for model, watch in zip(models, watches, strict=True)
    )
    sums = np.zeros(4)
    for i in range(0, len(of_a), LOGIT_ROWS):
        rows = slice(i, i + LOGIT_ROWS)
        sums += scores(a.logits(of_a[rows]), b.logits(of_b[rows]), piece[1:][rows])
    window = Window(len(of_a), (float(sums[0]), float(sums[1])), float(sums[2]), int(sums[3]))
    return Measured(window, tuple(map(tuple, streams.sums)) if alike else None)


def together(found: Sequence[Measured]) -> Comparison:
    """The comparison of two models from the measurements of a text's windows, in their order."""
    windows, streams = tuple(each.window for each in found), [each.streams for each in found]
    parts = [each for each in streams if each is not None]
    if len(parts) < len(streams):
        return Comparison(windows, None)
    return Comparison(windows, tuple(_error(chain.from_iterable(layer)) for layer in zip(*parts, strict=True)))


def _error(sums: Iterable[tuple[float, float]]) -> float:
    """The relative error of a stream from its sums of squares, added in order."""
    apart = whole = 0.0
    for of_difference, of_a in sums:
        apart += of_difference
        whole += of_a
    return sqrt(apart / whole) if whole else 0.0


def scores(a: F32, b: F32, followers: Sequence[int]) -> F64:
    """Sums over positions: the losses of A and of B, the divergence, and how often both agree.

    Two models with the same logits, at a token of probability 1/2:

    >>> same = np.zeros((1, 2), np.float32)
    >>> scores(same, same, [1]).round(4)
    array([0.6931, 0.6931, 0.    , 1.    ])

    Args:
        a, b: float32, T × vocabulary: the logits of A and of B.
        followers: the T tokens that follow.
    """
    log_p, log_q = map(log_probabilities, (a, b))
    at = (np.arange(len(followers)), np.asarray(followers))
    divergence = np.sum(np.exp(log_p) * (log_p - log_q))
    agreed = np.count_nonzero(a.argmax(axis=1) == b.argmax(axis=1))
    return np.array([-log_p[at].sum(), -log_q[at].sum(), divergence, agreed])


def log_probabilities(logits: F32) -> F64:
    """The logarithms of the probabilities: float64, T × vocabulary."""
    wide: F64 = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(axis=1, keepdims=True))
    return wide


class Streams:
    """The residual streams of a window in model A, and the sums of squares of B's differences from them.

    Attributes:
        sums: of each block, for each part that was compared, the sum of squares of the difference and that of A.
    """

    def __init__(self, layers: int) -> None:
        """Start without streams; `layers` is the number of blocks of both models."""
        self._kept: list[list[F64]] = [[] for _ in range(layers)]
        self.sums: list[list[tuple[float, float]]] = [[] for _ in range(layers)]

    def keep(self, layer: int, stream: F64) -> None:
        """Keep A's stream after a block."""
        self._kept[layer].append(stream)

    def compare(self, layer: int, stream: F64) -> None:
        """Compare B's stream after a block with A's earliest stream there that was not yet compared."""
        of_a = self._kept[layer].pop(0)
        self.sums[layer].append((float(np.sum((stream - of_a) ** 2)), float(np.sum(of_a**2))))
