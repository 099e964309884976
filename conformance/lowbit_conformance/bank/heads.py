"""Defects of attention, rotary embeddings, K-sort and the pooling of heads."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit import ksort
from lowbit.affine import Floats
from lowbit.attention import softmax
from lowbit.rope import Layout, Rotation
from lowbit_conformance.bank.blocks import of
from lowbit_conformance.bank.defect import Array

Reals = npt.NDArray[np.float64]
Order = npt.NDArray[np.int64]

# **Softmax.**


def without_largest(scores: Floats) -> Array:
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        powers = np.exp(scores)  # float32 overflows at 89
        return powers / powers.sum(axis=-1, keepdims=True, dtype=np.float32)


def largest_of_all_rows(scores: Floats) -> Array:
    with np.errstate(under="ignore", invalid="ignore", divide="ignore"):
        powers = np.exp(scores - scores.max())
        return powers / powers.sum(axis=-1, keepdims=True)


def minus_infinity_shared(scores: Floats) -> Array:
    return softmax(np.maximum(scores.astype(np.float64), -100.0))


def halved(scores: Floats) -> Array:
    return softmax(scores.astype(np.float16).astype(np.float64))


def remainder_to_last(scores: Floats) -> Array:
    shares = softmax(scores.astype(np.float64)).astype(np.float32)
    shares[:, -1] = np.float32(1) - shares[:, :-1].sum(axis=1, dtype=np.float32)
    return shares


# **Attention**, with one thing at a time to be replaced.


def visible(tokens: int, length: int, window: int | None) -> npt.NDArray[np.bool_]:
    position = np.arange(length - tokens, length)[:, None]
    seen = np.arange(length) <= position
    return seen if window is None else seen & (np.arange(length) > position - window)


def attend(
    queries: Floats,
    keys: Floats,
    values: Floats,
    window: int | None = None,
    *,
    see: Callable[[int, int, int | None], npt.NDArray[np.bool_]] = visible,
    head: Callable[[int, int, int], int] = lambda h, heads, groups: h * groups // heads,
    scale: Callable[[int], float] = lambda channels: 1 / np.sqrt(channels),
    hidden: float = -np.inf,
    value_head: Callable[[int, int, int], int] | None = None,
) -> Reals:
    """Right, unless something is replaced: what is seen, which head is read, the scale, the score of what is hidden."""
    tokens, heads, channels = queries.shape
    groups, length, _ = keys.shape
    mask = see(tokens, length, window)
    result = np.empty(queries.shape)
    with np.errstate(invalid="ignore", over="ignore"):
        for h in range(heads):
            j, v = head(h, heads, groups), (value_head or head)(h, heads, groups)
            scores = queries[:, h].astype(np.float64) @ keys[j].astype(np.float64).T * scale(channels)
            shares = softmax(np.where(mask, scores, hidden if np.isinf(hidden) else scores + hidden))
            result[:, h] = shares @ values[v].astype(np.float64)
    return result


def replacing(**replaced: Any) -> Callable[..., Reals]:
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


# **Rotary embeddings.**


def rotate(x: Floats, turn: Rotation, partner: Order | None = None, sign: float = 1.0, back: int = 0) -> Reals:
    cos, sin = np.roll(turn.cos, back, axis=0)[:, None], np.roll(turn.sin, back, axis=0)[:, None] * sign
    wide = x.astype(np.float64)
    return wide * cos + wide[..., turn.layout.partner if partner is None else partner] * sin


def halves(x: Floats, turn: Rotation) -> Reals:
    channels = x.shape[2]
    return rotate(x, turn, (np.arange(channels) + channels // 2) % channels)


def neighbours(x: Floats, turn: Rotation) -> Reals:
    return rotate(x, turn, np.arange(x.shape[2]) ^ 1)


def in_place(x: Floats, turn: Rotation) -> Reals:
    """The second channel of a pair is computed from a first that was turned already."""
    result, partner = x.astype(np.float64), turn.layout.partner
    for channel in range(x.shape[2]):
        sin = turn.sin[:, None, channel]
        result[..., channel] = result[..., channel] * turn.cos[:, None, channel] + result[..., partner[channel]] * sin
    return result


# **K-sort.**


def unstable(sizes: Reals) -> Order:
    return (len(sizes) - 1 - np.argsort(sizes[::-1], kind="stable")).astype(np.int64)


def by_float32(sizes: Reals) -> Order:
    return np.argsort(sizes.astype(np.float32), kind="stable").astype(np.int64)


def ranks(sizes: Reals) -> Order:
    return ksort.inverse(ksort.permutation(sizes))


def relabel(
    layout: Layout, order: Order, partner: Order, sign: Reals | None = None, pair: Order | None = None
) -> Layout:
    return Layout(
        np.ascontiguousarray(partner),
        layout.sign[order] if sign is None else sign,
        layout.pair[order] if pair is None else pair,
    )


def right_partner(layout: Layout, order: Order) -> Order:
    return ksort.inverse(order)[layout.partner[order]]


def inverted_order(layout: Layout, order: Order) -> Layout:
    back = ksort.inverse(order)
    return relabel(layout, back, order[layout.partner[back]])


# **Pooling.**


def members(weights: Floats, heads: int, groups: int) -> Array:
    """Rows × groups × heads of a group × channels."""
    rows, columns = weights.shape
    return weights.reshape(rows, groups, heads // groups, columns // heads)


def pooled(cells: Array, method: str = "mean", first: int = 0) -> Floats:
    if method == "first":
        return np.ascontiguousarray(cells[:, :, first].reshape(len(cells), -1))
    total = np.zeros((cells.shape[0], cells.shape[1], cells.shape[3]))
    for member in range(cells.shape[2]):
        total += cells[:, :, member]
    return np.ascontiguousarray((total / cells.shape[2]).astype(np.float32).reshape(len(cells), -1))


def strided(weights: Floats, heads: int, groups: int, method: str = "mean") -> Floats:
    rows, columns = weights.shape
    cells = weights.reshape(rows, heads // groups, groups, columns // heads).swapaxes(1, 2)
    return pooled(cells, method)


def in_float32(weights: Floats, heads: int, groups: int, method: str = "mean") -> Floats:
    cells = members(weights, heads, groups)
    if method == "first":
        return pooled(cells, method)
    total = np.zeros_like(cells[:, :, 0])
    for member in range(cells.shape[2]):
        total += cells[:, :, member]
    return np.ascontiguousarray((total / np.float32(cells.shape[2])).reshape(len(cells), -1))


def backwards(weights: Floats, heads: int, groups: int, method: str = "mean") -> Floats:
    cells = members(weights, heads, groups)
    return pooled(cells[:, :, ::-1] if method == "mean" else cells, method)


def summed(weights: Floats, heads: int, groups: int, method: str = "mean") -> Floats:
    result = pooled(members(weights, heads, groups), method)
    with np.errstate(over="ignore"):
        return result * np.float32(heads // groups) if method == "mean" else result


def channels_first(weights: Floats, heads: int, groups: int, method: str = "mean") -> Floats:
    rows, columns = weights.shape
    cells = weights.reshape(rows, columns // heads, groups, heads // groups).transpose(0, 2, 3, 1)
    return pooled(cells, method)


def last_of_group(weights: Floats, heads: int, groups: int, method: str = "mean") -> Floats:
    return pooled(members(weights, heads, groups), method, first=-1)


ATTENTION = (
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
    ),
    of(
        "attention.softmax",
        "minus-infinity-clamped",
        "Scores of minus infinity count as -100 and get a share.",
        "C1 C2",
        minus_infinity_shared,
    ),
    of("attention.softmax", "softmax-in-half", "Scores are rounded to float16 first.", "C2", halved),
    of(
        "attention.softmax",
        "last-share-is-the-rest",
        "The last share is 1 minus the others.",
        "C2 C3",
        remainder_to_last,
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
        "C2 C3",
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
    ),
    of("attention.attend", "one-token-ahead", "A token sees the one after it.", "C1 C3 C4", replacing(see=one_ahead)),
    of(
        "attention.attend",
        "window-one-too-wide",
        "A window of w lets a token see w + 1.",
        "C1 C3 C4",
        replacing(see=one_more),
        "https://github.com/huggingface/transformers/issues/39408",
    ),
    of("attention.attend", "window-ignored", "The window is not looked at.", "C1 C3 C4", replacing(see=no_window)),
    of(
        "attention.attend",
        "mask-of-minus-5",
        "What is hidden loses 5 of its score instead of all.",
        "C1 C3 C4",
        replacing(hidden=-5.0),
    ),
)

ROTARY = (
    of(
        "rope.rotate",
        "rotation-backwards",
        "The sign of the sine is the other one.",
        "C1 C2",
        lambda x, turn: rotate(x, turn, sign=-1.0),
    ),
    of(
        "rope.rotate",
        "pairs-taken-for-halves",
        "Channels pair as halves, whatever the layout says.",
        "C1 C2 C3",
        halves,
        "https://github.com/jzhang38/TinyLlama/issues/24",
    ),
    of(
        "rope.rotate",
        "pairs-taken-for-neighbours",
        "Channels pair with their neighbours, whatever the layout says.",
        "C1 C2 C3",
        neighbours,
        "https://github.com/jzhang38/TinyLlama/issues/24",
    ),
    of(
        "rope.rotate",
        "position-one-off",
        "A token is turned by the angle of the one before it.",
        "C1 C2",
        lambda x, turn: rotate(x, turn, back=1),
        "https://github.com/pytorch/executorch/pull/2010",
    ),
    of(
        "rope.rotate",
        "rotated-in-place",
        "The second channel of a pair sees the first after it was turned.",
        "C1 C2",
        in_place,
    ),
)

SORTS = (
    of(
        "ksort.permutation",
        "sorted-descending",
        "The largest channel comes first.",
        "C1 C2 C3",
        lambda sizes: np.argsort(-sizes, kind="stable").astype(np.int64),
    ),
    of("ksort.permutation", "equals-reversed", "Of equal channels the last comes first.", "C2", unstable),
    of("ksort.permutation", "sorted-in-float32", "Sizes are compared after a rounding to float32.", "C1", by_float32),
    of(
        "ksort.permutation",
        "ranks-for-order",
        "The rank of each channel is given and not the channel of each rank.",
        "C1 C2 C3",
        ranks,
    ),
    of(
        "ksort.permutation",
        "order-is-int32",
        "The order comes back as int32.",
        "C3",
        lambda sizes: ksort.permutation(sizes).astype(np.int32),
    ),
    of(
        "ksort.relabel",
        "partner-as-printed",
        "The partner is looked up and not relabelled: i goes to pi(i).",
        "C1",
        lambda layout, order: relabel(layout, order, order[layout.partner]),
        "errata B1, as the paper prints Algorithm 1",
    ),
    of(
        "ksort.relabel",
        "partner-not-moved",
        "Partners stay as they were before the channels moved.",
        "C1",
        lambda layout, order: relabel(layout, order, layout.partner),
    ),
    of("ksort.relabel", "order-inverted", "The order is applied the other way round.", "C1 C2", inverted_order),
    of(
        "ksort.relabel",
        "signs-not-moved",
        "Signs stay where they were.",
        "C1 C2",
        lambda layout, order: relabel(layout, order, right_partner(layout, order), sign=layout.sign),
    ),
    of(
        "ksort.relabel",
        "frequencies-not-moved",
        "Frequencies stay where they were.",
        "C1 C2",
        lambda layout, order: relabel(layout, order, right_partner(layout, order), pair=layout.pair),
    ),
)

POOLS = (
    of(
        "pooling.pool",
        "pooled-heads-strided",
        "Group j is the heads j, j + G, ... and not neighbours.",
        "C1 C2 C3",
        strided,
    ),
    of("pooling.pool", "mean-in-float32", "Heads are added in float32.", "C1 C3", in_float32),
    of("pooling.pool", "mean-backwards", "The last head of a group is added first.", "C1", backwards),
    of("pooling.pool", "sum-for-mean", "The sum of the heads is not divided.", "C1 C3", summed),
    of(
        "pooling.pool",
        "channels-before-heads",
        "Columns are read as channels of heads and not heads of channels.",
        "C1 C2 C3",
        channels_first,
    ),
    of("pooling.pool", "last-head-for-first", "The last head of a group is copied for the first.", "C2", last_of_group),
)

DEFECTS = (*ATTENTION, *ROTARY, *SORTS, *POOLS)
