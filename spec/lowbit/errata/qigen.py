"""Rulings on QIGen.

Each function is the check of one ruling: it computes the printed form and the ruled one on small inputs.

Source: QIGen, as printed in the copy at hand.
"""

import itertools
from collections.abc import Sequence

import numpy as np

from lowbit.arrays import F32, F64
from lowbit.attention.attention import KeyValueCache
from lowbit.errata import check_refused, ruling
from lowbit.kernels import layouts
from lowbit.kernels.blocking import (
    equation_3,
    equation_3_extended,
    equation_4,
    equation_4_extended,
    solve,
    solve_extended,
    tiles,
    tiles_extended,
)
from lowbit.kernels.interpreter import run
from lowbit.kernels.layouts import ColumnPanels, NestedPanels, ZCurve
from lowbit.kernels.microkernel import algorithm_3
from lowbit.linear.linear import equation_2_left, equation_2_right, qgemv
from lowbit.model.config import LlamaConfig
from lowbit.model.perplexity import perplexity
from lowbit.model.weights import Progress
from lowbit.quantization.affine import dequantize, quantize
from lowbit.quantization.memory import GROUP_SIZES, LLAMA, model_bytes
from lowbit.quantization.packing import CODES_PER_UNIT, WORDS_PER_UNIT, pack, unpack

WEIGHTS = np.linspace(-1, 2, 32, dtype=np.float32).reshape(32, 1)

TABLE_2 = {
    128: (5.81, 6.43, 23.58, 5.19, 5.51, 15.88, 4.21, 4.63, 11.13),
    64: (5.79, 6.23, 14.15, 5.18, 5.49, 11.13, 4.19, 4.55, 9.10),
    32: (5.77, 6.11, 10.24, 5.15, 5.40, 8.37, 4.18, 4.47, 7.22),
    16: (5.76, 5.99, 8.30, 5.13, 5.31, 7.11, 4.16, 4.39, 6.19),
}
"""Table 2, perplexity by group size; LLaMA-7B with 4, 3 and 2 bits, then 13B, then 30B."""


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


@ruling("Q6", printed="the block of a Mini-GEMV is m_b × b·t_b/32 words", ruled="b·m_b/32 × t_b words")
def a_block_is_packed_down_its_columns() -> None:
    """Packing m_b × t_b codes gives the ruled shape and not the printed one; the bits that equation 3 counts agree."""
    m_b, t_b = 16, 24
    for bits in (2, 4, 8):
        words = pack(np.zeros((m_b, t_b), np.uint8), bits)
        assert words.shape == (bits * m_b // 32, t_b) != (m_b, bits * t_b // 32)
        assert 32 * words.size == bits * m_b * t_b == equation_3(bits, m_b, t_b) - 32 * m_b - 32 * t_b


@ruling(
    "Q7",
    printed="Algorithm 3 loops to m, loads rows i/8 to (i + m_u)/8, and its last register of y lies at j + t_u",
    ruled="to m_b; rows i/8 to (i + m_u − 1)/8; t_u counts registers, so the last lies at j + (t_u − 1)·L",
)
def algorithm_3_stays_inside_its_block() -> None:
    """The printed loop and the printed rows leave the block; the printed registers overlap and leave columns out."""
    m, m_b, m_u, t_u, lanes = 32, 16, 8, 2, 4
    program = algorithm_3(4, m_u, t_u, lanes=lanes, stride=t_u * lanes)
    codes = np.ones((m_b, t_u * lanes), np.uint8)
    memory = {"w": pack(codes, 4).reshape(-1), "x": np.ones(m_b, np.float32), "y": np.zeros(t_u * lanes, np.float32)}
    run(program, memory, {"iterations": m_b // m_u})
    assert (memory["y"] == m_b).all()
    check_refused(lambda: run(program, memory, {"iterations": m // m_u}))
    for i in range(0, m_b, m_u):
        needed = sorted({code // 8 for code in range(i, i + m_u)})
        assert needed == list(range(i // 8, (i + m_u - 1) // 8 + 1)) != list(range(i // 8, (i + m_u) // 8 + 1))
    assert (m_b - m_u + m_u) // 8 == len(pack(codes, 4))  # the printed last row is one past the block's last
    assert {start + lane for start in (0, t_u) for lane in range(lanes)} != set(range(t_u * lanes))
    assert {start * lanes + lane for start in range(t_u) for lane in range(lanes)} == set(range(t_u * lanes))


@ruling(
    "Q8",
    printed="equation 3 has no scales and zeros; equation 4 has no mask, and no second word of a code that straddles",
    ruled="64·t_b·⌈m_b/g⌉ bits more, groups and blocks whole in each other; registers counted in the program",
)
def scales_and_the_mask_take_room_too() -> None:
    """The fullest printed block overflows the cache with its scales, and a printed tile its registers with the mask."""
    cache, group_size, registers = 32 * 1024 * 8, 16, 32
    printed = solve(4, cache, m_u=8, t_u=32, rows=4096, columns=4096)
    assert (
        equation_3(4, printed.m_b, printed.t_b) <= cache < equation_3_extended(4, printed.m_b, printed.t_b, group_size)
    )
    block = solve_extended(4, cache, group_size, m_u=8, t_u=4, lanes=8, rows=4096, columns=4096)
    assert block.used == equation_3_extended(4, block.m_b, block.t_b, group_size) <= cache
    assert block.m_b % group_size == 0 or group_size % block.m_b == 0
    assert equation_4(2, 10) == registers < equation_4_extended(4, 2, 10)
    assert (2, 10) in tiles(registers)
    assert (2, 10) not in tiles_extended(4, registers)
    memory = {"w": np.zeros(10, np.uint32), "x": np.zeros(8, np.float32), "y": np.zeros(10, np.float32)}
    program = algorithm_3(4, 2, 10, lanes=1, stride=10)
    check_refused(lambda: run(program, memory, {"iterations": 1}, registers=registers))


@ruling(
    "Q9",
    printed="groups of 32 to 128 in one copy, of 16 to 128 in the other",
    ruled="groups of 16, 32, 64 and 128, and full columns",
)
def groups_begin_at_sixteen() -> None:
    """The two copies differ by the size that costs most memory; the paper's own table 2 has it, and so has lowbit."""
    one, other = ({g for g in TABLE_2 if least <= g <= 128} for least in (32, 16))
    assert one != other == set(TABLE_2) == set(GROUP_SIZES)
    sizes = [model_bytes(LLAMA["7b"], 4, group_size) for group_size in (*GROUP_SIZES, None)]
    assert sizes == sorted(sizes, reverse=True)


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
    check_refused(lambda: pack(codes[:30].copy(), 3))


@ruling(
    "Q11",
    printed="blocks lie along the Z-curve; the authors' published code stores column panels, and at 3 bits panels of "
    "blocks of 3 words × 8 columns",
    ruled="all three are specified, and all are permutations of the same words",
)
def all_orders_are_permutations() -> None:
    """The streams differ, so a reader must know which one it has; each holds every word once.

    At 3 bits only the order of the words is another: the bits of a word are those of the stream of `packing`.
    """
    words = np.arange(6 * 24, dtype=np.uint32).reshape(6, 24)
    several = (
        ZCurve(6, 24, block_rows=1, block_columns=4),
        ColumnPanels(6, 24, panel=16),
        NestedPanels(6, 24, panel=16),
    )
    streams = [layouts.apply(words, layout) for layout in several]
    assert all((one != other).any() for one, other in itertools.combinations(streams, 2))
    for layout, stream in zip(several, streams, strict=True):
        assert sorted(stream.tolist()) == list(range(words.size))
        assert (layouts.invert(stream, layout) == words).all()
    # A block of 24 words in a row is all 32 codes of 8 columns, which no other of the layouts keeps together.
    codes = np.random.default_rng(0).integers(0, 8, (64, 24), dtype=np.uint8)
    first = layouts.apply(pack(codes, 3), several[2])[:24].reshape(3, 8)
    assert (unpack(first, 3) == codes[:32, :8]).all()


@ruling(
    "Q12",
    printed="smaller groups are better with the only exception of LLaMA-7B in groups of 32",
    ruled="table 2 has no exception; it is reported as it is",
)
def table_2_has_no_exception() -> None:
    """In all nine columns of the table the perplexity falls with every smaller group, that one included.

    Source: QIGen §4, table 2; errata Q12.
    """
    for column in zip(*(TABLE_2[group_size] for group_size in (128, 64, 32, 16)), strict=True):
        assert all(smaller < larger for larger, smaller in itertools.pairwise(column))
    assert TABLE_2[64][0] > TABLE_2[32][0] > TABLE_2[16][0]  # LLaMA-7B with 4 bits


class Recent:
    """A model to which the tokens that it has seen are likelier than others, so that it predicts late ones better."""

    config = LlamaConfig(1, 8, 8, 1, 1, 8, 16, 64, 1e4, 1e-5)

    def new_state(self, capacity: int = 64) -> list[KeyValueCache]:
        return []

    def hidden(self, tokens: Sequence[int], state: list[KeyValueCache], progress: Progress | None = None) -> F64:
        seen = np.eye(self.config.vocabulary)[list(tokens)]
        return np.cumsum(seen, axis=0)

    def logits(self, hidden: F64) -> F32:
        return (3 * np.minimum(hidden, 1)).astype(np.float32)


@ruling(
    "Q13",
    printed="perplexity on wikitext2; window, stride, mark of the beginning and last window are not stated",
    ruled="protocols are named values; GPTQ's, which QIGen's quantiser has, is one, and ours is another",
)
def perplexity_depends_on_the_protocol() -> None:
    """One model and one text: the protocols differ by more than a tenth, more than 4 bits and 3 do in table 2."""
    tokens = np.random.default_rng(0).integers(2, 8, 60).tolist()
    found = [perplexity(Recent(), tokens, 20, bos=1, protocol=name).value for name in ("lowbit", "gptq", "llama.cpp")]
    assert all(max(a, b) / min(a, b) > 1.1 for a, b in itertools.combinations(found, 2))
    assert TABLE_2[64][1] / TABLE_2[64][0] < 1.1


@ruling(
    "Q14",
    printed="the authors' published code has m_u = 16 and t_u = 32 columns, on AVX2 with its η = 16",
    ruled="equation 4 allows no such tile; it is reported; our tiles keep to the registers that the program needs",
)
def the_shipped_tile_breaks_equation_4() -> None:
    """32 columns are 4 registers of 8, and equation 4 then counts 84 of the 16; as 32 registers it counts 560."""
    eta, lanes = 16, 8
    assert equation_4(16, 32 // lanes) == 84 > eta
    assert equation_4(16, 32) == 560
    assert not {(16, 4), (16, 32)} & set(tiles(eta))
    kept = tiles_extended(4, eta)
    assert kept and (16, 4) not in kept
    assert all(equation_4_extended(4, *tile) <= eta for tile in kept)
