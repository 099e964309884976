"""Checks of every two sizes of codes and of products with them (`lowbit_conformance.suite.pairs`).

Widths of codes, groups and conventions may be undeclared, so each choice of them has a case of its own, in which the
number of columns goes through all sizes, and the numbers of rows and of activations take turns.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import lcm

import numpy as np

from lowbit.quantization import hqq
from lowbit.quantization.affine import CONVENTIONS, SCALE_DTYPES
from lowbit.quantization.packing import BITS, CODES_PER_UNIT
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.suite.bounded import assert_reference
from lowbit_conformance.suite.cases import MatrixCase, conventions
from lowbit_conformance.suite.clauses import test_hqq, test_integer, test_sizes
from lowbit_conformance.suite.clauses.test_hqq import STORED, RealZeroCase
from lowbit_conformance.suite.integer_cases import IntegerCase, lattice, of
from lowbit_conformance.suite.marking import Record, Settings, chained, checks, grid
from lowbit_conformance.suite.pairs import EVERY_PAIR, SIZES, each_of

TIER = "exhaustive"
GROUPS = (16, 32, 64, 128)
"""Common group sizes, which are combined with every number of columns and every width of codes."""
OTHERS = (1, 2, 4, 8, 24, 48, 80, 96, 192, 256, 512)

# **Packing.**


def heights(case: MatrixCase) -> Iterator[MatrixCase]:
    """One number of units of rows for each size, and a few more."""
    yield from (replace(case, rows=units * CODES_PER_UNIT[case.bits]) for units in (*SIZES, 256))


PACKED = [(bits, CODES_PER_UNIT[bits], columns) for bits, columns in product(BITS, SIZES)]


@checks(("packing.pack/C2", "packing.unpack/C1"), grid(MatrixCase, TIER, [EVERY_PAIR], *PACKED))
def test_packed(backend: Remote, case: MatrixCase, record_property: Record) -> None:
    """Random codes give the reference's words, and random words its codes."""
    each_of(backend, heights(case), record_property, test_sizes.EACH[case.clause][1])


SAME_CODES = ("no-codes", "top-codes", "codes-of-1")
alike = grid(MatrixCase, TIER, SAME_CODES, *((bits, 2 * CODES_PER_UNIT[bits], 9) for bits in BITS))


@checks("packing.pack/C2", alike)
def test_codes_that_are_alike_packed(backend: Remote, case: MatrixCase) -> None:
    """Codes that are all zero, all one or all the largest give the reference's words."""
    number = {"no-codes": 0, "codes-of-1": 1}.get(case.variant, 2**case.bits - 1)
    assert_reference(backend, case, "words", np.full((case.rows, case.columns), number, np.uint8), case.bits)


@checks("packing.unpack/C1", alike)
def test_words_that_are_alike_unpacked(backend: Remote, case: MatrixCase) -> None:
    """Words with no bit set, with all bits set and with the lowest bit set give the reference's codes."""
    number = {"no-codes": 0, "codes-of-1": 1}.get(case.variant, 0xFFFFFFFF)
    words = np.full((case.rows * case.bits // 32, case.columns), number, np.uint32)
    assert_reference(backend, case, "codes", words, case.bits)


# **Groups.**


def grouped(clause: str, settings: Settings) -> Iterator[MatrixCase]:
    """Every group with every width of codes and both conventions, with alternating dtypes of scales."""
    vectors = 3 if clause.startswith("linear.qgemm") else 0
    for turn, (size, bits) in enumerate(product((*GROUPS, *OTHERS), BITS)):
        for number, convention in enumerate(CONVENTIONS):
            if convention in conventions(clause):
                dtype = SCALE_DTYPES[(turn // 4 + turn + number) % 2]
                rows = lcm(CODES_PER_UNIT[bits], size)
                variant = f"{EVERY_PAIR}-full"
                yield MatrixCase(clause, TIER, variant, bits, rows, 1, size, convention, dtype, vectors, seed=turn)


def widths(case: MatrixCase) -> Iterator[MatrixCase]:
    """All numbers of columns for common group sizes, else eight of them, with up to three or four groups."""
    unit = CODES_PER_UNIT[case.bits]
    chosen = SIZES if case.group_size in GROUPS else SIZES[case.seed % 3 :: 3]
    for number, columns in enumerate(chosen):
        groups = (1, 2, 1, 3, 1, 2, 4)[(number + case.seed) % 7] if case.group_size >= 16 else unit
        rows = -(-case.group_size * groups // unit) * unit + unit * (number % 3 == 2)
        vectors = case.vectors and SIZES[(5 * number + 7 * case.seed) % 19]
        yield replace(case, rows=rows, columns=columns, vectors=vectors)


def squares(clause: str, settings: Settings) -> Iterator[MatrixCase]:
    """Square shapes, wide ones and tall ones, with alternating widths of codes."""
    vectors, own = 2 if clause.startswith("linear.qgemm") else 0, conventions(clause)
    shapes = [(size, size) for size in (64, 96, 128, 192, 256, 384, 512)]
    shapes += [(size, columns) for size in (256, 512, 1024, 2048) for columns in (16, 64)]
    shapes += [(64, columns) for columns in (256, 320, 384, 512, 640, 768, 1024, 2048, 4096)]
    for turn, (rows, columns) in enumerate(shapes):
        convention = own[turn % len(own)]
        sizes = (rows, columns, GROUPS[1 + turn % 3] if rows >= 128 else 32)
        bits, dtype = BITS[(turn + turn // 4) % 4], SCALE_DTYPES[turn % 2]
        yield MatrixCase(clause, TIER, f"{EVERY_PAIR}-square-sparse", bits, *sizes, convention, dtype, vectors)
    for count in (16, 32, 48, 64, 128, 256) if clause.startswith("linear.qgemm/") else ():
        for bits in BITS:
            yield MatrixCase(clause, TIER, f"{EVERY_PAIR}-tall-full", bits, 64, 64, 32, "minimum", vectors=count)


def parts(case: MatrixCase) -> Iterator[MatrixCase]:
    yield from [case] if "square" in case.variant or "tall" in case.variant else widths(case)


GROUPED = (
    "affine.quantize/C1",
    "affine.dequantize/C1",
    "affine.dequantize/C2",
    "linear.qgemv/C1",
    "linear.qgemm/C1",
)


@checks(GROUPED, chained(grouped, squares))
def test_groups(backend: Remote, case: MatrixCase, record_property: Record) -> None:
    """Random weights and matrices give the reference's, and products on the lattice equal the reference's."""
    each_of(backend, parts(case), record_property, test_sizes.EACH[case.clause][1])


# **Blocks of integers.**

BLOCKS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 128)
MANTISSAS = (2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 16)


def integers(clause: str, settings: Settings) -> Iterator[IntegerCase]:
    """Every block with every mantissa; widths of codes, groups, columns and rows of X alternate."""
    for turn, (block, mantissa) in enumerate(product(BLOCKS, MANTISSAS)):
        for number, bits in enumerate(BITS):
            size, convention = GROUPS[(turn + turn // 4 + number) % 4], CONVENTIONS[(turn + number) % 2]
            columns, count = SIZES[(7 * turn + 5 * number) % 23], SIZES[(3 * turn + number) % 19]
            case = MatrixCase(clause, TIER, EVERY_PAIR, bits, max(size, 32), columns, size, convention)
            yield of(case, count, (block, mantissa, 8))
    for turn, (block, size, columns) in enumerate(product((8, *GROUPS), GROUPS, (16, 32, 64, 128))):
        case = MatrixCase(clause, TIER, f"{EVERY_PAIR}-groups", BITS[turn % 4], 128, columns, size)
        yield of(case, 1 + turn % 5, (block, 8, 8))
    for turn, (count, columns) in enumerate(product((1, 4, 8, 16, 32, 64, 128), (16, 32, 64, 128))):
        case = MatrixCase(clause, TIER, EVERY_PAIR, BITS[turn % 4], 64, columns, 32, CONVENTIONS[turn % 2])
        yield of(case, count, (GROUPS[turn % 4], 8, 8))


@checks("linear.qgemm_bfp/C1", integers)
def test_integer_products(backend: Remote, case: IntegerCase) -> None:
    """On the lattice the result equals the reference's."""
    test_integer.assert_lattice(backend, *lattice(case, dense=False))


# **Real zeros.**


def real_zeros(clause: str, settings: Settings) -> Iterator[RealZeroCase]:
    """Every group with every width of codes along both axes, with alternating storage of scales and zeros."""
    for turn, (size, bits) in enumerate(product((2, 3, 4, 6, 8, *GROUPS, 24, 48, 96, 256), BITS)):
        for axis in hqq.AXES:
            variant = f"exact-{EVERY_PAIR}" if clause.startswith("hqq.qgemv") else EVERY_PAIR
            rows = lcm(CODES_PER_UNIT[bits], size)
            yield RealZeroCase(
                clause, TIER, variant, bits, rows, 1, size, axis, STORED[(turn // 2 + axis) % 2], seed=turn
            )


def real_widths(case: RealZeroCase) -> Iterator[RealZeroCase]:
    """Groups that divide K along axis 1, or K·N along axis 0, where K need not hold a whole group."""
    unit, chosen = CODES_PER_UNIT[case.bits], SIZES if case.group_size in GROUPS else SIZES[case.seed % 3 :: 3]
    for number, columns in enumerate(chosen):
        rows = case.rows
        if case.axis == 0:
            rows = next(count for count in range(unit, 99999, unit) if count * columns % case.group_size == 0)
        yield replace(case, rows=rows * (1 + (rows < 100 and (number + case.seed) % 3 == 0)), columns=columns)


@checks("hqq.dequantize/C1", real_zeros)
def test_real_zeros_dequantised(backend: Remote, case: RealZeroCase, record_property: Record) -> None:
    """Random codes, scales and zeros give the reference's weights."""
    each_of(backend, real_widths(case), record_property, test_hqq.test_dequantize)


@checks("hqq.qgemv/C1", real_zeros)
def test_real_zeros_multiplied(backend: Remote, case: RealZeroCase, record_property: Record) -> None:
    """On the lattice the result equals the reference's."""
    each_of(backend, real_widths(case), record_property, test_hqq.test_qgemv_on_the_lattice)
