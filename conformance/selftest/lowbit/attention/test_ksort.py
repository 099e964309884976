"""K-sort changes nothing until something is rounded, and then what it should."""

import numpy as np
import pytest

from lowbit.arrays import F32, F64
from lowbit.attention.attention import attend
from lowbit.attention.ksort import (
    LayerOrders,
    channel_sizes,
    hadamard,
    inverse,
    layer_orders,
    magnitudes,
    permutation,
    permuted_layout,
    v_sorted,
)
from lowbit.attention.rope import Layout, half_split, interleaved, rotate, rotation
from lowbit.errors import ArgumentError
from lowbit.quantization.bfp import Format, bfp12, bfp16, cast, decode

TOKENS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 5, 24, 6, 3, 16
LAYOUTS = {"half-split": half_split(HEAD_DIM), "interleaved": interleaved(HEAD_DIM)}


def layer(seed: int = 0) -> dict[str, F64]:
    """Projections and biases with channels of very different sizes."""
    rng = np.random.default_rng(seed)
    spread = np.exp(rng.normal(0, 1.5, KV_HEADS * HEAD_DIM))
    return {
        "x": rng.normal(size=(TOKENS, HIDDEN)),
        "query": rng.normal(size=(HIDDEN, HEADS * HEAD_DIM)),
        "key": rng.normal(size=(HIDDEN, KV_HEADS * HEAD_DIM)) * spread,
        "value": rng.normal(size=(HIDDEN, KV_HEADS * HEAD_DIM)) * spread[::-1],
        "output": rng.normal(size=(HEADS * HEAD_DIM, HIDDEN)),
        "query_bias": rng.normal(size=HEADS * HEAD_DIM),
        "key_bias": rng.normal(size=KV_HEADS * HEAD_DIM) * spread,
    }


def orders_of(weights: F64, heads: int = HEADS) -> LayerOrders:
    columns = weights.astype(np.float32).reshape(HIDDEN, KV_HEADS, HEAD_DIM)
    sizes = np.stack([channel_sizes(np.ascontiguousarray(columns[:, j])) for j in range(KV_HEADS)])
    return layer_orders(sizes, heads)


def attention(parts: dict[str, F64], layouts: tuple[Layout, ...] | None) -> F64:
    """Queries, keys and values of one layer, rotated head by head, attended and projected; float64."""
    q = (parts["x"] @ parts["query"] + parts["query_bias"]).reshape(TOKENS, HEADS, HEAD_DIM)
    k = (parts["x"] @ parts["key"] + parts["key_bias"]).reshape(TOKENS, KV_HEADS, HEAD_DIM)
    v = (parts["x"] @ parts["value"]).reshape(TOKENS, KV_HEADS, HEAD_DIM)
    if layouts is not None:
        turns = [rotation(layout, 10000.0, 0, TOKENS) for layout in layouts]
        group = HEADS // KV_HEADS
        q = np.stack([rotate(q[:, h : h + 1], turns[h // group])[:, 0] for h in range(HEADS)], axis=1)
        k = np.stack([rotate(k[:, j : j + 1], turns[j])[:, 0] for j in range(KV_HEADS)], axis=1)
    heads = attend(q, k.transpose(1, 0, 2), v.transpose(1, 0, 2))
    result: F64 = heads.reshape(TOKENS, -1) @ parts["output"]
    return result


def sorted_layer(parts: dict[str, F64]) -> tuple[dict[str, F64], LayerOrders]:
    """The same layer with keys (and queries) in order of their norms, and values in order of theirs."""
    keys, values = orders_of(parts["key"]), orders_of(parts["value"])
    moved = dict(parts)
    for name, order in (("query", keys.query_columns), ("key", keys.key_columns)):
        moved[name] = parts[name][:, order]
        moved[f"{name}_bias"] = parts[f"{name}_bias"][order]
    narrow = {name: parts[name].astype(np.float32) for name in ("value", "output")}
    value, output = v_sorted(narrow["value"], narrow["output"], values)
    moved |= {"value": value.astype(np.float64), "output": output.astype(np.float64)}
    return moved, keys


@pytest.mark.parametrize("name", [*LAYOUTS, "none"])
def test_attention_is_unchanged_before_quantisation(name: str) -> None:
    """A sorted layer gives the same output, to the rounding of sums taken in another order.

    The bound: scores are sums of d_h products and outputs of hidden more, in float64; each term moves by at most
    γ of its sum, and softmax turns an absolute error of its scores into a relative one of its weights.
    """
    parts = layer()
    for narrow in ("value", "output"):  # V-sort keeps float32 weights
        parts[narrow] = parts[narrow].astype(np.float32).astype(np.float64)
    moved, keys = sorted_layer(parts)
    before = None if name == "none" else (LAYOUTS[name],) * KV_HEADS
    after = None if name == "none" else tuple(permuted_layout(LAYOUTS[name], order) for order in keys.orders)
    wanted, given = attention(parts, before), attention(moved, after)
    u = 2.0**-53
    projected = np.abs(parts["x"]) @ np.abs(parts["key"]) + np.abs(parts["key_bias"])
    queried = np.abs(parts["x"]) @ np.abs(parts["query"]) + np.abs(parts["query_bias"])
    scores = HEAD_DIM * projected.max() * queried.max() / np.sqrt(HEAD_DIM)
    outputs = HEADS * HEAD_DIM * (np.abs(parts["x"]) @ np.abs(parts["value"])).max() * np.abs(parts["output"]).max()
    roundings = 4 * (HIDDEN + HEAD_DIM + HEADS * HEAD_DIM)
    assert np.abs(given - wanted).max() <= roundings * u * (1 + 2 * scores) * outputs
    assert np.abs(given - wanted).max() <= 1e-9 * np.abs(wanted).max()


def test_a_block_that_holds_the_head_does_not_care() -> None:
    """With block ≥ head_dim the mantissas of the sorted key are the same ones, moved, and the exponents are equal."""
    key = np.random.default_rng(1).normal(size=(7, HEAD_DIM)).astype(np.float32)
    order = permutation(magnitudes(key))
    for block in (HEAD_DIM, 2 * HEAD_DIM):
        plain, moved = cast(key, bfp12(block)), cast(np.ascontiguousarray(key[:, order]), bfp12(block))
        np.testing.assert_array_equal(moved.exponents, plain.exponents)
        np.testing.assert_array_equal(moved.mantissas, plain.mantissas[:, order])


def test_sorted_channels_lower_the_error_of_outliers() -> None:
    """Eight outlier channels spread over four blocks of 16: gathered in one block, they spoil only that one."""
    rng = np.random.default_rng(2)
    key = rng.normal(size=(50, 64)).astype(np.float32)
    key[:, ::8] *= 30
    order = permutation(magnitudes(key))

    def small_error(x: F32, small: F32) -> float:
        error = (decode(cast(np.ascontiguousarray(x), bfp12(16))) - x)[:, small]
        return float(np.sum(error.astype(np.float64) ** 2))

    small = np.arange(64) % 8 != 0
    assert small_error(key[:, order], small[order]) < 0.6 * small_error(key, small)


def test_after_rope_scores_are_integers_times_a_power_of_two() -> None:
    """Rotated keys in BFP12 and rotated queries in BFP16: the integer dot product is the product of their values."""
    from lowbit.quantization.bfp_dot import dot, total

    rng = np.random.default_rng(3)
    q, k = (rng.normal(size=(4, 1, HEAD_DIM)) for _ in range(2))
    turn = rotation(half_split(HEAD_DIM), 10000.0, 0, 4)
    queries = cast(rotate(q, turn)[:, 0].astype(np.float32), bfp16(HEAD_DIM))
    keys = cast(rotate(k, turn)[:, 0].astype(np.float32), bfp12(HEAD_DIM))
    exact = decode(queries).astype(np.float64) @ decode(keys).astype(np.float64).T
    np.testing.assert_array_equal(total(dot(queries, keys)), exact.astype(np.float32))  # one block: one rounding


def test_hadamard_keeps_scores_and_spreads_outliers() -> None:
    """An orthogonal matrix on both sides leaves scores alone; a single outlier becomes equal shares."""
    matrix = hadamard(HEAD_DIM)
    np.testing.assert_allclose(matrix @ matrix, np.eye(HEAD_DIM), atol=1e-15)
    one = np.eye(HEAD_DIM)[3] * 8
    np.testing.assert_allclose(np.abs(one @ matrix), 8 / np.sqrt(HEAD_DIM))


def test_sort_keys_see_what_they_say() -> None:
    """A large bias is seen only with the bias; a QK-norm gain multiplies; a rotated pair shares its mean."""
    weights = np.ones((HIDDEN, 4), np.float32)
    bias, gain = np.array([0, 50, 0, 0], np.float32), np.array([1, 1, 9, 1], np.float32)
    assert len(set(channel_sizes(weights, bias=bias))) == 1
    assert permutation(channel_sizes(weights, "norm_and_bias", bias=bias))[-1] == 1
    assert permutation(channel_sizes(weights, gain=gain))[-1] == 2
    rotated = channel_sizes(weights, "rotated_norm", bias=bias, layout=half_split(4))
    assert rotated[1] == rotated[3] > rotated[0] == rotated[2]


def test_orders_and_their_inverse() -> None:
    """An order and its inverse cancel, on arrays and on layouts."""
    order = np.random.default_rng(4).permutation(HEAD_DIM)
    layout = LAYOUTS["half-split"]
    back = permuted_layout(permuted_layout(layout, order), inverse(order))
    np.testing.assert_array_equal(back.partner, layout.partner)
    np.testing.assert_array_equal(np.arange(HEAD_DIM)[order][inverse(order)], np.arange(HEAD_DIM))


def test_wrong_arguments_are_refused() -> None:
    """Each names the argument and what is allowed."""
    weights = np.ones((3, 4), np.float32)
    for call in (
        lambda: channel_sizes(weights, "size"),  # type: ignore[arg-type]  # wrong on purpose
        lambda: channel_sizes(weights, "rotated_norm"),
        lambda: channel_sizes(weights, "norm_and_bias", bias=np.ones(3, np.float32)),
        lambda: layer_orders(np.ones((2, 4)), heads=3),
        lambda: hadamard(12),
        lambda: cast(weights, Format(0, 4)),
    ):
        with pytest.raises(ArgumentError):
            call()
