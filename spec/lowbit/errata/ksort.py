"""Rulings on K-sort and Block Floating Point.

Each function is the check of one ruling: it computes the printed form and the ruled one on small inputs.

Source: K-sort, as printed in the copy at hand.
"""

import numpy as np

from lowbit.arrays import F32, F64
from lowbit.attention.ksort import channel_sizes, layer_orders, permutation, permuted_layout, v_sorted
from lowbit.attention.rope import Layout, half_split, interleaved, rotate, rotation
from lowbit.errata import check_refused, ruling
from lowbit.quantization.bfp import Format, bfp12, bfp16, cast, decode
from lowbit.quantization.bfp_dot import dot, total
from lowbit.quantization.bfp_storage import store

HEAD_DIM = 8
ORDER = np.array([3, 0, 6, 1, 7, 4, 2, 5])


def random(*shape: int) -> F32:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def rotated(head: F64, layout: Layout) -> F64:
    """One head at positions 5 and 6, turned."""
    return rotate(head[:, np.newaxis], rotation(layout, 10000.0, start=5, count=len(head)))[:, 0]


@ruling("B1", printed="Algorithm 1: i ← π(i)", ruled="i ← π⁻¹ ∘ i ∘ π: the partner is renamed too")
def partners_are_renamed() -> None:
    """Rotating a permuted head is permuting the rotated head, with the ruled partners and not with the printed."""
    layout, head = interleaved(HEAD_DIM), random(2, HEAD_DIM).astype(np.float64)
    wanted = rotated(head, layout)[:, ORDER]
    printed = Layout(layout.partner[ORDER], layout.sign[ORDER], layout.pair[ORDER])
    assert np.abs(rotated(head[:, ORDER], printed) - wanted).max() > 0.1
    assert (rotated(head[:, ORDER], permuted_layout(layout, ORDER)) == wanted).all()


@ruling(
    "B2",
    printed="exponent, ties, overflow, zero block, exponent range and non-finite input: not stated",
    ruled="frexp's exponent, ties to even, saturation, least exponent, clamping, an error",
)
def the_cast_is_specified_to_the_bit() -> None:
    """A logarithm misses the exponent just below a power of two; every other silence has one outcome."""
    below = np.nextafter(np.float32(8), np.float32(0))
    by_logarithm = int(np.floor(np.log2(below))) - 2  # float32's logarithm of 7.9999995 is 3
    assert by_logarithm == 1
    assert cast(np.array([[below]]), bfp12(1)).exponents[0, 0] == 0
    ties = cast(np.array([[4.0, 0.5, 1.5, 2.5, -0.5, -1.5]], np.float32), bfp12(6))
    assert ties.mantissas.tolist() == [[4, 0, 2, 2, 0, -2]]
    assert cast(np.array([[7.75, -7.75]], np.float32), bfp12(2)).mantissas.tolist() == [[7, -7]]
    assert cast(np.zeros((1, 4), np.float32), bfp12(4)).exponents.tolist() == [[-127]]
    narrow = cast(np.array([[1e6, 1.0]], np.float32), Format(2, 4, 3))
    assert (narrow.exponents.tolist(), narrow.mantissas.tolist()) == ([[3]], [[7, 0]])
    check_refused(lambda: cast(np.array([[np.nan]], np.float32), bfp12(1)))


@ruling("B3", printed="increasing or decreasing order; near-ties: not stated", ruled="ascending, float64, stable")
def the_order_is_one() -> None:
    """Both directions gather like with like, and differ; equal norms keep their order."""
    sizes = np.array([2.0, 1.0, 2.0, 3.0])
    assert permutation(sizes).tolist() == [1, 0, 2, 3]
    assert permutation(-sizes).tolist() != permutation(sizes)[::-1].tolist()


@ruling(
    "B4", printed="one head; grouped queries and biases: not stated", ruled="a group's queries take its key's order"
)
def groups_share_an_order() -> None:
    """With an order of each query head's own, scores change; with the group's, they do not."""
    keys, queries = random(3, HEAD_DIM).astype(np.float64), random(4, HEAD_DIM)[::-1].astype(np.float64)
    orders = layer_orders(np.abs(keys[:1]), heads=4)
    head = orders.query_columns.reshape(4, HEAD_DIM)
    moved = np.stack([query[order % HEAD_DIM] for query, order in zip(queries, head, strict=True)])
    assert np.abs(moved @ keys[:, orders.key_columns].T - queries @ keys.T).max() < 1e-12
    own = np.stack([query[permutation(np.abs(query))] for query in queries])
    assert np.abs(own @ keys[:, orders.key_columns].T - queries @ keys.T).max() > 0.1
    bias = np.zeros(HEAD_DIM, np.float32)
    bias[2] = 99
    assert permutation(channel_sizes(random(16, HEAD_DIM), "norm_and_bias", bias=bias))[-1] == 2


@ruling(
    "B5", printed="the footnote on half-split channels gives no algorithm", ruled="i(c) = (c + d/2) mod d, s = −1 below"
)
def half_split_is_the_same_algorithm() -> None:
    """Half-split is interleaved in another order, and the one function relabels both."""
    order = np.arange(HEAD_DIM).reshape(-1, 2).T.reshape(-1)  # even channels first
    moved, wanted = permuted_layout(interleaved(HEAD_DIM), order), half_split(HEAD_DIM)
    assert (moved.partner == wanted.partner).all()
    assert (moved.sign == wanted.sign).all()
    assert (moved.pair == wanted.pair).all()


@ruling(
    "B6", printed="where rotation and the query's cast happen: not stated", ruled="a cache before and one after RoPE"
)
def the_two_caches_differ() -> None:
    """Keys cast before and after the rotation are different numbers; after it, a score is an integer dot product."""
    key, layout = random(2, HEAD_DIM), half_split(HEAD_DIM)
    before = rotated(decode(cast(key, bfp12(4))).astype(np.float64), layout)
    stored = cast(rotated(key.astype(np.float64), layout).astype(np.float32), bfp12(4))
    assert np.abs(before - decode(stored)).max() > 1e-3
    query = cast(random(1, HEAD_DIM), bfp16(4))
    exact = decode(query).astype(np.float64) @ decode(stored).astype(np.float64).T
    assert np.abs(total(dot(query, stored)) - exact).max() <= 2.0**-23 * np.abs(exact).max() + 1e-7
    weights = random(16, HEAD_DIM)
    pairs = channel_sizes(weights, "rotated_norm", layout=layout)
    assert np.allclose(pairs[layout.partner], pairs)


@ruling("B7", printed="values: postponed", ruled="columns of W_v with rows of W_o, per key-value head")
def values_sort_for_free() -> None:
    """The product of both is the same, up to the order of its sum."""
    value, output = random(6, HEAD_DIM), random(2 * HEAD_DIM, 5)
    orders = layer_orders(channel_sizes(value)[np.newaxis], heads=2)
    sorted_value, sorted_output = v_sorted(value, output, orders)
    before = np.tile(value, 2).astype(np.float64) @ output
    after = np.tile(sorted_value, 2).astype(np.float64) @ sorted_output
    assert np.abs(before - after).max() < 1e-12
    assert (np.diff(channel_sizes(sorted_value)) >= 0).all()


@ruling(
    "B8",
    printed="equation 4 begins θ₁ θ₁ θ₁ θ₂; the range of mantissas is garbled",
    ruled="θ₁ θ₁ θ₂ θ₂; ±(2^(p−1) − 1)",
)
def each_frequency_stands_twice() -> None:
    """A third θ₁ breaks the second pair, which then no longer keeps its length."""
    layout, head = interleaved(4), random(1, 4).astype(np.float64)
    printed = Layout(layout.partner, layout.sign, np.array([0, 0, 0, 1]))
    lengths = np.hypot(head[0, 2], head[0, 3])
    turned, ruled = rotated(head, printed), rotated(head, layout)
    assert abs(np.hypot(turned[0, 2], turned[0, 3]) - lengths) > 0.1
    assert abs(np.hypot(ruled[0, 2], ruled[0, 3]) - lengths) < 1e-12
    assert (bfp12(32).top, bfp16(32).top) == (7, 127)


@ruling(
    "B9", printed="storage of a block: not stated", ruled="two's complement, little-endian stream; one byte e + 127"
)
def blocks_have_bytes() -> None:
    """Two 4-bit mantissas to a byte, the first in its low half; a byte of exponent."""
    stored = store(cast(np.array([[5.0, -1.0]], np.float32), bfp12(32)))
    assert stored.mantissas.tolist() == [[0xF5]]
    assert stored.exponents.tolist() == [[127]]


KNOWN_LLAMA2_7B = 5.47
"""Perplexity of Llama2-7B in float16 on wikitext-2, in windows of 2048 tokens, as AWQ's authors and others print it."""

TABLE_1 = {128: (10.0861, 10.0861), 64: (9.9999, 9.6061), 32: (9.8300, 9.5196)}
"""Table I, perplexity by block size: original and K-sorted."""


@ruling(
    "B10",
    printed="the float model has perplexity 9.4881; window, stride and tokens are not stated",
    ruled="nothing is compared with that number; only differences are, under a stated protocol",
)
def the_baseline_is_not_the_models() -> None:
    """What is unexplained in the baseline is nine times the largest effect of the table, counted in nats a token.

    Source: K-sort §IV and Table I; the known figure is AWQ's (arXiv 2306.00978), by GPTQ's protocol.
    """
    baseline = 9.4881
    unexplained = np.log(baseline / KNOWN_LLAMA2_7B)
    effects = {block: np.log(np.array(row) / baseline) for block, row in TABLE_1.items()}
    assert unexplained > 0.5
    assert max(effect.max() for effect in effects.values()) < unexplained / 9
    assert effects[128][0] == effects[128][1]  # the sanity row: a block is the whole head
    assert all(after < before for before, after in (effects[64], effects[32]))
