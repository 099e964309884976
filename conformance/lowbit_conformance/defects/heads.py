"""Defects of rotary embeddings, K-sort and the pooling of heads."""

import numpy as np

from lowbit.arrays import F32, F64, I64, Array
from lowbit.attention import ksort
from lowbit.attention.rope import Layout, Rotation
from lowbit_conformance.defects.defect import of

Order = I64

# **Rotary embeddings.**


def rotate(x: F32, rotation: Rotation, partner: Order | None = None, sign: float = 1.0, back: int = 0) -> F64:
    cos, sin = np.roll(rotation.cos, back, axis=0)[:, None], np.roll(rotation.sin, back, axis=0)[:, None] * sign
    wide = x.astype(np.float64)
    return wide * cos + wide[..., rotation.layout.partner if partner is None else partner] * sin


def halves(x: F32, rotation: Rotation) -> F64:
    channels = x.shape[2]
    return rotate(x, rotation, (np.arange(channels) + channels // 2) % channels)


def neighbours(x: F32, rotation: Rotation) -> F64:
    return rotate(x, rotation, np.arange(x.shape[2]) ^ 1)


def in_place(x: F32, rotation: Rotation) -> F64:
    """The second channel of a pair is computed from a first that was turned already."""
    result, partner = x.astype(np.float64), rotation.layout.partner
    for channel in range(x.shape[2]):
        sin = rotation.sin[:, None, channel]
        result[..., channel] = (
            result[..., channel] * rotation.cos[:, None, channel] + result[..., partner[channel]] * sin
        )
    return result


# **K-sort.**


def unstable(sizes: F64) -> Order:
    return (len(sizes) - 1 - np.argsort(sizes[::-1], kind="stable")).astype(np.int64)


def by_float32(sizes: F64) -> Order:
    return np.argsort(sizes.astype(np.float32), kind="stable").astype(np.int64)


def ranks(sizes: F64) -> Order:
    return ksort.inverse(ksort.permutation(sizes))


def relabel(layout: Layout, order: Order, partner: Order, sign: F64 | None = None, pair: Order | None = None) -> Layout:
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


def members(weights: F32, heads: int, groups: int) -> Array:
    """Rows × groups × heads of a group × channels."""
    rows, columns = weights.shape
    return weights.reshape(rows, groups, heads // groups, columns // heads)


def pooled(cells: Array, method: str = "mean", first: int = 0, *, from_zero: bool = False) -> F32:
    if method == "first":
        return np.ascontiguousarray(cells[:, :, first].reshape(len(cells), -1))
    total = cells[:, :, 0].astype(np.float64) if not from_zero else np.zeros(cells[:, :, 0].shape)
    for member in range(not from_zero, cells.shape[2]):
        total += cells[:, :, member]
    return np.ascontiguousarray((total / cells.shape[2]).astype(np.float32).reshape(len(cells), -1))


def strided(weights: F32, heads: int, groups: int, method: str = "mean") -> F32:
    rows, columns = weights.shape
    cells = weights.reshape(rows, heads // groups, groups, columns // heads).swapaxes(1, 2)
    return pooled(cells, method)


def in_float32(weights: F32, heads: int, groups: int, method: str = "mean") -> F32:
    cells = members(weights, heads, groups)
    if method == "first":
        return pooled(cells, method)
    total = np.zeros_like(cells[:, :, 0])
    for member in range(cells.shape[2]):
        total += cells[:, :, member]
    return np.ascontiguousarray((total / np.float32(cells.shape[2])).reshape(len(cells), -1))


def backwards(weights: F32, heads: int, groups: int, method: str = "mean") -> F32:
    cells = members(weights, heads, groups)
    return pooled(cells[:, :, ::-1] if method == "mean" else cells, method)


def summed(weights: F32, heads: int, groups: int, method: str = "mean") -> F32:
    result = pooled(members(weights, heads, groups), method)
    with np.errstate(over="ignore"):
        return result * np.float32(heads // groups) if method == "mean" else result


def channels_first(weights: F32, heads: int, groups: int, method: str = "mean") -> F32:
    rows, columns = weights.shape
    cells = weights.reshape(rows, columns // heads, groups, heads // groups).transpose(0, 2, 3, 1)
    return pooled(cells, method)


def from_zero(weights: F32, heads: int, groups: int, method: str = "mean") -> F32:
    return pooled(members(weights, heads, groups), method, from_zero=True)


def pairwise(weights: F32, heads: int, groups: int, method: str = "mean") -> F32:
    """Neighbours first, then neighbours of these sums."""
    cells = members(weights, heads, groups)
    if method == "first":
        return pooled(cells, method)
    sums = [cells[:, :, member].astype(np.float64) for member in range(cells.shape[2])]
    while len(sums) > 1:
        sums = [sums[i] + sums[i + 1] if i + 1 < len(sums) else sums[i] for i in range(0, len(sums), 2)]
    return np.ascontiguousarray((sums[0] / cells.shape[2]).astype(np.float32).reshape(len(cells), -1))


def ends_exchanged(weights: F32, heads: int, groups: int, method: str = "mean") -> F32:
    """The two last heads of a group change places in the sum."""
    cells = members(weights, heads, groups)
    if method == "mean" and cells.shape[2] > 2:
        cells = cells[:, :, [*range(cells.shape[2] - 2), -1, -2]]
    return pooled(cells, method)


def last_of_group(weights: F32, heads: int, groups: int, method: str = "mean") -> F32:
    return pooled(members(weights, heads, groups), method, first=-1)


ROTARY = (
    of(
        "rope.rotate",
        "rotation-backwards",
        "The sign of the sine is the other one.",
        "C1 C2",
        lambda x, rotation: rotate(x, rotation, sign=-1.0),
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
        lambda x, rotation: rotate(x, rotation, back=1),
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
    of(
        "pooling.pool",
        "mean-from-zero",
        "The sum begins with +0, so heads of -0 have a mean of +0.",
        "C1 C3",
        from_zero,
    ),
    of("pooling.pool", "mean-pairwise", "Neighbouring heads are added first, and then their sums.", "C1", pairwise),
    of(
        "pooling.pool",
        "mean-ends-exchanged",
        "The last head of a group is added before its neighbour.",
        "C1",
        ends_exchanged,
    ),
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

DEFECTS = (*ROTARY, *SORTS, *POOLS)
