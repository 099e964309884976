"""Algorithms 1 to 3 as programs: their results against the reference, their counts against the paper's formulas."""

from collections.abc import Callable

import numpy as np
import pytest

from lowbit.arrays import F32
from lowbit.contract.rounding import Arithmetic
from lowbit.errors import ArgumentError
from lowbit.kernels.blocking import equation_4, equation_4_extended, tiles
from lowbit.kernels.interpreter import Counts, run
from lowbit.kernels.microkernel import (
    algorithm_1,
    algorithm_2,
    algorithm_3,
    algorithm_3_streamed,
    codes_per_iteration,
    epilogue,
)
from lowbit.kernels.program import Instruction, Program, live_registers
from lowbit.linear.bounds import linear_bound
from lowbit.linear.linear import group_offsets, qgemv
from lowbit.quantization.affine import QuantizedMatrix
from lowbit.quantization.packing import BITS, CODES_PER_UNIT, pack, unpack

LANES = 4


def by_algorithm_1(matrix: QuantizedMatrix, x: F32) -> F32:
    """``y = x W`` by the interpreter."""
    y = np.full(matrix.columns, np.nan, np.float32)
    sums = [np.sum(x[matrix.group_rows(group)], dtype=np.float64) for group in range(matrix.groups)]
    memory = {
        "w": matrix.words.reshape(-1),
        "x": x,
        "X": np.array(sums, np.float32),
        "s": matrix.scales.reshape(-1),
        "o": group_offsets(matrix).astype(np.float32).reshape(-1),
        "y": y,
    }
    run(algorithm_1(matrix.bits, matrix.rows, matrix.columns, matrix.group_size, lanes=LANES), memory)
    return y


def some_matrix(bits: int, groups: int, seed: int, *, exact: bool) -> tuple[QuantizedMatrix, F32]:
    """Two units a group; with `exact`, numbers whose every partial sum is a float32 number."""
    random = np.random.default_rng(seed)
    rows, shape = 2 * groups * CODES_PER_UNIT[bits], (groups, 3 * LANES)
    words = random.integers(0, 2**32, (rows * bits // 32, shape[1]), np.uint32)
    scales = np.exp2(random.integers(-2, 2, shape)) if exact else random.random(shape) + 0.1
    x = random.integers(-3, 4, rows).astype(np.float32) if exact else random.standard_normal(rows).astype(np.float32)
    zeros = random.integers(0, 2**bits, shape).astype(np.uint8)
    return QuantizedMatrix(words, scales.astype(np.float32), zeros, bits, rows, rows // groups, "zero_point"), x


@pytest.mark.parametrize("groups", (1, 3))
@pytest.mark.parametrize("bits", BITS)
def test_algorithm_1_is_the_gemv(bits: int, groups: int) -> None:
    """By equation 1 and by equation 2: equal on exact inputs, within the bound of its own declaration on others."""
    matrix, x = some_matrix(bits, groups, bits, exact=True)
    np.testing.assert_array_equal(by_algorithm_1(matrix, x), qgemv(x, matrix))
    matrix, x = some_matrix(bits, groups, bits, exact=False)
    exact = qgemv(x, matrix)
    # In a group n additions; then a fused multiply-add for its sum and one for its offset, after which 2·G − 2 follow.
    arithmetic = Arithmetic("factored", "float32", lambda rows, n: n + 2 * (rows // n))
    bound = linear_bound(x, matrix, arithmetic, exact)
    error = np.abs(by_algorithm_1(matrix, x) - exact)
    assert (error <= bound.limit).all() and error.any()


@pytest.mark.parametrize("bits", BITS)
def test_algorithm_2_unpacks(bits: int) -> None:
    """Any words: the codes of the chapter `packing`, as floats, in order."""
    words = np.random.default_rng(bits).integers(0, 2**32, (CODES_PER_UNIT[bits] * bits // 32, LANES), np.uint32)
    codes = np.full(CODES_PER_UNIT[bits] * LANES, np.nan, np.float32)
    run(algorithm_2(bits, lanes=LANES), {"v": words.reshape(-1), "l": codes})
    np.testing.assert_array_equal(codes.reshape(-1, LANES), unpack(words, bits))


def test_algorithm_2_for_four_bits_is_the_papers() -> None:
    """Eight shifts by 4·i, of which the first changes nothing; eight masks, of which the last changes nothing."""
    steps = [step for step in algorithm_2(4, lanes=8).instructions() if step.word != "store"]
    assert [step.arguments[1] for step in steps if step.word == "srli"] == [4, 8, 12, 16, 20, 24, 28]
    assert [step.word for step in steps].count("and") == 7
    assert [step.word for step in steps].count("cvt_int_float") == 8
    assert steps[0] == Instruction("broadcast_int", "mask", (15,))


def by_algorithm_3(program: Program, bits: int, t_u: int, iterations: int, step: int) -> tuple[Counts, F32, F32]:
    """Run it on a block of small integers wider than the tile; the counts, the result, and what it should be."""
    random = np.random.default_rng(step)
    m_b, width = iterations * step, (t_u + 1) * LANES
    codes = random.integers(0, 2**bits, (m_b, width)).astype(np.uint8)
    x = random.integers(-3, 4, m_b).astype(np.float32)
    y = random.integers(-9, 10, width).astype(np.float32)
    expected = y + x @ codes.astype(np.float32)
    expected[t_u * LANES :] = y[t_u * LANES :]  # beside the tile
    counts = run(program, {"w": pack(codes, bits).reshape(-1), "x": x, "y": y}, {"iterations": iterations})
    return counts, y, expected


@pytest.mark.parametrize("m_u", (1, 2, 3, 8, 11))
@pytest.mark.parametrize("bits", BITS)
def test_algorithm_3_adds_a_block_to_y(bits: int, m_u: int) -> None:
    """Any micro-step, whole units or not; and its counts: a load for each code, an element of x for each, y once."""
    t_u, iterations, step = 2, 2, codes_per_iteration(bits, m_u)
    program = algorithm_3(bits, m_u, t_u, lanes=LANES, stride=(t_u + 1) * LANES)
    counts, y, expected = by_algorithm_3(program, bits, t_u, iterations, step)
    np.testing.assert_array_equal(y, expected)
    straddling = iterations * step // 32 * 2 if bits == 3 else 0
    assert counts.instructions["load_int"] == (iterations * step + straddling) * t_u
    assert counts.instructions["fmadd"] == iterations * step * t_u
    assert counts.read["x"] == iterations * step
    assert counts.read["y"] == counts.written["y"] == t_u * LANES


@pytest.mark.parametrize("t_u", (1, 3))
@pytest.mark.parametrize("bits", BITS)
def test_the_streamed_order_reads_every_word_once(bits: int, t_u: int) -> None:
    """The same result, each word loaded once, and registers that do not depend on the number of codes."""
    step = CODES_PER_UNIT[bits]
    program = algorithm_3_streamed(bits, t_u, lanes=LANES, stride=(t_u + 1) * LANES)
    counts, y, expected = by_algorithm_3(program, bits, t_u, 3, step)
    np.testing.assert_array_equal(y, expected)
    assert counts.read["w"] == 3 * step * bits // 32 * t_u * LANES
    if bits != 3:  # mask, one activation, one code; for each register a word and a sum
        assert counts.registers == 2 * t_u + 3


@pytest.mark.parametrize("bits", BITS)
def test_equation_4_forgets_the_mask(bits: int) -> None:
    """The printed order takes exactly one register more; with 3 bits two where a micro-step begins in a straddle."""
    for m_u, t_u in tiles(24):
        more = equation_4_extended(bits, m_u, t_u) - equation_4(m_u, t_u)
        starts = range(0, codes_per_iteration(bits, m_u), m_u)
        straddles = any(start * bits % 32 + bits > 32 for start in starts)
        assert more == (2 if straddles else 1), (m_u, t_u)


def test_a_program_of_too_many_registers_does_not_run() -> None:
    """One register fewer than it needs is an error, and y is as it was; as many as it needs are enough."""
    program = algorithm_3(4, 8, 2, lanes=1, stride=2)
    need = live_registers(program)
    memory = {"w": np.ones(2, np.uint32), "x": np.ones(8, np.float32), "y": np.zeros(2, np.float32)}
    with pytest.raises(ArgumentError, match=f"registers live at once is {need}; allowed: at most {need - 1}"):
        run(program, memory, {"iterations": 1}, registers=need - 1)
    assert not memory["y"].any()
    run(program, memory, {"iterations": 1}, registers=need)
    assert memory["y"].all()


def test_closing_is_the_end_of_equation_2() -> None:
    """``y += acc * s + X * o``, each in place."""
    acc, s, o, y = (np.arange(start, start + 8, dtype=np.float32) for start in (1, 2, 3, 4))
    expected = y + acc * s + 5 * o
    run(epilogue(2, lanes=4), {"acc": acc, "s": s, "o": o, "X": np.full(1, 5, np.float32), "y": y})
    np.testing.assert_array_equal(y, expected)


def test_sizes_that_are_not_whole_are_refused() -> None:
    """Bits that do not exist, groups inside a unit, rows inside a group, columns inside a register, sizes below 1."""
    mistakes: list[tuple[Callable[[], Program], str]] = [
        (lambda: algorithm_1(5, 8, 8, 8, lanes=8), "bits is 5"),
        (lambda: algorithm_1(4, 16, 8, 4, lanes=8), "group_size is 4; allowed: a multiple of 8"),
        (lambda: algorithm_1(4, 24, 8, 16, lanes=8), "rows is 24; allowed: a multiple of 16"),
        (lambda: algorithm_1(4, 16, 12, 16, lanes=8), "columns is 12; allowed: a multiple of 8"),
        (lambda: algorithm_2(4, lanes=0), "lanes is 0"),
        (lambda: algorithm_3(4, 0, 1, lanes=8, stride=8), "m_u is 0"),
        (lambda: algorithm_3_streamed(4, 1, lanes=8, stride=0), "stride is 0"),
        (lambda: epilogue(0, lanes=8), "t_u is 0"),
    ]
    for call, message in mistakes:
        with pytest.raises(ArgumentError, match=message):
            call()
