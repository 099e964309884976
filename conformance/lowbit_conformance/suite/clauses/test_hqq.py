"""Checks of `hqq.codes`, `hqq.step`, `hqq.dequantize` and `hqq.qgemv`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from lowbit.arrays import F32
from lowbit.quantization import hqq, hqq_solver
from lowbit.quantization.hqq import Axis, HqqMatrix
from lowbit.quantization.hqq_numbers import EightBit, Numbers
from lowbit.quantization.packing import BITS, CODES_PER_UNIT, pack
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.suite.bounded import assert_bounded, assert_on_lattice, assert_reference
from lowbit_conformance.suite.cases import Case
from lowbit_conformance.suite.compare import assert_array, assert_equal_values, assert_exact, refuses
from lowbit_conformance.suite.inputs import NON_FINITE
from lowbit_conformance.suite.marking import Record, Settings, chained, checks, grid

STORED = ("float32", "float16", "eight-bit")


@dataclass(frozen=True)
class BlocksCase(Case):
    """A case with blocks of weights, each column a group.

    Attributes:
        bits: width of a code.
        rows: g.
        columns: G.
    """

    bits: int
    rows: int
    columns: int

    @property
    def label(self) -> str:
        return f"b{self.bits}-{self.rows}x{self.columns}"


@dataclass(frozen=True)
class RealZeroCase(BlocksCase):
    """A case with a matrix with real zeros.

    Attributes:
        rows: K.
        columns: N.
        group_size: g.
        axis: 0 or 1.
        scales: how scales and zeros are stored: ``float32``, ``float16`` or ``eight-bit``.
    """

    group_size: int
    axis: Axis
    scales: str

    @property
    def zeros(self) -> str:
        """How zeros are stored: as scales are, but in *mixed* cases in the next way."""
        return STORED[STORED.index(self.scales) + ("mixed" in self.variant) - len(STORED)]

    def parameters(self) -> dict[str, object]:
        return super().parameters() | {"zeros": self.zeros}

    @property
    def label(self) -> str:
        return f"b{self.bits}-{self.rows}x{self.columns}-g{self.group_size}-axis{self.axis}-{self.scales}"


# **Blocks**: codes and steps of the solver.

BLOCKS = ((1, 1), (2, 3), (16, 5), (33, 17), (64, 40), (128, 9), (256, 3), (5, 300))


def blocks(*variants: str) -> Callable[[str, Settings], Iterator[BlocksCase]]:
    def generator(clause: str, settings: Settings) -> Iterator[BlocksCase]:
        for variant in variants:
            for bits in BITS:
                for rows, columns in BLOCKS:
                    yield BlocksCase(clause, "lattice", variant, bits, rows, columns)
                for seed in settings.seeds:
                    rng = np.random.Generator(np.random.PCG64([seed, bits]))
                    rows, columns = (int(size) for size in rng.integers(1, 100, 2))
                    yield BlocksCase(clause, "random", f"{variant}-drawn", bits, rows, columns, seed=seed)

    return generator


Grid = tuple[F32, F32, F32]


def weights_and_grid(case: BlocksCase) -> Grid:
    """Weights, scales and real zeros, such that most weights are on the grid; *large* weights have large errors."""
    rng = case.generator()
    size = 1.0 if "large" in case.variant else 0.02
    weights = rng.standard_t(4, size=(case.rows, case.columns)) * size
    scales = np.exp(rng.normal(0, 0.3, case.columns)) * 4 * size / 2**case.bits
    zeros = 2 ** (case.bits - 1) + rng.normal(size=case.columns)
    if "huge" in case.variant:
        weights[::2] *= 2.0**126
        scales[::2] *= 2.0**-20
    if "ties" in case.variant:  # scale 1 and zero 1/2: every odd multiple of 1/2 is a tie
        weights = rng.integers(-(2**case.bits), 2**case.bits, weights.shape) / 2
        scales, zeros = np.ones(case.columns), np.full(case.columns, 0.5)
    if "odd" in case.variant:  # ties and integer zeros; quotients are exact, but products with a reciprocal are not
        scales, zeros = rng.choice((3, 5, 7, 11), case.columns) / 64, rng.integers(0, 2, case.columns) * 1.0
        weights = weights * scales
    return weights.astype(np.float32), scales.astype(np.float32), zeros.astype(np.float32)


@checks("hqq.codes/C2", blocks("huge"))
@checks("hqq.codes/C1", blocks("ties", "ties-of-odd-scales", "small", "large"))
def test_codes_equal_the_reference(backend: Remote, case: BlocksCase) -> None:
    """Weights on ties, small, large and huge weights whose quotients overflow give the reference's codes."""
    assert_reference(backend, case, "codes", *weights_and_grid(case), case.bits)


@checks("hqq.step/C1", blocks("exact"))
def test_step_on_the_lattice(backend: Remote, case: BlocksCase) -> None:
    """Errors of at most 1/16 are far below the threshold: they shrink to 0, and the zero is an exact mean.

    The mean of g numbers is exact if g is a power of two; the case takes the largest one that fits.
    """
    rng = case.generator()
    rows = 2 ** (case.rows.bit_length() - 1)
    scales = np.exp2(-rng.integers(3, 6, case.columns)).astype(np.float32)
    zeros = (rng.integers(-64, 64 * 2**case.bits, case.columns) / 64).astype(np.float32)
    q = rng.integers(0, 2**case.bits, (rows, case.columns)).astype(np.uint8)
    errors = rng.integers(-16, 17, q.shape) / 32 * scales  # half a step at most
    weights = (scales.astype(np.float64) * (q - zeros.astype(np.float64)) + errors).astype(np.float32)
    arrays = (weights, q, scales, zeros)
    given = backend.run("hqq.step", *arrays, 0.7, 10.0)
    assert_equal_values(given, np.mean(q - weights.astype(np.float64) / scales, axis=0))


NORMS = ((0.7, 10.0), (1.0, 4.0), (0.5, 30.0), (0.7, 12.2))


@checks("hqq.step/C2", blocks("small", "large"))
def test_step_within_the_bound(backend: Remote, case: BlocksCase, record_property: Record) -> None:
    """Errors below and above the threshold, with several norms, stay within the bound."""
    weights, scales, zeros = weights_and_grid(case)
    q = hqq_solver.codes(weights, scales, zeros, case.bits)
    for norm in NORMS:
        assert_bounded(backend, case, record_property, weights, q, scales, zeros, *norm)


STEP_MISTAKES = {
    "p-0": (0.0, 10.0),
    "p-2": (2.0, 10.0),
    "p-nan": (np.nan, 10.0),
    "beta-0": (0.7, 0.0),
    "beta-infinite": (0.7, np.inf),
}
"""p and β."""


@checks("hqq.step/H8", grid(BlocksCase, "edge", STEP_MISTAKES, (4, 6, 5)))
def test_step_refuses(backend: Remote, case: BlocksCase) -> None:
    """A norm or a penalty out of range raises ArgumentError."""
    weights, scales, zeros = weights_and_grid(case)
    q = hqq_solver.codes(weights, scales, zeros, case.bits)
    with refuses():
        backend.run("hqq.step", weights, q, scales, zeros, *STEP_MISTAKES[case.variant])


# **Matrices.**


# Rows, columns, group size and axis: more than a kernel processes at once.
LARGE: tuple[tuple[int, int, int, Axis], ...] = (
    *((512, 7, 64, 1), (64, 300, 32, 1), (288, 90, 40, 0)),
    *((4096, 24, 64, 1), (11008, 9, 64, 1), (4096, 12, 64, 0), (64, 2064, 64, 1)),
)


def matrices(*variants: str) -> Callable[[str, Settings], Iterator[RealZeroCase]]:
    """Both axes with every width and storage; along axis 0 also groups that do not divide N."""

    def generator(clause: str, settings: Settings) -> Iterator[RealZeroCase]:
        tier = "lattice" if clause == "hqq.qgemv/C1" else "random"
        for variant in variants:
            for bits in BITS:
                unit = CODES_PER_UNIT[bits]
                small: tuple[tuple[int, int, int, Axis], ...] = (
                    (unit, 1, unit, 1),
                    (2 * unit, 7, unit // 2, 1),
                    (3 * unit, 16, 3 * unit, 1),
                    (unit, 4, 4, 0),
                    (2 * unit, 9, 6, 0),
                    (unit, 33, 11, 0),
                    (unit, 6, unit, 0),
                )
                for stored in STORED:
                    for rows, columns, size, axis in small:
                        yield RealZeroCase(clause, tier, variant, bits, rows, columns, size, axis, stored)
                for turn, shape in enumerate(LARGE):
                    stored = STORED[(turn + bits) % 3]
                    yield RealZeroCase(clause, tier, f"{variant}-large".lstrip("-"), bits, *shape, stored)
                for seed in settings.seeds:
                    yield _drawn(clause, tier, variant, bits, seed)

    return generator


def _drawn(clause: str, tier: str, variant: str, bits: int, seed: int) -> RealZeroCase:
    rng = np.random.Generator(np.random.PCG64([seed, bits]))
    rows, columns = CODES_PER_UNIT[bits] * int(rng.integers(1, 6)), int(rng.integers(1, 40))
    axis: Axis = 1 if rng.integers(2) else 0
    whole = rows if axis == 1 else rows * columns
    size = int(rng.choice([size for size in range(1, 65) if whole % size == 0]))
    stored = STORED[int(rng.integers(3))]
    return RealZeroCase(
        clause, tier, f"{variant}-drawn".lstrip("-"), bits, rows, columns, size, axis, stored, seed=seed
    )


def random_matrix(case: RealZeroCase) -> tuple[F32, HqqMatrix]:
    """Activations, and random codes with scales over several octaves and zeros inside and outside the range of
    codes."""
    rng = case.generator()
    groups = case.rows * case.columns // case.group_size
    scales = stored(np.exp(rng.normal(-4, 1, groups)), case.scales, rng)
    zeros = stored(rng.uniform(-1, 2**case.bits, groups), case.zeros, rng)
    if case.variant == "subnormal" and isinstance(scales, np.ndarray):
        scales *= np.float32(2.0**-130)
    q = rng.integers(0, 2**case.bits, (case.rows, case.columns)).astype(np.uint8)
    x = rng.normal(size=case.rows).astype(np.float32)
    return x, HqqMatrix(pack(q, case.bits), scales, zeros, case.bits, case.rows, case.group_size, case.axis)


def stored(numbers: np.ndarray[Any, Any], way: str, rng: np.random.Generator) -> Numbers:
    """Numbers above −1 in their stored form; in 8 bits as codes in a few groups."""
    if way != "eight-bit":
        return numbers.astype(way)
    count = len(numbers)
    groups = max(size for size in (1, 2, 3) if count % size == 0)
    codes = rng.integers(1, 256, count).astype(np.uint8)
    return EightBit(codes, np.exp(rng.normal(-4, 1, groups)).astype(np.float16), np.zeros(groups, np.float16) + 0.5)


def exact_matrix(case: RealZeroCase) -> tuple[F32, HqqMatrix]:
    """Scales that are powers of two, zeros in halves and small integer activations: every partial sum is exact."""
    rng = case.generator()
    groups = case.rows * case.columns // case.group_size
    dtypes = ("float16" if way == "float16" else "float32" for way in (case.scales, case.zeros))
    scales: Numbers = np.exp2(-rng.integers(0, 3, groups)).astype(next(dtypes))
    zeros: Numbers = (rng.integers(0, 2 ** (case.bits + 1), groups) / 2).astype(next(dtypes))
    one, half = np.ones(1, np.float32), np.full(1, 0.5, np.float32)
    if case.scales == "eight-bit":
        scales = EightBit(rng.integers(1, 4, groups).astype(np.uint8), half, np.zeros(1, np.float32))
    if case.zeros == "eight-bit":
        zeros = EightBit(rng.integers(0, 2**case.bits, groups).astype(np.uint8), one, half)
    q = rng.integers(0, 2**case.bits, (case.rows, case.columns)).astype(np.uint8)
    x = (rng.integers(1, 4, case.rows) * rng.choice((-1, 1), case.rows)).astype(np.float32)
    return x, HqqMatrix(pack(q, case.bits), scales, zeros, case.bits, case.rows, case.group_size, case.axis)


SMALL = [(4, 16, 6, 8, axis, "float32") for axis in hqq.AXES]


def plain(clause: str, settings: Settings) -> Iterator[Case]:
    cases = matrices("", "mixed")(clause, settings)
    yield from (case for case in cases if "eight-bit" not in (case.scales, case.zeros))
    yield from grid(RealZeroCase, "edge", ["subnormal"], *SMALL)(clause, settings)


def eight_bit(clause: str, settings: Settings) -> Iterator[RealZeroCase]:
    cases = matrices("", "mixed")(clause, settings)
    yield from (case for case in cases if "eight-bit" in (case.scales, case.zeros))


@checks("hqq.dequantize/C3", eight_bit)
@checks("hqq.dequantize/C1", plain)
def test_dequantize(backend: Remote, case: RealZeroCase) -> None:
    """Random codes with scales and zeros in float32, float16 or 8 bits give the reference's weights."""
    assert_reference(backend, case, "weights", random_matrix(case)[1])


@checks("hqq.dequantize/C2", plain)
def test_dequantize_finds_the_group(backend: Remote, case: RealZeroCase) -> None:
    """With codes of 1, zeros of 0 and scale i + 1 for group i, a weight gives its group; this needs no reference."""
    groups = case.rows * case.columns // case.group_size
    ones = pack(np.ones((case.rows, case.columns), np.uint8), case.bits)
    scales, zeros = np.arange(1, groups + 1).astype(np.float32), np.zeros(groups, np.float32)
    matrix = HqqMatrix(ones, scales, zeros, case.bits, case.rows, case.group_size, case.axis)
    given = backend.run("hqq.dequantize", matrix)
    flat = np.arange(case.rows * case.columns)
    group = flat // case.group_size if case.axis == 1 else flat % groups
    expected = np.ascontiguousarray((group + 1).reshape(case.columns, case.rows).T.astype(np.float32))
    assert_exact("weights", given, expected)


@checks("hqq.qgemv/C1", matrices("exact", "exact-mixed"))
def test_qgemv_on_the_lattice(backend: Remote, case: RealZeroCase) -> None:
    """With every partial sum exact, the result equals the reference's, along both axes."""
    assert_on_lattice(backend, case, *exact_matrix(case))


def assert_rows(backend: Remote, rows: F32, matrix: HqqMatrix) -> None:
    """The products of several vectors equal the reference's; partial sums and weights are exact in float32."""
    __tracebackhide__ = True
    given = [backend.run("hqq.qgemv", x, matrix) for x in rows]
    weights = hqq.dequantize(matrix).astype(np.float64)
    for x, result in zip(rows, given, strict=True):
        assert_equal_values(result, x.astype(np.float64) @ weights)


@checks("hqq.qgemv/C2", matrices("", "mixed"))
def test_qgemv_within_the_bound(backend: Remote, case: RealZeroCase, record_property: Record) -> None:
    """Random activations and matrices stay within the bound derived from the declared arithmetic."""
    assert_bounded(backend, case, record_property, *random_matrix(case))


DEEPER = [(4, *shape, "float32") for shape in LARGE]


@checks("hqq.qgemv/C3", chained(*(grid(RealZeroCase, "edge", NON_FINITE, *shapes) for shapes in (SMALL, DEEPER))))
def test_qgemv_passes_non_finite_on(backend: Remote, case: RealZeroCase) -> None:
    """A NaN or an infinity in any row of x reaches every column."""
    for row in (0, case.rows // 2, case.rows - 1):
        x, matrix = random_matrix(case)
        x[row] = NON_FINITE[case.variant]
        given = assert_array("the result", backend.run("hqq.qgemv", x, matrix), np.float32, (case.columns,))
        finite = np.flatnonzero(np.isfinite(given))
        assert len(finite) == 0, f"WRONG: x[{row}] is {x[row]}, and y is finite at columns {finite[:6].tolist()}"
