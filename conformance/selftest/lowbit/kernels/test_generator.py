"""Algorithm 4: what it chooses, and that what it generates multiplies."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from lowbit.errors import ArgumentError
from lowbit.kernels.blocking import tiles
from lowbit.kernels.generator import Machine, Tile, candidates, costs, generate, instructions, multiply
from lowbit.kernels.program import live_registers
from lowbit.linear.linear import qgemv
from lowbit.quantization.affine import QuantizedMatrix
from lowbit.quantization.packing import BITS, CODES_PER_UNIT


@settings(max_examples=25)
@given(
    st.sampled_from(BITS),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 9),
    st.sampled_from((3000, 6000, 20000)),
    st.sampled_from(("streamed", "printed")),
    st.integers(0, 99),
)
def test_the_generated_product_is_exact_on_exact_inputs(
    bits: int, units: int, groups: int, registers: int, cache_bits: int, order: str, seed: int
) -> None:
    """Any width, group and cache: blocks that cut groups, blocks of several, edges; equal to the reference."""
    random = np.random.default_rng(seed)
    machine = Machine(cache_bits, registers=8, lanes=2)
    g = units * CODES_PER_UNIT[bits]
    rows, columns = groups * g, registers * machine.lanes
    words = random.integers(0, 2**32, (rows * bits // 32, columns), np.uint32)
    scales = np.exp2(random.integers(-2, 2, (groups, columns))).astype(np.float32)
    zeros = random.integers(-4, 5, (groups, columns)).astype(np.float32)
    matrix = QuantizedMatrix(words, scales, zeros, bits, rows, g, "minimum")
    x = random.integers(-3, 4, rows).astype(np.float32)
    plan = generate(bits, rows, columns, g, machine, cost=lambda b, tile: (tile.order != order) + seed % tile.t_u)
    np.testing.assert_array_equal(multiply(plan, x, matrix), qgemv(x, matrix))


@pytest.mark.parametrize("bits", BITS)
def test_every_candidate_fits_and_none_is_missing(bits: int) -> None:
    """All printed tiles and all streamed ones whose programs need no more than η registers."""
    for registers in (5, 12, 16):
        found = list(candidates(bits, registers))
        assert all(live_registers(tile.kernel(bits, 8, 8 * tile.t_u)) <= registers for tile in found)
        widest = max((tile.t_u for tile in found if tile.order == "streamed"), default=0)
        # Mask, activation and code, and for each register a word and a sum; where codes straddle, two words.
        assert widest == (registers - 3) // (3 if bits == 3 else 2)
        refused = {(m_u, t_u) for m_u, t_u in tiles(registers)} - {
            (tile.m_u, tile.t_u) for tile in found if tile.order == "printed"
        }
        for m_u, t_u in refused:
            assert live_registers(Tile("printed", m_u, t_u).kernel(bits, 1, t_u)) > registers


def test_the_cost_is_the_number_of_instructions_of_the_loop() -> None:
    """4 bits, two registers, streamed: of 8 codes 2 loads, 8 broadcasts, and for each register 7 + 7 + 8 + 8."""
    assert instructions(4, Tile("streamed", 8, 2)) == (2 + 8 + 2 * (7 + 7 + 8 + 8)) / 16


def test_the_cheapest_tile_is_chosen_and_a_cost_of_ones_own_is_obeyed() -> None:
    """Of equal costs the widest; of a measured cost the least, whatever it is."""
    machine = Machine(32 * 1024 * 8, registers=16, lanes=8)
    found = costs(4, machine)
    plan = generate(4, 256, 1024, 128, machine)
    assert found[plan.tile] == min(found.values())
    assert generate(4, 256, 1024, 128, machine, cost=lambda bits, tile: 1.0).tile.t_u == max(t.t_u for t in found)
    wanted = Tile("printed", 4, 2)
    assert generate(4, 256, 1024, 128, machine, cost=lambda bits, tile: tile != wanted).tile == wanted
    assert plan.block.used <= machine.cache_bits
    assert plan.block.t_b % (plan.tile.t_u * machine.lanes) == 0


def test_wrong_sizes_are_refused() -> None:
    """Machines, shapes and matrices that do not fit, each in one line."""
    machine = Machine(32 * 1024 * 8, registers=16, lanes=8)
    plan = generate(4, 16, 8, 16, machine)
    other = QuantizedMatrix(
        np.zeros((2, 16), np.uint32), np.ones((1, 16), np.float32), np.zeros((1, 16), np.float32), 4, 16, 16, "minimum"
    )
    for call, message in (
        (lambda: Machine(0, 16, 8), "cache_bits is 0"),
        (lambda: generate(5, 16, 8, 16, machine), "bits is 5"),
        (lambda: generate(4, 16, 8, 12, machine), "rows is 16; allowed: a multiple of 12"),
        (lambda: generate(4, 12, 8, 12, machine), "group_size is 12; allowed: a multiple of 8"),
        (lambda: generate(4, 16, 9, 16, machine), "columns is 9; allowed: a multiple of 8"),
        (lambda: generate(4, 16, 8, 16, Machine(10**6, registers=3, lanes=8)), "registers is 3"),
        (lambda: generate(4, 16, 8, 16, Machine(500, registers=16, lanes=8)), "cache_bits is 500"),
        (lambda: multiply(plan, np.zeros(16, np.float32), other), "columns of the matrix is 16; allowed: 8"),
        (lambda: multiply(plan, np.zeros(15, np.float32), other), "shape of x"),
    ):
        with pytest.raises(ArgumentError, match=message):
            call()
