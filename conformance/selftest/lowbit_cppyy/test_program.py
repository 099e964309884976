"""The generated programs: they mean what the specification says, and every compiler gives the interpreter's bits."""

from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
from kernel_runs import (
    ADDS_TO,
    HERE,
    KINDS,
    Compiled,
    activations,
    assert_same_bits,
    interpreted,
    kind_of,
    purposes_of,
    recipes,
    some_blocks,
    some_matrix,
)

from lowbit.arrays import F32
from lowbit.linear import integer, linear
from lowbit.quantization.affine import Convention, QuantizedMatrix, ScaleDtype
from lowbit.quantization.bfp import Blocks
from lowbit.quantization.packing import BITS, CODES_PER_UNIT
from lowbit_cppyy.codegen.isa import AVX2, PLAIN, TABLES, InstructionSet
from lowbit_cppyy.layout.panels import PanelLayout
from lowbit_cppyy.recipe import INTEGER, Method, Recipe
from lowbit_cppyy.tuning.choices import PANEL, default_recipe

LANES = sorted({table.lanes for table in TABLES.values()})


def reference(x: F32 | Blocks, matrix: QuantizedMatrix) -> F32:
    """What the specification computes, in float64."""
    exact = integer.qgemm_bfp(x, matrix) if isinstance(x, Blocks) else linear.qgemm(x, matrix)
    return exact.astype(np.float32)


# The program means what the specification says.


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("scales", "convention"), KINDS)
def test_every_method_is_exact_on_the_lattice(
    bits: int, scales: ScaleDtype, convention: Convention, lanes: int
) -> None:
    """With small integers every sum is exact, so the interpreted program and the reference agree to the bit.

    Groups are not whole units, the last one is short, N is more than a panel and no multiple of a register.
    """
    rows = 3 * CODES_PER_UNIT[bits] if bits != 3 else 64
    matrix = some_matrix(bits, rows, lanes + 3, rows // 2 + 1, convention, scales, lattice=True)
    for recipe in recipes(lanes, bits, scales, convention):
        recipe = replace(recipe, panel=32)
        x = activations(recipe, 1, rows, lattice=True)
        np.testing.assert_array_equal(interpreted(matrix, x, recipe, lanes), reference(x, matrix), recipe.name)


@pytest.mark.parametrize("bits", BITS)
def test_rows_chains_and_unrolling_change_nothing_on_the_lattice(bits: int) -> None:
    """Three rows of x in kernels for four, three chains, as many registers as a panel has, several units at once."""
    unit = CODES_PER_UNIT[bits]
    rows = 4 * max(unit, 16)
    matrix = some_matrix(bits, rows, 17, rows // 2, lattice=True)
    for recipe in recipes(16, bits, "float32", "minimum"):
        several = replace(recipe, rows=4, chains=3, unroll=max(1, 32 // unit), registers=2, panel=32)
        if several.fits(16):
            several = replace(several, rows=1)
        x = activations(several, min(several.rows, 3), rows, lattice=True)
        np.testing.assert_array_equal(interpreted(matrix, x, several, 16), reference(x, matrix), several.name)


@pytest.mark.parametrize("bits", BITS)
def test_integers_are_exact_whatever_cuts_what(bits: int) -> None:
    """Groups that end inside blocks of activations and inside units, blocks that end inside units, groups of one."""
    method: Method = "dot4" if bits == 8 else "pairs"
    recipe = Recipe(bits, "float32", "zero_point", method, rows=2, registers=1, panel=16)
    for rows, group_size in ((64, 1), (64, 5), (96, 33), (96, 40), (64, 63), (96, 96)):
        matrix = some_matrix(bits, rows, 3, group_size, "zero_point", lattice=True)
        x = some_blocks(2, rows, lattice=True)
        np.testing.assert_array_equal(interpreted(matrix, x, recipe, 16), reference(x, matrix))


@pytest.mark.parametrize("method", INTEGER)
def test_the_largest_codes_and_mantissas_stay_exact(method: Method) -> None:
    """A whole block of ±127 by the largest codes: nothing saturates and nothing wraps, whatever the signs."""
    for bits in BITS:
        recipe = Recipe(bits, "float32", "minimum", method, registers=1, panel=16)
        if recipe.fits(16):
            continue
        words = np.full((32 * bits // 32, 1), 2**32 - 1, np.uint32)
        one, none = np.ones((1, 1), np.float32), np.zeros((1, 1), np.float32)
        matrix = QuantizedMatrix(words, one, none, bits, 32, 32, "minimum")
        for mantissas in (np.full((1, 32), 127), np.full((1, 32), -127), np.tile((127, 127, -127, -127), (1, 8))):
            x = Blocks(mantissas.astype(np.int8), np.zeros((1, 1), np.int16), integer.ACTIVATIONS)
            np.testing.assert_array_equal(interpreted(matrix, x, recipe, 16), reference(x, matrix))


# Every compiler gives the bits of the interpreted program.


@cache
def expected(recipe: Recipe, count: int, lanes: int, fused: bool) -> tuple[QuantizedMatrix, F32 | Blocks, F32]:
    """A random case with a group that cuts a unit and a tail in N, and its result by the interpreter."""
    matrix = some_matrix(recipe.bits, 32, 21, 23, recipe.convention, recipe.scales)
    x = activations(recipe, count, 32)
    return matrix, x, interpreted(matrix, x, recipe, lanes, fused=fused)


EACH = list(product(BITS, HERE))
"""Each width with each instruction set of this processor."""


@pytest.mark.parametrize("each", EACH, ids=lambda each: f"{each[0]}-{each[1].name}")
def test_compiled_kernels_have_the_bits_of_the_interpreted_program(each: tuple[int, InstructionSet]) -> None:
    """For every method: not one rounding differs."""
    bits, table = each
    for recipe in recipes(table.lanes, bits, *KINDS[BITS.index(bits)]):
        if table.name in ADDS_TO and recipe.method != "dot4":
            continue
        matrix, x, bits_expected = expected(replace(recipe, panel=32), 1, table.lanes, table.fused)
        assert_same_bits(Compiled(matrix, replace(recipe, panel=32), table)(x), bits_expected)


@pytest.mark.parametrize("each", EACH, ids=lambda each: f"{each[0]}-{each[1].name}")
def test_the_kernels_that_are_used_have_the_bits_of_the_interpreted_program(each: tuple[int, InstructionSet]) -> None:
    """The default kernels, for one row of x less than they take; the kinds of scales alternate."""
    bits, table = each
    for purpose in purposes_of(table):
        scales, convention = kind_of(purpose, bits)
        layout = PanelLayout.of(some_matrix(bits, 32, 21, 23, convention, scales), PANEL)
        recipe = default_recipe(purpose, layout, table)
        matrix, x, bits_expected = expected(recipe, max(1, recipe.rows - 1), table.lanes, table.fused)
        assert_same_bits(Compiled(matrix, recipe, table, threads=2)(x), bits_expected)


def test_instruction_sets_differ_in_nothing_but_the_fused_multiply_add() -> None:
    """A program for eight lanes gives the plain kernel's bits if `fmadd` rounds twice, and AVX2's if it rounds once."""
    matrix = some_matrix(4, 64, 40, 24)
    recipe = Recipe(4, "float32", "minimum", "fold", rows=4, registers=1)
    x = activations(recipe, 4, 64)
    once, twice = (interpreted(matrix, x, recipe, 8, fused=fused) for fused in (True, False))
    assert (once != twice).any()
    for table in (AVX2, PLAIN):
        if table in HERE:
            assert_same_bits(Compiled(matrix, recipe, table)(x), once if table.fused else twice)


# Blocks.


@pytest.mark.parametrize(("method", "rows"), [("fold", 1), ("fold", 3), ("table", 3), ("sums", 1), ("pairs", 3)])
def test_blocks_change_no_bit(method: Method, rows: int) -> None:
    """Three panels of five groups, in blocks of two groups: compiled and interpreted, all the same."""
    table = HERE[0]
    recipe = Recipe(4, "float16", "zero_point", method, rows=rows, registers=1, panel=32)
    if recipe.fits(table.lanes):
        pytest.skip("this method needs longer registers")
    matrix = some_matrix(4, 64, 70, 14, "zero_point", "float16")
    x = activations(recipe, rows, 64)
    whole = interpreted(matrix, x, recipe, table.lanes, fused=table.fused)
    in_blocks = interpreted(matrix, x, recipe, table.lanes, fused=table.fused, block_rows=2 * 14)
    assert_same_bits(in_blocks, whole)
    assert_same_bits(Compiled(matrix, recipe, table, block_rows=2 * 14)(x), whole)
    assert_same_bits(Compiled(matrix, recipe, table)(x), whole)
