"""Defects of attention: the softmax, what a token sees, and which head it reads."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit.arrays import F32, F64, Array
from lowbit.linear.elementary import softmax
from lowbit_conformance.defects.defect import MOVES, Defect, Function, of_operation
from lowbit_conformance.defects.roundings import DEEP, Rounding, exactly, half

DEFECTS: list[Defect] = []
of_softmax = of_operation(DEFECTS, "attention.softmax")
of_attend = of_operation(DEFECTS, "attention.attend")

Mask = npt.NDArray[np.bool_]

# **Softmax.**


def unshifted(kind: type[np.floating[Any]]) -> Callable[[Array], Array]:
    """The exponentials of unshifted scores in this dtype; in float32 they overflow at 89."""

    def probabilities(scores: Array) -> Array:
        with np.errstate(all="ignore"):
            powers = np.exp(scores.astype(kind))
            return np.asarray(powers / powers.sum(axis=-1, keepdims=True))

    return probabilities


of_softmax.add(
    "softmax-without-max",
    "Exponentials of scores as they are overflow.",
    "C2",
    unshifted(np.float32),
    "https://github.com/NVIDIA/FasterTransformer/issues/43",
)


@of_softmax("C2 C3", verdicts=MOVES)
def softmax_with_max_of_all_rows(scores: F32) -> Array:
    """The largest score of all rows is taken off every row."""
    with np.errstate(under="ignore", invalid="ignore", divide="ignore"):
        powers = np.exp(scores - scores.max())
        return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


@of_softmax("C1 C2")
def minus_infinity_clamped(scores: F32) -> Array:
    """Scores of minus infinity count as -100 and get a share."""
    return softmax(np.maximum(scores.astype(np.float64), -100.0))


@of_softmax("C2")
def base_2_before_the_difference(scores: F32) -> Array:
    """Each score and the largest are multiplied by log2 e and rounded before they are subtracted."""
    base = scores * np.float32(np.log2(np.e))
    powers = np.exp2((base - base.max(axis=1, keepdims=True)).astype(np.float64))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True), np.float32)


@of_softmax("C2")
def softmax_in_half(scores: F32) -> Array:
    """Scores are rounded to float16 first."""
    return softmax(half(scores).astype(np.float64))


@of_softmax("C2 C3", verdicts=MOVES)
def last_share_is_the_rest(scores: F32) -> Array:
    """The last share is 1 minus the others."""
    probabilities = softmax(scores.astype(np.float64)).astype(np.float32)
    probabilities[:, -1] = np.float32(1) - probabilities[:, :-1].sum(axis=1, dtype=np.float32)
    return probabilities


def undivided(scores: Array) -> Array:
    """The exponentials of scores minus the largest of their row."""
    with np.errstate(all="ignore"):
        wide = scores.astype(np.float64)
        return np.asarray(np.exp(wide - wide.max(axis=-1, keepdims=True)))


of_softmax.add("softmax-not-divided", "Exponentials are not divided by their sum.", "C2", undivided)


@of_softmax("C2")
def powers_of_2(scores: F32) -> Array:
    """Powers of 2 are used instead of powers of e."""
    return softmax(scores.astype(np.float64) * np.log(2.0))


@of_softmax("C2 C3", verdicts=MOVES)
def softmax_along_columns(scores: F32) -> Array:
    """Columns sum to 1 instead of rows."""
    return softmax(scores.astype(np.float64).T).T


# **Attention**, in which one step at a time can be replaced.


def visible(
    tokens: int, length: int, window: int | None, ahead: int = 0, back: int = 0, start: int | None = None
) -> Mask:
    """A mask, T × S, of the tokens that each token sees; `ahead` and `back` are extra tokens, `start` the first
    position."""
    position = (length - tokens if start is None else start) + np.arange(tokens)[:, None]
    u = np.arange(length)
    seen = u <= position + ahead
    return seen if window is None else seen & (u > position - window - back)


def hidden(scores: F64, mask: Mask) -> F64:
    return np.where(mask, scores, -np.inf)


def attend(
    queries: F32,
    keys: F32,
    values: F32,
    window: int | None = None,
    *,
    see: Callable[[int, int, int | None], Mask] = visible,
    query: Callable[[int, int], int] = lambda h, heads: h,
    head: Callable[[int, int, int], int] = lambda h, heads, groups: h * groups // heads,
    value_head: Callable[[int, int, int], int] | None = None,
    scale: Callable[[int, int], float] = lambda channels, length: 1 / np.sqrt(channels),
    masked: Callable[[F64, Mask], F64] = hidden,
    probabilities: Callable[[F64], F64] = softmax,
    of_operands: Rounding = exactly,
    of_probabilities: Rounding = exactly,
    of_values: Rounding = exactly,
) -> F64:
    """Right, unless something is replaced.

    Args:
        queries: as of `lowbit.attention.attention.attend_to`; so are `keys`, `values` and `window`.
        keys: see `queries`.
        values: see `queries`.
        window: see `queries`.
        see: which tokens a token sees.
        query: the query head that gives result h.
        head: the key-value head that it reads.
        value_head: the same for values, if it differs.
        scale: of scores.
        masked: the scores of visible and of hidden tokens.
        probabilities: the softmax.
        of_operands: how long contexts round queries and keys.
        of_probabilities: how they round probabilities.
        of_values: how they round values.
    """
    tokens, heads, channels = queries.shape
    groups, length, _ = keys.shape
    if length < DEEP:
        of_operands = of_probabilities = of_values = exactly
    q, k, v = (part.astype(np.float64) for part in (of_operands(queries), of_operands(keys), of_values(values)))
    mask, result = see(tokens, length, window), np.empty(queries.shape)
    with np.errstate(all="ignore"):
        for h in range(heads):
            of_keys, of_own = head(h, heads, groups), (value_head or head)(h, heads, groups)
            scores = masked(q[:, query(h, heads)] @ k[of_keys].T * scale(channels, length), mask)
            result[:, h] = of_probabilities(probabilities(scores)).astype(np.float64) @ v[of_own]
    return result


def replacing(**replaced: Any) -> Function:
    return lambda queries, keys, values, window=None: attend(queries, keys, values, window, **replaced)


of_attend.add(
    "scale-missing", "Scores are not divided by the root of d_h.", "C3", replacing(scale=lambda channels, length: 1.0)
)
of_attend.add(
    "scale-by-channels",
    "Scores are divided by d_h and not by its root.",
    "C3",
    replacing(scale=lambda channels, length: 1 / channels),
)
of_attend.add(
    "attention-not-divided", "Exponentials are not divided by their sum.", "C3", replacing(probabilities=undivided)
)


def added(number: float) -> Callable[[F64, Mask], F64]:
    """A mask that adds a number to hidden scores."""
    return lambda scores, mask: np.where(mask, scores, scores + number)


def replaced(number: float) -> Callable[[F64, Mask], F64]:
    """A mask that sets hidden scores to a number."""
    return lambda scores, mask: np.where(mask, scores, number)


of_attend.add(
    "mask-of-minus-5",
    "What is hidden loses 5 of its score instead of all.",
    "C1 C3 C4",
    replacing(masked=added(-5.0)),
    verdicts=MOVES,
)

# **Heads.**

of_attend.add(
    "query-heads-strided",
    "Query head h reads key-value head h mod G.",
    "C1 C2 C3",
    replacing(head=lambda h, heads, groups: h % groups),
    "https://github.com/onnx/onnx/pull/7274",
)
of_attend.add(
    "value-heads-strided",
    "Query head h reads the values of key-value head h mod G.",
    "C1 C2 C3",
    replacing(value_head=lambda h, heads, groups: h % groups),
)
of_attend.add(
    "values-of-first-head",
    "Keys go by group, and values are always of the first.",
    "C1 C2 C3",
    replacing(value_head=lambda h, heads, groups: 0),
)
of_attend.add(
    "keys-of-first-head",
    "Values are read by group, but keys always from the first head.",
    "C3",
    replacing(head=lambda h, heads, groups: 0, value_head=lambda h, heads, groups: h * groups // heads),
)

# **What a token sees.**

of_sight = of_operation(DEFECTS, "attention.attend", lambda see: replacing(see=see))


of_sight.add(
    "mask-at-top-left",
    "The causal mask begins at the first key and not at the last query.",
    "C1 C2 C3 C4",
    partial(visible, start=0),
    "https://github.com/pytorch/pytorch/issues/108108",
    MOVES,
)
of_sight.add("one-token-ahead", "A token sees the one after it.", "C1 C3 C4", partial(visible, ahead=1), verdicts=MOVES)
of_sight.add(
    "window-one-too-wide",
    "A window of w lets a token see w + 1.",
    "C1 C3 C4",
    partial(visible, back=1),
    "https://github.com/huggingface/transformers/issues/39408",
    MOVES,
)


@of_sight("C3")
def window_one_too_narrow(tokens: int, length: int, window: int | None) -> Mask:
    """A window of w lets a token see w - 1."""
    return visible(tokens, length, None if window is None else max(window - 1, 1))


@of_sight("C1 C3 C4", verdicts=MOVES)
def window_ignored(tokens: int, length: int, window: int | None) -> Mask:
    """The window is not looked at."""
    return visible(tokens, length, None)


@of_sight("C1 C3 C4", verdicts=MOVES)
def mask_left_out(tokens: int, length: int, window: int | None) -> Mask:
    """A token sees all later tokens."""
    return visible(tokens, length, window, ahead=length)


@of_sight("C3")
def own_token_hidden(tokens: int, length: int, window: int | None) -> Mask:
    """A token does not see itself."""
    seen = visible(tokens, length, window)
    position = np.arange(length - tokens, length)
    lonely = seen.sum(axis=1) == 1  # the first token has no other
    seen[~lonely, position[~lonely]] = False
    return seen
