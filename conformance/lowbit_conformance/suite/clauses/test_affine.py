"""Checks of `affine.quantize` and `affine.dequantize`, all of them exact."""

from collections.abc import Callable, Iterator
from itertools import chain, product
from typing import Any

import numpy as np

from lowbit.arrays import F32
from lowbit.quantization import affine
from lowbit.quantization.affine import CONVENTIONS, SCALE_DTYPES, QuantizedMatrix
from lowbit.quantization.packing import BITS, CODES_PER_UNIT, unpack
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.suite import inputs
from lowbit_conformance.suite.bounded import assert_reference
from lowbit_conformance.suite.cases import MatrixCase, conventions, drawn, edges, systematic
from lowbit_conformance.suite.compare import assert_array, assert_exact, assert_kind, refuses
from lowbit_conformance.suite.marking import Settings, checks, grid


def choices(case: MatrixCase) -> dict[str, Any]:
    """The options of the case."""
    return {name: getattr(case, name) for name in ("bits", "group_size", "convention", "scale_dtype")}


def quantize(backend: Remote, weights: F32, case: MatrixCase) -> QuantizedMatrix:
    """A matrix from the backend, in the form that the case requires."""
    __tracebackhide__ = True
    given = backend.run("affine.quantize", weights, **choices(case))
    matrix = assert_kind("the result", given, QuantizedMatrix)
    for name in ("bits", "rows", "group_size", "convention"):
        mine, right = getattr(matrix, name), getattr(case, name)
        assert mine == right, f"WRONG: {name} is {mine!r}, the specification says {right!r}"
    shape = (-(-case.rows // case.group_size), case.columns)
    assert_array("scales", matrix.scales, case.scale_dtype, shape)
    assert_array("zeros", matrix.zeros, case.scale_dtype if case.convention == "minimum" else np.uint8, shape)
    assert_array("words", matrix.words, np.uint32, (case.rows * case.bits // 32, case.columns))
    return matrix


def expected(weights: F32, case: MatrixCase) -> QuantizedMatrix:
    return affine.quantize(weights, **choices(case))


def assert_quantized(backend: Remote, case: MatrixCase, weights: F32) -> QuantizedMatrix:
    """The backend's matrix, which must equal the reference's."""
    __tracebackhide__ = True
    given = quantize(backend, weights, case)
    assert_same_matrix(given, expected(weights, case), weights)
    return given


def assert_same_matrix(given: QuantizedMatrix, wanted: QuantizedMatrix, weights: F32) -> None:
    """Scales, zeros and codes are bit-identical; scales are compared first, since wrong scales explain wrong codes.

    A zero minimum may have either sign if its group has zeros of both signs: which one is the least is not specified.
    """
    __tracebackhide__ = True
    assert_exact("scales", given.scales, wanted.scales)
    right = wanted.zeros.copy()
    if wanted.convention == "minimum":
        starts = range(0, wanted.rows, wanted.group_size)
        signs = np.signbit(weights) & (weights == 0), ~np.signbit(weights) & (weights == 0)
        both = np.logical_and(*(np.logical_or.reduceat(sign, starts, axis=0) for sign in signs))
        free = both & (right == 0) & (given.zeros == 0)
        right[free] = given.zeros[free]
    assert_exact("zeros", given.zeros, right)
    assert_exact("codes", unpack(given.words, given.bits), unpack(wanted.words, wanted.bits))


# More rows and columns than a kernel processes at once.
LARGE = ((1536, 40, 128), (96, 1100, 32))


def lattice_and_random(clause: str, settings: Settings) -> Iterator[MatrixCase]:
    yield from systematic(clause)
    for turn, (bits, convention, shape) in enumerate(product(BITS, CONVENTIONS, LARGE)):
        scale_dtype = SCALE_DTYPES[(turn // 2 + turn) % 2]
        yield MatrixCase(clause, "lattice", "large", bits, *shape, convention, scale_dtype)
    for rows, columns in ((64, 66000), (28672, 9)):
        yield MatrixCase(clause, "lattice", "large-model", 4, rows, columns, 32, "zero_point", "float16")
    for seed in settings.seeds:
        yield from drawn(clause, "random", seed)
    yield from (case.of(clause) for case in settings.model if not case.vectors)


@checks("affine.quantize/C1", lattice_and_random)
def test_quantize_equals_the_reference(
    backend: Remote, case: MatrixCase, model_matrices: dict[str, QuantizedMatrix]
) -> None:
    """Normal weights of very different columns, and a model's own, give the reference's scales, zeros and codes."""
    rng = case.generator()
    weights = (rng.normal(size=(case.rows, case.columns)) * np.exp(rng.normal(-3, 1, case.columns))).astype(np.float32)
    if case.tier == "model":
        weights = affine.dequantize(model_matrices[case.variant])
    assert_quantized(backend, case, weights)


SPECIAL = (
    "ties",
    "ties-of-odd-scales",
    "positive",
    "negative",
    "tiny",
    "one-outlier",
    "signed-zeros",
    "up-to-zero",
    "some-constant",
)


@checks("affine.quantize/C2", lambda clause, settings: edges(clause, SPECIAL))
def test_quantize_special_weights(backend: Remote, case: MatrixCase) -> None:
    """Ties between two codes, ranges on one side of zero, subnormal ranges and outliers give the reference's codes."""
    assert_quantized(backend, case, special_weights(case))


def special_weights(case: MatrixCase) -> F32:
    """Weights of one kind, K × N."""
    rng = case.generator()
    shape = (case.rows, case.columns)
    if case.variant.startswith("ties"):  # range 2^b − 1, so that the scale is 1 and every half is a tie
        weights = rng.integers(0, 2 ** (case.bits + 1) - 1, shape) / 2
        weights[:: case.group_size], weights[1 :: case.group_size] = 0, 2**case.bits - 1
        if "odd" in case.variant:  # also exact, but not with a reciprocal
            weights *= rng.choice((3, 5, 7, 11), case.columns) / 64
    elif case.variant == "positive":
        weights = rng.uniform(1, 2, shape)
    elif case.variant == "negative":
        weights = rng.uniform(-2, -1, shape)
    elif case.variant == "up-to-zero":  # the range ends at zero itself
        weights = -rng.uniform(0, 2, shape)
        weights[:: case.group_size] = 0
    elif case.variant == "some-constant":  # every third column is constant: below zero, zero or above it
        weights = rng.normal(size=shape)
        weights[:, ::3] = np.resize((-1.5, 0, 2.5), weights[:, ::3].shape[1])
    elif case.variant == "tiny":
        weights = rng.normal(size=shape) * 2.0**-140
    elif case.variant == "one-outlier":
        weights = np.where(np.arange(case.rows)[:, None] == 1, 1e6, rng.normal(size=shape))
    else:
        weights = np.where(rng.integers(0, 2, shape) == 0, -0.0, rng.integers(-1, 2, shape) * 1.0)
    return np.ascontiguousarray(weights, np.float32)


@checks("affine.quantize/C3", lambda clause, settings: edges(clause, ("constant", "zero")))
def test_quantize_constant_groups(backend: Remote, case: MatrixCase) -> None:
    """A constant column is restored exactly under minimum; zeros are restored as zeros under both conventions."""
    row = np.arange(case.columns) - 7 if case.variant == "constant" else np.zeros(case.columns)
    weights = np.ascontiguousarray(np.broadcast_to(row, (case.rows, case.columns)), np.float32)
    given = assert_quantized(backend, case, weights)
    if case.variant == "zero" or case.convention == "minimum":
        assert_exact("weights", affine.dequantize(given), weights)
        assert_exact("scales", given.scales, np.ones_like(given.scales))


@checks("affine.quantize/C4", lambda clause, settings: systematic(clause))
def test_quantize_groups_are_runs_of_rows(backend: Remote, case: MatrixCase) -> None:
    """Weights on the points of a lattice of powers of two are restored exactly, group by group.

    This needs no reference: the first two rows of a group span its range, so the scale is known beforehand.
    """
    rng = case.generator()
    scales = np.exp2(rng.integers(-3, 4, (-(-case.rows // case.group_size), case.columns)))
    each = np.repeat(scales, case.group_size, axis=0)[: case.rows]
    codes = rng.integers(0, 2**case.bits, each.shape)
    within = np.arange(case.rows) % case.group_size
    codes[within == 0], codes[within == 1] = 0, 2**case.bits - 1
    weights = (each * codes).astype(np.float32)
    given = quantize(backend, weights, case)
    assert_exact("weights", affine.dequantize(given), weights)
    ranged = np.array([case.rows - start > 1 for start in range(0, case.rows, case.group_size)]) & (case.group_size > 1)
    assert_exact("scales of groups with a range", given.scales[ranged], scales.astype(case.scale_dtype)[ranged])


WRONG_WEIGHTS: dict[str, Callable[[F32], F32]] = {
    "rows": lambda weights: weights[:-1].copy(),
    "overflow": lambda weights: np.where(weights > 0, np.float32(3e38), np.float32(-3e38)),
}


WRONG_SHAPES = [(bits, 2 * CODES_PER_UNIT[bits], 3, 3) for bits in BITS]


@checks("affine.quantize/H8", grid(MatrixCase, "edge", WRONG_WEIGHTS, *WRONG_SHAPES))
def test_quantize_refuses(backend: Remote, case: MatrixCase) -> None:
    """Rows that are not whole units, and a range that overflows, raise ArgumentError."""
    weights = case.generator().normal(size=(case.rows, case.columns)).astype(np.float32)
    with refuses():
        backend.run("affine.quantize", WRONG_WEIGHTS[case.variant](weights), bits=case.bits, group_size=case.group_size)


def of_convention(clause: str, settings: Settings) -> Iterator[MatrixCase]:
    cases = chain(lattice_and_random(clause, settings), edges(clause, ("subnormal-weights",)))
    yield from (case for case in cases if case.convention in conventions(clause))


@checks(("affine.dequantize/C1", "affine.dequantize/C2"), of_convention)
def test_dequantize(backend: Remote, case: MatrixCase, model_matrices: dict[str, QuantizedMatrix]) -> None:
    """Random codes, scales and zeros, and those of a model, give the reference's float32 weights."""
    matrix = model_matrices[case.variant] if case.tier == "model" else inputs.random(case)[1]
    if case.variant == "subnormal-weights":
        matrix.scales[...] *= np.float32(2.0**-130)
        if case.convention == "minimum":
            matrix.zeros[...] *= np.float32(2.0**-130)
    assert_reference(backend, case, "weights", matrix)


WIDENED = [(bits, 2 * unit, 9, 2 * unit - 1, "minimum", "float16") for bits, unit in CODES_PER_UNIT.items()]


@checks("affine.dequantize/C3", grid(MatrixCase, "edge", ["float16-limits"], *WIDENED))
def test_dequantize_widens_first(backend: Remote, case: MatrixCase) -> None:
    """Scales and minima at the ends of the range of float16, including subnormals, are widened before
    multiplication."""
    _, matrix = inputs.random(case)
    matrix.scales[...] = np.resize(np.array([65504, 2**-24, 2**-14], np.float16), matrix.scales.shape)
    matrix.zeros[...] = np.resize(np.array([-65504, 2**-24, 0, -(2**-14)], np.float16), matrix.zeros.shape)
    assert_reference(backend, case, "weights", matrix)
