r"""Pooling heads: a multi-head checkpoint made into a grouped-query one.

Grouped-query attention keeps fewer key-value heads than query heads (see `attention`), but most models were trained
with one of each. The GQA paper converts them: the key and value projections of the heads of a group are replaced by
one, their *mean*, and the model is trained a little further. This chapter is the conversion; the training is not.

**The mean.** The columns of :math:`W_K` (hidden × :math:`H d_h`) are :math:`H` heads of :math:`d_h` channels. With
:math:`G` groups of :math:`r = H/G` neighbours (errata G1), channel c of the new head j is

.. math:: W'_K[:, j d_h + c] = \frac1r \sum_{i=0}^{r-1} W_K[:, (j r + i)\, d_h + c],

and the same for :math:`W_V` and for both biases (errata G2): a projection is linear, so the new key is the mean of the
old keys, bias and all. Queries and output stay as they are. The paper compared two other ways (figure 4) and found them
worse: the *first* head of each group, and *random* new heads.

**The arithmetic.** The heads are added in float64, in ascending order, divided by r, and rounded to float32 once. This
is exact to the bit and needs no tolerance; where all heads of a group are equal, it returns them unchanged, since
:math:`r w` needs few bits more than w. A sum in float32 does not: :math:`(w + w + \dots + w)/r` misses about every
seventh w at r = 3 and every second at r = 8.

**Zeros.** The sum begins with the first head and not with a zero: :math:`-0 + -0` is :math:`-0`, but :math:`0 + -0` is
:math:`+0` (IEEE 754, §6.3). So a mean is −0 where all heads are −0, and +0 where their zeros have both signs or where
they cancel.

**What it commutes with.** The mean treats every channel alike and mixes none, so it may come before or after anything
that does the same to every head of a group: a rotary embedding in either layout, for the rotation depends on position
and channel only; a change from one layout to the other. It does not commute with a permutation of channels that differs
from head to head, such as the sorted keys of K-sort: there, pool first and sort afterwards.

**Where it applies.** It applies to self-attention of a decoder and to cross-attention, whose keys and values come from
the encoder. It does not apply to self-attention of an encoder, which runs once over all tokens in parallel: no cache is
read token by token, and the paper does not convert it (§2.2). `convert` refuses it.

Source: GQA §2.1, §2.2, figures 1 and 4; errata G1, G2.
"""

from dataclasses import dataclass, replace
from typing import Annotated, Literal, get_args

import numpy as np

from lowbit.arrays import F32
from lowbit.contract.checks import check_array, check_choice, check_integer
from lowbit.contract.operation import EXACT, operation
from lowbit.contract.signature import FINITE, In, Shape, checked
from lowbit.errors import ArgumentError

Method = Literal["mean", "first"]
METHODS: tuple[Method, ...] = get_args(Method)

Kind = Literal["self", "cross", "encoder"]
KINDS: tuple[Kind, ...] = get_args(Kind)


def check_heads(argument: str, columns: int, heads: int) -> None:
    """Refuse a number of heads that does not divide the columns."""
    check_integer("heads", heads, least=1)
    if columns % heads != 0:
        raise ArgumentError(f"columns of {argument}", columns, f"a multiple of the {heads} heads")


def _check_divisors(weights: F32, heads: int, groups: int, method: Method) -> None:
    check_heads("weights", weights.shape[1], heads)
    if heads % groups != 0:
        raise ArgumentError("groups", groups, f"a divisor of the {heads} heads")


@checked(also=_check_divisors)
def pool(
    weights: Annotated[F32, Shape("rows", "columns"), FINITE],
    heads: Annotated[int, In(1)],
    groups: Annotated[int, In(1, "heads")],
    method: Method = "mean",
) -> F32:
    """Replace the heads of each group by their mean, or by the first of them.

    Four heads of one channel, in two groups:

    >>> weights = np.array([[1, 3, 10, 20]], np.float32)
    >>> pool(weights, heads=4, groups=2), pool(weights, heads=4, groups=2, method="first")
    (array([[ 2., 15.]], dtype=float32), array([[ 1., 10.]], dtype=float32))

    Args:
        weights: float32, any number of rows × H·d_h, finite; a bias is one row.
        heads: H, a divisor of the columns.
        groups: G, a divisor of H; with G = H nothing changes.
        method: ``mean`` or ``first``.

    Returns:
        float32, rows × G·d_h.

    Raises:
        ArgumentError: wrong argument.

    Source: GQA §2.1, figure 1; §3.3, figure 4.
    """
    rows, columns = weights.shape
    members = weights.reshape(rows, groups, heads // groups, columns // heads)
    if method == "first":
        first: F32 = members[:, :, 0].reshape(rows, -1).copy()  # also if every group has one head
        return first
    total = members[:, :, 0].astype(np.float64)  # not zeros: 0 + −0 is +0
    for member in range(1, heads // groups):
        total += members[:, :, member]
    mean: F32 = (total / (heads // groups)).astype(np.float32)
    return np.ascontiguousarray(mean.reshape(rows, -1))


# **A layer.** Keys and values, and their biases if they have any, are converted together.


@dataclass(frozen=True, eq=False)
class KeyValueProjection:
    """The projections to keys and values of one attention layer.

    Attributes:
        kind: ``self`` of a decoder, ``cross``, or ``encoder`` self-attention.
        heads: key-value heads; as many as query heads before conversion.
        key: float32, source × heads·d_h; for cross-attention the source is the encoder's output.
        value: float32, source × heads·d_v.
        key_bias: float32, heads·d_h, or none.
        value_bias: float32, heads·d_v, or none.

    Raises:
        ArgumentError: parts that do not match.
    """

    kind: Kind
    heads: int
    key: F32
    value: F32
    key_bias: F32 | None = None
    value_bias: F32 | None = None

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, KINDS)
        for name, matrix, bias in (("key", self.key, self.key_bias), ("value", self.value, self.value_bias)):
            check_array(name, matrix, np.float32, (len(self.key), None))
            check_heads(name, matrix.shape[1], self.heads)
            if bias is not None:
                check_array(f"{name}_bias", bias, np.float32, (matrix.shape[1],))


def convert(layer: KeyValueProjection, groups: int, method: Method = "mean") -> KeyValueProjection:
    """The same layer with `groups` key-value heads.

    >>> layer = KeyValueProjection("cross", 2, np.eye(2, dtype=np.float32), np.eye(2, dtype=np.float32))
    >>> convert(layer, groups=1).key
    array([[0.5],
           [0.5]], dtype=float32)

    Args:
        layer: with H heads.
        groups: G, a divisor of H.
        method: ``mean`` or ``first``.

    Raises:
        ArgumentError: self-attention of an encoder; wrong groups or method; weights that are not finite.

    Source: GQA §2.2 (conversion; where it is not applied); errata G1, G2.
    """
    if layer.kind == "encoder":
        raise ArgumentError("kind", "'encoder'", "'self' or 'cross' (an encoder's self-attention keeps its heads)")

    def pooled_bias(bias: F32 | None) -> F32 | None:
        return None if bias is None else pool(bias[np.newaxis], layer.heads, groups, method)[0]

    return replace(
        layer,
        heads=groups,
        key=pool(layer.key, layer.heads, groups, method),
        value=pool(layer.value, layer.heads, groups, method),
        key_bias=pooled_bias(layer.key_bias),
        value_bias=pooled_bias(layer.value_bias),
    )


# **What a backend promises.**

operation(
    "pooling.pool",
    "Heads of a group to one",
    pool,
    promise=EXACT,
    source="GQA §2.1, §2.2; errata G1, G2",
    clauses={
        "C1": "The mean is the float64 sum of the heads j·r to (j + 1)·r − 1 in this order, divided by r, rounded to "
        "float32; the sum begins with the first head, so heads of −0 have a mean of −0; channels keep their places.",
        "C2": "The first head of each group is copied.",
        "C3": "Where the heads of each group are equal, both methods give them back to the bit.",
    },
)
