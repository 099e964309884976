"""Rulings on QIGen.

Each function is the check of one ruling: it computes the printed form and the ruled one on small inputs.

Source: QIGen, as printed in the copy at hand.
"""

import numpy as np

from lowbit.affine import dequantize, quantize
from lowbit.errata import ruling
from lowbit.errors import ArgumentError
from lowbit.linear import equation_2_left, equation_2_right, qgemv
from lowbit.packing import CODES_PER_UNIT, WORDS_PER_UNIT, pack, unpack

WEIGHTS = np.linspace(-1, 2, 32, dtype=np.float32).reshape(32, 1)


@ruling("Q1", printed="D(x_q) = s(x_q z)", ruled="s·q + min under minimum, s·(q − zero) under zero_point")
def dequantisation_is_a_difference() -> None:
    """A product of code and zero gives back nothing like the weights; either ruled convention is within half a step."""
    matrix = quantize(WEIGHTS, bits=4, group_size=32, convention="minimum")
    s, z, q = matrix.scales[0, 0], matrix.zeros[0, 0], unpack(matrix.words, 4)
    assert np.abs(s * (q * z) - WEIGHTS).max() > s
    assert np.abs(dequantize(matrix) - WEIGHTS).max() <= 0.51 * s
    zero_point = quantize(WEIGHTS, bits=4, group_size=32, convention="zero_point")
    assert np.abs(dequantize(zero_point) - WEIGHTS).max() <= 0.51 * zero_point.scales[0, 0]


@ruling("Q2", printed="s is a multiplier in Q and its reciprocal in D and equation 1", ruled="scale multiplies codes")
def the_scale_is_one_thing() -> None:
    """The printed s = (2^b − 1)/(max − min), used in D, is off by its own square; the ruled scale is its reciprocal."""
    printed = (2**4 - 1) / float(WEIGHTS.max() - WEIGHTS.min())
    matrix = quantize(WEIGHTS, bits=4, group_size=32)
    codes, low = unpack(matrix.words, 4).astype(np.float64), float(WEIGHTS.min())
    assert np.abs(codes * printed + low - WEIGHTS).max() > 10
    assert abs(float(matrix.scales[0, 0]) * printed - 1) < 1e-6
    assert np.abs(codes / printed + low - WEIGHTS).max() < 0.51 / printed


@ruling("Q3", printed="… − Σ z_i⟨y_i, 1⟩", ruled="… − Σ s_i z_i⟨y_i, 1⟩")
def the_correction_is_scaled() -> None:
    """On exact inputs the printed right side of equation 2 differs from its left side, the ruled one is equal."""
    y, codes = [np.array([1.0, -2.0]), np.array([3.0, 1.0])], [np.array([7.0, 0.0]), np.array([15.0, 2.0])]
    scales, zeros = [0.5, 2.0], [8.0, 4.0]
    left = equation_2_left(y, codes, scales, zeros)
    products = sum(s * float(yi @ qi) for s, yi, qi in zip(scales, y, codes, strict=True))
    printed = products - sum(z * float(yi.sum()) for z, yi in zip(zeros, y, strict=True))
    assert printed != left
    assert equation_2_right(y, codes, scales, zeros) == left


@ruling("Q4", printed="Algorithm 1: W is n/b × m", ruled="n·b/32 × m words of 32 bits")
def the_word_matrix_has_its_own_height() -> None:
    """n/b words hold the codes for no width but the one at which b² is 32; n·b/32 words hold them for every width."""
    for bits, unit in CODES_PER_UNIT.items():
        words = pack(np.zeros((2 * unit, 1), np.uint8), bits).shape[0]
        assert words == 2 * unit * bits // 32 == 2 * WORDS_PER_UNIT[bits]
        assert words != 2 * unit / bits


@ruling(
    "Q5", printed="Algorithm 1 reduces lanes, writes w[j], steps j by 1, leaves x̂ undefined", ruled="lanes are columns"
)
def lanes_are_output_columns() -> None:
    """Summing the lanes adds neighbouring columns together; kept apart, with x̂ the sum of x, they are y."""
    weights = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    x = np.arange(16, dtype=np.float32) - 7
    matrix = quantize(weights, bits=4, group_size=16, convention="zero_point")
    codes, s, z = unpack(matrix.words, 4).astype(np.float64), matrix.scales[0].astype(np.float64), matrix.zeros[0]
    accumulator = np.zeros(8)  # a register of 8 lanes
    for i in range(16):
        accumulator += x[i] * codes[i]
    reduced = s * (accumulator.sum() - z * x.sum())
    kept_apart = s * (accumulator - z * x.sum())
    exact = x.astype(np.float64) @ dequantize(matrix).astype(np.float64)
    assert np.abs(reduced - exact).max() > 1
    assert np.abs(kept_apart - exact).max() < 1e-4
    assert np.abs(qgemv(x, matrix) - exact).max() < 1e-4


@ruling(
    "Q10",
    printed="constant groups, ties, K not a multiple of g, 3-bit straddles: not stated",
    ruled="as the chapters say",
)
def silences() -> None:
    """A constant group, a tie, a short last group and a straddling code each have one specified outcome."""
    constant = np.full((32, 1), np.float32(0.3))
    assert (dequantize(quantize(constant, bits=2, group_size=32)) == constant).all()
    assert (
        np.abs(dequantize(quantize(constant, bits=2, group_size=32, convention="zero_point")) - constant).max() < 1e-6
    )
    zeros = np.zeros((32, 1), np.float32)
    assert quantize(zeros, bits=2, group_size=32, convention="zero_point").scales[0, 0] == 1
    ties = np.array([0, 0.5, 1.5, 2.5, 15, 0, 0, 0], np.float32).reshape(8, 1)  # scale 1: halves are ties
    assert unpack(quantize(ties, bits=4, group_size=8).words, 4)[:4, 0].tolist() == [0, 0, 2, 2]
    assert quantize(WEIGHTS, bits=4, group_size=20).groups == 2
    codes = np.zeros((32, 1), np.uint8)
    codes[10] = 0b110
    assert pack(codes, 3)[:, 0].tolist() == [0b10 << 30, 0b1, 0]
    try:
        pack(codes[:30].copy(), 3)
    except ArgumentError:
        return
    raise AssertionError("30 codes of 3 bits do not fill whole words and must be refused")
