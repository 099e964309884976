"""Equations 3 to 5 against brute force over all pairs of integers."""

from collections.abc import Callable
from itertools import product

import hypothesis.strategies as st
import pytest
from hypothesis import given

from lowbit.errors import ArgumentError
from lowbit.kernels.blocking import (
    CacheBlock,
    equation_3,
    equation_3_extended,
    equation_4,
    equation_4_extended,
    solve,
    solve_extended,
    tiles,
    tiles_extended,
)
from lowbit.kernels.microkernel import codes_per_iteration
from lowbit.quantization.packing import BITS

Bits = st.sampled_from(BITS)


def best_of(pairs: list[tuple[int, int]], used: Callable[[int, int], int], cache_bits: int) -> CacheBlock | None:
    """The fullest, then the largest, then the tallest of all pairs that fit; none if none does."""
    fit = [(used(*pair), pair[0] * pair[1], pair[0], pair[1]) for pair in pairs if used(*pair) <= cache_bits]
    return CacheBlock(max(fit)[2], max(fit)[3], max(fit)[0]) if fit else None


@given(Bits, st.integers(1, 3000), st.integers(1, 9), st.integers(1, 9), st.integers(1, 60), st.integers(1, 60))
def test_solve_finds_the_best_of_all_blocks(b: int, gamma: int, m_u: int, t_u: int, rows: int, columns: int) -> None:
    """Every block of whole tiles, one by one: with the matrix as a limit, and without."""
    for K, N in ((rows, columns), (None, None)):
        heights = range(m_u, gamma // 32 + 1 if K is None else K + 1, m_u)
        widths = range(t_u, gamma // 32 + 1 if N is None else N + t_u, t_u)
        expected = best_of(list(product(heights, widths)), lambda m, t: equation_3(b, m, t), gamma)
        if expected is None:
            with pytest.raises(ArgumentError, match=f"cache_bits is {gamma}|rows is {K}"):
                solve(b, gamma, m_u, t_u, rows=K, columns=N)
        else:
            assert solve(b, gamma, m_u, t_u, rows=K, columns=N) == expected


@given(Bits, st.integers(1, 40000), st.integers(1, 5), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_the_extended_model_is_solved_too(b: int, gamma: int, m_u: int, t_u: int, iterations: int, groups: int) -> None:
    """Blocks within a group or of whole groups, tiles of whole registers, iterations of whole words; one by one."""
    lanes, step = 4, codes_per_iteration(b, m_u)
    g = iterations * step
    rows, columns = groups * g, 40
    heights = [m for m in range(1, rows + 1) if m % step == 0 and (m % g == 0 or g % m == 0)]
    widths = [t for t in range(1, columns + t_u * lanes) if t % (t_u * lanes) == 0]
    pairs = list(product(heights, widths))
    expected = best_of(pairs, lambda m, t: equation_3_extended(b, m, t, g), gamma)
    if expected is None:
        with pytest.raises(ArgumentError, match=f"cache_bits is {gamma}"):
            solve_extended(b, gamma, g, m_u, t_u, lanes=lanes, rows=rows, columns=columns)
    else:
        assert solve_extended(b, gamma, g, m_u, t_u, lanes=lanes, rows=rows, columns=columns) == expected


def test_the_objective_is_blind_to_shape() -> None:
    """What the chapter says of equation 5: two blocks of very unlike shapes both fill 32 KiB to the last bit."""
    gamma = 32 * 1024 * 8
    assert equation_3(4, 2, 6552) == equation_3(4, 312, 197) == gamma
    assert (6552 // 197, 312 // 2) == (33, 156)


@given(st.integers(3, 40))
def test_equation_4_is_a_question_of_products(registers: int) -> None:
    """(m_u + 1)(t_u + 1) ≤ η + 1 and nothing else."""
    every = product(range(1, registers + 1), repeat=2)
    assert tiles(registers) == [pair for pair in every if (pair[0] + 1) * (pair[1] + 1) <= registers + 1]


@pytest.mark.parametrize("bits", BITS)
def test_the_extended_tiles_are_those_whose_programs_fit(bits: int) -> None:
    """None but printed tiles, and of them all that leave a register for the mask, and for straddling codes."""
    for registers in (8, 16, 20):
        counted = {tile: equation_4_extended(bits, *tile) for tile in tiles(registers)}
        assert tiles_extended(bits, registers) == [tile for tile, count in counted.items() if count <= registers]
        assert all(counted[tile] > equation_4(*tile) for tile in counted)
    assert tiles_extended(4, 16) == tiles(16)
    assert set(tiles(20)) - set(tiles_extended(4, 20)) == {(2, 6), (6, 2)}  # 3 · 7 = 21


def test_scales_and_zeros_fill_the_cache_that_equation_3_takes_for_free() -> None:
    """One pair for each group and column, 64 bits; a block that is cut in a group pays for it whole."""
    for m_b, groups in ((16, 1), (17, 2), (32, 2), (8, 1), (33, 3)):
        assert equation_3_extended(4, m_b, 10, 16) - equation_3(4, m_b, 10) == groups * 10 * 64


def test_wrong_sizes_are_refused() -> None:
    """Bits that do not exist, sizes below 1 or no integers, groups that end inside a step of the loop."""
    extended = {"lanes": 8, "rows": 64, "columns": 64}
    for call, message in (
        (lambda: solve(5, 1000, 1, 1), "bits is 5"),
        (lambda: solve(4, 1000, 0, 1), "m_u is 0"),
        (lambda: solve(4, 1000, 1, 1, rows=0), "rows is 0"),
        (lambda: solve(4, 67, 1, 1), "cache_bits is 67; allowed: enough for the x"),
        (lambda: solve(4, 10**6, 8, 1, rows=7), "rows is 7; allowed: at least 8"),
        (lambda: solve_extended(3, 10**6, 16, 32, 1, **extended), "group_size is 16; allowed: a multiple of 32"),
        (lambda: solve_extended(4, 10**6, 32, 3, 1, **extended), "group_size is 32; allowed: a multiple of 24"),
        (lambda: tiles(2), "registers is 2"),
        (lambda: tiles_extended(7, 16), "bits is 7"),
    ):
        with pytest.raises(ArgumentError, match=message):
            call()
