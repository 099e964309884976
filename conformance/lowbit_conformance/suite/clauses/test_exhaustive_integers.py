"""The exhaustive tier of `linear.qgemm_bfp`: all mantissas by all codes in every place, and every small shape."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from lowbit.quantization.affine import CONVENTIONS
from lowbit.quantization.bfp import Blocks
from lowbit.quantization.packing import BITS, CODES_PER_UNIT
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.suite import inputs, integer_cases
from lowbit_conformance.suite.cases import MatrixCase
from lowbit_conformance.suite.clauses.test_exhaustive_weights import REGISTER, TIER
from lowbit_conformance.suite.clauses.test_integer import assert_lattice
from lowbit_conformance.suite.integer_cases import IntegerCase, of
from lowbit_conformance.suite.marking import Settings, checks

ROWS = 32
"""For the cases of all pairs: a unit of any width, and a block."""
FILLS = {"among-zeros": 0, "among-the-largest": 1, "among-the-least": -1}
"""The mantissas beside the tested one, as fractions of the largest; their codes are the largest."""


def pairs(clause: str, settings: Settings) -> Iterator[IntegerCase]:
    """One case for each width and each value of the other places."""
    for bits in BITS:
        for fill in FILLS:
            yield of(MatrixCase(clause, TIER, f"all-pairs-{fill}", bits, ROWS, 2**bits, ROWS), 255)


@checks("linear.qgemm_bfp/C1", pairs)
def test_every_mantissa_by_every_code(backend: Remote, case: IntegerCase) -> None:
    """A row of X for each mantissa and a column for each code, at each place of the first and last unit of a block."""
    unit, top = CODES_PER_UNIT[case.bits], case.format.top
    fill = FILLS[case.variant.removeprefix("all-pairs-")] * top
    ones, zeros = np.ones((1, case.columns)), np.zeros((1, case.columns))
    if case.convention == "minimum":
        zeros += 0.5
    for place in sorted({*range(min(unit, 8)), ROWS - 1}):
        mantissas = np.full((case.vectors, case.rows), fill, np.int8)
        mantissas[:, place] = np.arange(-top, top + 1)
        codes = np.full((case.rows, case.columns), 2**case.bits - 1, np.uint8)
        codes[place] = np.arange(case.columns)
        x = Blocks(mantissas, np.full((case.vectors, 1), -7, np.int16), case.format)
        assert_lattice(backend, x, inputs.build(case, codes, ones, zeros))


def all_groups(clause: str, settings: Settings) -> Iterator[IntegerCase]:
    """All group sizes at a K of one and a half blocks, so that ends of blocks and groups are at all relative
    positions."""
    for bits in BITS:
        rows = 64 if bits == 3 else 48
        for group_size in range(1, rows + 1):
            convention = CONVENTIONS[group_size % 2]
            yield of(MatrixCase(clause, TIER, "all-groups", bits, rows, 5, group_size, convention), 2)


def all_blocks(clause: str, settings: Settings) -> Iterator[IntegerCase]:
    """All block sizes, with a group size that few of them divide."""
    for block in range(1, 49):
        yield of(MatrixCase(clause, TIER, "all-blocks", 4, 48, 5, 20), 2, (block, 8, 8))


@checks("linear.qgemm_bfp/C1", all_groups)
def test_integer_product_with_every_group_size(backend: Remote, case: IntegerCase) -> None:
    """The result is equal on the dense lattice, on which no mantissa or code is zero."""
    assert_dense(backend, case)


@checks("linear.qgemm_bfp/C1", all_blocks)
def test_integer_product_with_every_block_size(backend: Remote, case: IntegerCase) -> None:
    """The result is equal on the dense lattice, on which neighbouring blocks have different exponents."""
    assert_dense(backend, case)


def small_shapes(clause: str, settings: Settings) -> Iterator[IntegerCase]:
    """The smallest K of each width, and a whole block with a short one after it."""
    for bits in BITS:
        for rows in (CODES_PER_UNIT[bits], 64):
            case = MatrixCase(clause, TIER, "all-widths-up-to", bits, rows, REGISTER + 1, min(40, rows))
            yield of(case, 2)
            yield replace(of(case, 9), variant="all-vectors-up-to")


@checks("linear.qgemm_bfp/C1", small_shapes)
def test_integer_product_of_every_small_shape(backend: Remote, case: IntegerCase) -> None:
    """The result is equal on the dense lattice at N from 1 to one more than a register, or at T from 1."""
    last = case.columns if case.variant == "all-widths-up-to" else case.vectors
    for number in range(1, last + 1):
        wide = case.variant == "all-widths-up-to"
        assert_dense(backend, replace(case, columns=number) if wide else replace(case, vectors=number))


def assert_dense(backend: Remote, case: IntegerCase) -> None:
    __tracebackhide__ = True
    assert_lattice(backend, *integer_cases.lattice(case, dense=True))
