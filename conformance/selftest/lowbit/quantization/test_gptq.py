"""GPTQ: the algebra against brute force and the usual form with an inverse, and the error of the layer on a corpus."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from lowbit.arrays import F32, F64
from lowbit.errors import ArgumentError
from lowbit.linear.linear import qgemv
from lowbit.quantization import affine
from lowbit.quantization.act_order import ActOrderMatrix, order_of
from lowbit.quantization.affine import CONVENTIONS, Convention, group_codes, group_scale_and_zero, group_values
from lowbit.quantization.gptq import damped, factor, hessian, layer_error, quantize, targets
from lowbit.quantization.packing import BITS, CODES_PER_UNIT, pack, unpack


def correlated(seed: int, tokens: int, rows: int, factors: int = 4) -> F32:
    """Inputs as layers see them: channels of very different size that follow a few common factors."""
    rng = np.random.Generator(np.random.PCG64(seed))
    x = 0.3 * rng.normal(size=(tokens, rows)) + rng.normal(size=(tokens, factors)) @ rng.normal(size=(factors, rows))
    return (x * np.exp(rng.normal(0, 0.7, rows))).astype(np.float32)


def normal(seed: int, rows: int, columns: int) -> F32:
    return np.random.Generator(np.random.PCG64(seed)).normal(size=(rows, columns)).astype(np.float32)


def test_factor_is_cholesky_backwards() -> None:
    """M M^T is H, and M is what LAPACK gives for H turned round: an independent computation."""
    square = damped(hessian(correlated(0, 40, 24)), 0.01)
    triangle = factor(square)
    np.testing.assert_allclose(triangle @ triangle.T, square, rtol=1e-12, atol=1e-9)
    turned = np.linalg.cholesky(square[::-1, ::-1])[::-1, ::-1]
    np.testing.assert_allclose(triangle, turned, rtol=1e-9, atol=1e-9)


def usual_form(weights: F32, square: F64, bits: int, group_size: int) -> F32:
    """GPTQ as it is usually written: the factor U of the inverse, errors subtracted from the weights that are left."""
    upper = np.linalg.cholesky(np.linalg.inv(square)).T
    left: F64 = weights.astype(np.float64)
    values = np.empty_like(weights)
    for k in range(len(weights)):
        if k % group_size == 0:
            group = left[k : k + group_size].astype(np.float32)
            scale, zero = group_scale_and_zero(group, bits, "zero_point", np.dtype(np.float32))
        codes = group_codes(left[k].astype(np.float32), scale, zero, bits, "zero_point")
        values[k] = group_values(codes, scale, zero, "zero_point")
        left[k + 1 :] -= np.outer(upper[k, k + 1 :], (left[k] - values[k]) / upper[k, k])
    return values


@pytest.mark.parametrize("bits", BITS)
def test_it_is_the_usual_form_in_other_letters(bits: int) -> None:
    """Without an inverse or with one, the same weights come out; the scales differ by rounding alone."""
    weights, square = normal(1, 64, 20), hessian(correlated(1, 200, 64))
    for group_size in (16, 64):
        ours = quantize(weights, square, bits=bits, group_size=group_size).dequantize()
        usual = usual_form(weights, damped(square, 0.01), bits, group_size)
        np.testing.assert_allclose(ours, usual, rtol=1e-4, atol=1e-5)


def test_a_target_is_the_best_row_if_the_rest_were_free() -> None:
    """Minimise E over the rows from k on by a linear solve: the k-th of them is the target of row k."""
    weights, values = normal(2, 12, 3), normal(3, 12, 3)
    square = damped(hessian(correlated(2, 30, 12)), 0.01)
    goals = targets(weights, factor(square).astype(np.float32), values)
    for k in range(12):
        fixed = (weights[:k] - values[:k]).astype(np.float64)
        rest = np.linalg.solve(square[k:, k:], -square[k:, :k] @ fixed)  # the Δ of rows k … that make E least
        np.testing.assert_allclose(goals[k], weights[k] - rest[0], rtol=1e-4, atol=1e-4)


@given(hnp.arrays(np.float32, (8, 2), elements=st.integers(-20, 20).map(lambda i: i / 8)), st.integers(0, 99))
@settings(max_examples=50)
def test_the_error_is_the_sum_of_the_squares(weights: F32, seed: int) -> None:
    """E, from its definition, equals the sum of the completed squares, for any values that rows take."""
    values = np.random.Generator(np.random.PCG64(seed)).normal(size=weights.shape).astype(np.float32)
    square = damped(hessian(correlated(seed, 20, 8)), 0.01)
    triangle = factor(square).astype(np.float32)
    residual = targets(weights, triangle, values) - values
    squares = float(np.sum((triangle.diagonal().astype(np.float64)[:, None] * residual) ** 2))
    assert squares == pytest.approx(layer_error(weights, values, square), rel=1e-4)


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("bits", BITS)
def test_without_correlation_it_is_rounding_to_the_nearest(bits: int, convention: Convention) -> None:
    """With a multiple of the identity for H, scales, zeros and codes are those of `affine.quantize`, to the bit."""
    weights = normal(4, 3 * CODES_PER_UNIT[bits], 7)
    plain = affine.quantize(weights, bits=bits, group_size=len(weights) // 2 + 1, convention=convention)
    square = 3 * np.eye(len(weights))
    ours = quantize(weights, square, bits=bits, group_size=plain.group_size, convention=convention).matrix
    for name in ("words", "scales", "zeros"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(plain, name))


def corpus() -> Iterator[tuple[int, F32, F32]]:
    """Ten layers: seed, weights and calibration inputs."""
    for seed in range(10):
        rows, columns, tokens = ((96, 40, 300), (64, 64, 48), (128, 8, 1000))[seed % 3]
        yield seed, normal(100 + seed, rows, columns), correlated(seed, tokens, rows, factors=2 + seed)


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_never_worse_than_rounding_on_the_corpus(bits: int, symmetric: bool, act_order: bool) -> None:
    """Over layers with correlated inputs the error on the calibration set is below that of rounding to the nearest."""
    for seed, weights, x in corpus():
        square = hessian(x)
        size = 32 if seed % 2 else len(weights)
        ours = quantize(weights, square, bits=bits, group_size=size, symmetric=symmetric, act_order=act_order)
        nearest = quantize(weights, np.eye(len(weights)), bits=bits, group_size=size, symmetric=symmetric)
        error, before = (layer_error(weights, each.dequantize(), square) for each in (ours, nearest))
        assert error <= before, f"layer {seed}: {error} against {before}"


def least_error(weights: F64, square: F64) -> tuple[float, float, float]:
    """E of greedy rounding, of rounding to the nearest and of the best integers near the weights; scale 1, no clamp."""

    def error(values: F64) -> float:
        delta = weights - values
        return float(delta @ square @ delta)

    triangle, values = factor(square), np.zeros(len(weights))
    for k in range(len(weights)):
        feedback = (triangle[:k, k] / triangle[k, k]) @ (weights[:k] - values[:k])
        values[k] = np.rint(weights[k] + feedback)
    near = [np.floor(w) + np.arange(-3, 5) for w in weights]
    best = min(error(np.array(choice)) for choice in itertools.product(*near))
    return error(values), error(np.rint(weights)), best


def test_two_rows_are_never_worse_and_three_may_be() -> None:
    """With two rows the greedy choice never loses to rounding to the nearest; with three it can, and here it does.

    Nor is greedy rounding the best there is: that is found here by trying all integers near the weights.
    """
    rng = np.random.Generator(np.random.PCG64(5))
    lost = 0
    for rows, trials in ((2, 200), (3, 200)):
        for _ in range(trials):
            x = rng.normal(size=(4, rows))
            greedy, nearest, best = least_error(rng.uniform(-2, 2, rows), x.T @ x)
            assert best <= min(greedy, nearest) + 1e-12
            if rows == 2:
                assert greedy <= nearest + 1e-12
            lost += greedy > nearest + 1e-9
    assert lost > 0


def test_act_order_takes_the_largest_first_and_gathers_back() -> None:
    """The order falls along the diagonal, ties as they come; x W comes from the stored matrix by gathering x."""
    weights, x = normal(6, 64, 5), correlated(6, 100, 64)
    x[:, 10] = x[:, 20]  # equal diagonal elements
    square = hessian(x)
    result = quantize(weights, square, bits=4, group_size=24, act_order=True)
    diagonal = square.diagonal()[result.order]
    assert (np.diff(diagonal) <= 0).all()
    assert list(result.order).index(10) + 1 == list(result.order).index(20)
    exact = x[0].astype(np.float64) @ result.dequantize().astype(np.float64)
    np.testing.assert_allclose(qgemv(x[0][result.order], result.matrix), exact, rtol=1e-5, atol=1e-4)
    plain = quantize(weights, square, bits=4, group_size=24)
    np.testing.assert_array_equal(plain.order, np.arange(64))


def test_g_idx_and_order_say_the_same() -> None:
    """From the order to each row's group and back, the weights are the same, to the bit."""
    weights, square = normal(7, 64, 5), hessian(correlated(7, 100, 64))
    result = quantize(weights, square, bits=4, group_size=24, act_order=True)
    assert np.bincount(result.g_idx).tolist() == [24, 24, 16]
    codes = np.empty((64, 5), np.uint8)
    codes[result.order] = unpack(result.matrix.words, 4)  # rows as a file keeps them, with g_idx
    order = order_of(result.g_idx, 24)
    again = ActOrderMatrix(replace(result.matrix, words=pack(codes[order], 4)), order)
    np.testing.assert_array_equal(again.dequantize(), result.dequantize())


def test_few_samples_are_no_obstacle() -> None:
    """Fewer samples than rows: damping makes the Hessian definite."""
    weights, square = normal(8, 32, 4), hessian(correlated(8, 5, 32))
    damp = quantize(weights, square, bits=4, group_size=32)
    nearest = affine.quantize(weights, bits=4, group_size=32, convention="zero_point")
    assert layer_error(weights, damp.dequantize(), square) < layer_error(weights, affine.dequantize(nearest), square)


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_dead_inputs_do_not_widen_their_group(convention: Convention) -> None:
    """Whatever weights a dead input has, every code and grid is that of weights 0; they widen no range of others."""
    weights, x = normal(8, 64, 4) + np.float32(3), correlated(8, 100, 64)
    x[:, [3, 40]] = 0
    square = hessian(x)
    results = []
    for dead in (0, 1000, -1000):
        weights[[3, 40]] = dead
        results.append(quantize(weights, square, bits=4, group_size=16, convention=convention, act_order=True))
    for other in results[1:]:
        for name in ("words", "scales", "zeros"):
            np.testing.assert_array_equal(getattr(other.matrix, name), getattr(results[0].matrix, name))
    kept = np.delete(weights, [3, 40], axis=0)
    largest = 2 * np.abs(kept).max() / 15  # the errors of other rows may widen a range, but not a hundred times
    assert results[1].matrix.scales.max() < largest
    if convention == "zero_point":
        assert (results[1].dequantize()[[3, 40]] == 0).all()
    else:  # a range that begins above 0 has a code nearest to 0, which stands for its minimum
        assert (results[1].matrix.zeros.min(axis=0) > 0).any()


def test_what_a_dead_input_would_cost() -> None:
    """With the weight of a dead input kept the error on the calibration set is a hundred times as large."""
    weights, x = normal(8, 64, 4), correlated(8, 100, 64)
    x[:, 3] = 0
    weights[3] = 1000
    square = hessian(x)
    ours = quantize(weights, square, bits=4, group_size=64).dequantize()
    barely = square.copy()
    barely[3, 3] = 1e-9  # an input that is nearly dead: its weight is kept
    kept = quantize(weights, barely, bits=4, group_size=64).dequantize()
    assert layer_error(weights, kept, square) > 100 * layer_error(weights, ours, square)
    nothing = quantize(weights, hessian(np.eye(64, dtype=np.float32)) * (np.arange(64) < 1), bits=4, group_size=32)
    assert (nothing.dequantize()[32:] == 0).all()  # a group in which every input is dead


def lazy_form(weights: F32, square: F64, bits: int, group_size: int, block: int) -> F32:
    """GPTQ in blocks, as the authors' code has it: errors leave a block when it is done; ranges see only those."""
    upper = np.linalg.cholesky(np.linalg.inv(square)).T
    outside: F64 = weights.astype(np.float64)
    values = np.empty_like(weights)
    for start in range(0, len(weights), block):
        stop = min(start + block, len(weights))
        inside, errors = outside[start:stop].copy(), np.zeros((stop - start, weights.shape[1]))
        for i in range(stop - start):
            k = start + i
            if k % group_size == 0:
                group = outside[k : k + group_size].astype(np.float32)
                scale, zero = group_scale_and_zero(group, bits, "zero_point", np.dtype(np.float32))
            codes = group_codes(inside[i].astype(np.float32), scale, zero, bits, "zero_point")
            values[k] = group_values(codes, scale, zero, "zero_point")
            errors[i] = (inside[i] - values[k]) / upper[k, k]
            inside[i + 1 :] -= np.outer(upper[k, k + 1 : stop], errors[i])
        outside[stop:] -= upper[start:stop, stop:].T @ errors
    return values


@pytest.mark.parametrize(("group_size", "block"), [(16, 64), (32, 128), (48, 64), (64, 16), (128, 128)])
def test_blocks_are_the_authors(group_size: int, block: int) -> None:
    """With a block the ranges are those of rows without the errors of their block; codes and grids then agree."""
    weights, square = normal(11, 192, 12), damped(hessian(correlated(11, 400, 192)), 0.01)
    result = quantize(weights, square, bits=4, group_size=group_size, damping=0.0, block_size=block)
    lazy = lazy_form(weights, square, 4, group_size, block)
    np.testing.assert_allclose(result.dequantize(), lazy, rtol=1e-4, atol=1e-5)
    ours = quantize(weights, square, bits=4, group_size=group_size, damping=0.0).dequantize()
    differ = (result.dequantize() != ours).mean()
    if group_size < block:
        assert differ > 0.1
    else:  # the range of a group that begins with a block sees the same errors either way
        assert differ == 0


def test_symmetric_grids_have_their_zero_in_the_middle() -> None:
    """Every zero-point is 2^(b−1), and the scale covers the largest magnitude on both sides."""
    for bits in BITS:
        weights = normal(9, CODES_PER_UNIT[bits], 6)
        matrix = quantize(weights, np.eye(len(weights)), bits=bits, group_size=len(weights), symmetric=True).matrix
        assert (matrix.zeros == 2 ** (bits - 1)).all()
        most = np.abs(weights).max(axis=0).astype(np.float64)
        np.testing.assert_allclose(matrix.scales[0], 2 * most / (2**bits - 1), rtol=1e-6)


def test_mistakes_are_refused() -> None:
    """Each wrong argument is named by the error."""
    weights, square = normal(10, 32, 4), np.eye(32)
    mistakes: dict[str, Callable[[], object]] = {
        "hessian": lambda: quantize(weights, np.eye(31), bits=4, group_size=8),
        "not symmetric": lambda: quantize(weights, np.triu(np.ones((32, 32))), bits=4, group_size=8),
        "damp": lambda: quantize(weights, np.zeros((32, 32)), bits=4, group_size=8),
        "damping": lambda: quantize(weights, square, bits=4, group_size=8, damping=-1.0),
        r"damping is 1e\+308; allowed: a number with which the damped Hessian is finite": lambda: quantize(
            weights, 100 * square, bits=4, group_size=8, damping=1e308
        ),
        "convention": lambda: quantize(weights, square, bits=4, group_size=8, convention="minimum", symmetric=True),
        "bits": lambda: quantize(weights, square, bits=5, group_size=8),
        "block_size": lambda: quantize(weights, square, bits=4, group_size=8, block_size=0),
        "g_idx": lambda: order_of(np.array([0, 0, 0, 1], np.int32), 2),
        "order": lambda: ActOrderMatrix(affine.quantize(weights, bits=4, group_size=8), np.zeros(32, np.int64)),
    }
    for name, call in mistakes.items():
        with pytest.raises(ArgumentError, match=name):
            call()
