r"""What the cases are run on: lattice, edge and random matrices and activations.

**Lattice.** Scales are powers of two, zeros and activations are small integers. Then every product and every partial
sum of every form (dequantised, factored, offset), in any order, is a multiple of the least scale; and it stays below
:math:`2^{24}` times that scale, so that float32 holds it exactly. A correct kernel has no freedom left: the result is
equal, and one wrong index, one dropped product or one swapped code shows.

A product that is zero could be dropped unseen, so the *dense* lattice keeps every activation, every code and every
difference of code and zero away from zero; the *full* lattice uses all codes.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from lowbit.arrays import F32, F64, I64
from lowbit.errors import ArgumentError
from lowbit.quantization.affine import QuantizedMatrix, Scales
from lowbit.quantization.packing import Codes
from lowbit_conformance.packing import pack
from lowbit_conformance.suite.cases import MatrixCase

FLOAT32_INTEGERS = 2**24


def build(case: MatrixCase, codes: Codes, scales: Scales, zeros: F64) -> QuantizedMatrix:
    """A matrix in the convention of the case with the value ``scale * (code - zero)``.

    Under ``zero_point`` zeros are codes; under ``minimum`` they are real numbers of both signs.
    """
    stored = scales.astype(case.scale_dtype)
    if case.convention == "minimum":
        offsets = (-stored.astype(np.float64) * zeros).astype(case.scale_dtype)
    else:
        offsets = zeros.astype(np.uint8)
    words = pack(codes, case.bits)
    return QuantizedMatrix(words, stored, offsets, case.bits, case.rows, case.group_size, case.convention)


def lattice(case: MatrixCase, *, dense: bool, sparse: bool = False) -> tuple[F32, QuantizedMatrix]:
    """Activations (max(1, T) × K) and a matrix, such that every partial sum is exact in float32.

    With `sparse` only the activations of a few rows (`live_rows`) are nonzero. Products with zero add nothing to a sum
    in any order, so sums are those of the live rows alone, and codes of 8 bits fit at any K.

    Minima are odd multiples of half a scale, of both signs. They equal no zero-point and cancel no code, so a product
    is never zero under ``minimum``.
    """
    rng = case.generator()
    top = 2**case.bits - 1
    halves = 2 if case.convention == "minimum" else 1
    live = live_rows(case.rows) if sparse else np.arange(case.rows)
    # The largest sum of magnitudes is K times twice the top code, in units of the least scale and activation.
    room = FLOAT32_INTEGERS // (len(live) * 2 * top * halves)
    if room < 1:
        raise ArgumentError("rows", case.rows, f"at most {FLOAT32_INTEGERS // (2 * top * halves)} for an exact lattice")
    amplitude, octaves = (3, 2) if room >= 12 else (1, 1) if room >= 2 else (1, 0)
    shape = (-(-case.rows // case.group_size), case.columns)
    scales = np.exp2(-rng.integers(0, octaves + 1, shape))
    if case.convention == "minimum":
        zeros: F64 = rng.integers(-top, top, shape).astype(np.float64) + 0.5
    else:
        zeros = rng.integers(0, top + 1, shape).astype(np.float64)
    x = rng.integers(1, amplitude + 1, (max(1, case.vectors), case.rows)) * rng.choice((-1, 1), case.rows)
    if dense:
        zero = np.repeat(zeros, case.group_size, axis=0)[: case.rows]
        codes = rng.integers(1, top, zero.shape)  # one value fewer than 1 … top, then skip the zero
        codes += (codes >= zero) & (zero >= 1)
    else:
        codes = rng.integers(0, top + 1, (case.rows, case.columns))
        x *= rng.integers(0, 2, x.shape)
    x[:, np.setdiff1d(np.arange(case.rows), live)] = 0
    return x.astype(np.float32), build(case, codes.astype(np.uint8), scales, zeros)


def live_rows(rows: int) -> I64:
    """The rows at both ends and on both sides of every power of two, and some between."""
    powers = 2 ** np.arange(4, 31)
    near = np.concatenate([[0, 1, rows - 2, rows - 1], powers - 1, powers, np.arange(0, rows, rows // 23 + 1)])
    return np.unique(near[near < rows]).astype(np.int64)


def random_zeros(case: MatrixCase, rng: np.random.Generator) -> F64:
    """Typical zeros: codes, or real numbers from below the codes to above them."""
    shape, top = (-(-case.rows // case.group_size), case.columns), 2**case.bits - 1
    if case.convention == "minimum":
        return rng.uniform(-top / 2, 1.5 * top, shape)
    return rng.integers(0, top + 1, shape).astype(np.float64)


def random(case: MatrixCase) -> tuple[F32, QuantizedMatrix]:
    """Typical activations (max(1, T) × K) and matrix: normal activations, scales over several octaves."""
    rng = case.generator()
    codes = rng.integers(0, 2**case.bits, (case.rows, case.columns)).astype(np.uint8)
    zeros = random_zeros(case, rng)
    scales = np.exp(rng.normal(-4, 1, zeros.shape))
    x = rng.normal(size=(max(1, case.vectors), case.rows)) * np.exp(rng.normal(0, 1, case.rows))
    return x.astype(np.float32), build(case, codes, scales, zeros)


HALF_SUBNORMAL = "subnormal-half-scales"
SUBNORMAL_RESULT = "subnormal-result"
EDGES = (
    "zero-x",
    "one-hot-first",
    "one-hot-last",
    "one-hot-group",
    "cancelling",
    "huge",
    "subnormal-x",
    SUBNORMAL_RESULT,
    "top-codes",
    "zero-weights",
    HALF_SUBNORMAL,
)


def edge(case: MatrixCase) -> tuple[F32, QuantizedMatrix]:
    """Inputs that arithmetic treats specially, chosen by the variant of the case; x is max(1, T) × K."""
    x, matrix = random(case)
    boundary = case.group_size % case.rows
    if case.variant == "zero-x":
        x[:] = 0
    elif case.variant.startswith("one-hot"):
        row = {"one-hot-first": 0, "one-hot-last": case.rows - 1, "one-hot-group": boundary}[case.variant]
        x[:] = np.where(np.arange(case.rows) == row, x[:, row : row + 1], 0)
    elif case.variant == "cancelling":
        x[:] = 1 + np.abs(x[:, :1])
        x[:, 1::2] *= -1
    elif case.variant == "huge":
        x *= np.float32(2.0**90)
    elif case.variant == "subnormal-x":
        x *= np.float32(2.0**-140)
    elif case.variant == SUBNORMAL_RESULT:
        x *= np.float32(2.0**-70)
        matrix = _with(case, matrix, scales=matrix.scales * np.float32(2.0**-70))
    elif case.variant == "top-codes":
        matrix = _with(case, matrix, codes=np.full((case.rows, case.columns), 2**case.bits - 1, np.uint8))
    elif case.variant == "zero-weights":
        zeros = np.ones(matrix.scales.shape)
        matrix = _with(case, matrix, codes=np.ones((case.rows, case.columns), np.uint8), zeros=zeros)
    elif case.variant == HALF_SUBNORMAL:  # subnormal in float16, below 2^-14; simple conversions flush them
        steps = case.generator().integers(1, 500, matrix.scales.shape)
        matrix = _with(case, matrix, scales=np.ldexp(steps.astype(np.float16), -24))
    return x, matrix


def _with(
    case: MatrixCase,
    matrix: QuantizedMatrix,
    codes: Codes | None = None,
    scales: Scales | None = None,
    zeros: F64 | None = None,
) -> QuantizedMatrix:
    """The matrix of a case with some parts replaced."""
    rng = case.generator()
    if codes is None:
        codes = rng.integers(0, 2**case.bits, (case.rows, case.columns)).astype(np.uint8)
    if zeros is None:
        zeros = random_zeros(case, rng)
    return build(case, codes, matrix.scales if scales is None else scales, zeros)


NON_FINITE = {"nan": np.nan, "infinity": np.inf, "minus-infinity": -np.inf}


def in_turn(shape: tuple[int, ...], rows: Sequence[tuple[float, ...]]) -> Iterator[list[F32]]:
    """Arrays of a shape that are filled with rows of numbers in turn, one number of a row in each array, so that they
    reach both a kernel's whole registers and its remainders."""
    size, width = int(np.prod(shape)), len(rows[0])
    for first in range(0, len(rows), max(1, size // 2)):
        some = np.resize(np.array([*rows[first:], *rows[:first]], np.float32), (size, width))
        yield [np.ascontiguousarray(part).reshape(shape) for part in some.T]
