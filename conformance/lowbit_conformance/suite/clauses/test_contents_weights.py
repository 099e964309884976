"""Checks of special contents of weights, their scales and zeros, and of blocks (`lowbit_conformance.suite.contents`).

Beside these, weights whose scale overflows the dtype in which it is stored or vanishes in it, whose range ends at zero
or holds it in its middle; zeros far outside the codes; matrices of one code, one scale, one zero.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

import numpy as np

from lowbit.arrays import F32, F64
from lowbit.errors import ArgumentError
from lowbit.quantization import bfp, bfp_dot, gptq, hqq, hqq_solver
from lowbit.quantization.affine import CONVENTIONS, QuantizedMatrix
from lowbit.quantization.hqq import HqqMatrix
from lowbit.quantization.packing import BITS, CODES_PER_UNIT, pack
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.suite import inputs
from lowbit_conformance.suite.bounded import assert_bounded, assert_reference
from lowbit_conformance.suite.cases import MatrixCase, conventions
from lowbit_conformance.suite.clauses import test_affine, test_bfp, test_gptq, test_hqq, test_linear
from lowbit_conformance.suite.clauses.test_bfp import BfpCase
from lowbit_conformance.suite.clauses.test_gptq import LayerCase
from lowbit_conformance.suite.clauses.test_hqq import BlocksCase, RealZeroCase
from lowbit_conformance.suite.compare import assert_exact, refuses
from lowbit_conformance.suite.contents import CONTENTS, filled
from lowbit_conformance.suite.marking import Record, Settings, chained, checks, grid

TIER = "exhaustive"

# **Quantising.**

RANGES = {
    "scale-at-the-end": 65504.0,
    "scale-just-past-the-end": 65520.0,
    "scale-past-the-end": 1e6,
    "scale-vanishes-in-half": 2.0**-26,
    "scale-subnormal-in-half": 2.0**-20,
    "scale-least-of-half": 2.0**-25 * 1.01,
    "scale-vanishes": 2.0**-150,
    "scale-subnormal": 2.0**-140,
    "scale-huge": 2.0**119,
    "range-huge": 2.0**126,
}
"""The scale of the range of every group; for the last entry, the range itself."""

ENDS = {
    "ends-at-zero": (-1.0, 0.0),
    "begins-at-zero": (0.0, 1.0),
    "about-zero": (-0.5, 0.5),
    "constant-groups": (0.7, 0.7),
    "minimum-past-half": (-7e4, -6.9e4),
    "minimum-at-the-end-of-half": (-65504.0, -65000.0),
    "far-from-zero": (1e4, 1e4 + 1),
}


def ranged(case: MatrixCase) -> F32:
    """K × N weights whose groups have the range of the variant, or half of it in every second column."""
    rng, kind = case.generator(), case.variant
    low, high = ENDS.get(kind, (-0.25, 0.75))
    size = RANGES.get(kind, 1.0) * (2**case.bits - 1 if kind.startswith("scale") else 1)
    weights = rng.uniform(low, high, (case.rows, case.columns))
    weights[:: case.group_size], weights[1 :: case.group_size] = low, high
    weights = np.clip(weights * size, low * size, high * size)
    if kind in RANGES and not kind.startswith(("scale-past", "scale-just")):
        weights[:, 1::2] /= 2
    return np.ascontiguousarray(weights, np.float32)


def weights_cases(clause: str, settings: Settings) -> Iterator[MatrixCase]:
    """Every range and contents with every width, convention and dtype of scales."""
    for variant, bits, convention in product((*RANGES, *ENDS, *CONTENTS), BITS, CONVENTIONS):
        rows = 2 * CODES_PER_UNIT[bits]
        for dtype in ("float32", "float16"):
            if variant in CONTENTS and (bits + len(variant)) % 2 == (dtype == "float16"):
                continue
            yield MatrixCase(clause, TIER, variant, bits, rows, 5, rows // 2, convention, dtype)


def weights_of(case: MatrixCase) -> F32:
    if case.variant in CONTENTS:
        return filled(case.variant, case.generator().normal(size=(case.rows, case.columns)).astype(np.float32))
    return ranged(case)


@checks("affine.quantize/C2", weights_cases)
def test_quantised(backend: Remote, case: MatrixCase) -> None:
    """The reference's scales, zeros and codes, or refusal of a range that the stored dtype cannot hold."""
    weights = weights_of(case)
    try:
        given = test_affine.quantize(backend, weights, case)
    except ArgumentError:
        with refuses():
            test_affine.expected(weights, case)
        return
    try:
        wanted = test_affine.expected(weights, case)
    except ArgumentError as refusal:
        raise AssertionError(f"WRONG: weights were quantised that must be refused: {refusal}") from None
    test_affine.assert_same_matrix(given, wanted, weights)


# **Matrices.**

Change = Callable[[MatrixCase, QuantizedMatrix], QuantizedMatrix]


def all_zeros(number: int) -> Change:
    """Equal zero-points or minima: a code, or that number of scales."""

    def change(case: MatrixCase, matrix: QuantizedMatrix) -> QuantizedMatrix:
        code = min(number, 2**case.bits - 1)
        offset = code if case.convention == "zero_point" else -code * matrix.scales[0, 0]
        return replace(matrix, zeros=np.full_like(matrix.zeros, offset))

    return change


def codes(number: int) -> Change:
    def change(case: MatrixCase, matrix: QuantizedMatrix) -> QuantizedMatrix:
        every = np.full((case.rows, case.columns), min(number, 2**case.bits - 1), np.uint8)
        return replace(matrix, words=pack(every, case.bits))

    return change


def scaled(power: int) -> Change:
    def change(case: MatrixCase, matrix: QuantizedMatrix) -> QuantizedMatrix:
        factor = np.float32(2.0**power)
        minima = matrix.zeros * factor if case.convention == "minimum" else matrix.zeros
        return replace(matrix, scales=matrix.scales * factor, zeros=minima)

    return change


MATRICES: dict[str, Change] = {
    "no-codes": codes(0),
    "codes-of-1": codes(1),
    "top-codes": codes(255),
    "zeros-0": all_zeros(0),
    "zeros-1": all_zeros(1),
    "zeros-top": all_zeros(255),
    "zeros-middle": lambda case, matrix: all_zeros(2 ** (case.bits - 1))(case, matrix),
    "equal-scales": lambda case, matrix: replace(matrix, scales=np.full_like(matrix.scales, 0.125)),
    "scales-of-1": lambda case, matrix: replace(matrix, scales=np.ones_like(matrix.scales)),
    "huge-scales": scaled(110),
    "large-scales": scaled(60),
    "small-scales": scaled(-60),
    "far-apart-scales": lambda case, matrix: replace(
        matrix, scales=matrix.scales * np.resize(np.array([1, 2.0**30, 2.0**-30], np.float32), matrix.scales.shape)
    ),
    "positive-zeros": lambda case, matrix: replace(matrix, zeros=np.abs(matrix.zeros)),
}


def matrix_cases(clause: str, settings: Settings) -> Iterator[MatrixCase]:
    """Every kind with every width and convention, and with each contents of activations if there are any."""
    wide = clause.startswith("linear.qgemm/")
    for variant, bits, convention in product(MATRICES, BITS, conventions(clause)):
        for rows, groups, columns in ((2, 1, 9), (8, 3, 16)):
            sizes = (rows * CODES_PER_UNIT[bits], columns, -(-rows * CODES_PER_UNIT[bits] // groups))
            vectors = 3 if wide else 0
            yield MatrixCase(clause, TIER, variant, bits, *sizes, convention, vectors=vectors)
    if clause.startswith("linear."):
        for turn, variant in enumerate(CONTENTS):
            bits = BITS[turn % 4]
            sizes = (4 * CODES_PER_UNIT[bits], 17, 2 * CODES_PER_UNIT[bits])
            for convention in CONVENTIONS:
                vectors = 4 if wide else 0
                yield MatrixCase(clause, TIER, f"x-{variant}", bits, *sizes, convention, vectors=vectors)


def drawn(case: MatrixCase) -> tuple[F32, QuantizedMatrix]:
    x, matrix = inputs.random(case)
    if case.variant in MATRICES:
        return x, MATRICES[case.variant](case, matrix)
    return filled(case.variant.removeprefix("x-"), x), matrix


@checks(("affine.dequantize/C1", "affine.dequantize/C2"), matrix_cases)
def test_dequantised(backend: Remote, case: MatrixCase) -> None:
    """Matrices with a single code, scale or zero, and with huge or tiny scales, give the reference's weights."""
    assert_reference(backend, case, "weights", drawn(case)[1])


@checks(("linear.qgemv/C2", "linear.qgemm/C2"), matrix_cases)
def test_products(backend: Remote, case: MatrixCase, record_property: Record) -> None:
    """Special matrices and activations stay within the bound."""
    test_linear.assert_rows_bounded(backend, case, record_property, *drawn(case))


# **Real zeros.**

ZEROS: dict[str, Callable[[F64, int], F64]] = {
    "below": lambda z, top: -2 - np.abs(z),
    "above": lambda z, top: top + 2 + np.abs(z),
    "far-below": lambda z, top: -3000 - z,
    "far-above": lambda z, top: 3000 + z,
    "all-equal": lambda z, top: np.full_like(z, 0.5),
    "all-0": lambda z, top: np.zeros_like(z),
    "negative-0": lambda z, top: np.full_like(z, -0.0),
    "codes": lambda z, top: 1 + np.rint(np.abs(z)) % top,
}
SCALES: dict[str, Callable[[F64], F64]] = {
    "scales-equal": lambda s: np.full_like(s, 0.25),
    "scales-far-apart": lambda s: s * np.resize((1.0, 2.0**12, 2.0**-12), s.shape),
    "scales-large": lambda s: s * 2.0**10,
}


STORED = [(bits, 64, 12, 32, axis, dtype) for bits, axis, dtype in product(BITS, hqq.AXES, ("float32", "float16"))]
real_zeros = grid(RealZeroCase, TIER, (*ZEROS, *SCALES), *STORED)


def real_zero_matrix(case: RealZeroCase) -> tuple[F32, HqqMatrix]:
    rng, top = case.generator(), 2**case.bits - 1
    groups = case.rows * case.columns // case.group_size
    zeros, scales = rng.normal(size=groups), np.exp(rng.normal(-3, 0.5, groups))
    if case.variant in ZEROS:
        zeros = ZEROS[case.variant](zeros, top)
    else:
        scales = SCALES[case.variant](scales)
    words = pack(rng.integers(0, top + 1, (case.rows, case.columns)).astype(np.uint8), case.bits)
    stored = scales.astype(case.scales), zeros.astype(case.scales)
    x = rng.normal(size=case.rows).astype(np.float32)
    return x, HqqMatrix(words, *stored, case.bits, case.rows, case.group_size, case.axis)


@checks("hqq.dequantize/C1", real_zeros)
def test_real_zeros_dequantised(backend: Remote, case: RealZeroCase) -> None:
    """Zeros outside the range of codes, equal zeros and integer zeros give the reference's weights."""
    assert_reference(backend, case, "weights", real_zero_matrix(case)[1])


@checks("hqq.qgemv/C2", real_zeros)
def test_real_zeros_multiplied(backend: Remote, case: RealZeroCase, record_property: Record) -> None:
    """The products with such matrices stay within the bound."""
    assert_bounded(backend, case, record_property, *real_zero_matrix(case))


def solver_cases(clause: str, settings: Settings) -> Iterator[BlocksCase]:
    """Every kind of zeros and scales, and every contents of weights."""
    for turn, variant in enumerate((*ZEROS, *SCALES, *CONTENTS)):
        for rows, columns in ((16, 5), (64, 32)):
            yield BlocksCase(clause, TIER, variant, BITS[turn % 4], rows, columns)


def solved(case: BlocksCase) -> tuple[F32, F32, F32]:
    weights, scales, zeros = test_hqq.weights_and_grid(replace(case, variant="small"))
    if case.variant in ZEROS:
        zeros = ZEROS[case.variant](zeros.astype(np.float64), 2**case.bits - 1).astype(np.float32)
    elif case.variant in SCALES:
        scales = SCALES[case.variant](scales.astype(np.float64)).astype(np.float32)
    else:
        weights = filled(case.variant, weights)
    return weights, scales, zeros


@checks("hqq.codes/C1", solver_cases)
def test_codes(backend: Remote, case: BlocksCase) -> None:
    """Special weights, scales and zeros give the reference's codes."""
    assert_reference(backend, case, "codes", *solved(case), case.bits)


@checks("hqq.step/C2", solver_cases)
def test_steps(backend: Remote, case: BlocksCase, record_property: Record) -> None:
    """A solver step on such inputs stays within its bound; weights on the grid leave no error."""
    weights, scales, zeros = solved(case)
    q = hqq_solver.codes(weights, scales, zeros, case.bits)
    on_grid = (scales * (q - zeros)).astype(np.float32)
    for own, p, beta in ((weights, 0.7, 10.0), (on_grid, 0.7, 10.0), (weights, 1.0, 80.0)):
        assert_bounded(backend, case, record_property, own, q, scales, zeros, p, beta)


# **Factors.**

FACTORS: dict[str, Callable[[F64], F64]] = {
    "normal": lambda h: h,
    "identity": lambda h: np.eye(len(h)),
    "diagonal": lambda h: np.diag(np.diagonal(h)),
    "equal-beside": lambda h: np.diag(np.full(len(h), 2.0)) + 0.5,
    "dead-input": lambda h: np.where(np.eye(len(h)) > 0, h, h * np.outer(*[np.arange(len(h)) != len(h) // 2] * 2)),
    "far-apart": lambda h: h * np.outer(*[np.resize((2.0**20, 1.0, 2.0**-15), len(h))] * 2),
    "huge": lambda h: h * 2.0**80,
    "tiny": lambda h: h * 2.0**-80,
    "one-block": lambda h: h * np.kron(np.eye(2), np.ones([len(h) // 2] * 2)),
}


SMALL = [(rows, 2 * rows, dtype) for rows, dtype in product((6, 34), ("float32", "float64"))]
LARGE = ((192, 300), (256, 300))


@checks("gptq.factor/C2", chained(grid(LayerCase, TIER, FACTORS, *SMALL), grid(LayerCase, TIER, ["normal"], *LARGE)))
def test_factors(backend: Remote, case: LayerCase, record_property: Record) -> None:
    """Diagonal Hessians, dead inputs, pivots far apart, huge and tiny ones stay within the bound."""
    x = case.generator().normal(size=(case.columns, case.rows)).astype(np.float32)
    wide = FACTORS[case.variant](gptq.damped(gptq.hessian(x), 0.01))
    hessian = np.ascontiguousarray(np.triu(wide) + np.triu(wide, 1).T, case.dtype)
    test_gptq.assert_factor(backend, case, hessian, record_property)


# **Blocks.**


FORMATS = ((32, 4), (16, 8), (4, 12))
"""Block and mantissa."""


def block_cases(clause: str, settings: Settings) -> Iterator[BfpCase]:
    for turn, variant in enumerate(CONTENTS):
        for block, mantissa in FORMATS:
            yield BfpCase(clause, TIER, variant, 2 + turn % 3, block * (1 + turn % 2), block, mantissa)


KINDS = ("zero-mantissas", "top-mantissas", "equal-exponents", "falling-exponents", "negative")
one_kind = grid(BfpCase, TIER, KINDS, *((3, 6 * block, block, mantissa) for block, mantissa in FORMATS))


def special_blocks(case: BfpCase) -> bfp.Blocks:
    some = test_bfp.blocks(case)
    mantissas, exponents = some.mantissas.copy(), some.exponents.copy()
    if case.variant == "zero-mantissas":
        mantissas[...] = 0
    elif case.variant == "top-mantissas":
        mantissas[...] = case.format.top
    elif case.variant == "negative":
        mantissas = -np.abs(mantissas)
    else:
        exponents[...] = 0 if case.variant == "equal-exponents" else -np.arange(exponents.shape[1])
    return bfp.Blocks(mantissas, exponents, case.format)


@checks("bfp.cast/C1", block_cases)
def test_casts(backend: Remote, case: BfpCase) -> None:
    """Rows of special contents give the reference's blocks."""
    x = filled(case.variant, case.generator().normal(size=(case.rows, case.columns)).astype(np.float32))
    test_bfp.assert_casts(backend, x, case.format)


@checks("bfp.decode/C1", one_kind)
def test_decodes(backend: Remote, case: BfpCase) -> None:
    """Mantissas that are all zero or all the largest, and equal or descending exponents, give the reference's
    values."""
    assert_reference(backend, case, "values", special_blocks(case))


@checks("bfp.dot/C1", one_kind)
def test_dots(backend: Remote, case: BfpCase) -> None:
    """Products of such blocks with themselves give the reference's sums."""
    some = special_blocks(case)
    given, wanted = test_bfp.dotted(backend, some, some), bfp_dot.dot(some, some)
    assert_exact("sums", given.sums, wanted.sums)


@checks("bfp.total/C1", one_kind)
def test_totals(backend: Remote, case: BfpCase) -> None:
    """Totals of such sums are the reference's."""
    some = special_blocks(case)
    assert_reference(backend, case, "totals", bfp_dot.dot(some, some))
