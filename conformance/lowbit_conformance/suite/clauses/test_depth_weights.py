"""Precision at depth in products with quantised weights, in GPTQ and in integers.

Few terms among thousands show what a rounding of operands, weights, scales or partial sums does. The inputs are those
of `deep_inputs`. Where they make every partial sum exact the result is equal, and elsewhere it lies within the same
derived bound as in every other case.
"""

from collections.abc import Callable, Iterator

import numpy as np

from lowbit.quantization.affine import CONVENTIONS, QuantizedMatrix
from lowbit.quantization.bfp import Blocks
from lowbit.quantization.hqq import Axis, HqqMatrix
from lowbit.quantization.packing import BITS, CODES_PER_UNIT, pack
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.suite import deep_inputs
from lowbit_conformance.suite.bounded import assert_bounded, assert_on_lattice, assert_reference
from lowbit_conformance.suite.cases import GROUPS_IN_USE, MatrixCase
from lowbit_conformance.suite.clauses.test_bfp import BfpCase, dotted
from lowbit_conformance.suite.clauses.test_gptq import LayerCase
from lowbit_conformance.suite.clauses.test_hqq import RealZeroCase, assert_rows
from lowbit_conformance.suite.clauses.test_integer import assert_lattice
from lowbit_conformance.suite.clauses.test_linear import run_rows, share_of_rows
from lowbit_conformance.suite.compare import assert_equal_values, assert_exact
from lowbit_conformance.suite.inputs import FLOAT32_INTEGERS
from lowbit_conformance.suite.integer_cases import IntegerCase, of
from lowbit_conformance.suite.marking import Record, Settings, checks, grid

# **Products with quantised weights.**


def deep_one_hot(clause: str, settings: Settings) -> Iterator[MatrixCase]:
    """1024 rows with every width and convention, and common group sizes."""
    vectors = 4 * clause.startswith("linear.qgemm")
    for convention in CONVENTIONS:
        for bits in BITS:
            yield MatrixCase(clause, "edge", "deep-one-hot", bits, 1024, 9, 128, convention, vectors=vectors)
        for size in GROUPS_IN_USE:
            yield MatrixCase(clause, "edge", "deep-one-hot", 4, 1024, 9, size, convention, "float16", vectors)


@checks(("linear.qgemv/C1", "linear.qgemm/C1"), lambda clause, settings: deep_inputs.matrices(clause))
def test_deep_product_on_the_lattice(backend: Remote, case: MatrixCase) -> None:
    """Few activations, or scales, of up to 20 bits among thousands of rows: each row equals the reference's."""
    x, matrix = deep_inputs.lattice(case)
    if not case.vectors and case.variant.startswith("wide"):
        x = x[:3]
    assert_equal_values(run_rows(backend, x, matrix, case), deep_inputs.product(x, matrix))


@checks(("linear.qgemv/C2", "linear.qgemm/C2"), deep_one_hot)
def test_deep_one_hot_product(backend: Remote, case: MatrixCase, record_property: Record) -> None:
    """One 24-bit activation in each row, and scales and minima of as many bits, stay within the bound."""
    x, matrix = deep_inputs.one_hot(case)
    record_property("share", share_of_rows(backend, case, run_rows(backend, x, matrix, case), x, matrix))


# **Real zeros.**

DEEP_HQQ: tuple[tuple[int, int, int, Axis], ...] = ((1024, 7, 64, 1), (1024, 6, 1024, 1), (1024, 8, 32, 0))


def deep_hqq(*variants: str) -> Callable[[str, Settings], Iterator[RealZeroCase]]:
    def generator(clause: str, settings: Settings) -> Iterator[RealZeroCase]:
        for variant in variants:
            for bits in BITS:
                for shape in DEEP_HQQ:
                    yield RealZeroCase(clause, "lattice", variant, bits, *shape, "float32")

    return generator


@checks("hqq.qgemv/C1", deep_hqq("deep-activations", "deep-scales"))
def test_deep_real_zeros_on_the_lattice(backend: Remote, case: RealZeroCase) -> None:
    """Two activations or scales of at least 13 bits among 1024 rows: the result equals the reference's."""
    kind = case.variant.removeprefix("deep-")
    rows, matrix = deep_inputs.hqq_lattice(
        case.generator(), kind, case.bits, case.rows, case.columns, case.group_size, case.axis
    )
    assert_rows(backend, rows, matrix)


def two_roundings(clause: str, settings: Settings) -> Iterator[RealZeroCase]:
    """8-bit scales and zeros whose own scales and zeros are in either format, along both axes; large K for the
    product."""
    for bits in BITS:
        for dtype in ("float32", "float16"):
            unit = CODES_PER_UNIT[bits]
            shapes: tuple[tuple[int, int, int, Axis], ...] = ((2 * unit, 16, unit, 1), (2 * unit, 12, 6, 0))
            for shape in DEEP_HQQ[::2] if clause.startswith("hqq.qgemv") else shapes:
                yield RealZeroCase(clause, "edge", f"two-roundings-{dtype}", bits, *shape, "eight-bit")


def two_roundings_matrix(case: RealZeroCase) -> HqqMatrix:
    rng, groups = case.generator(), case.rows * case.columns // case.group_size
    dtype = case.variant.rpartition("-")[2]
    scales = deep_inputs.eight_bit(rng, groups, dtype, above_zero=True)
    zeros = deep_inputs.eight_bit(rng, groups, dtype, above_zero=False)
    codes = pack(rng.integers(0, 2**case.bits, (case.rows, case.columns)).astype(np.uint8), case.bits)
    return HqqMatrix(codes, scales, zeros, case.bits, case.rows, case.group_size, case.axis)


@checks("hqq.dequantize/C3", two_roundings)
def test_eight_bit_numbers_round_twice(backend: Remote, case: RealZeroCase) -> None:
    """Meta groups with their own zeros of many bits: each of the two roundings is visible."""
    assert_reference(backend, case, "weights", two_roundings_matrix(case))


@checks("hqq.qgemv/C2", two_roundings)
def test_deep_eight_bit_numbers(backend: Remote, case: RealZeroCase, record_property: Record) -> None:
    """One activation among 1024 times such a matrix stays within the bound."""
    matrix = two_roundings_matrix(case)
    for place in (0, case.rows // 2, case.rows - 1):
        x = np.zeros(case.rows, np.float32)
        x[place] = case.generator().uniform(1, 2)
        assert_bounded(backend, case, record_property, x, matrix)


# **GPTQ.**


@checks("gptq.hessian/C1", grid(LayerCase, "lattice", ["deep"], (9, 1024), (33, 2048), (130, 1100)))
def test_deep_hessian_on_the_lattice(backend: Remote, case: LayerCase) -> None:
    """Of a thousand inputs one has odd 12-bit numbers and one has ±1: products have 24 bits, and sums no more."""
    rng = case.generator()
    x = np.zeros((case.columns, case.rows), np.float32)
    x[0], x[-1] = deep_inputs.odd(rng, 2**12, case.rows), rng.choice((-1, 1), case.rows)
    assert_on_lattice(backend, case, x)


@checks("gptq.targets/C1", grid(LayerCase, "lattice", ("deep-weights", "deep-factor"), (64, 9), (1024, 5)))
def test_deep_targets_on_the_lattice(backend: Remote, case: LayerCase) -> None:
    """Three rows have errors; these or the factor's elements have 15 bits: the targets are equal."""
    rng = case.generator()
    size = (case.rows, case.rows)
    fine, coarse = (2**15, 3) if case.variant == "deep-weights" else (3, 2**15)
    triangle = np.triu(deep_inputs.odd(rng, coarse, size), 1) + np.diag(2.0 ** rng.integers(0, 2, case.rows))
    weights = 1.0 * rng.integers(-9, 10, (case.rows, case.columns))
    values = weights.copy()
    for place in (0, case.rows // 2, case.rows - 2):
        weights[place] = deep_inputs.odd(rng, fine, case.columns)
        values[place] = weights[place] - deep_inputs.odd(rng, fine, case.columns)
    arrays = tuple(np.ascontiguousarray(part, np.float32) for part in (weights, triangle, values))
    assert_on_lattice(backend, case, *arrays)


# **Blocks of integers.**


def long_blocks(clause: str, settings: Settings) -> Iterator[IntegerCase]:
    """Blocks whose mantissas sum to more than 2^15 and 2^16, while products with the top code stay below 2^24."""
    for bits in BITS:
        for convention in CONVENTIONS:
            formats = [(512, 8, 8), (32, 12, 8)] if bits == 8 else [(512, 8, 8), (1024, 8, 8), (32, 12, 8), (64, 12, 8)]
            for format in formats:
                case = MatrixCase(clause, "lattice", "long-blocks", bits, format[0], 6, format[0], convention)
                yield of(case, 4, format)
    for bits in (4, 8):
        for convention in CONVENTIONS:
            case = MatrixCase(clause, "lattice", "deep-scales", bits, 1024, 6, 64, convention)
            yield from (of(case, 4, format) for format in ((32, 8, 8), (128, 8, 8)))
            case = MatrixCase(clause, "lattice", "empty-blocks", bits, 1024, 6, 64, convention)
            yield from (of(case, 4, format) for format in ((32, 8, 8), (128, 8, 8), (32, 4, 8)))


@checks("linear.qgemm_bfp/C1", long_blocks)
def test_deep_integer_product(backend: Remote, case: IntegerCase) -> None:
    """Long blocks of largest mantissas of one sign; one mantissa among scales of many bits; and one block or none among
    empty blocks with the greatest and least exponents: the result equals the reference's."""
    rng, top, format = case.generator(), 2**case.bits - 1, case.format
    shape, groups = (case.vectors, case.rows), (-(-case.rows // case.group_size), case.columns)
    mantissas = np.zeros(shape, np.int64)
    exponents = rng.integers(-9, 9, (case.vectors, format.blocks(case.rows)))
    scales, zeros = np.ones(groups), np.resize([top, 1, 0], groups)
    codes = rng.integers(0, top + 1, (case.rows, case.columns))
    place = np.array([0, case.rows - 1, case.rows // 2, case.rows // 3])
    if case.variant == "long-blocks":
        mantissas[...] = format.top * np.array([1, -1, 1, -1])[:, np.newaxis]
        mantissas[2:, ::7] -= np.sign(mantissas[2:, ::7])  # an odd sum
        codes[:, ::2] = top
    elif case.variant == "deep-scales":
        mantissas[np.arange(4), place] = (format.top, -format.top, 1, 2)
        room = FLOAT32_INTEGERS // (format.top * 2 * top)
        scales, zeros = np.abs(deep_inputs.odd(rng, room, groups)).astype(np.float64), rng.integers(0, top + 1, groups)
    else:
        exponents[...] = np.resize((format.reach, -format.reach, format.reach), exponents.shape)
        for row, at in enumerate(place[:-1]):  # the last row is all zeros
            block = at // format.block
            span = slice(block * format.block, (block + 1) * format.block)
            mantissas[row, span] = rng.integers(-7, 8, format.block)
            exponents[row, block] = -3
    offsets = -scales * zeros if case.convention == "minimum" else zeros
    matrix: QuantizedMatrix = deep_inputs.matrix_of(case, codes, scales, offsets)
    x = Blocks(mantissas.astype(format.dtype), exponents.astype(np.int16), format)
    assert_lattice(backend, x, matrix)


# Sums past 2^15 (300 mantissas of 4 bits and more), 2^24, 2^31 and 2^32.
LONG = ((1024, 4, 8), (512, 8, 8), (2048, 8, 8), (64, 12, 8), (600, 12, 8), (1100, 12, 8), (40, 16, 8))


@checks("bfp.dot/C1", grid(BfpCase, "edge", ["long-blocks"], *((3, format[0] + 5, *format) for format in LONG)))
def test_sums_of_long_blocks(backend: Remote, case: BfpCase) -> None:
    """Largest mantissas of positive, negative and both signs, and odd sums: every bit of an integer counts."""
    format, shape = case.format, (case.rows, case.columns)
    a, b = np.full(shape, format.top), np.full((case.rows + 1, case.columns), format.top)
    a[1] *= -1
    a[2, ::3] -= 1
    b[1], b[2, -7:], b[3, 1::2] = b[1] - 1, 1, -format.top
    exponents = np.zeros((case.rows + 1, format.blocks(case.columns)), np.int16)
    one, two = Blocks(a.astype(format.dtype), exponents[:-1], format), Blocks(b.astype(format.dtype), exponents, format)
    given = dotted(backend, one, two)
    expected = [a[:, span].astype(np.int64) @ b[:, span].T.astype(np.int64) for span in format.spans(case.columns)]
    assert_exact("sums", given.sums, np.ascontiguousarray(np.stack(expected, axis=2)))
