r"""K-sort: sort the channels of a head by size, so that outliers share blocks.

A block of Block Floating Point has one exponent, set by its largest element (chapter `bfp`). Keys have outliers, in the
same few channels for every token. Where such a channel shares a block with small ones, the small ones round to zero.
Sorting each key by magnitude would help but costs too much, because it must be undone for every token. But the order of
*channels* is free. It can be chosen once, from the weights, and built into them.

**Why it is free.** A score is a dot product, and a dot product does not depend on the order of its terms, as long as
both factors agree. With :math:`\pi(x)[c] = x[\pi[c]]` applied to the channels of :math:`W_q` and :math:`W_k`,

.. math:: W_q^\top W_k = [\pi(W_q)]^\top\, \pi(W_k), \tag{2}

.. math:: q\,k^\top = [\pi(q^\top)]^\top\, \pi(k^\top). \tag{3}

**The order** is ascending by the norm of what makes a channel, the row of :math:`W_k` that yields it (here, where
:math:`W_k` is stored transposed, the column). That is Algorithm 1; there are other *sort keys* besides the printed one.

**The rotary embedding** pairs channels (chapter `rope`), and pairs must stay pairs. A layout is the triple of partner
:math:`i`, sign :math:`s` and frequency :math:`\Theta`. Frequencies and signs move with their channels. The partner of
a channel is itself the number of a channel, so it must be *renamed* as well as moved:

.. math:: \Theta \leftarrow \pi(\Theta), \qquad s \leftarrow \pi(s), \qquad i \leftarrow \pi^{-1} \circ i \circ \pi .

As printed, the last is :math:`i \leftarrow \pi(i)`, which points to the wrong channels (errata B1).

**Grouped queries.** All query heads of a group use the same key head, so they take its order (errata B4).

**Nothing changes until something is rounded.** Sums are taken in another order, so scores move by rounding errors of
that sum; and where a block holds a whole head, all its channels share one exponent in any order, and even the blocks'
integers are the same ones, moved.

**Measured** in BFP12 with blocks of 32, on keys of real models reading alice29.txt: the squared error of the keys,
divided by that of the same cache with its channels as they stand; the median over heads, and how many heads got worse.
SmolLM2-135M: 90 heads, 1024 tokens, no biases. Qwen2.5-Coder-0.5B: 48 heads, 512 tokens, large key biases.

.. list-table::
   :header-rows: 1

   * - order
     - SmolLM2
     - Qwen
   * - before RoPE, row norm (as printed)
     - 0.95, 22 of 90 worse
     - 0.91, 5 of 48 worse
   * - before RoPE, row norm and bias
     - no biases
     - 0.83, 5 worse
   * - before RoPE, calibrated
     - 0.88, 3 worse
     - 0.79, 6 worse
   * - after RoPE, norm of the pair
     - 0.95, 25 worse
     - 0.87, 4 worse
   * - after RoPE, calibrated
     - 0.88, 2 worse
     - 0.81, 5 worse
   * - after RoPE, Hadamard rotation
     - 0.41, none worse
     - 0.49, none worse

``lowbit ksort`` builds an order into the weights of a model (`lowbit.rewriting.sorting`).
``bench/experiments/ksort.py`` measures this, for other models too. On these two, the printed order gains least, an
order that uses the bias or real keys more, and the rotation most. That is the error of the keys. It does not determine
perplexity, because the error of a channel reaches a score multiplied by the query's channel: the page *Sorted keys* of
the results shows that the calibrated order makes SmolLM2 worse, and that keys over queries do not.

Source: K-sort §II.C, §III, equations 2 and 3, Algorithm 1, figure 1; errata B1, B3 to B7.
"""

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

import numpy as np

from lowbit.arrays import F32, F64, I64
from lowbit.attention.rope import Layout, check_layout
from lowbit.contract.checks import check_array, check_choice, check_finite, check_integer
from lowbit.contract.operation import EXACT, operation
from lowbit.contract.signature import FINITE, Shape, Valid, checked
from lowbit.errors import ArgumentError

Order = I64

SortKey = Literal["norm", "norm_and_bias", "rotated_norm"]
MOST_HADAMARD = 2**12
"""The channels of the largest Hadamard matrix, which takes 128 MiB."""
SORT_KEYS: tuple[SortKey, ...] = get_args(SortKey)


# **How large is a channel?** There are five answers. The paper's is the Euclidean norm of its weights. A bias adds the
# same to every key, and some models have their outliers in the bias, which a norm of weights ignores. After the
# rotation a channel mixes both channels of its pair, so a cache of rotated keys uses the mean of both. The fourth
# answer, `magnitudes`, needs data: it measures the channel's values on some text. The fifth, `sizes_over_queries`, also
# measures those of the queries.


def channel_sizes(
    weights: F32,
    key: SortKey = "norm",
    *,
    bias: F32 | None = None,
    gain: F32 | None = None,
    layout: Layout | None = None,
) -> F64:
    r"""The size of each channel of one key head, by its weights.

    >>> weights = np.array([[3.0, 0.0, 1.0], [4.0, 2.0, 0.0]], np.float32)
    >>> channel_sizes(weights)
    array([5., 2., 1.])
    >>> channel_sizes(weights, "norm_and_bias", bias=np.array([0, 0, 9], np.float32)).round(2)
    array([5.  , 2.  , 9.06])

    Args:
        weights: float32, hidden × d_h: the columns of one key head.
        key: ``norm``; ``norm_and_bias``, which is :math:`\sqrt{N_c^2 + b_c^2}`; or ``rotated_norm``, which is
            :math:`\sqrt{(N_c^2 + N_{i(c)}^2)/2}` over the pair of c, including the bias if there is one.
        bias: float32, d_h, or none.
        gain: float32, d_h: the gain of a norm over the head's keys (QK-norm), which multiplies every size.
        layout: the pairs, for ``rotated_norm``.

    Returns:
        float64, d_h.

    Raises:
        ArgumentError: wrong key, dtype, shape or layout of arrays, numbers that are not finite; ``rotated_norm``
            without a layout.

    Source: K-sort Algorithm 1; errata B3, B4, B6.
    """
    check_choice("key", key, SORT_KEYS)
    check_array("weights", weights, np.float32, (None, None))
    check_finite("weights", weights)
    channels = weights.shape[1]
    squares: F64 = np.sum(weights.astype(np.float64) ** 2, axis=0)
    if bias is not None and key != "norm":
        check_array("bias", bias, np.float32, (channels,))
        squares = squares + bias.astype(np.float64) ** 2
    if gain is not None:
        check_array("gain", gain, np.float32, (channels,))
        squares = squares * gain.astype(np.float64) ** 2
    if key == "rotated_norm":
        if layout is None or layout.head_dim != channels:
            raise ArgumentError("layout", "missing or of another head", f"the pairs of {channels} channels")
        squares = (squares + squares[layout.partner]) / 2
    sizes: F64 = np.sqrt(squares)
    return sizes


def magnitudes(keys: F32) -> F64:
    """The size of each channel by its values: the root mean square over the tokens of some text.

    Args:
        keys: float32, tokens × d_h, as the cache would store them.

    Returns:
        float64, d_h.

    Raises:
        ArgumentError: wrong dtype, shape or layout of the array.
    """
    check_array("keys", keys, np.float32, (None, None))
    sizes: F64 = np.sqrt(np.mean(keys.astype(np.float64) ** 2, axis=0))
    return sizes


def sizes_over_queries(keys: F32, queries: F32) -> F64:
    r"""The size of each channel: the root mean square of its keys over that of the queries they are multiplied by.

    A block's largest channel sets the step of all its channels, and the error of channel c reaches a score multiplied
    by :math:`q[c]`. In ascending order of

    .. math:: \sqrt{\overline{k[c]^2}} \,/\, \sqrt{\overline{q[c]^2}}

    the coarsest steps go to channels where keys are large *and* queries small. A channel in which all queries are 0
    counts as if they held the smallest normal float32.

    >>> keys = np.array([[4.0, 3.0], [4.0, 3.0]], np.float32)
    >>> sizes_over_queries(keys, np.array([[8.0, 1.0]], np.float32))
    array([0.5, 3. ])

    Args:
        keys: float32, tokens × d_h, as the cache would store them.
        queries: float32, tokens × d_h, of all query heads of the key head, concatenated; before or after RoPE, like the
            keys.

    Returns:
        float64, d_h.

    Raises:
        ArgumentError: wrong dtype, shape or layout of arrays.

    Source: none of the papers; the results page *Sorted keys* measures it.
    """
    check_array("keys", keys, np.float32, (None, None))
    check_array("queries", queries, np.float32, (None, keys.shape[1]))
    return magnitudes(keys) / np.maximum(magnitudes(queries), np.finfo(np.float32).tiny)


# **The order**, and its effect on a head.


@checked
def permutation(sizes: Annotated[F64, Shape("d_h"), FINITE]) -> Order:
    """Channels in ascending order of size; ties keep their order.

    >>> permutation(np.array([5.0, 2.0, 9.0, 2.0]))
    array([1, 3, 0, 2])

    Args:
        sizes: float64, d_h, finite, from `channel_sizes` or `magnitudes`.

    Returns:
        int64, d_h: channel ``order[c]`` of the head becomes channel c.

    Raises:
        ArgumentError: wrong dtype or shape; a size that is not finite.

    Source: K-sort Algorithm 1, line 2; errata B3.
    """
    return np.argsort(sizes, kind="stable").astype(np.int64)


def inverse(order: Order) -> Order:
    """The inverse order: ``x[order][inverse(order)]`` is x.

    >>> inverse(np.array([1, 3, 0, 2]))
    array([2, 0, 3, 1])
    """
    back = np.empty_like(order)
    back[order] = np.arange(order.size)
    return back


def _check_order(layout: Layout, order: Order) -> None:
    if not np.array_equal(np.sort(order), np.arange(layout.head_dim)):
        raise ArgumentError("order", "not a permutation", f"each of 0 to {layout.head_dim - 1} once")


@checked(also=_check_order)
def permuted_layout(
    layout: Annotated[Layout, Valid(check_layout)], order: Annotated[Order, Shape("layout.head_dim")]
) -> Layout:
    """The pairs of a head after reordering its channels.

    Channels 0 and 1 are a pair; moved to places 2 and 0, they still are:

    >>> from lowbit.attention.rope import interleaved
    >>> moved = permuted_layout(interleaved(4), np.array([1, 3, 0, 2]))
    >>> moved.partner, moved.pair
    (array([2, 3, 0, 1]), array([0, 1, 0, 1]))

    Args:
        layout: the pairs before reordering.
        order: int64, d_h, from `permutation`.

    Raises:
        ArgumentError: an order that is not a permutation of the head's channels.

    Source: K-sort Algorithm 1, line 5; errata B1, B5.
    """
    partner = inverse(order)[layout.partner[order]]
    return Layout(partner, layout.sign[order], layout.pair[order])


# **A whole layer** has one order for each key head. The columns of a projection are those of its heads, one after
# another, so an order of columns is the heads' orders, each shifted to its head.


@dataclass(frozen=True)
class LayerOrders:
    """The orders of one layer.

    Attributes:
        orders: for each of the G key heads, int64, d_h.
        heads: H, query heads.
    """

    orders: tuple[Order, ...]
    heads: int

    @classmethod
    def of(cls, key_order: F32, head_dim: int, heads: int) -> "LayerOrders":
        """The orders that a model stores in one vector (`lowbit.model.weights`).

        >>> LayerOrders.of(np.array([1, 0, 0, 1], np.float32), head_dim=2, heads=4).query_columns
        array([1, 0, 3, 2, 4, 5, 6, 7])

        Args:
            key_order: float32, G·d_h: for each key head the original number of each channel, from 0.
            head_dim: d_h.
            heads: H, a multiple of G; or G.

        Raises:
            ArgumentError: heads that do not fit, or numbers that are not an order of each head.
        """
        check_integer("head_dim", head_dim, least=1)
        check_array("key_order", key_order, np.float32, (None,))
        groups = len(key_order) // head_dim
        if groups * head_dim != len(key_order) or not groups or heads % groups:
            raise ArgumentError("key_order", f"{len(key_order)} numbers", f"heads of {head_dim}, a divisor of {heads}")
        if not np.array_equal(np.sort(key_order.reshape(groups, -1)), np.tile(np.arange(head_dim), (groups, 1))):
            raise ArgumentError("key_order", "no permutation", f"each of 0 to {head_dim - 1} once for each head")
        return cls(tuple(key_order.astype(np.int64).reshape(groups, -1)), heads)

    @property
    def key_order(self) -> F32:
        """float32, G·d_h: as `of` reads it."""
        return np.concatenate(self.orders).astype(np.float32)

    @property
    def key_columns(self) -> Order:
        """int64, G·d_h: for the columns, biases and gains of the keys and, under V-sort, of the values."""
        return _columns(self.orders)

    @property
    def query_columns(self) -> Order:
        """int64, H·d_h: for those of the queries; head h takes the order of key head ⌊h / r⌋."""
        group = self.heads // len(self.orders)
        return _columns(tuple(self.orders[head // group] for head in range(self.heads)))


def layer_orders(sizes: F64, heads: int) -> LayerOrders:
    """One order for each key head.

    >>> sizes = np.array([[2.0, 1.0], [3.0, 4.0]])  # two key heads of two channels, four query heads
    >>> layer_orders(sizes, heads=4).query_columns
    array([1, 0, 3, 2, 4, 5, 6, 7])

    Args:
        sizes: float64, G × d_h.
        heads: H, a multiple of G.

    Raises:
        ArgumentError: wrong dtype, shape or number of heads.

    Source: errata B4.
    """
    check_array("sizes", sizes, np.float64, (None, None))
    check_integer("heads", heads, least=1)
    if heads % len(sizes):
        raise ArgumentError("heads", heads, f"a multiple of the {len(sizes)} key heads")
    return LayerOrders(tuple(permutation(row) for row in np.ascontiguousarray(sizes)), heads)


def _columns(orders: tuple[Order, ...]) -> Order:
    head_dim = orders[0].size
    return np.concatenate([head * head_dim + order for head, order in enumerate(orders)])


# **V-sort** does the same for values, which is easier because they are not rotated. Where the columns of :math:`W_v`
# are reordered, so are the rows of :math:`W_o`, for each head that reads them.


def v_sorted(value: F32, output: F32, orders: LayerOrders) -> tuple[F32, F32]:
    """Value and output weights with the channels of the values reordered; their product stays the same.

    Args:
        value: float32, hidden × G·d_h.
        output: float32, H·d_h × hidden.
        orders: from `layer_orders`, of the sizes of value channels.

    Returns:
        The same two, permuted.

    Raises:
        ArgumentError: shapes that do not match these heads.

    Source: K-sort §III (values); errata B7.
    """
    check_array("value", value, np.float32, (None, orders.key_columns.size))
    check_array("output", output, np.float32, (orders.query_columns.size, None))
    return np.ascontiguousarray(value[:, orders.key_columns]), np.ascontiguousarray(output[orders.query_columns])


# **The alternative that engines use**: rotate the head by a Hadamard matrix, which spreads an outlier over all channels
# instead of gathering outliers in their own block. It is orthogonal, so scores are unchanged. It mixes channels, so it
# must come after the rotary embedding, on rotated queries and keys.


def hadamard(head_dim: int) -> F64:
    r"""Sylvester's Hadamard matrix, divided by :math:`\sqrt{d_h}`: symmetric, and its own inverse.

    >>> hadamard(2) * np.sqrt(2)
    array([[ 1.,  1.],
           [ 1., -1.]])

    Raises:
        ArgumentError: `head_dim` is not a power of two, or above `MOST_HADAMARD`.
    """
    check_integer("head_dim", head_dim, 1, MOST_HADAMARD)
    if head_dim & (head_dim - 1):
        raise ArgumentError("head_dim", head_dim, "a power of two")
    matrix: F64 = np.ones((1, 1))
    while len(matrix) < head_dim:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return np.asarray(matrix / np.sqrt(head_dim))


# **What a backend promises.**

operation(
    "ksort.permutation",
    "Channels in order of size",
    permutation,
    promise=EXACT,
    source="K-sort §III Algorithm 1; errata B3",
    clauses={
        "C1": "The sizes in the order given are ascending.",
        "C2": "Channels of equal size keep their order.",
        "C3": "Each channel stands in the order once; the result is int64.",
    },
)

operation(
    "ksort.relabel",
    "The pairs of a head in another order",
    permuted_layout,
    promise=EXACT,
    source="K-sort §III Algorithm 1; errata B1, B5",
    clauses={
        "C1": "The partner of channel c is π⁻¹(i(π(c))): the partner of a channel's partner is the channel, and both "
        "have one frequency and opposite signs.",
        "C2": "Frequencies and signs move with their channels.",
    },
)
