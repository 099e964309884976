"""Defects of attention: the softmax, what a token sees, and which head it reads."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit.arrays import F32, F64, Array
from lowbit.linear.elementary import softmax
from lowbit_conformance.defects.defect import MOVES, of

# **Softmax.**


def without_largest(scores: F32) -> Array:
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        powers = np.exp(scores)  # float32 overflows at 89
        answer: Array = powers / powers.sum(axis=-1, keepdims=True, dtype=np.float32)
    return answer


def largest_of_all_rows(scores: F32) -> Array:
    with np.errstate(under="ignore", invalid="ignore", divide="ignore"):
        powers = np.exp(scores - scores.max())
        answer: Array = powers / powers.sum(axis=-1, keepdims=True)
    return answer


def minus_infinity_shared(scores: F32) -> Array:
    return softmax(np.maximum(scores.astype(np.float64), -100.0))


def based_apart(scores: F32) -> Array:
    base = scores * np.float32(np.log2(np.e))
    powers = np.exp2((base - base.max(axis=1, keepdims=True)).astype(np.float64))
    probabilities: Array = powers / powers.sum(axis=1, keepdims=True)
    return probabilities.astype(np.float32)


def halved(scores: F32) -> Array:
    return softmax(scores.astype(np.float16).astype(np.float64))


def remainder_to_last(scores: F32) -> Array:
    probabilities = softmax(scores.astype(np.float64)).astype(np.float32)
    probabilities[:, -1] = np.float32(1) - probabilities[:, :-1].sum(axis=1, dtype=np.float32)
    return probabilities


# **Attention**, with one thing at a time to be replaced.


def visible(tokens: int, length: int, window: int | None) -> npt.NDArray[np.bool_]:
    position = np.arange(length - tokens, length)[:, None]
    seen = np.arange(length) <= position
    return seen if window is None else seen & (np.arange(length) > position - window)


def attend(
    queries: F32,
    keys: F32,
    values: F32,
    window: int | None = None,
    *,
    see: Callable[[int, int, int | None], npt.NDArray[np.bool_]] = visible,
    head: Callable[[int, int, int], int] = lambda h, heads, groups: h * groups // heads,
    scale: Callable[[int], float] = lambda channels: 1 / np.sqrt(channels),
    hidden: float = -np.inf,
    value_head: Callable[[int, int, int], int] | None = None,
) -> F64:
    """Right, unless something is replaced: what is seen, which head is read, the scale, the score of what is hidden."""
    tokens, heads, channels = queries.shape
    groups, length, _ = keys.shape
    mask = see(tokens, length, window)
    result = np.empty(queries.shape)
    with np.errstate(invalid="ignore", over="ignore"):
        for h in range(heads):
            j, v = head(h, heads, groups), (value_head or head)(h, heads, groups)
            scores = queries[:, h].astype(np.float64) @ keys[j].astype(np.float64).T * scale(channels)
            probabilities = softmax(np.where(mask, scores, hidden if np.isinf(hidden) else scores + hidden))
            result[:, h] = probabilities @ values[v].astype(np.float64)
    return result


def replacing(**replaced: Any) -> Callable[..., F64]:
    return lambda queries, keys, values, window=None: attend(queries, keys, values, window, **replaced)


def top_left(tokens: int, length: int, window: int | None) -> npt.NDArray[np.bool_]:
    seen = np.arange(length) <= np.arange(tokens)[:, None]
    return seen if window is None else seen & (np.arange(length) > np.arange(tokens)[:, None] - window)


def one_ahead(tokens: int, length: int, window: int | None) -> npt.NDArray[np.bool_]:
    position = np.arange(length - tokens, length)[:, None] + 1
    seen = np.arange(length) <= position
    return seen if window is None else seen & (np.arange(length) > position - 1 - window)


def one_more(tokens: int, length: int, window: int | None) -> npt.NDArray[np.bool_]:
    return visible(tokens, length, None if window is None else window + 1)


def no_window(tokens: int, length: int, window: int | None) -> npt.NDArray[np.bool_]:
    return visible(tokens, length, None)


DEFECTS = (
    of(
        "attention.softmax",
        "softmax-without-max",
        "Exponentials of scores as they are overflow.",
        "C2",
        without_largest,
        "https://github.com/NVIDIA/FasterTransformer/issues/43",
    ),
    of(
        "attention.softmax",
        "softmax-with-max-of-all-rows",
        "The largest score of all rows is taken off every row.",
        "C2 C3",
        largest_of_all_rows,
        verdicts=MOVES,
    ),
    of(
        "attention.softmax",
        "minus-infinity-clamped",
        "Scores of minus infinity count as -100 and get a share.",
        "C1 C2",
        minus_infinity_shared,
    ),
    of(
        "attention.softmax",
        "base-2-before-the-difference",
        "Scores and the largest are each multiplied by log2 e and rounded before one is taken from the other.",
        "C2",
        based_apart,
    ),
    of("attention.softmax", "softmax-in-half", "Scores are rounded to float16 first.", "C2", halved),
    of(
        "attention.softmax",
        "last-share-is-the-rest",
        "The last share is 1 minus the others.",
        "C2 C3",
        remainder_to_last,
        verdicts=MOVES,
    ),
    of(
        "attention.attend",
        "scale-missing",
        "Scores are not divided by the root of d_h.",
        "C3",
        replacing(scale=lambda channels: 1.0),
    ),
    of(
        "attention.attend",
        "scale-by-channels",
        "Scores are divided by d_h and not by its root.",
        "C3",
        replacing(scale=lambda channels: 1 / channels),
    ),
    of(
        "attention.attend",
        "query-heads-strided",
        "Query head h reads key-value head h mod G.",
        "C1 C2 C3",
        replacing(head=lambda h, heads, groups: h % groups),
        "https://github.com/onnx/onnx/pull/7274",
    ),
    of(
        "attention.attend",
        "values-of-first-head",
        "Keys go by group, and values are always of the first.",
        "C1 C2 C3",
        replacing(value_head=lambda h, heads, groups: 0),
    ),
    of(
        "attention.attend",
        "mask-at-top-left",
        "The causal mask begins at the first key and not at the last query.",
        "C1 C2 C3 C4",
        replacing(see=top_left),
        "https://github.com/pytorch/pytorch/issues/108108",
        verdicts=MOVES,
    ),
    of(
        "attention.attend",
        "one-token-ahead",
        "A token sees the one after it.",
        "C1 C3 C4",
        replacing(see=one_ahead),
        verdicts=MOVES,
    ),
    of(
        "attention.attend",
        "window-one-too-wide",
        "A window of w lets a token see w + 1.",
        "C1 C3 C4",
        replacing(see=one_more),
        "https://github.com/huggingface/transformers/issues/39408",
        verdicts=MOVES,
    ),
    of(
        "attention.attend",
        "window-ignored",
        "The window is not looked at.",
        "C1 C3 C4",
        replacing(see=no_window),
        verdicts=MOVES,
    ),
    of(
        "attention.attend",
        "mask-of-minus-5",
        "What is hidden loses 5 of its score instead of all.",
        "C1 C3 C4",
        replacing(hidden=-5.0),
        verdicts=MOVES,
    ),
)
