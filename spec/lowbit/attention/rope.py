r"""Rotary position embedding: the position of a token as an angle in its queries and keys.

Attention compares a query with a key by a dot product, which does not depend on how far apart the two tokens are. The
rotary embedding makes it depend on that without adding a parameter: the channels of a head are taken in pairs, each
pair is read as a point in the plane, and the point is rotated by an angle proportional to the token's position
:math:`m`. Rotating two points by :math:`m` and :math:`n` changes their dot product only through :math:`m - n`, so the
score depends only on the distance between the tokens.

**The rotation.** A head has :math:`d_h` channels, an even number, in :math:`d_h/2` pairs. Pair :math:`i` is rotated by
:math:`m\theta_i` with

.. math:: \theta_i = \mathrm{base}^{-2(i-1)/d_h}, \qquad i = 1 \dots d_h/2,

fast for the first pairs and ever more slowly for the later ones. The block-diagonal matrix
:math:`R^{d_h}_{\Theta,m}` is never built. Written out by channels, the product is

.. math:: R^{d_h}_{\Theta,m}\, x = x \otimes \cos(m\Theta) + s \otimes x_{i} \otimes \sin(m\Theta),

where :math:`\Theta` repeats each :math:`\theta` for both channels of its pair, :math:`x_i` is :math:`x` with every
channel replaced by its *partner*, :math:`s` is :math:`-1` for the first channel of a pair and :math:`+1` for the
second, and :math:`\otimes` is the product channel by channel (K-sort, equation 4; errata B8 on the cosine vector as it
is printed).

**Which channels form a pair** is a convention, and confusing two conventions gives fluent nonsense. The *interleaved*
layout of the paper pairs neighbours, :math:`(0, 1), (2, 3), \dots`; the *half-split* layout of most published Llama
weights pairs channel :math:`c` with :math:`c + d_h/2` (errata B5). A layout is therefore a value here, the triple
:math:`(i, s, \Theta)`, and there is one function that rotates.

**Longer contexts, and parts of a head.** For texts longer than those of its training, a model rotates its pairs more
slowly, or some of them not at all: `lowbit.attention.rope_scaling`.

Source: RoFormer (arXiv 2104.09864) §3.2.2 and §3.4.2; K-sort §II.D, equation 4; errata B5, B8.
"""

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from lowbit.arrays import F64, I64, Activations
from lowbit.attention.rope_scaling import MOST_CHANNELS, MOST_POSITIONS, frequencies
from lowbit.attention.rope_scaling import Scaling as Scaling  # re-exported
from lowbit.attention.rope_scaling import dynamic_scaling as dynamic_scaling
from lowbit.attention.rope_scaling import linear_scaling as linear_scaling
from lowbit.attention.rope_scaling import llama3_scaling as llama3_scaling
from lowbit.attention.rope_scaling import long_scaling as long_scaling
from lowbit.attention.rope_scaling import partial_scaling as partial_scaling
from lowbit.attention.rope_scaling import proportional_scaling as proportional_scaling
from lowbit.attention.rope_scaling import yarn_scaling as yarn_scaling
from lowbit.contract.checks import check_array, check_instance, check_integer, check_view
from lowbit.contract.operation import BOUNDED, operation
from lowbit.contract.rounding import ETA, UNIT_ROUNDOFF, Arithmetic, Bound, direct_bound, gamma, returned
from lowbit.contract.signature import ONE_TYPE, Shape, Valid, View, checked
from lowbit.errors import ArgumentError
from lowbit.linear.propagation import declared

MOST_ANGLES = 2**28
"""The most angles of one `rotation`, positions times channels: two million positions of a head of 128 channels."""


# **A layout** and a rotation consist of arrays that a caller may have made or changed, so each use checks them.


@dataclass(frozen=True, eq=False)
class Layout:
    r"""How the channels of one head pair up.

    Attributes:
        partner: int64, :math:`d_h`: the other channel of the pair, :math:`i`.
        sign: float64, :math:`d_h`: −1 where the channel is the first of its pair and +1 where it is the second,
            :math:`s`.
        pair: int64, :math:`d_h`: which pair a channel belongs to, from 0, and so which :math:`\theta` rotates it.
    """

    partner: I64
    sign: F64
    pair: I64

    @property
    def head_dim(self) -> int:
        """d_h."""
        return self.partner.size


def check_layout(layout: Layout) -> None:
    """Refuse anything but a layout, and partners that are not channels of the head."""
    check_instance("layout", layout, Layout)
    check_array("partner of layout", layout.partner, np.int64, (None,))
    check_array("sign of layout", layout.sign, np.float64, layout.partner.shape)
    check_array("pair of layout", layout.pair, np.int64, layout.partner.shape)
    least, most = int(layout.partner.min()), int(layout.partner.max())
    if least < 0 or most >= layout.head_dim:
        raise ArgumentError("partner of layout", f"from {least} to {most}", f"0 to {layout.head_dim - 1}")


def _check_head_dim(head_dim: int) -> None:
    check_integer("head_dim", head_dim, 2, MOST_CHANNELS)
    if head_dim % 2 != 0:
        raise ArgumentError("head_dim", head_dim, "an even number: channels rotate in pairs")


def half_split(head_dim: int) -> Layout:
    """Channel c of the first half is paired with channel c + d_h/2 of the second.

    >>> layout = half_split(6)
    >>> layout.partner, layout.sign, layout.pair
    (array([3, 4, 5, 0, 1, 2]), array([-1., -1., -1.,  1.,  1.,  1.]), array([0, 1, 2, 0, 1, 2]))

    Raises:
        ArgumentError: `head_dim` is not an even number of at least 2.

    Source: errata B5.
    """
    _check_head_dim(head_dim)
    channel, half = np.arange(head_dim), head_dim // 2
    return Layout((channel + half) % head_dim, np.where(channel < half, -1.0, 1.0), channel % half)


def interleaved(head_dim: int) -> Layout:
    """Channel 2i is paired with channel 2i + 1, as the paper prints it.

    >>> layout = interleaved(6)
    >>> layout.partner, layout.sign, layout.pair
    (array([1, 0, 3, 2, 5, 4]), array([-1.,  1., -1.,  1., -1.,  1.]), array([0, 0, 1, 1, 2, 2]))

    Raises:
        ArgumentError: `head_dim` is not an even number of at least 2.

    Source: K-sort, equation 4.
    """
    _check_head_dim(head_dim)
    channel = np.arange(head_dim)
    return Layout(channel ^ 1, np.where(channel % 2 == 0, -1.0, 1.0), channel // 2)


def front_split(head_dim: int, channels: int) -> Layout:
    """The first channels are half-split among themselves, and so are the rest.

    >>> layout = front_split(6, channels=4)
    >>> layout.partner, layout.pair
    (array([2, 3, 0, 1, 5, 4]), array([0, 1, 0, 1, 2, 2]))

    Raises:
        ArgumentError: a number of channels that is not even, or not from 2 to `head_dim`.
    """
    _check_head_dim(head_dim)
    check_integer("channels", channels, 2, head_dim)
    front = half_split(channels)
    if channels == head_dim:
        return front
    back = half_split(head_dim - channels)
    return Layout(
        np.concatenate([front.partner, back.partner + channels]),
        np.concatenate([front.sign, back.sign]),
        np.concatenate([front.pair, back.pair + channels // 2]),
    )


@dataclass(frozen=True)
class Frequencies:
    """What may differ between the rotations of layers: the base, and the scaling if there is one."""

    base: float
    scaling: Scaling | None = None

    def of(self, pair: I64, head_dim: int) -> F64:
        """The radians by which pairs, counted from 0, rotate at each position: float64, one for each pair.

        >>> Frequencies(100.0, Scaling((1.0, 4.0))).of(np.array([0, 1]), head_dim=4)
        array([1.   , 0.025])
        """
        channels = self.scaling.channels if self.scaling is not None else None
        theta = frequencies(self.base, pair, channels or head_dim)
        return theta if self.scaling is None else theta / np.array(self.scaling.factors)[pair]

    def layout(self, head_dim: int) -> Layout:
        """Which channels of a head are pairs: `half_split`, or `front_split` if the scaling has channels."""
        if self.scaling is None or self.scaling.channels is None:
            return half_split(head_dim)
        return front_split(head_dim, self.scaling.channels)

    def rotation(self, head_dim: int, start: int, count: int) -> "Rotation":
        """The `rotation` of positions from `start` on, for the layout of these frequencies."""
        return rotation(self.layout(head_dim), self.base, start, count, self.scaling)


# **The angles** depend on positions and not on data, so they are computed once for a run of positions and used by
# every layer.


@dataclass(frozen=True, eq=False)
class Rotation:
    """Cosines and signed sines for T positions: what `rotate` multiplies by.

    Attributes:
        layout: which channels are pairs.
        cos: float64, T × d_h.
        sin: float64, T × d_h, already multiplied by the layout's sign.
    """

    layout: Layout
    cos: F64
    sin: F64

    @property
    def count(self) -> int:
        """T, the positions."""
        return len(self.cos)

    @property
    def head_dim(self) -> int:
        """d_h."""
        return self.layout.head_dim


def check_rotation(turn: Rotation) -> None:
    """Refuse anything but a rotation, and cosines or sines that do not match its layout."""
    check_instance("turn", turn, Rotation)
    check_layout(turn.layout)
    check_view("cos of turn", turn.cos, np.float64, (None, turn.layout.head_dim))
    check_view("sin of turn", turn.sin, np.float64, turn.cos.shape)


def rotation(layout: Layout, base: float, start: int, count: int, scaling: Scaling | None = None) -> Rotation:
    r"""The rotation of positions :math:`m` from `start` to ``start + count - 1``.

    At position 0 nothing is rotated; the first pair rotates by one radian a position:

    >>> turn = rotation(half_split(4), base=10000.0, start=0, count=2)
    >>> turn.cos[0], turn.sin[0]
    (array([1., 1., 1., 1.]), array([-0., -0.,  0.,  0.]))
    >>> print(turn.cos[1].round(4), turn.sin[1].round(4))
    [0.5403 1.     0.5403 1.    ] [-0.8415 -0.01    0.8415  0.01  ]

    Args:
        layout: which channels are pairs.
        base: the number whose powers are the frequencies, above 0; 10000 in the papers.
        start: the first position, at least 0.
        count: T, at least 1, and at most `MOST_ANGLES` over the channels of a head.
        scaling: of the frequencies; None for unscaled ones.

    Raises:
        ArgumentError: wrong base, start or count, or a scaling of other heads.

    Source: RoFormer §3.2.2.
    """
    check_layout(layout)
    if not isinstance(base, int | float) or not (np.isfinite(base) and base > 0):
        raise ArgumentError("base", repr(base), "a finite number above 0")
    check_integer("start", start, 0, MOST_POSITIONS)
    check_integer("count", count, 1, MOST_ANGLES // layout.head_dim)
    if scaling is not None and len(scaling.factors) != layout.head_dim // 2:
        raise ArgumentError("number of factors", len(scaling.factors), f"{layout.head_dim // 2}, one for each pair")
    theta = Frequencies(base, scaling).of(layout.pair, layout.head_dim)
    angle = np.arange(start, start + count)[:, np.newaxis] * theta
    size = 1.0 if scaling is None else np.where(theta > 0, scaling.magnitude, 1.0)  # unrotated pairs keep theirs
    return Rotation(layout, size * np.cos(angle), layout.sign * size * np.sin(angle))


Turn = Annotated[Rotation, Valid(check_rotation)]


@checked
def rotate(x: Annotated[F64, View("turn.count", "heads", "turn.head_dim")], turn: Turn) -> F64:
    """Rotate the heads of T tokens: K-sort's equation 4, for any layout.

    A quarter of a rotation moves the first channel of a pair onto the second:

    >>> quarter = rotation(interleaved(2), base=1.0, start=0, count=1)
    >>> quarter.cos[:], quarter.sin[:] = np.cos(np.pi / 2), quarter.layout.sign * np.sin(np.pi / 2)
    >>> print(rotate(np.array([[[3.0, 0.0]]]), quarter).round(12))
    [[[0. 3.]]]

    Args:
        x: float64, T × heads × d_h: queries or keys.
        turn: the rotation of the same T positions.

    Returns:
        float64, T × heads × d_h; every pair keeps its length.

    Raises:
        ArgumentError: x is not T × heads × d_h of this rotation.

    Source: K-sort, equation 4; errata B5, B8.
    """
    return _rotated(x, turn)


def _rotated(x: F64, turn: Rotation) -> F64:
    """`rotate` for checked arguments."""
    cos, sin = turn.cos[:, np.newaxis, :], turn.sin[:, np.newaxis, :]
    return x * cos + x[..., turn.layout.partner] * sin


# **What a backend promises.** It rotates heads of float32, float16 or bfloat16 and returns that type; cosines and sines
# are inputs, since computing them is not part of the operation, and a backend may round them to float32 first.


@checked
def rotate_heads(x: Annotated[Activations, Shape("turn.count", "heads", "turn.head_dim"), ONE_TYPE], turn: Turn) -> F64:
    """`rotate` for float32, float16 or bfloat16 heads, in float64: the reference of `rope.rotate`.

    Raises:
        ArgumentError: wrong dtype, shape or layout.

    Source: K-sort, equation 4.
    """
    return _rotated(x.astype(np.float64), turn)


def rotate_bound(x: Activations, turn: Rotation, arithmetic: Arithmetic, exact: F64) -> Bound:
    r"""The bound of `rope.rotate`: a term is rounded when its cosine or sine is stored, multiplied and added.

    .. math:: |\hat y - y| \le \gamma_D\,(|x||\cos| + |x_i||\sin|) + \text{underflow},

    where a backend declares D for a sum of two terms: 3 for a plain one. A kernel that rounds its intermediate values
    to the type of x, as vLLM's does, also rounds cosines, sines and both products to it: two more roundings for each
    term, and :math:`\eta_T (2 + |x| + |x_i|)`.

    Raises:
        ArgumentError: the declared arithmetic would allow more than a tenth of the gauge.
    """
    size, partner = np.abs(x.astype(np.float64)), turn.layout.partner
    cos, sin = np.abs(turn.cos[:, np.newaxis]), np.abs(turn.sin[:, np.newaxis])
    gauge, lost, inputs = size * cos + size[..., partner] * sin, 2 + size + size[..., partner], x.dtype.name
    bound = direct_bound(gauge, 2, arithmetic, exact, 2 * lost)
    if declared(arithmetic, inputs).handed is not None:
        limit = bound.limit + gamma(2, UNIT_ROUNDOFF[inputs]) * (gauge + bound.limit) + ETA[inputs] * lost * 2
        bound = Bound(limit, gauge, f"{bound.derivation} + cosines, sines and products in {inputs}")
    return returned(bound, exact, inputs)


operation(
    "rope.rotate",
    "Heads rotated by their positions",
    rotate_heads,
    promise=BOUNDED,
    source="K-sort §II.D equation 4; errata B5, B8",
    parameters=lambda x, turn: {"head_dim": x.shape[2]},
    clauses={
        "C1": "Rotations of integers by multiples of 90° are exact: a channel becomes itself, its partner, or the "
        "negative of either.",
        "C2": "Each element differs from the exact one by at most the bound of two terms.",
        "C3": "Any pairing of channels works: interleaved, half-split, and both in another order.",
    },
)
