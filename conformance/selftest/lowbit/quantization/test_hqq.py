"""HQQ: the solver against a plain transcription, the shrinking against its definition, axes, storage and sizes."""

from dataclasses import replace
from math import fsum

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from lowbit.arrays import F32
from lowbit.errors import ArgumentError
from lowbit.linear.linear import qgemv
from lowbit.quantization import affine, hqq, hqq_solver
from lowbit.quantization.affine import dequantize
from lowbit.quantization.hqq import AXES, Axis, HqqMatrix, as_minimum, from_blocks, minimum_error, quantize, to_blocks
from lowbit.quantization.hqq_numbers import EightBit, decode, encode, range_grid
from lowbit.quantization.hqq_solver import Solver, codes, residual, shrink, solve, step
from lowbit.quantization.hqq_table1 import PRINTED, Scheme, mixtral, table_1
from lowbit.quantization.packing import BITS, unpack

FLOAT32 = np.dtype(np.float32)


def weights_of(seed: int, rows: int, columns: int, size: float = 0.02) -> F32:
    rng = np.random.Generator(np.random.PCG64(seed))
    return (rng.standard_t(4, size=(rows, columns)) * size).astype(np.float32)


def plain_solver(blocks: F32, scales: F32, zeros: F32, bits: int) -> tuple[F32, list[float]]:
    """Errata H, loop by loop and weight by weight."""
    p, beta, kappa = 0.7, 10.0, 1.01
    g, groups = blocks.shape
    zero, best = zeros.astype(np.float64), zeros
    errors: list[float] = []
    for _ in range(21):  # the 20th step's zeros are measured too
        z = zero.astype(np.float32)
        following, total = np.zeros(groups), 0.0
        for j in range(groups):
            for i in range(g):
                w, s = float(blocks[i, j]), float(scales[j])
                q = min(max(float(np.rint(np.float32(blocks[i, j] / scales[j]) + z[j])), 0.0), 2.0**bits - 1)
                d = w - s * (q - float(z[j]))
                e = np.sign(d) * max(0.0, abs(d) - abs(d) ** (p - 1) / beta) if d else 0.0
                following[j] += (q - (w - e) / s) / g
                total += abs(d) / (g * groups)
        if errors and not total < min(errors) * (1 - 1e-12):
            break
        errors.append(total)
        zero, best, beta = following, z, beta * kappa
    return best, errors


@pytest.mark.parametrize("size", [0.02, 1.0])
@pytest.mark.parametrize("bits", [2, 4])
def test_solver_is_the_ruling_loop_by_loop(bits: int, size: float) -> None:
    """The zeros and every error on the way agree with a transcription without arrays, at both sizes of weights."""
    blocks = to_blocks(weights_of(bits, 32, 4, size), 16, axis=1)
    scales, zeros = range_grid(blocks, bits, FLOAT32)
    found = solve(blocks, scales, zeros, bits)
    best, errors = plain_solver(blocks, scales, zeros, bits)
    np.testing.assert_allclose(found.zeros, best, rtol=1e-5)
    np.testing.assert_allclose(found.errors[: len(errors)], errors, rtol=1e-9)
    assert len(found.errors) <= 21


@pytest.mark.parametrize("groups", [1, 2, 3, 5, 37])
@pytest.mark.parametrize("size", [0.02, 1.0])
def test_groups_are_solved_some_after_the_others(size: float, groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few at a time, zeros and errors are to the bit those of `codes` and `step` on all groups at once."""
    weights = weights_of(groups, 100, groups, size)
    weights *= np.float32(2.0) ** -np.arange(100, dtype=np.float32)[:, None] / 3  # so that the order of a sum shows
    scales, zeros = range_grid(weights, 2, FLOAT32)
    z, beta, errors, best = zeros, 10.0, list[float](), zeros
    for _ in range(21):
        q = codes(weights, scales, z, 2)
        errors.append(fsum(np.add.reduce(np.abs(residual(weights, q, scales, z)), axis=0).tolist()) / weights.size)
        if len(errors) > 1 and errors[-1] >= min(errors[:-1]):
            break
        best, z, beta = z, step(weights, q, scales, z, 0.7, beta).astype(np.float32), beta * 1.01
    for at_a_time in (1, 250, 700, 10**6):
        monkeypatch.setattr(hqq_solver, "WEIGHTS_AT_A_TIME", at_a_time)
        found = solve(weights, scales, zeros, 2)
        assert found.errors == tuple(errors)
        np.testing.assert_array_equal(found.zeros, best)


@given(st.floats(0.3, 1.0), st.floats(1.0, 100.0), st.floats(-4, 4))
def test_shrinking_leaves_nothing_up_to_the_threshold(p: float, beta: float, d: float) -> None:
    """Beyond the threshold what is left is smaller than d and of its sign; up to the threshold nothing is left."""
    left = float(shrink(np.array([d]), p, beta)[0])
    threshold = Solver(p=p, beta=beta).threshold
    assert abs(left) <= abs(d)
    assert left == 0 or np.sign(left) == np.sign(d)
    if abs(d) < threshold * (1 - 1e-9):
        assert left == 0
    if abs(d) > threshold * (1 + 1e-9):
        assert left != 0


def test_slope_of_the_shrinking_is_at_most_two_less_p() -> None:
    """The bound of a step rests on this slope; it is reached at the threshold."""
    for p, beta in ((0.7, 10.0), (0.4, 3.0), (1.0, 5.0)):
        threshold = Solver(p=p, beta=beta).threshold
        d = np.linspace(0, 5 * threshold, 200001)
        slopes = np.diff(shrink(d, p, beta)) / np.diff(d)
        assert slopes.max() <= 2 - p + 1e-9
        assert slopes.max() >= 0.99 * (2 - p)


@pytest.mark.parametrize("bits", BITS)
def test_small_weights_never_meet_the_norm(bits: int) -> None:
    """With errors below the threshold p does not matter, and a step gives the zero of least squares."""
    blocks = to_blocks(weights_of(7, 64, 8), 32, axis=1)
    scales, zeros = range_grid(blocks, bits, FLOAT32)
    norms = [solve(blocks, scales, zeros, bits, Solver(p=p)) for p in (0.5, 0.7, 1.0)]
    for other in norms[1:]:
        np.testing.assert_array_equal(norms[0].zeros, other.zeros)
    q = codes(blocks, scales, zeros, bits)
    best = np.mean(q - blocks.astype(np.float64) / scales, axis=0)
    np.testing.assert_allclose(step(blocks, q, scales, zeros, 0.7, 10.0), best, rtol=1e-12)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("bits", BITS)
def test_the_mean_error_never_rises(bits: int, axis: Axis) -> None:
    """With float32 zeros the solver's result is at least as good as the range's, and what it says it is."""
    weights = weights_of(3, 64, 12)
    begun, solved = (
        quantize(weights, bits=bits, group_size=16, axis=axis, solver=Solver(steps=steps)) for steps in (0, 20)
    )
    before, after = (np.abs(weights.astype(np.float64) - hqq.dequantize(each)).mean() for each in (begun, solved))
    assert after <= before * (1 + 1e-6)


@given(st.integers(0, 999), st.sampled_from(AXES))
@settings(max_examples=30)
def test_blocks_are_the_groups_of_the_ruling(seed: int, axis: Axis) -> None:
    """Number f of N × K is in group f // g along axis 1 and f mod G along axis 0, and goes back to its place."""
    rng = np.random.Generator(np.random.PCG64(seed))
    rows, columns = (int(size) for size in rng.integers(1, 9, 2))
    whole = rows if axis == 1 else rows * columns
    g = int(rng.choice([size for size in range(1, whole + 1) if whole % size == 0]))
    f = np.arange(rows * columns).reshape(columns, rows).T.copy()
    blocks = to_blocks(f, g, axis)
    for group, members in enumerate(blocks.T):
        for number in members:
            assert group == (number // g if axis == 1 else number % (rows * columns // g))
    np.testing.assert_array_equal(from_blocks(blocks, rows, axis), f)


def test_axis_1_runs_through_the_linear_chapter() -> None:
    """As a minimum it is an ordinary matrix; the product moves by no more than the rounding of the minima."""
    x = weights_of(5, 64, 1, 1.0)[:, 0].copy()
    for bits in BITS:
        for meta_group in (None, 4):
            matrix = quantize(weights_of(4, 64, 12), bits=bits, group_size=16, meta_group=meta_group)
            ordinary = as_minimum(matrix)
            exact, given = hqq.qgemv(x, matrix), qgemv(x, ordinary)
            assert (np.abs(given - exact) <= minimum_error(x, matrix) * (1 + 1e-9) + 1e-15).all()
            np.testing.assert_array_equal(unpack(ordinary.words, bits), unpack(matrix.words, bits))
            np.testing.assert_allclose(dequantize(ordinary), hqq.dequantize(matrix), rtol=1e-4, atol=1e-7)


def test_axis_0_does_not_factor() -> None:
    """One output has a scale for every input, so equation 2 has nothing to take out; as a minimum it is refused.

    With g a divisor of N the scale belongs to (k, n mod N/g), and folding it into the activation gives the product.
    """
    weights, x = weights_of(6, 32, 12), weights_of(8, 32, 1, 1.0)[:, 0].copy()
    matrix = quantize(weights, bits=4, group_size=4, axis=0)
    with pytest.raises(ArgumentError, match="axis is 0"):
        as_minimum(matrix)
    scales, zeros = (decode(part).reshape(3, 32).astype(np.float64) for part in (matrix.scales, matrix.zeros))
    assert len(np.unique(scales[0])) == 32
    q = unpack(matrix.words, 4).astype(np.float64)
    folded = [(x * scales[n % 3]) @ q[:, n] - (x * scales[n % 3]) @ zeros[n % 3] for n in range(12)]
    np.testing.assert_allclose(hqq.qgemv(x, matrix), folded, rtol=1e-10, atol=1e-12)


def test_without_the_solver_and_with_a_minimum_it_is_affine() -> None:
    """Scales by range are those of `affine.quantize`; codes differ at most where −s·z is not quite the minimum."""
    weights = weights_of(9, 64, 10)
    plain = affine.quantize(weights, bits=3, group_size=32)
    ours = as_minimum(quantize(weights, bits=3, group_size=32, solver=Solver(steps=0)))
    np.testing.assert_array_equal(ours.scales, plain.scales)
    np.testing.assert_allclose(ours.zeros, plain.zeros, rtol=1e-6)
    assert (unpack(ours.words, 3) != unpack(plain.words, 3)).mean() < 0.01


def test_zero_is_rounded_at_first_only_at_4_bits() -> None:
    """Before any step the zeros are integers at 4 bits and not otherwise; the solver makes them real again."""
    weights = weights_of(10, 64, 10)
    for bits in BITS:
        first = decode(quantize(weights, bits=bits, group_size=16, solver=Solver(steps=0)).zeros)
        assert (first == np.rint(first)).all() == (bits == 4)
        moved = decode(quantize(weights, bits=bits, group_size=16).zeros)
        assert (moved != np.rint(moved)).any()


def test_constant_groups_come_back() -> None:
    """A constant group is exact in float32; one whose zero float16 could not hold counts as constant."""
    weights = np.full((32, 4), np.float32(0.3))
    np.testing.assert_array_equal(hqq.dequantize(quantize(weights, bits=2, group_size=16)), weights)
    weights[::2] += np.float32(1e-6)
    near = hqq.dequantize(quantize(weights, bits=2, group_size=16, scale_dtype="float16"))
    np.testing.assert_allclose(near, weights, rtol=1e-3)


def test_eight_bits_are_within_half_a_step() -> None:
    """Numbers in 8 bits come back within half a step of their group's scale; scales stay above 0."""
    numbers = np.abs(weights_of(11, 256, 1, 1.0)[:, 0])
    for dtype in (FLOAT32, np.dtype(np.float16)):
        stored = encode(numbers, 64, dtype)
        steps = np.resize(stored.scales.astype(np.float64), 256)
        offsets = np.resize(np.abs(stored.zeros.astype(np.float64)), 256)
        rounding = 2.0 ** (-10 if dtype != FLOAT32 else -22) * steps * (256 + offsets)
        assert (np.abs(decode(stored) - numbers) <= steps / 2 + rounding).all()
    tiny = np.array([0.0, 1e-9, 1.0, 0.5] * 16, np.float32)  # a weight of a group of zeros has scale 1, others far less
    weights = np.repeat(tiny[:, None], 16, axis=1) * np.linspace(0, 1, 16, dtype=np.float32)
    matrix = quantize(np.ascontiguousarray(weights.T), bits=2, group_size=16, meta_group=8, scale_dtype="float16")
    assert (decode(matrix.scales) > 0).all()


def test_bytes_are_the_bit_budget() -> None:
    """2-bit codes in groups of 16, scale groups of 128: the bytes of a real matrix are 3.016 bits a weight."""
    matrix = quantize(weights_of(12, 256, 64), bits=2, group_size=16, meta_group=128, scale_dtype="float16")
    budget = Scheme(2, 16, 128).bits_per_weight()
    assert budget == 2 + 8 / 16 + 8 / 16 + 32 / (16 * 128) == 3.015625
    assert 8 * matrix.nbytes == budget * 256 * 64 + 32  # and one scale and zero for all zeros of the tensor
    assert as_minimum(matrix).rows == 256


def test_table_1_row_by_row() -> None:
    """Residuals are what the chapter says of them, and the model is the paper's by its own counts."""
    rows = table_1()
    assert [(row.attention, row.experts) for row in rows] == list(PRINTED)
    assert round(mixtral().total / 1e9, 1) == 46.7
    for row in rows:
        if row.experts == "FP16":
            assert abs(row.stored_residual) < 0.01
            assert abs(row.residual) < (0.09 if row.attention == "3-bit" else 0.01)
        else:
            assert 0.50 < row.stored_residual < 0.56
            assert (3.1 < row.residual < 3.24) if row.experts == "3-bit" else (0.50 < row.residual < 0.64)


def test_mistakes_are_refused() -> None:
    """Each wrong part is named by the error."""
    weights = weights_of(13, 32, 6)
    matrix = quantize(weights, bits=4, group_size=8, axis=0)
    for name, arguments in {
        "group_size": {"group_size": 7},
        "axis": {"axis": 2},
        "bits": {"bits": 6},
        "meta_group": {"meta_group": 5},
    }.items():
        with pytest.raises(ArgumentError, match=name):
            quantize(weights, **({"bits": 4, "group_size": 8} | arguments))  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(ArgumentError, match="scales"):
        replace(matrix, scales=-decode(matrix.scales))
    with pytest.raises(ArgumentError, match="zeros"):
        replace(matrix, zeros=decode(matrix.zeros)[:-1])
    with pytest.raises(ArgumentError, match="words"):
        replace(matrix, words=matrix.words[1:])
    with pytest.raises(ArgumentError, match="number of scales"):
        EightBit(np.zeros(5, np.uint8), np.ones(2, np.float32), np.ones(2, np.float32))
    with pytest.raises(ArgumentError, match="matrix"):
        hqq.dequantize(weights)  # type: ignore[arg-type]  # wrong on purpose
    assert isinstance(matrix, HqqMatrix)
    for wrong in ({"p": 0.0}, {"beta": -1.0}, {"kappa": 0.0}, {"steps": -1}):
        with pytest.raises(ArgumentError):
            Solver(**wrong)
