"""What the scale of a cast may come from in place of the largest magnitude, and what may be stored in place of it.

`cast_scales` compares these rules with the scales of wrong casts.
"""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from lowbit.arrays import F64, Array

Rule = Callable[[F64], F64]
"""From numbers, tokens x runs x numbers of a run, to the magnitude that gets the largest code, tokens x runs."""

WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
FLOORS = (1e-12, 1e-10, 1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0)


def largest(numbers: F64) -> F64:
    found: F64 = np.abs(numbers).max(axis=-1)
    return found


def of_tokens(order: Callable[[Array, int], Array], numbers: F64) -> F64:
    """The scales of other tokens."""
    count = len(numbers)
    return np.asarray(largest(numbers)[order(np.arange(count), count) % count])


def over_tokens(numbers: F64) -> F64:
    """The largest of all tokens, run by run."""
    return np.broadcast_to(largest(numbers).max(axis=0), numbers.shape[:2])


def of_channels(all_alike: bool, numbers: F64) -> F64:
    """The largest of all tokens in one channel: token t uses channel t, or all use the first channel."""
    channels = np.abs(numbers).max(axis=0).reshape(-1)
    count = numbers.shape[0] * numbers.shape[1]
    return (np.full(count, channels[0]) if all_alike else np.resize(channels, count)).reshape(numbers.shape[:2])


def of_everything(numbers: F64) -> F64:
    return np.full(numbers.shape[:2], np.abs(numbers).max())


def of_whole_token(numbers: F64) -> F64:
    return np.broadcast_to(largest(numbers).max(axis=1, keepdims=True), numbers.shape[:2])


def of_some(kept: Callable[[Array, int], Array], numbers: F64) -> F64:
    """The largest number at some places of each run.

    Raises:
        ValueError: there are none.
    """
    size = numbers.shape[-1]
    there = kept(np.arange(size), size)
    if not there.any():
        raise ValueError("there are no such places")
    return largest(numbers[..., there])


def of_powers(rounded: Callable[[F64], F64], top: float, numbers: F64) -> F64:
    """The magnitude that gives a scale that is a power of two."""
    most = largest(numbers)
    with np.errstate(all="ignore"):
        return np.where(most == 0, 0.0, top * np.exp2(rounded(np.log2(most / top))))


def at_least(least: float, numbers: F64) -> F64:
    return np.maximum(largest(numbers), least)


def added(least: float, numbers: F64) -> F64:
    return largest(numbers) + least


STATISTICS: tuple[tuple[str, str, Rule], ...] = (
    ("maximum-of-signed", "the largest number, ignoring the magnitude of negative ones", lambda a: a.max(axis=-1)),
    ("minimum-of-signed", "the magnitude of the least number", lambda a: np.abs(a.min(axis=-1))),
    ("range", "the range of numbers, from the least to the largest", lambda a: np.ptp(a, axis=-1)),
    ("half-the-range", "half of the range of numbers", lambda a: np.ptp(a, axis=-1) / 2),
    ("mean-magnitude", "the mean magnitude", lambda a: np.abs(a).mean(axis=-1)),
    ("sum-of-magnitudes", "the sum of magnitudes", lambda a: np.abs(a).sum(axis=-1)),
    ("root-of-mean-square", "the root of the mean square", lambda a: np.sqrt(np.square(a).mean(axis=-1))),
    ("norm", "the root of the sum of squares", lambda a: np.sqrt(np.square(a).sum(axis=-1))),
    ("deviation", "the standard deviation", lambda a: a.std(axis=-1)),
    ("square", "the square of the largest magnitude", lambda a: np.square(largest(a))),
    ("root", "the root of the largest magnitude", lambda a: np.sqrt(largest(a))),
    ("least-magnitude", "the least magnitude", lambda a: np.abs(a).min(axis=-1)),
    ("median", "the median magnitude", lambda a: np.median(np.abs(a), axis=-1)),
    ("magnitude-of-the-sum", "the magnitude of the sum", lambda a: np.abs(a.sum(axis=-1))),
)
TOKENS: tuple[tuple[str, str, Callable[[Array, int], Array]], ...] = (
    ("first-token", "of the first token", lambda t, n: 0 * t),
    ("last-token", "of the last token", lambda t, n: 0 * t + n - 1),
    ("token-before", "of the token before", lambda t, n: t - 1),
    ("token-before", "of the token before, and the first one's own", lambda t, n: np.maximum(t - 1, 0)),
    ("next-token", "of the next token", lambda t, n: t + 1),
    ("next-token", "of the next token, and the last one's own", lambda t, n: np.minimum(t + 1, n - 1)),
    ("tokens-in-reverse", "of the tokens in reverse order", lambda t, n: n - 1 - t),
)
PLACES: tuple[tuple[str, str, Callable[[Array, int], Array]], ...] = (
    ("all-but-the-last", "all numbers but the last", lambda k, n: k < n - 1),
    ("all-but-the-first", "all numbers but the first", lambda k, n: k > 0),
    ("even-places", "the numbers at even places", lambda k, n: k % 2 == 0),
    ("odd-places", "the numbers at odd places", lambda k, n: k % 2 == 1),
    ("first-half", "the first half of the numbers", lambda k, n: k < n // 2),
    ("second-half", "the second half of the numbers", lambda k, n: k >= n // 2),
    *((f"first-{w}", f"the first {w} numbers", lambda k, n, w=w: k < w) for w in WIDTHS),
    *((f"last-{w}", f"the last {w} numbers", lambda k, n, w=w: k >= n - w) for w in WIDTHS),
    *((f"whole-{w}", f"the numbers up to the last whole {w}", lambda k, n, w=w: k < n // w * w) for w in WIDTHS[1:]),
    *((f"every-{w}", f"every {w}th number", lambda k, n, w=w: k % w == 0) for w in WIDTHS[2:]),
)
POWERS: tuple[tuple[str, str, Callable[[F64], F64]], ...] = (
    ("scale-rounded-up", "rounded up", np.ceil),
    ("scale-rounded-down", "rounded down", np.floor),
    ("scale-rounded-to-a-power", "rounded to the nearest", np.rint),
)


def rules(top: float) -> Iterator[tuple[str, str, Rule]]:
    """For each rule a name, the description of what replaces the largest magnitude, and a function."""
    yield "one-scale", "the largest magnitude of all numbers", of_everything
    yield "scale-of-row", "the largest magnitude of all runs of a token", of_whole_token
    yield "scale-of-all-rows", "the largest magnitude over all tokens, run by run", over_tokens
    yield (
        "scale-of-channel",
        "the largest magnitude over all tokens of channel t, for token t",
        partial(of_channels, False),
    )
    yield "scale-of-channel", "the largest magnitude over all tokens of the first channel", partial(of_channels, True)
    for name, words, order in TOKENS:
        yield f"scale-of-{name}", f"the largest magnitude {words}", partial(of_tokens, order)
    yield from STATISTICS
    for name, words, kept in PLACES:
        yield f"largest-of-{name}", f"the largest magnitude of {words}", partial(of_some, kept)
    for name, words, rounded in POWERS:
        yield name, f"what makes the scale a power of two, {words}", partial(of_powers, rounded, top)
    for least in FLOORS:
        yield (
            "least-magnitude-of-a-scale",
            f"the largest magnitude, but no less than {least:g}",
            partial(at_least, least),
        )
        yield "magnitude-and-a-number", f"the largest magnitude plus {least:g}", partial(added, least)


# **What is stored** as a scale, if codes are right.


def over_largest(above: float | None, at_zero: float, top: float, numbers: F64) -> F64:
    """A number, or the largest code, over the largest magnitude; another number if that is 0."""
    most = largest(numbers)
    with np.errstate(all="ignore"):
        return np.where(most == 0, at_zero, (top if above is None else above) / most)


STORED: tuple[tuple[str, str, Callable[[float, F64], F64]], ...] = (
    ("magnitude-stored", "the largest magnitude, which is not divided", lambda top, a: largest(a)),
    ("scale-divided-twice", "divided twice", lambda top, a: largest(a) / top / top),
    ("scale-squared", "its square", lambda top, a: np.square(largest(a) / top)),
    *(
        ("inverse-stored", f"its inverse, and {at_zero:g} for zeros", partial(over_largest, None, at_zero))
        for at_zero in (0.0, 1.0, np.inf)
    ),
    *(
        (
            "inverse-magnitude-stored",
            f"1 over the largest magnitude ({at_zero:g} for 0)",
            partial(over_largest, 1.0, at_zero),
        )
        for at_zero in (0.0, 1.0, np.inf)
    ),
    *(
        (f"scale-times-{by:g}", f"{by:g} times as large", lambda top, a, by=by: by * largest(a) / top)
        for by in (0.5, 2.0, 0.25, 4.0, 127 / 128, 128 / 127)
    ),
)
