"""Defects of attention with shaped scores: what the factor, the soft cap and the sink act on, and when."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from lowbit.arrays import F32, F64, Array
from lowbit.linear.elementary import soft_cap
from lowbit_conformance.defects.attention import Mask, visible
from lowbit_conformance.defects.defect import MOVES, Defect, Function, of_operation
from lowbit_conformance.defects.roundings import half, tensor_float

DEFECTS: list[Defect] = []
OPERATION = "attention.attend_shaped"
of_shaped = of_operation(DEFECTS, OPERATION)

Capped = Callable[[F64, float], F64]
Shared = Callable[[F64, F64], F64]
"""From scores, T × S, and a sink to probabilities."""


def hidden_last(scores: F64, cap: float | None, mask: Mask, capped: Capped = soft_cap) -> F64:
    """Cap the scores, then mask hidden ones."""
    return np.where(mask, scores if cap is None else capped(scores, cap), -np.inf)


def beside(scores: F64, sink: F64) -> F64:
    """The right probabilities."""
    top = np.maximum(scores.max(axis=-1, keepdims=True), sink)
    powers = np.exp(scores - top)
    return np.asarray(powers / (powers.sum(axis=-1, keepdims=True) + np.exp(sink - top)))


def attend(
    queries: F32,
    keys: F32,
    values: F32,
    window: int | None = None,
    scale: float | None = None,
    cap: float | None = None,
    sinks: F32 | None = None,
    *,
    see: Callable[[int, int, int | None], Mask] = visible,
    head: Callable[[int, int, int], int] = lambda h, heads, groups: h * groups // heads,
    factor: Callable[[float | None, int], float] = lambda scale, channels: scale or channels**-0.5,
    shaped: Callable[[F64, float | None, Mask], F64] = hidden_last,
    sink: Callable[[F64, int, int, float, float | None], float] = lambda sinks, h, groups, factor, cap: sinks[h],
    shared: Shared = beside,
    after: Callable[[F64, float | None], F64] = lambda probabilities, cap: probabilities,
    mixed: Callable[[F64, F64, F64, F64], F64] = lambda probabilities, values, scores, sink: probabilities @ values,
) -> F64:
    """Attention; right unless a step is replaced.

    Args:
        queries: as of `lowbit.attention.shaped.attend_shaped_to`; so are the other positional ones.
        keys: see `queries`.
        values: see `queries`.
        window: see `queries`.
        scale: see `queries`.
        cap: see `queries`.
        sinks: see `queries`.
        see: which tokens a token sees.
        head: the key-value head that a query head reads.
        factor: multiplies products.
        shaped: caps and masks scores.
        sink: of a head; −∞ where there are none.
        shared: the softmax.
        after: the step after the softmax.
        mixed: probabilities times values.
    """
    (tokens, heads, channels), (groups, length, _) = queries.shape, keys.shape
    q, k, v = (part.astype(np.float64) for part in (queries, keys, values))
    own = np.full(heads, -np.inf) if sinks is None else sinks.astype(np.float64)
    mask, result = see(tokens, length, window), np.empty(queries.shape)
    times = factor(scale, channels)
    with np.errstate(all="ignore"):
        for h in range(heads):
            j = head(h, heads, groups)
            scores = shaped(q[:, h] @ k[j].T * times, cap, mask)
            least = np.array(sink(own, h, groups, times, cap))
            result[:, h] = mixed(after(shared(scores, least), cap), v[j], scores, least)
    return result


def replacing(**replaced: Any) -> Function:
    return partial(attend, **replaced)


# **Sinks.**

of_sink = of_operation(DEFECTS, OPERATION, lambda sink: replacing(sink=sink))
of_shares = of_operation(DEFECTS, OPERATION, lambda shared: replacing(shared=shared))


@of_shares("C1 C2 C3")
def sink_left_out(scores: F64, sink: F64) -> F64:
    """The sink gets no probability."""
    return beside(scores, np.array(-np.inf))


@of_shares("C1 C2 C3")
def sink_in_the_maximum_only(scores: F64, sink: F64) -> F64:
    """The sink is included in the maximum, but not added to the sum."""
    powers = np.exp(scores - np.maximum(scores.max(axis=-1, keepdims=True), sink))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


@of_shares("C1 C2 C3")
def sink_not_shifted(scores: F64, sink: F64) -> F64:
    """The exponential of the sink is added without subtracting the maximum."""
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(powers / (powers.sum(axis=-1, keepdims=True) + np.exp(sink)))


@of_shares("C1 C2 C3")
def sink_overflows(scores: F64, sink: F64) -> F64:
    """The maximum is not subtracted, so that exponentials of scores and the sink overflow."""
    powers, own = np.exp(scores.astype(np.float32)), np.exp(sink.astype(np.float32))
    return np.asarray(powers / (powers.sum(axis=-1, keepdims=True) + own), np.float64)


@of_shares("C1 C2 C3")
def sink_added_to_the_sum(scores: F64, sink: F64) -> F64:
    """The sink is added to the sum of exponentials instead of its exponential."""
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(powers / (powers.sum(axis=-1, keepdims=True) + np.where(np.isinf(sink), 0, sink)))


@of_shares("C1 C2 C3")
def sink_in_half(scores: F64, sink: F64) -> F64:
    """The probability that a sink leaves is rounded to float16."""
    left = beside(scores, sink).sum(axis=-1, keepdims=True)
    return np.asarray(beside(scores, np.array(-np.inf)) * half(left * (1 - 2.0**-11)))


of_sink.add("sink-of-0", "1 is added to the sum for every sink.", "C1 C2 C3", lambda sinks, h, groups, factor, cap: 0.0)
of_sink.add(
    "sink-of-the-first-head",
    "All heads have the sink of the first.",
    "C1 C2 C3 C4",
    lambda sinks, h, groups, factor, cap: sinks[0],
    verdicts=MOVES,
)
of_sink.add(
    "sink-by-key-value-head",
    "The sinks of a group are those of the first heads.",
    "C1 C2 C3 C4",
    lambda sinks, h, groups, factor, cap: sinks[h * groups // len(sinks)],
    verdicts=MOVES,
)
of_sink.add(
    "sink-times-factor",
    "The sink is multiplied by the factor of the scores.",
    "C1 C2 C3",
    lambda sinks, h, groups, factor, cap: sinks[h] * factor,
)
of_sink.add(
    "sink-capped",
    "The sink goes through the soft cap, as scores do.",
    "C1 C2 C3",
    lambda sinks, h, groups, factor, cap: (
        sinks[h] if cap is None else -cap if sinks[h] == -np.inf else soft_cap(sinks[h], cap)
    ),
)
of_sink.add(
    "sink-negated",
    "The sink has the wrong sign in the exponent.",
    "C1 C2 C3",
    lambda sinks, h, groups, factor, cap: -sinks[h] if np.isfinite(sinks[h]) else sinks[h],
)


def to_the_first(probabilities: F64, values: F64, scores: F64, sink: F64) -> F64:
    rest = 1 - probabilities.sum(axis=-1, keepdims=True)
    return np.asarray(probabilities @ values + rest * values[:1])


of_shaped.add(
    "sink-reads-the-first-token",
    "The probability of the sink goes to the value of the first token.",
    "C1 C2 C3 C4",
    replacing(mixed=to_the_first),
    verdicts=MOVES,
)

# **The cap.**

of_cap = of_operation(DEFECTS, OPERATION, lambda capped: replacing(shaped=partial(hidden_last, capped=capped)))
of_cap.add("cap-left-out", "Scores are not capped.", "C1 C3", lambda scores, cap: scores)
of_cap.add("cap-by-clipping", "Scores are clipped at the cap.", "C3", lambda scores, cap: np.clip(scores, -cap, cap))
of_cap.add(
    "cap-not-multiplied",
    "The tanh is not multiplied by the cap.",
    "C1 C2 C3",
    lambda scores, cap: np.tanh(scores / cap),
)
of_cap.add("cap-not-divided", "Scores are not divided by the cap.", "C3", lambda scores, cap: cap * np.tanh(scores))
of_cap.add(
    "cap-squashed-otherwise",
    "Scores are divided by 1 + |s / c|.",
    "C1 C3",
    lambda scores, cap: scores / (1 + np.abs(scores / cap)),
)
of_cap.add(
    "cap-of-50",
    "The cap is always 50.",
    "C1 C3",
    lambda scores, cap: soft_cap(scores, 50.0),
)
of_cap.add(
    "cap-in-half",
    "The tanh is rounded to float16.",
    "C3",
    lambda scores, cap: cap * half(np.tanh(scores / cap)).astype(np.float64),
)
of_cap.add(
    "cap-in-11-bits",
    "The tanh comes from an instruction with 11 bits of precision.",
    "C3",
    lambda scores, cap: cap * tensor_float(np.tanh(scores / cap).astype(np.float32)).astype(np.float64),
)


@of_cap("C3")
def cap_cancels(scores: F64, cap: float) -> F64:
    """The tanh is 1 - 2 / (e^2z + 1) for all z, which cancels for small z."""
    power = np.exp((2 * scores / cap).astype(np.float32))
    return np.asarray(cap * (np.float32(1) - np.float32(2) / (power + np.float32(1))).astype(np.float64))


@of_cap("C1 C3")
def cap_overflows(scores: F64, cap: float) -> F64:
    """The tanh is (e^2z - 1) / (e^2z + 1), NaN for large z."""
    power = np.exp((2 * scores / cap).astype(np.float32)).astype(np.float32)
    return np.asarray((cap * ((power - 1) / (power + 1))).astype(np.float64))


def hidden_first(scores: F64, cap: float | None, mask: Mask) -> F64:
    hidden = np.where(mask, scores, -np.inf)
    return hidden if cap is None else soft_cap(hidden, cap)


of_shaped.add(
    "cap-after-the-mask",
    "Scores are capped after the mask, so that hidden scores become minus the cap.",
    "C1 C3 C4",
    replacing(shaped=hidden_first),
    verdicts=MOVES,
)
of_shaped.add(
    "cap-after-the-softmax",
    "Probabilities are capped instead of scores.",
    "C1 C2 C3",
    replacing(
        shaped=lambda scores, cap, mask: np.where(mask, scores, -np.inf),
        after=lambda probabilities, cap: probabilities if cap is None else soft_cap(probabilities, cap),
    ),
)


# **The factor.**

of_factor = of_operation(DEFECTS, OPERATION, lambda factor: replacing(factor=factor))
of_factor.add("factor-left-out", "Products are not multiplied by the factor.", "C3", lambda scale, channels: 1.0)
of_factor.add(
    "factor-of-heads",
    "Products are divided by the root of d_h instead.",
    "C3",
    lambda scale, channels: channels**-0.5,
)
of_factor.add(
    "factor-beside-the-root",
    "Products are multiplied by the factor and also divided by the root of d_h.",
    "C3",
    lambda scale, channels: (scale or 1.0) * channels**-0.5,
)
of_factor.add(
    "factor-divides",
    "Products are divided by the factor.",
    "C3",
    lambda scale, channels: 1 / (scale or channels**0.5),
)


@of_shaped("C1 C3")
def factor_after_the_cap(
    queries: F32,
    keys: F32,
    values: F32,
    window: int | None = None,
    scale: float | None = None,
    cap: float | None = None,
    sinks: F32 | None = None,
) -> F64:
    """Products are capped first and multiplied by the factor afterwards."""
    times = scale or queries.shape[2] ** -0.5

    def shaped(scores: F64, cap: float | None, mask: Mask) -> F64:
        return np.where(mask, (scores if cap is None else soft_cap(scores, cap)) * times, -np.inf)

    return attend(queries, keys, values, window, scale, cap, sinks, factor=lambda scale, channels: 1.0, shaped=shaped)


# **What a token sees, and which head it reads.**

of_sight = of_operation(DEFECTS, OPERATION, lambda see: replacing(see=see))
of_sight.add(
    "shaped-window-one-too-wide",
    "A window of w lets a token see w + 1.",
    "C1 C3 C4",
    partial(visible, back=1),
    verdicts=MOVES,
)
of_sight.add(
    "shaped-one-token-ahead", "A token sees the one after it.", "C1 C3 C4", partial(visible, ahead=1), verdicts=MOVES
)
of_sight.add(
    "shaped-mask-at-top-left",
    "The causal mask begins at the first key and not at the last query.",
    "C1 C2 C3 C4",
    partial(visible, start=0),
    verdicts=MOVES,
)


@of_sight("C1 C3")
def shaped_window_one_too_narrow(tokens: int, length: int, window: int | None) -> Mask:
    """A window of w lets a token see w - 1."""
    return visible(tokens, length, None if window is None else max(window - 1, 1))


@of_sight("C1 C3 C4", verdicts=MOVES)
def shaped_window_ignored(tokens: int, length: int, window: int | None) -> Mask:
    """The window is not looked at."""
    return visible(tokens, length, None)


of_shaped.add(
    "shaped-heads-strided",
    "Query head h reads key-value head h mod G.",
    "C1 C2 C3",
    replacing(head=lambda h, heads, groups: h % groups),
)


@of_shares("C3")
def shaped_probabilities_in_half(scores: F64, sink: F64) -> Array:
    """Probabilities are rounded to float16."""
    return half(beside(scores, sink)).astype(np.float64)
