"""Zeros of either sign in the operations that promise equal bits.

What is expected here comes from IEEE 754 (§6.3) and no reference: x − x and +0 + −0 are +0, −0 + −0 is −0, and a
product or a quotient has the sign of its parts. A backend that skips a code of 0, begins a sum with a zero of its own,
or puts the sign of a number on its zero is found. Results of bounded operations are compared as values, for which the
two zeros are one.
"""

from collections.abc import Iterator

import numpy as np

from lowbit.arrays import F32
from lowbit.attention.pooling import METHODS
from lowbit.quantization.affine import QuantizedMatrix
from lowbit.quantization.bfp_dot import BlockSums
from lowbit.quantization.hqq import HqqMatrix
from lowbit.quantization.packing import BITS, CODES_PER_UNIT, pack
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.suite.cases import GROUPS_IN_USE, MatrixCase, conventions
from lowbit_conformance.suite.clauses.test_bfp import BfpCase
from lowbit_conformance.suite.clauses.test_hqq import RealZeroCase
from lowbit_conformance.suite.clauses.test_pooling import SHAPES, HeadsCase
from lowbit_conformance.suite.clauses.test_pooling import run as pooled
from lowbit_conformance.suite.compare import assert_exact
from lowbit_conformance.suite.inputs import build
from lowbit_conformance.suite.marking import Settings, checks, grid

# **Weights.**


def matrices(clause: str, settings: Settings) -> Iterator[MatrixCase]:
    """A small shape for each width, and common group sizes; the clause determines the convention."""
    (convention,) = conventions(clause)
    for bits in BITS:
        rows = 3 * CODES_PER_UNIT[bits]
        yield MatrixCase(clause, "edge", "zeros", bits, rows, 9, 2 * CODES_PER_UNIT[bits], convention)
    for size in GROUPS_IN_USE:
        yield MatrixCase(clause, "edge", "zeros", 4, 2 * size, 9, size, convention, "float16")


def assert_positive_zeros(weights: object, shape: tuple[int, ...]) -> None:
    __tracebackhide__ = True
    assert_exact("weights that are 0", weights, np.zeros(shape, np.float32))


@checks("affine.dequantize/C1", matrices)
def test_a_minimum_of_zero(backend: Remote, case: MatrixCase) -> None:
    """Codes of 0 with minima of −0 and +0, and codes for which scale · code cancels the minimum, give +0."""
    rng = case.generator()
    shape = (-(-case.rows // case.group_size), case.columns)
    scales = np.exp2(rng.integers(-3, 4, shape))
    for code in (0, 1, 2**case.bits - 1):
        codes = np.full((case.rows, case.columns), code, np.uint8)
        matrix = build(case, codes, scales, np.full(shape, float(code)))
        if code == 0:
            matrix.zeros[...] = rng.choice((0.0, -0.0), shape)
        assert_positive_zeros(backend.run("affine.dequantize", matrix), (case.rows, case.columns))


@checks("affine.dequantize/C2", matrices)
def test_a_code_of_its_zero_point(backend: Remote, case: MatrixCase) -> None:
    """Codes that equal their zero-point give +0, for every zero-point."""
    rng = case.generator()
    zeros = rng.integers(0, 2**case.bits, (-(-case.rows // case.group_size), case.columns))
    codes = np.repeat(zeros, case.group_size, axis=0)[: case.rows].astype(np.uint8)
    matrix = build(case, codes, np.exp(rng.normal(-4, 1, zeros.shape)), zeros.astype(np.float64))
    assert_positive_zeros(backend.run("affine.dequantize", matrix), (case.rows, case.columns))


def real_zeros(clause: str, settings: Settings) -> Iterator[RealZeroCase]:
    for bits in BITS:
        unit = CODES_PER_UNIT[bits]
        for stored in ("float32", "float16"):
            yield RealZeroCase(clause, "edge", "zeros", bits, 2 * unit, 6, unit, 1, stored)
            yield RealZeroCase(clause, "edge", "zeros", bits, 2 * unit, 6, 4, 0, stored)


@checks("hqq.dequantize/C1", real_zeros)
def test_a_code_of_its_real_zero(backend: Remote, case: RealZeroCase) -> None:
    """Codes of 0 with zeros of −0 and +0, and codes that equal their zero, give +0."""
    groups = case.rows * case.columns // case.group_size
    for code in (0, 1, 2**case.bits - 1):
        zeros = np.full(groups, code, case.scales)
        if code == 0:
            zeros = np.resize(np.array([-0.0, 0.0, -0.0], case.scales), groups)
        codes = pack(np.full((case.rows, case.columns), code, np.uint8), case.bits)
        scales = np.exp(case.generator().normal(-4, 1, groups)).astype(case.scales)
        matrix = HqqMatrix(codes, scales, zeros, case.bits, case.rows, case.group_size, case.axis)
        assert_positive_zeros(backend.run("hqq.dequantize", matrix), (case.rows, case.columns))


def quantised(clause: str, settings: Settings) -> Iterator[MatrixCase]:
    for bits in BITS:
        rows = 3 * CODES_PER_UNIT[bits]
        yield MatrixCase(clause, "edge", "negative-zeros", bits, rows, 9, 2 * CODES_PER_UNIT[bits])
    yield MatrixCase(clause, "edge", "negative-zeros", 4, 64, 9, 32, "minimum", "float16")


@checks("affine.quantize/C3", quantised)
def test_groups_of_negative_zeros(backend: Remote, case: MatrixCase) -> None:
    """A group of −0 has a minimum of −0, and −0 among larger weights is quantised as any other 0."""
    weights = np.full((case.rows, case.columns), -0.0, np.float32)
    choices = {"bits": case.bits, "group_size": case.group_size}
    given = backend.run("affine.quantize", weights, **choices, convention="minimum", scale_dtype=case.scale_dtype)
    assert isinstance(given, QuantizedMatrix), "WRONG: the result is no QuantizedMatrix"
    assert_exact("zeros", given.zeros, np.full(given.scales.shape, -0.0, case.scale_dtype))
    assert_exact("words", given.words, np.zeros_like(given.words))


# **Heads.**


def heads(clause: str, settings: Settings) -> Iterator[HeadsCase]:
    for method in METHODS if clause.endswith("C3") else ("mean",):
        for variant in ("negative-zeros", *(() if clause.endswith("C3") else ("either-zero", "cancelling-zeros"))):
            for shape in SHAPES:
                yield HeadsCase(clause, "edge", variant, *shape, method)


def zeros_of_heads(case: HeadsCase) -> F32:
    """Zeros, or numbers and their negatives, in pairs of heads."""
    rng, shape = case.generator(), (case.rows, case.groups, case.heads // case.groups, case.head_dim)
    if case.variant == "negative-zeros":
        return np.full((case.rows, case.heads * case.head_dim), -0.0, np.float32)
    weights = rng.choice((0.0, -0.0, -0.0), shape).astype(np.float32)
    if case.variant == "cancelling-zeros" and shape[2] > 1:
        weights[:, :, -2], weights[:, :, -1] = 3, -3
    return np.ascontiguousarray(weights.reshape(case.rows, -1))


@checks(("pooling.pool/C1", "pooling.pool/C3"), heads)
def test_pooled_zeros(backend: Remote, case: HeadsCase) -> None:
    """Heads of −0 have a mean and a first head of −0; zeros of both signs, and heads that cancel, give +0."""
    weights = zeros_of_heads(case)
    given = pooled(backend, case, weights)
    members = weights.reshape(case.rows, case.groups, -1, case.head_dim)
    negative = (np.signbit(members) & (members == 0)).all(axis=2).reshape(case.rows, -1)
    assert_exact("pooled", given, np.where(negative, np.float32(-0.0), np.float32(0.0)))


# **Totals.**


TOTALS = [(2, blocks, 1, 8) for blocks in (1, 2, 7, 8, 9, 33)]


@checks("bfp.total/C2", grid(BfpCase, "edge", ["zeros-of-sums"], *TOTALS))
def test_a_total_of_zeros(backend: Remote, case: BfpCase) -> None:
    """Blocks of 0 with the greatest and least exponents give +0 and do not change other sums. A sum that underflows
    gives a zero of its sign, unless a zero of the other sign follows."""
    reach = 2 * case.format.reach  # of the sum of two exponents
    sums = np.zeros((2, 3, case.columns), np.int64)
    exponents = np.resize(np.array([reach, -reach, 0, reach], np.int32), sums.shape)
    sums[0, 0, 0], exponents[0, 0, 0] = 5, 0
    sums[0, 1, -1], exponents[0, 1, -1] = -1, -reach
    sums[1, 0, 0], exponents[1, 0, 0] = -1, -reach
    given = backend.run("bfp.total", BlockSums(sums, exponents))
    expected = np.zeros((2, 3), np.float32)
    expected[0, 0], expected[0, 1] = 5, -0.0
    expected[1, 0] = 0.0 if case.columns > 1 else -0.0
    assert_exact("totals", given, expected)
