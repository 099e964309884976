"""Medians with an interval that assumes nothing about how times are distributed."""

from collections.abc import Sequence
from math import comb
from statistics import median
from typing import NamedTuple

COVERAGE = 0.95


class Interval(NamedTuple):
    """A median and the two order statistics between which the true median lies with at least 95 %."""

    median: float
    low: float
    high: float


def rank(n: int) -> int:
    """How many values lie outside on either side: the greatest k with P(at most k − 1 heads of n coins) ≤ 2.5 %.

    A value falls below the true median as often as above it, whatever the distribution; so the k-th smallest and
    the k-th largest of n independent values hold it between them unless a fair coin shows fewer than k heads.

    >>> rank(30), rank(5)
    (10, 0)
    """
    tail, k = 0.0, 0
    while (tail := tail + comb(n, k) / 2**n) <= (1 - COVERAGE) / 2:
        k += 1
    return k


def interval(values: Sequence[float]) -> Interval:
    """The median of some values with its interval; with fewer than six values, the interval is from the least to the
    greatest.

    >>> interval(range(1, 31))
    Interval(median=15.5, low=10, high=21)
    """
    ordered, k = sorted(values), max(rank(len(values)), 1)
    return Interval(median(ordered), ordered[k - 1], ordered[-k])


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """The ratios of paired measurements."""
    return [a / b for a, b in zip(over, under, strict=True)]
