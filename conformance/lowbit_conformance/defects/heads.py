"""Defects of rotary embeddings, K-sort and the pooling of heads."""

from collections.abc import Callable
from functools import partial

import numpy as np

from lowbit.arrays import F32, F64, I64, Array
from lowbit.attention import ksort
from lowbit.attention.rope import Layout, Rotation
from lowbit_conformance.defects.defect import Defect, Function, of_operation

DEFECTS: list[Defect] = []
of_rotate = of_operation(DEFECTS, "rope.rotate")
of_order = of_operation(DEFECTS, "ksort.permutation")
of_relabel = of_operation(DEFECTS, "ksort.relabel")

Order = I64

# **Rotary embeddings.**


def rotate(x: F32, rotation: Rotation, partner: Order | None = None, sign: float = 1.0, back: int = 0) -> F64:
    """Rotate; right unless channels have other partners, sines another sign, or angles are those of `back` tokens
    earlier."""
    cos, sin = np.roll(rotation.cos, back, axis=0)[:, None], np.roll(rotation.sin, back, axis=0)[:, None] * sign
    wide = x.astype(np.float64)
    return wide * cos + wide[..., rotation.layout.partner if partner is None else partner] * sin


of_rotate.add("rotation-backwards", "The sign of the sine is the other one.", "C1 C2", partial(rotate, sign=-1.0))
of_rotate.add(
    "position-one-off",
    "A token is turned by the angle of the one before it.",
    "C1 C2",
    partial(rotate, back=1),
    "https://github.com/pytorch/executorch/pull/2010",
)
of_rotate.add("not-rotated", "Heads are returned unchanged.", "C1 C2", lambda x, rotation: x.astype(np.float64))


@of_rotate("C1 C2 C3", "https://github.com/jzhang38/TinyLlama/issues/24")
def pairs_taken_for_halves(x: F32, rotation: Rotation) -> F64:
    """Channels pair as halves, whatever the layout says."""
    channels = x.shape[2]
    return rotate(x, rotation, (np.arange(channels) + channels // 2) % channels)


@of_rotate("C1 C2 C3", "https://github.com/jzhang38/TinyLlama/issues/24")
def pairs_taken_for_neighbours(x: F32, rotation: Rotation) -> F64:
    """Channels pair with their neighbours, whatever the layout says."""
    return rotate(x, rotation, np.arange(x.shape[2]) ^ 1)


@of_rotate("C1 C2")
def rotated_in_place(x: F32, rotation: Rotation) -> F64:
    """The second channel of a pair sees the first after it was turned."""
    result, partner = x.astype(np.float64), rotation.layout.partner
    for channel in range(x.shape[2]):
        sin = rotation.sin[:, None, channel]
        turned = result[..., channel] * rotation.cos[:, None, channel]
        result[..., channel] = turned + result[..., partner[channel]] * sin
    return result


def with_angles(change: Callable[[Array, Array], tuple[Array, Array]]) -> Function:
    """With other cosines and sines."""
    return lambda x, rotation: rotate(x, Rotation(rotation.layout, *change(rotation.cos, rotation.sin)))


def of_tokens(choose: Callable[[Array], Array]) -> Function:
    """With the angles of other tokens."""
    return with_angles(lambda *both: tuple(part[choose(np.arange(len(part)))] for part in both))


of_rotate.add(
    "position-one-ahead",
    "A token is rotated by the angle of the next token.",
    "C2",
    of_tokens(lambda token: np.minimum(token + 1, len(token) - 1)),
)
of_rotate.add(
    "position-one-behind",
    "Every token but the first is rotated by the previous angle.",
    "C2",
    of_tokens(lambda token: np.maximum(token - 1, 0)),
)
of_rotate.add(
    "first-position-for-all",
    "All tokens are rotated by the angle of the first.",
    "C2",
    of_tokens(lambda token: 0 * token),
)
of_rotate.add(
    "cosine-and-sine-exchanged",
    "Cosines and sines are exchanged.",
    "C1 C2",
    with_angles(lambda cos, sin: (sin, cos)),
)
of_rotate.add(
    "sine-left-out",
    "Channels are only multiplied by cosines.",
    "C1 C2",
    with_angles(lambda cos, sin: (cos, 0 * sin)),
)

# **K-sort.**


@of_order("C2")
def equals_reversed(sizes: F64) -> Order:
    """Of equal channels the last comes first."""
    return (len(sizes) - 1 - np.argsort(sizes[::-1], kind="stable")).astype(np.int64)


@of_order("C1")
def sorted_in_float32(sizes: F64) -> Order:
    """Sizes are compared after a rounding to float32."""
    return np.argsort(sizes.astype(np.float32), kind="stable").astype(np.int64)


@of_order("C1 C2 C3")
def ranks_for_order(sizes: F64) -> Order:
    """The rank of each channel is given and not the channel of each rank."""
    return ksort.inverse(ksort.permutation(sizes))


def relabel(layout: Layout, order: Order, partner: Order, sign: F64 | None = None, pair: Order | None = None) -> Layout:
    """With other partners, and with the signs and frequencies that are right unless others are given."""
    return Layout(
        np.ascontiguousarray(partner),
        layout.sign[order] if sign is None else sign,
        layout.pair[order] if pair is None else pair,
    )


def right_partner(layout: Layout, order: Order) -> Order:
    return ksort.inverse(order)[layout.partner[order]]


@of_relabel("C1 C2")
def order_inverted(layout: Layout, order: Order) -> Layout:
    """The order is applied the other way round."""
    back = ksort.inverse(order)
    return relabel(layout, back, order[layout.partner[back]])


of_order.add(
    "sorted-descending",
    "The largest channel comes first.",
    "C1 C2 C3",
    lambda sizes: np.argsort(-sizes, kind="stable").astype(np.int64),
)
of_order.add(
    "order-is-int32", "The order comes back as int32.", "C3", lambda sizes: ksort.permutation(sizes).astype(np.int32)
)
of_relabel.add(
    "partner-as-printed",
    "The partner is looked up and not relabelled: i goes to pi(i).",
    "C1",
    lambda layout, order: relabel(layout, order, order[layout.partner]),
    "errata B1, as the paper prints Algorithm 1",
)
of_relabel.add(
    "partner-not-moved",
    "Partners stay as they were before the channels moved.",
    "C1",
    lambda layout, order: relabel(layout, order, layout.partner),
)
of_relabel.add(
    "signs-not-moved",
    "Signs stay where they were.",
    "C1 C2",
    lambda layout, order: relabel(layout, order, right_partner(layout, order), sign=layout.sign),
)
of_relabel.add(
    "frequencies-not-moved",
    "Frequencies stay where they were.",
    "C1 C2",
    lambda layout, order: relabel(layout, order, right_partner(layout, order), pair=layout.pair),
)

# **Pooling.**


def members(weights: F32, heads: int, groups: int) -> Array:
    """Rows × groups × heads of a group × channels."""
    rows, columns = weights.shape
    return weights.reshape(rows, groups, heads // groups, columns // heads)


def total(cells: Array, first: float = -0.0) -> F64:
    """The sum of the heads of each group, in their order."""
    result = np.full(cells[:, :, 0].shape, first)
    for member in range(cells.shape[2]):
        result += cells[:, :, member]
    return result


def mean(cells: Array, first: float = -0.0) -> F64:
    return np.asarray(total(cells, first) / cells.shape[2])


def pooled(cells: Array, method: str, means: Callable[[Array], Array] = mean) -> F32:
    with np.errstate(over="ignore"):
        answer = cells[:, :, 0] if method == "first" else means(cells)
        return np.ascontiguousarray(answer.reshape(len(cells), -1), np.float32)


def by(means: Callable[[Array], Array]) -> Function:
    """Heads are pooled by another mean."""
    return lambda weights, heads, groups, method="mean": pooled(members(weights, heads, groups), method, means)


of_pool = of_operation(DEFECTS, "pooling.pool")
of_mean = of_operation(DEFECTS, "pooling.pool", by)


@of_pool("C1 C2 C3")
def pooled_heads_strided(weights: F32, heads: int, groups: int, method: str = "mean") -> F32:
    """Group j is the heads j, j + G, ... and not neighbours."""
    return pooled(members(weights, heads, heads // groups).swapaxes(1, 2), method)


@of_pool("C1 C2 C3")
def channels_before_heads(weights: F32, heads: int, groups: int, method: str = "mean") -> F32:
    """Columns are read as channels of heads and not heads of channels."""
    rows, columns = weights.shape
    return pooled(weights.reshape(rows, columns // heads, groups, heads // groups).transpose(0, 2, 3, 1), method)


@of_pool("C2")
def last_head_for_first(weights: F32, heads: int, groups: int, method: str = "mean") -> F32:
    """The last head of a group is copied for the first."""
    cells = members(weights, heads, groups)
    return pooled(cells[:, :, ::-1] if method == "first" else cells, method)


@of_pool("C2")
def mean_for_first(weights: F32, heads: int, groups: int, method: str = "mean") -> F32:
    """The mean is returned where the first head is requested."""
    return pooled(members(weights, heads, groups), "mean")


@of_mean("C1 C3")
def mean_in_float32(cells: Array) -> Array:
    """Heads are added in float32."""
    total = np.zeros_like(cells[:, :, 0])
    for member in range(cells.shape[2]):
        total += cells[:, :, member]
    return np.asarray(total / np.float32(cells.shape[2]))


@of_mean("C1")
def mean_pairwise(cells: Array) -> Array:
    """Neighbouring heads are added in pairs, and then their sums."""
    sums = [cells[:, :, member].astype(np.float64) for member in range(cells.shape[2])]
    while len(sums) > 1:
        sums = [sums[i] + sums[i + 1] if i + 1 < len(sums) else sums[i] for i in range(0, len(sums), 2)]
    return np.asarray(sums[0] / cells.shape[2])


@of_mean("C1")
def mean_ends_exchanged(cells: Array) -> Array:
    """The last head of a group is added before its neighbour."""
    return mean(cells[:, :, [*range(cells.shape[2] - 2), -1, -2]] if cells.shape[2] > 2 else cells)


of_mean.add("mean-backwards", "The last head of a group is added first.", "C1", lambda cells: mean(cells[:, :, ::-1]))
of_mean.add(
    "mean-from-zero", "The sum begins with +0, so heads of -0 have a mean of +0.", "C1 C3", partial(mean, first=0.0)
)
of_mean.add(
    "first-for-mean", "The first head is returned where the mean is requested.", "C1", lambda cells: cells[:, :, 0]
)
of_mean.add(
    "sum-for-mean",
    "The sum of the heads is not divided.",
    "C1 C3",
    lambda cells: mean(cells).astype(np.float32) * np.float32(cells.shape[2]),
)
of_mean.add(
    "sums-for-means",
    "The sum of the heads, otherwise right, is not divided.",
    "C1",
    total,
)
