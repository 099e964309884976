r"""Grouped-query attention, with a key-value cache in full precision.

Attention lets a token read from the tokens before it: its *query* is compared with the *key* of each of them, and the
comparison decides how much of each *value* enters the result. Keys and values of past tokens never change, so they are
kept in a *cache*, which grows with the length of a conversation. Grouped-query attention makes it smaller: several
query heads share one key head and one value head.

**The mathematics.** There are :math:`H` query heads and :math:`G` key-value heads, each of :math:`d_h` channels, and
:math:`r = H / G` query heads in a group. Key-value head :math:`j` serves the query heads
:math:`j r, \dots, (j + 1) r - 1`, neighbours (errata G1). For query head :math:`h` of group :math:`j` and the token at
position :math:`t`,

.. math::

    \mathrm{score}_u = \frac{q_{t,h} \cdot k_{u,j}}{\sqrt{d_h}}, \qquad
    o_{t,h} = \sum_{u \le t} \mathrm{softmax}(\mathrm{score})_u \; v_{u,j}.

The sum stops at :math:`t`: a token does not see what comes after it. One function covers the family: with
:math:`G = H` it is multi-head attention, with :math:`G = 1` multi-query attention, and anything between is grouped
(GQA §2.2, figure 2).

**A sliding window** of :math:`w` tokens begins the sum at :math:`u = t - w + 1`: a token sees itself and the :math:`w -
1` before it. Information from farther back still arrives, layer by layer, through the tokens that saw it.

**Softmax** is that of `lowbit.linear.elementary`: it subtracts the maximum first, so that no exponential overflows.

Everything here is float64. The surrounding weights are already approximations; attention adds nothing to their error.

Source: GQA §2.2 and figure 2; errata G1, G4.
"""

from typing import Annotated, Any, ClassVar

import numpy as np

from lowbit.arrays import F32, F64, Activations
from lowbit.contract.checks import check_integer, check_view
from lowbit.contract.operation import BOUNDED, operation
from lowbit.contract.signature import FINITE, ONE_TYPE, In, Shape, View, checked
from lowbit.errors import ArgumentError
from lowbit.linear.elementary import soft_cap, softmax, softmax_beside

MOST_CHANNELS = 2**20
"""The most channels of the keys of one token in one layer, over all heads; large models have some ten thousand."""


def check_grouping(queries: F32 | F64, keys: F32 | F64, *others: object) -> None:
    """`check_sizes` of queries, T × H × d_h, and keys, G × S × d_h."""
    (tokens, heads, _), (kv_heads, length, _) = queries.shape, keys.shape
    check_sizes(tokens, heads, kv_heads, length)


def check_sizes(tokens: int, heads: int, kv_heads: int, length: int) -> None:
    """Refuse a number of query heads that is not a multiple of the key-value heads, and more queries than keys."""
    if heads % kv_heads != 0:
        raise ArgumentError("query heads", heads, f"a multiple of the {kv_heads} key-value heads")
    if tokens > length:
        raise ArgumentError("query tokens", tokens, f"at most the {length} tokens of the keys")


@checked(also=check_grouping)
def attend(
    queries: Annotated[F64, View("T", "H", "d_h")],
    keys: Annotated[F64, View("G", "S", "d_h")],
    values: Annotated[F64, View("G", "S", "d_h")],
    window: Annotated[int, In(1)] | None = None,
    *,
    scale: float | None = None,
    bias: Annotated[F64, View("H", "T", "S")] | None = None,
) -> F64:
    r"""Grouped-query attention of the last T of S tokens over all S.

    The first of two tokens attends only to itself; the second, whose query favours neither key, to both equally:

    >>> queries = np.zeros((2, 1, 2))
    >>> keys, values = np.ones((1, 2, 2)), np.array([[[1.0, 0.0], [3.0, 0.0]]])
    >>> attend(queries, keys, values)[:, 0, 0]
    array([1., 2.])
    >>> attend(queries, keys, values, window=1)[:, 0, 0]
    array([1., 3.])

    Args:
        queries: float64, T × H × d_h, of the tokens at positions S − T to S − 1. Prefill is T = S, decode T = 1.
        keys: float64, G × S × d_h; G divides H.
        values: float64, G × S × d_h.
        window: how many tokens a token attends to, itself included; None for all.
        scale: the factor of the scores; None for :math:`1/\sqrt{d_h}`. T5 has 1.
        bias: float64, H × T × S, added to the scaled scores, such as T5's bias by the distance of tokens; None for
            none.

    Returns:
        float64, T × H × d_h.

    Raises:
        ArgumentError: shapes that do not match; a window below 1.

    Source: GQA §2.2; errata G1, G4.
    """
    return attended(queries, keys, values, window, scale, bias)


def attended(
    queries: F64,
    keys: F64,
    values: F64,
    window: int | None,
    scale: float | None = None,
    bias: F64 | None = None,
    cap: float | None = None,
    sinks: F64 | None = None,
) -> F64:
    """`attend` for checked arguments; with the soft cap and sinks of `lowbit.attention.shaped`."""
    tokens, heads, head_dim = queries.shape
    kv_heads, length, _ = keys.shape
    if window is not None:
        first = max(0, length - tokens - window + 1)  # the first token that any query attends to
        keys, values, length = keys[:, first:], values[:, first:], length - first
        bias = None if bias is None else bias[:, :, first:]
    # Group j is heads j·r … (j+1)·r − 1, so splitting the head axis into (G, r) forms the groups. Keys and values of a
    # group broadcast over the second axis to its r heads.
    grouped = queries.reshape(tokens, kv_heads, heads // kv_heads, head_dim).transpose(1, 2, 0, 3)
    products = grouped @ keys[:, np.newaxis].swapaxes(-1, -2)  # G × r × T × S
    scores = products / np.sqrt(head_dim) if scale is None else products * scale
    if cap is not None:
        scores = soft_cap(scores, cap)
    if bias is not None:
        scores += bias.reshape(kv_heads, heads // kv_heads, tokens, length)
    if tokens > 1:
        position = np.arange(length - tokens, length)[:, np.newaxis]
        scores[..., np.arange(length) > position] = -np.inf  # the causal mask
        if window is not None:
            scores[..., np.arange(length) <= position - min(window, length)] = -np.inf
    probabilities = softmax(scores) if sinks is None else softmax_beside(scores, sinks.reshape(kv_heads, -1, 1, 1))
    output = probabilities @ values[:, np.newaxis]  # G × r × T × d_h
    return output.transpose(2, 0, 1, 3).reshape(tokens, heads, head_dim)


# **The cache** holds the keys and values of one layer. It is allocated ahead and doubles when full, so that adding a
# token takes constant time on average.


class KeyValueCache:
    """Keys and values of one layer, in float64, as they were computed.

    >>> cache = KeyValueCache(kv_heads=1, head_dim=2)
    >>> cache.append(np.ones((3, 1, 2)), np.zeros((3, 1, 2)))
    >>> len(cache), cache.keys.shape
    (3, (1, 3, 2))
    """

    dtype: ClassVar[np.dtype[Any]] = np.dtype(np.float64)
    """Of what is kept."""

    def __init__(self, kv_heads: int, head_dim: int, capacity: int = 64) -> None:
        """An empty cache with room for `capacity` tokens before it must grow.

        Raises:
            ArgumentError: an argument below 1, or heads of more channels than `MOST_CHANNELS`.
        """
        check_heads(kv_heads, head_dim)
        check_integer("capacity", capacity, least=1)
        self._keys = np.empty((kv_heads, capacity, head_dim), self.dtype)
        self._values = np.empty((kv_heads, capacity, head_dim), self.dtype)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def keys(self) -> F64:
        """float64, G × S × d_h: a view of the tokens so far."""
        return self._keys[:, : self._length]

    @property
    def values(self) -> F64:
        """float64, G × S × d_h: a view of the tokens so far."""
        return self._values[:, : self._length]

    def append(self, keys: F64, values: F64) -> None:
        """Append T tokens.

        Args:
            keys: float64 or the cache's dtype, T × G × d_h, rotated.
            values: as keys, T × G × d_h.

        Raises:
            ArgumentError: other heads or channels than the cache's; another dtype.
        """
        self._check(keys, values)
        capacity = self._keys.shape[1]
        end = self._length + len(keys)
        if end > capacity:
            self._keys = _grown(self._keys, max(end, 2 * capacity))
            self._values = _grown(self._values, max(end, 2 * capacity))
        self._keys[:, self._length : end] = keys.swapaxes(0, 1)
        self._values[:, self._length : end] = values.swapaxes(0, 1)
        self._length = end

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens so far."""
        return self.keys.nbytes + self.values.nbytes

    def _check(self, keys: F64, values: F64) -> None:
        for name, array in (("keys", keys), ("values", values)):
            own = isinstance(array, np.ndarray) and array.dtype == self.dtype
            check_view(name, array, self.dtype if own else np.float64, (None, None, None))
        kv_heads, _, head_dim = self._keys.shape
        if keys.shape != values.shape or keys.shape[1:] != (kv_heads, head_dim):
            allowed = f"T x {kv_heads} x {head_dim}, both"
            raise ArgumentError("shapes of keys and values", (keys.shape, values.shape), allowed)


def check_heads(kv_heads: int, head_dim: int) -> None:
    """Refuse numbers of heads or channels below 1, and more channels in total than a token of any model has."""
    check_integer("kv_heads", kv_heads, 1, MOST_CHANNELS)
    check_integer("head_dim", head_dim, 1, MOST_CHANNELS // kv_heads)


def _grown(array: F64, capacity: int) -> F64:
    larger = np.empty((array.shape[0], capacity, array.shape[2]), array.dtype)
    larger[:, : array.shape[1]] = array
    return larger


# **What a backend promises.** A backend takes float32, float16 or bfloat16, all arrays in one type, and returns that
# type. Its result is compared with the functions above, applied to the exact values of its inputs. The bounds are
# derived in the chapter `lowbit.attention.bounds`.


def _check_rows(scores: Activations) -> None:
    """Refuse NaN, +∞ and rows without a finite score; −∞ is allowed."""
    wide = scores.astype(np.float64)
    if np.isnan(wide).any() or np.isposinf(wide).any():
        raise ArgumentError("scores", "NaN or +∞ somewhere", "finite numbers and −∞")
    if np.isneginf(wide).all(axis=-1).any():
        raise ArgumentError("scores", "−∞ all through a row", "at least one finite number a row")


@checked(also=_check_rows)
def softmax_of(scores: Annotated[Activations, Shape("R", "S"), ONE_TYPE]) -> F64:
    """`softmax` of scores, R × S, in float64: the reference of `attention.softmax`.

    Raises:
        ArgumentError: wrong dtype, shape or layout; NaN, +∞, or a row of nothing but −∞.
    """
    return softmax(scores.astype(np.float64))


@checked(also=check_grouping)
def attend_to(
    queries: Annotated[Activations, Shape("T", "H", "d_h"), FINITE, ONE_TYPE],
    keys: Annotated[Activations, Shape("G", "S", "d_h"), FINITE, ONE_TYPE],
    values: Annotated[Activations, Shape("G", "S", "d_h"), FINITE, ONE_TYPE],
    window: Annotated[int, In(1)] | None = None,
) -> F64:
    """`attend` for float32, float16 or bfloat16 inputs, in float64: the reference of `attention.attend`.

    Raises:
        ArgumentError: wrong dtypes, shapes or layouts; numbers that are not finite; a window below 1.
    """
    return attended(queries.astype(np.float64), keys.astype(np.float64), values.astype(np.float64), window)


operation(
    "attention.softmax",
    "Exponentials that sum to 1",
    softmax_of,
    promise=BOUNDED,
    source="GQA §2.2",
    clauses={
        "C1": "Where all but one score of a row are −∞, or lie 200 and more below it, its probability is "
        "exactly 1 and theirs are exactly 0.",
        "C2": "Each probability differs from the exact one by at most the derived bound, however large the scores are.",
        "C3": "Equal scores have equal probabilities, to the bit; a row depends on no other row.",
    },
)

operation(
    "attention.attend",
    "Grouped-query attention",
    attend_to,
    promise=BOUNDED,
    source="GQA §2.2 and figure 2; errata G1",
    parameters=lambda queries, keys, values, window=None: {
        "head_dim": queries.shape[2],
        "window": "none" if window is None else "sliding",
    },
    clauses={
        "C1": "A token that sees one token only, the first or one with a window of 1, takes its value exactly.",
        "C2": "Where one score lies 200 and more above all others, the result is that token's value exactly; query "
        "head h reads key-value head ⌊h / r⌋.",
        "C3": "Each element differs from the exact one by at most the derived bound.",
        "C4": "A token depends on no later token, and with a window of w on none before the w − 1 that precede it: "
        "changing those changes no bit.",
    },
)
