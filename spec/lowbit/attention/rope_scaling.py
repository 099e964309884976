r"""Slower rotations for longer contexts, and partial rotations of a head.

Pair :math:`i` of a head of :math:`d_h` channels is rotated by :math:`m\theta_i` at position :math:`m`
(`lowbit.attention.rope`).

**Longer contexts.** A model is trained on :math:`L` positions, and the angles of later ones lie outside the range of
its training. A slower rotation keeps more positions inside that range: pair :math:`i` rotates by
:math:`m\theta_i / f_i`, and models differ in their *factors* :math:`f_i`. For a context :math:`s` times as long,

- *linear* scaling divides all angles by :math:`f_i = s`;
- *Llama 3* scales by wavelengths :math:`\lambda_i = 2\pi/\theta_i`. A pair that turns at least :math:`h` times within
  :math:`L` positions stays as it is, one that turns at most :math:`l` times is divided by :math:`s`, and the
  frequencies between are mixed:

  .. math:: \frac{1}{f_i} = \frac{1 - \alpha_i}{s} + \alpha_i, \qquad
            \alpha_i = \mathrm{clip}\Bigl(\frac{L/\lambda_i - l}{h - l}, 0, 1\Bigr);

- *YaRN* mixes in the same way, with an :math:`\alpha_i` that falls from 1 to 0 in equal steps from pair to pair. It
  falls between the pair that turns :math:`h` times and the one that turns :math:`l` times, which are

  .. math:: i(n) = \frac{d_h \ln(L / 2\pi n)}{2 \ln \mathrm{base}}, \qquad
            \alpha_i = 1 - \mathrm{clip}\Bigl(\frac{(i - 1) - \lfloor i(h) \rfloor}
            {\lceil i(l) \rceil - \lfloor i(h) \rfloor}, 0, 1\Bigr).

  It also multiplies cosines and sines by :math:`1 + \ln(s)/10`, and so every score by the square of that;
- *dynamic* scaling takes a larger base for a text of :math:`n > L` tokens, and leaves a shorter one as it is:

  .. math:: f_i = \bigl(s\,n/L - (s - 1)\bigr)^{2(i-1)/(d_h - 2)};

- *LongRoPE* has two lists of factors, found by a search: short ones for texts of at most :math:`L` tokens and long ones
  for longer texts. It multiplies cosines and sines by :math:`\sqrt{1 + \ln s/\ln L}`.

The last two depend on the length of the text. Keys in a cache have been rotated already, so the length must be known
before the first token is read: here it is the context with which a model is opened.

**Rotating a part of a head.** Some models rotate a part of their channels and leave the others as they are. *Partial*
rotation rotates the first :math:`r` channels as if they were the whole head: they are half-split among themselves, and
:math:`r` stands for :math:`d_h` above. *Proportional* rotation pairs the channels of the whole head and rotates the
first :math:`r/2` pairs with the frequencies that they have there. A pair that is not rotated has :math:`f_i = \infty`.

Source: Position Interpolation (arXiv 2306.15595) §3.2; the reference implementation of Llama 3.1; YaRN (arXiv
2309.00071) §3, whose §2.3 describes dynamic scaling; LongRoPE (arXiv 2402.13753) §3; the ``transformers`` library for
the last three rules.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lowbit.arrays import F64, I64
from lowbit.contract.checks import check_integer, check_number
from lowbit.errors import ArgumentError

MOST_CHANNELS = 2**16
MOST_TURNS = 2.0**64
"""The most rotations of a pair within the positions of the first training, and the inverse of the least."""
MOST_POSITIONS = 2**40
"""Far beyond any model; the angle of a later position would lose its fraction."""


def frequencies(base: float, pair: I64, channels: int) -> F64:
    """The radians by which pairs, counted from 0, rotate per position in a head of this many channels.

    >>> frequencies(100.0, np.array([0, 1]), channels=4)
    array([1. , 0.1])
    """
    theta: F64 = base ** (-2 * pair / channels)
    return theta


# **A scaling** holds the factors of all pairs, whichever rule gave them.


@dataclass(frozen=True)
class Scaling:
    r"""How a rotation is slowed down for a longer context, and which pairs it leaves as they are.

    >>> print(Scaling((1.0, 2.5, 8.0)), "and", Scaling((1.0, math.inf), channels=2))
    1 to 8 and 1 for 2 channels

    Attributes:
        factors: :math:`d_h/2` numbers, :math:`f_i`, each above 0; infinite for a pair that is not rotated.
        magnitude: the factor of the cosines and sines of rotated pairs.
        channels: how many channels, the first of a head, are half-split among themselves and set the frequencies; None
            for all of the head.

    Raises:
        ArgumentError: a number that is not above 0, a magnitude that is not finite, a number of channels that is not
            even or exceeds the head, a rotated pair after these channels, or no rotated pair.
    """

    factors: tuple[float, ...]
    magnitude: float = 1.0
    channels: int | None = None

    def __post_init__(self) -> None:
        for number in (*self.factors, self.magnitude):
            if not number > 0:
                raise ArgumentError("scaling of the rotation", number, "finite numbers above 0")
        if not math.isfinite(self.magnitude) or not self.rotated:
            raise ArgumentError("scaling of the rotation", math.inf, "finite numbers above 0")
        if self.channels is None:
            return
        check_integer("channels", self.channels, 2, 2 * len(self.factors))
        if self.channels % 2 or any(map(math.isfinite, self.factors[self.channels // 2 :])):
            allowed = f"an even number, at least twice the {len(self.rotated)} pairs that are rotated"
            raise ArgumentError("channels", self.channels, allowed)

    @property
    def rotated(self) -> tuple[float, ...]:
        """The factors of the pairs that are rotated."""
        return tuple(factor for factor in self.factors if math.isfinite(factor))

    def __str__(self) -> str:
        least, most = min(self.rotated), max(self.rotated)
        spread = f"{least:g}" if least == most and len(self.rotated) < len(self.factors) else f"{least:g} to {most:g}"
        times = "" if self.magnitude == 1 else f" times {self.magnitude:g}"
        still = len(self.rotated) < len(self.factors)
        return f"{spread}{times}{f' for {2 * len(self.rotated)} channels' if still else ''}"


# **The rules.**


def linear_scaling(head_dim: int, factor: float) -> Scaling:
    """All frequencies divided by the same factor.

    >>> linear_scaling(4, 8.0)
    Scaling(factors=(8.0, 8.0), magnitude=1.0, channels=None)

    Source: Position Interpolation §3.2.
    """
    return Scaling((factor,) * (head_dim // 2))


def llama3_scaling(head_dim: int, base: float, factor: float, low: float, high: float, original: int) -> Scaling:
    r"""The scaling of Llama 3.1 and its successors: slow pairs are divided by a factor, fast ones are not.

    >>> print([round(each, 3) for each in llama3_scaling(8, 10000.0, 8.0, 1.0, 4.0, original=128).factors])
    [1.0, 2.339, 8.0, 8.0]

    Args:
        head_dim: :math:`d_h`.
        base: of the frequencies.
        factor: :math:`s`.
        low: :math:`l`, the rotations within `original` positions at and below which a pair is divided by the factor.
        high: :math:`h`, those at and above which it is not; above `low`.
        original: :math:`L`, the positions that the model was first trained on.

    Raises:
        ArgumentError: a number out of range.

    Source: the reference implementation of Llama 3.1.
    """
    check_integer("original", original, 1, MOST_POSITIONS)
    if not low < high:
        raise ArgumentError("high", high, f"above low, {low}")
    turns = original * frequencies(base, np.arange(head_dim // 2), head_dim) / (2 * np.pi)
    return _mixed(factor, np.clip((turns - low) / (high - low), 0, 1))


def yarn_scaling(
    head_dim: int,
    base: float,
    factor: float,
    original: int,
    slow: float = 1.0,
    fast: float = 32.0,
    magnitude: float | None = None,
    *,
    whole: bool = True,
) -> Scaling:
    r"""The scaling of YaRN: a ramp over the pairs, and larger scores.

    >>> scaling = yarn_scaling(8, 10000.0, 4.0, original=64)
    >>> print([round(each, 3) for each in scaling.factors], round(scaling.magnitude, 4))
    [1.0, 1.6, 4.0, 4.0] 1.1386

    Args:
        head_dim: :math:`d_h`.
        base: of the frequencies, above 1.
        factor: :math:`s`.
        original: :math:`L`, the positions that the model was first trained on.
        slow: :math:`l`, the rotations within `original` positions at which the ramp ends.
        fast: :math:`h`, those at which it begins.
        magnitude: of cosines and sines; by default that of the paper.
        whole: whether the ramp begins and ends at whole pairs, as above; GPT-OSS leaves its ends unrounded.

    Raises:
        ArgumentError: a number out of range.

    Source: YaRN §3.2, §3.4.
    """
    check_integer("original", original, 1, MOST_POSITIONS)
    if not (math.isfinite(base) and base > 1):
        raise ArgumentError("base", base, "a finite number above 1")
    for name, turns in (("slow", slow), ("fast", fast)):
        check_number(name, turns, 1 / MOST_TURNS, MOST_TURNS)
    first, last = (
        head_dim * math.log(original / (2 * math.pi * turns)) / (2 * math.log(base)) for turns in (fast, slow)
    )
    first, last = (math.floor(first), math.ceil(last)) if whole else (first, last)
    begin, end = max(first, 0), min(last, head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2) - begin) / (end - begin if end != begin else 0.001), 0, 1)
    paper = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
    return Scaling(_mixed(factor, 1 - ramp).factors, paper if magnitude is None else magnitude)


def dynamic_scaling(head_dim: int, factor: float, original: int, length: int) -> Scaling:
    r"""Dynamic scaling for texts of up to `length` tokens.

    >>> [round(each, 3) for each in dynamic_scaling(6, 2.0, original=8, length=16).factors]
    [1.0, 1.732, 3.0]

    Args:
        head_dim: :math:`d_h`, above 2.
        factor: :math:`s`, at least 1.
        original: :math:`L`, the positions that the model was first trained on.
        length: :math:`n`.

    Raises:
        ArgumentError: a number out of range.

    Source: YaRN §2.3, with the exponent of the ``transformers`` library.
    """
    check_integer("head_dim", head_dim, 4, MOST_CHANNELS)
    check_integer("original", original, 1, MOST_POSITIONS)
    if not (math.isfinite(factor) and factor >= 1):
        raise ArgumentError("factor", factor, "a finite number of at least 1")
    growth = factor * max(length, original) / original - (factor - 1)
    return Scaling(tuple((growth ** (2 * np.arange(head_dim // 2) / (head_dim - 2))).tolist()))


def long_scaling(factors: Sequence[float], factor: float, original: int, magnitude: float | None = None) -> Scaling:
    r"""LongRoPE's scaling by one of its two lists.

    >>> print(long_scaling([1.0, 1.5, 4.0], 4.0, original=16))
    1 to 4 times 1.22474

    Args:
        factors: :math:`f_i`, short or long.
        factor: :math:`s`, how many times longer than `original` the model's context is.
        original: :math:`L`, the positions that the model was first trained on.
        magnitude: of cosines and sines; by default :math:`\sqrt{1 + \ln s/\ln L}`, or 1 where s is at most 1.

    Raises:
        ArgumentError: a number out of range.

    Source: the ``transformers`` library.
    """
    check_integer("original", original, 2, MOST_POSITIONS)
    for number in (*factors, factor):
        if not (math.isfinite(number) and number > 0):
            raise ArgumentError("factor", number, "finite numbers above 0")
    usual = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return Scaling(tuple(factors), usual if magnitude is None else magnitude)


def partial_scaling(head_dim: int, channels: int, scaling: Scaling | None = None) -> Scaling:
    """Partial rotation: the first channels rotate as if they were the whole head.

    >>> partial_scaling(8, 4)
    Scaling(factors=(1.0, 1.0, inf, inf), magnitude=1.0, channels=4)

    Args:
        head_dim: d_h.
        channels: how many rotate; an even number from 2 to d_h.
        scaling: of a head of this many channels; None for none.

    Raises:
        ArgumentError: a number out of range, or a scaling for other heads.
    """
    check_integer("channels", channels, 2, head_dim)
    if channels % 2 != 0 or head_dim % 2 != 0:
        raise ArgumentError("channels", channels, "an even number: channels rotate in pairs")
    factors = (1.0,) * (channels // 2) if scaling is None else scaling.factors
    if len(factors) != channels // 2:
        raise ArgumentError("number of factors", len(factors), f"{channels // 2}, one for each pair that is rotated")
    still = (math.inf,) * ((head_dim - channels) // 2)
    return Scaling(factors + still, 1.0 if scaling is None else scaling.magnitude, channels)


def proportional_scaling(head_dim: int, pairs: int, factor: float = 1.0) -> Scaling:
    """Proportional rotation: the first pairs of a head rotate, with frequencies divided by a factor.

    >>> proportional_scaling(8, 2).factors
    (1.0, 1.0, inf, inf)

    Raises:
        ArgumentError: a number of pairs that a head of d_h channels does not have, or a wrong factor.
    """
    check_integer("pairs", pairs, 1, head_dim // 2)
    if not (math.isfinite(factor) and factor > 0):
        raise ArgumentError("factor", factor, "a finite number above 0")
    return Scaling((factor,) * pairs + (math.inf,) * (head_dim // 2 - pairs))


def _mixed(factor: float, unchanged: F64) -> Scaling:
    """Frequencies of which a fraction stays unchanged and the rest is divided by the factor."""
    if not (math.isfinite(factor) and factor > 0):
        raise ArgumentError("factor", factor, "a finite number above 0")
    return Scaling(tuple((1 / ((1 - unchanged) / factor + unchanged)).tolist()))
