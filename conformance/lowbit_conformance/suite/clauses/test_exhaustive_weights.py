"""The exhaustive tier of packing, quantisation and products: all there is, where that is little.

Where a thing has few states, drawing some of them is a poor bargain. Here are all codes at all positions of a word
beside all codes of its neighbour, all numbers of float16 as scales, every size of a group of a small matrix, and every
small shape up to a word and a register and one past both. A case stands for a whole range, which its variant names.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from lowbit.linear import linear
from lowbit.quantization.affine import CONVENTIONS, SCALE_DTYPES, QuantizedMatrix
from lowbit.quantization.packing import BITS, CODES_PER_UNIT, Codes, pack
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.suite import inputs
from lowbit_conformance.suite.bounded import assert_reference
from lowbit_conformance.suite.cases import MatrixCase, conventions
from lowbit_conformance.suite.clauses.test_affine import assert_quantized
from lowbit_conformance.suite.clauses.test_linear import assert_product
from lowbit_conformance.suite.compare import assert_equal_values, assert_exact
from lowbit_conformance.suite.marking import Settings, checks, grid

TIER = "exhaustive"
REGISTER = 16
"""Float32 lanes of the widest register, 512 bits."""


# Words.

FILLS = {"among-zeros": 0, "among-ones": 255}


def pairs(clause: str, settings: Settings) -> Iterator[MatrixCase]:
    """One case for each width and each value of the other codes."""
    for bits in BITS:
        unit = CODES_PER_UNIT[bits]
        for fill in FILLS:
            yield MatrixCase(clause, TIER, f"all-pairs-{fill}", bits, unit, (unit - 1) * 4**bits)


def neighbours(case: MatrixCase) -> Codes:
    """A unit of codes for each position but the last, with all values there and all values next to it."""
    count = 2**case.bits
    codes = np.full((case.rows, case.columns), FILLS[case.variant.removeprefix("all-pairs-")] % count, np.uint8)
    first, second = (each.reshape(-1) for each in np.indices((count, count)))
    for position in range(case.rows - 1):
        columns = slice(position * count**2, (position + 1) * count**2)
        codes[position, columns], codes[position + 1, columns] = first, second
    return codes


@checks("packing.pack/C1", pairs)
def test_every_code_beside_every_code(backend: Remote, case: MatrixCase) -> None:
    """All values of two neighbouring codes at all positions of a unit; the bits of other codes are all zeros or all
    ones."""
    assert_reference(backend, case, "words", neighbours(case), case.bits)


@checks("packing.unpack/C1", pairs)
def test_every_code_is_found_beside_every_code(backend: Remote, case: MatrixCase) -> None:
    """Unpacking the same words gives the codes."""
    words = pack(neighbours(case), case.bits)
    given = backend.run("packing.unpack", words, case.bits)
    assert_exact("codes", given, neighbours(case))


# Scales, zeros and groups.

HALVES = 2**15 - 2**10  # number of float16 patterns from 0 up to infinity
PART = 2**13


def half_scales(clause: str, settings: Settings) -> Iterator[MatrixCase]:
    """The positive float16 numbers, in a few parts."""
    (convention,) = conventions(clause)
    for bits in BITS:
        for first in range(1, HALVES, PART):
            last = min(first + PART, HALVES) - 1
            shape = (CODES_PER_UNIT[bits], last - first + 1, CODES_PER_UNIT[bits])
            yield MatrixCase(clause, TIER, f"half-{first}-to-{last}", bits, *shape, convention, "float16")


@checks(("affine.dequantize/C1", "affine.dequantize/C2"), half_scales)
def test_every_half_precision_scale(backend: Remote, case: MatrixCase) -> None:
    """Each positive float16 number is the scale of one column and, with both signs, the minimum of another."""
    rng, top = case.generator(), 2**case.bits - 1
    first = int(case.variant.split("-")[1])
    scales = np.arange(first, first + case.columns, dtype=np.uint16).view(np.float16)[None]
    minima = scales[:, ::-1] * np.where(np.arange(case.columns) % 2, -1, 1).astype(np.float16)
    zeros = minima if case.convention == "minimum" else rng.integers(0, top + 1, scales.shape).astype(np.uint8)
    words = pack(rng.integers(0, top + 1, (case.rows, case.columns)).astype(np.uint8), case.bits)
    matrix = QuantizedMatrix(words, scales, zeros, case.bits, case.rows, case.group_size, case.convention)
    assert_reference(backend, case, "weights", matrix)


DEPTHS = {bits: max(2**bits, unit) for bits, unit in CODES_PER_UNIT.items()}
ZERO_POINTS = [(bits, rows, 2**bits, min(rows, 32), "zero_point") for bits, rows in DEPTHS.items()]


@checks("affine.dequantize/C2", grid(MatrixCase, TIER, ["all-zeros"], *ZERO_POINTS))
def test_every_code_less_every_zero(backend: Remote, case: MatrixCase) -> None:
    """Each column has a different zero-point, and contains all codes."""
    codes = np.broadcast_to(np.arange(case.rows)[:, None] % 2**case.bits, (case.rows, case.columns))
    shape = (-(-case.rows // case.group_size), case.columns)
    zeros = np.ascontiguousarray(np.broadcast_to(np.arange(case.columns), shape).astype(np.float64))
    matrix = inputs.build(case, codes.astype(np.uint8), np.full(shape, 0.1, np.float32), zeros)
    assert_reference(backend, case, "weights", matrix)


ROWS = {2: 16, 3: 32, 4: 16, 8: 16}
"""K of the cases with all group sizes."""


def all_groups(clause: str, settings: Settings) -> Iterator[MatrixCase]:
    """All group sizes from one row to the whole column, at one K."""
    for bits in BITS:
        for group_size in range(1, ROWS[bits] + 1):
            for convention in conventions(clause):
                shape = (ROWS[bits], 5, group_size)
                yield MatrixCase(clause, TIER, "all-groups", bits, *shape, convention, SCALE_DTYPES[group_size % 2])


@checks("affine.quantize/C4", all_groups)
def test_quantize_with_every_group_size(backend: Remote, case: MatrixCase) -> None:
    """Normal weights with very different rows: a row in the wrong group changes its scale."""
    weights = case.generator().normal(size=(case.rows, case.columns)) * np.exp2(np.arange(case.rows) % 11)[:, None]
    assert_quantized(backend, case, weights.astype(np.float32))


@checks(("affine.dequantize/C1", "affine.dequantize/C2"), all_groups)
def test_dequantize_with_every_group_size(backend: Remote, case: MatrixCase) -> None:
    """Every row has the scale and the zero of its own group."""
    assert_reference(backend, case, "weights", inputs.random(case)[1])


# Products.


@checks("linear.qgemv/C1", all_groups)
def test_qgemv_with_every_group_size(backend: Remote, case: MatrixCase) -> None:
    """The result is equal on the dense lattice, on which no product is zero."""
    assert_product(backend, case, *inputs.lattice(case, dense=True))


def small_shapes(clause: str, settings: Settings) -> Iterator[MatrixCase]:
    """One and two units of codes, each with every N up to one more than a register."""
    for bits in BITS:
        unit = CODES_PER_UNIT[bits]
        for convention in CONVENTIONS:
            for rows in (unit, 2 * unit):
                shape = (rows, REGISTER + 1, min(32, rows))
                yield MatrixCase(clause, TIER, "all-widths-up-to", bits, *shape, convention)


@checks("linear.qgemv/C1", small_shapes)
def test_qgemv_of_every_small_width(backend: Remote, case: MatrixCase) -> None:
    """The result is equal on the dense lattice at N from 1 to one more than a register."""
    for columns in range(1, case.columns + 1):
        assert_product(backend, case, *inputs.lattice(replace(case, columns=columns), dense=True))


def few_vectors(clause: str, settings: Settings) -> Iterator[MatrixCase]:
    for bits in BITS:
        for convention in CONVENTIONS:
            rows = 2 * CODES_PER_UNIT[bits]
            shape = (rows, REGISTER + 1, min(32, rows))
            yield MatrixCase(clause, TIER, "all-vectors-up-to", bits, *shape, convention, vectors=9)


@checks("linear.qgemm/C1", few_vectors)
def test_qgemm_of_every_small_number_of_vectors(backend: Remote, case: MatrixCase) -> None:
    """The result is equal on the dense lattice at T from 1 to 9: kernels take 1, 2, 4 or 8 rows of x at once."""
    x, matrix = inputs.lattice(case, dense=True)
    prepared = backend.prepare(matrix)
    for vectors in range(1, case.vectors + 1):
        some = np.ascontiguousarray(x[:vectors])
        assert_equal_values(prepared.guarded(some, vectors), linear.qgemm(some, matrix))
