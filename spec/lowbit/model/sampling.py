r"""Sampling: from logits to a token, by a pinned generator.

Greedy decoding always takes the likeliest token. Sampling draws one, commonly with four settings. With a *temperature*
:math:`\tau > 0`, token *i* has the weight

.. math:: w_i = e^{(\ell_i - \max_j \ell_j) / \tau},

and its probability is its weight over the sum of all. A low temperature favours the likeliest tokens; 0 stands for the
greedy choice. The tokens are ordered by weight, the largest first, and equal ones by number. Three filters then cut off
the end of this list, one after another:

top-k
   keeps the first *k* tokens.
top-p
   keeps the shortest beginning of the list whose weights reach the fraction *p* of the sum of what top-k kept.
min-p
   keeps the tokens whose weight is at least *p* times the largest weight.

The temperature comes first, as in transformers and vLLM. llama.cpp applies it last, so its top-p and min-p see other
weights.

**The same tokens everywhere.** A seed is useful if it gives the same text on another machine. Three things usually
prevent that, and each is fixed here, so that equal logits give the same token.

- *The exponential.* Libraries round it differently. Here it is a sequence of additions and multiplications of float64,
  which IEEE 754 rounds to the bit: :math:`e^x = 2^n e^r` with :math:`n = \mathrm{rint}(x / \ln 2)`, and a Taylor
  polynomial of degree 13 for :math:`|r| \le \ln 2 / 2`.
- *The sums.* A sum of floats depends on its order. A weight becomes the integer :math:`W_i = \lfloor 2^{44} w_i
  \rfloor`, and sums of fewer than :math:`2^{19}` of these are exact in 64 bits. A token :math:`2^{44}` times less
  likely than the likeliest is never drawn.
- *The generator.* Philox4x64-10 turns a key and a counter into random bits, without a state. The key is the seed. The
  counter is the position of the token in its sequence and, with several sequences at once, the number of the sequence.
  So a sequence can be continued after an interruption, and its draws do not depend on other sequences. With the first
  64 bits *R* of a block, the token is the first one in the list at which the sum of the weights exceeds :math:`\lfloor
  R\, S / 2^{64} \rfloor`, where *S* is the sum of what is kept.

Backends round logits differently, so a seed gives the same text on two backends only as long as no draw falls between
their weights.

Source: top-k from arXiv 1805.04833 §5.1; top-p from arXiv 1904.09751 §3.1; min-p from arXiv 2407.01082 §3; Philox from
J. Salmon and others, "Parallel random numbers: as easy as 1, 2, 3" (2011).
"""

from dataclasses import dataclass
from fractions import Fraction
from math import ceil, factorial

import numpy as np

from lowbit.arrays import F32, F64, I64
from lowbit.contract.checks import check_integer
from lowbit.errors import ArgumentError

ONE = 2**44
"""The weight of the likeliest token as an integer."""
MOST_TOKENS = 2**19 - 1
"""The sum of this many weights is below 2^63."""
LN2_HIGH, LN2_LOW = 0.693147180369123816490, 1.90821492927058770002e-10
"""ln 2 as a sum: the first has 32 bits, so n times it is exact."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn.

    Attributes:
        temperature: τ; 0 takes the likeliest token and ignores the other settings.
        top_k: the number of tokens to keep; 0 keeps all.
        top_p: above 0, at most 1; 1 keeps all.
        min_p: from 0, which keeps all, to 1, which keeps only those as likely as the likeliest.
        seed: of the generator, below 2^64.

    Raises:
        ArgumentError: a number outside these ranges.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ArgumentError("temperature", self.temperature, "0 or a finite number above it")
        check_integer("top_k", self.top_k, least=0)
        if not 0 < self.top_p <= 1:
            raise ArgumentError("top_p", self.top_p, "a number above 0 and at most 1")
        if not 0 <= self.min_p <= 1:
            raise ArgumentError("min_p", self.min_p, "a number from 0 to 1")
        check_integer("seed", self.seed, 0, 2**64 - 1)


GREEDY = Sampling(temperature=0)


def choose(logits: F32, sampling: Sampling, position: int, sequence: int = 0) -> int:
    """The next token.

    >>> logits = np.log(np.array([1, 2, 4, 1], np.float32))
    >>> [choose(logits, Sampling(seed=7), position) for position in range(12)]
    [3, 0, 2, 2, 2, 2, 2, 1, 2, 0, 2, 3]
    >>> choose(logits, GREEDY, 0), choose(logits, Sampling(top_k=1), 0)
    (2, 2)

    Args:
        logits: float32, vocabulary; finite.
        sampling: the settings.
        position: of the token in its sequence; the token after a prompt of n tokens has position n.
        sequence: its number among several sequences.

    Returns:
        The number of a token.

    Raises:
        ArgumentError: a logit that is not finite, 2^19 tokens or more, a position or sequence outside 0 to 2^64 − 1.
    """
    check_logits(logits)
    if sampling.temperature == 0:
        return int(np.argmax(logits))
    tokens, weights = kept(logits, sampling)
    sums = np.cumsum(weights)
    drawn = random_bits(sampling.seed, position, sequence) * int(sums[-1]) >> 64
    return int(tokens[np.searchsorted(sums, drawn, side="right")])


def check_logits(logits: F32) -> None:
    """Refuse logits from which no token can be chosen.

    Raises:
        ArgumentError: one that is not finite; no logits, or 2^19 or more.
    """
    check_integer("number of logits", len(logits), 1, MOST_TOKENS)
    if not np.isfinite(logits).all():
        raise ArgumentError("logits", "infinite or NaN", "finite numbers")


def kept(logits: F32, sampling: Sampling) -> tuple[I64, I64]:
    """The tokens that the filters keep, in decreasing order of weight, and their weights as integers.

    >>> kept(np.array([0, 3, 3, 1], np.float32), Sampling(top_p=0.5))[0].tolist()
    [1, 2]
    >>> kept(np.array([0, 3, 3, 1], np.float32), Sampling(top_p=0.25))[0].tolist()
    [1]
    """
    weights = integer_weights(logits, sampling.temperature)
    tokens: I64 = np.argsort(-weights, kind="stable")
    weights = weights[tokens]
    count = min(sampling.top_k, len(tokens)) or len(tokens)
    sums = np.cumsum(weights[:count])
    reached = ceil(Fraction(sampling.top_p) * int(sums[-1]))
    count = int(np.searchsorted(sums, reached)) + 1
    least = max(1, ceil(Fraction(sampling.min_p) * ONE))
    count = min(count, int((weights >= least).sum()))
    return tokens[:count], weights[:count]


def integer_weights(logits: F32, temperature: float) -> I64:
    """``⌊2^44 w⌋`` of each token.

    >>> integer_weights(np.array([0, 5, -1000], np.float32), 1.0).tolist()
    [118535217165, 17592186044416, 0]
    """
    exact = logits.astype(np.float64)
    with np.errstate(over="ignore"):  # a small temperature: the weight is 0
        powers = exponential((exact - exact.max()) / temperature)
    found: I64 = np.floor(powers * ONE).astype(np.int64)
    return found


def exponential(x: F64) -> F64:
    """e^x for x ≤ 0, within a few units of the last place; 0 below −64, where weights vanish.

    >>> bool(exponential(np.array([0.0]))[0] == 1.0)
    True
    """
    within = np.maximum(x, -64.0)
    n = np.rint(within / (LN2_HIGH + LN2_LOW))
    r = (within - n * LN2_HIGH) - n * LN2_LOW
    total = np.full_like(r, 1 / factorial(13))
    for degree in range(12, -1, -1):
        total = total * r + 1 / factorial(degree)
    powers: F64 = np.where(x < -64.0, 0.0, np.ldexp(total, n.astype(np.int64)))
    return powers


def random_bits(seed: int, position: int, sequence: int = 0) -> int:
    """The first 64 bits of a block of Philox4x64-10: key (seed, 0), counter (position, sequence, 0, 0).

    >>> hex(random_bits(0, 0))
    '0x16554d9eca36314c'

    Raises:
        ArgumentError: a number outside 0 to 2^64 − 1.
    """
    check_integer("seed", seed, 0, 2**64 - 1)
    check_integer("position", position, 0, 2**64 - 1)
    check_integer("sequence", sequence, 0, 2**64 - 1)
    before = (position + (sequence << 64) - 1) % 2**256  # numpy increments the counter before each block
    words = np.random.Philox(key=seed, counter=before).random_raw()
    return int(words)
