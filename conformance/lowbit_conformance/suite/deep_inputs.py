r"""Inputs that show how precisely a deep product is computed: many rows, few of which count, each with many bits.

A dense lattice of 4096 rows leaves an activation two bits and a scale one, because thousands of products must have an
exact sum. Operands of two bits survive any rounding: TF32 keeps 11 significant bits, half 11 and bfloat16 8. So here
all but a few rows are multiplied by an activation of 0, and the room that this leaves goes to the bits of what remains.

**Room.** Let :math:`m` activations of magnitude at most :math:`A` meet weights :math:`s (q - z)` or :math:`s q + o`,
with :math:`s` an integer of magnitude :math:`S` times a power of two. Every partial sum of every form is a multiple of
that power of two and of magnitude at most

.. math:: m \cdot A \cdot 2 S (2^b - 1) \;<\; 2^{24},

so float32 holds it, whatever the order. In *activations* :math:`A` takes all of the room and scales are powers of two;
in *scales* :math:`S` does, and so do the minima; in *sums* activations are 1 beside a power of two, each of which half
precision holds, while their sums need 13 bits and more. In *subnormal* activations are integers times the least
subnormal number, and so is everything that comes of them.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from lowbit.arrays import F32, F64, I64, Array
from lowbit.linear.linear import group_offsets
from lowbit.quantization.affine import CONVENTIONS, QuantizedMatrix
from lowbit.quantization.hqq import Axis, HqqMatrix
from lowbit.quantization.hqq_numbers import EightBit
from lowbit.quantization.packing import BITS
from lowbit_conformance.packing import pack, unpack
from lowbit_conformance.suite.cases import GROUPS_IN_USE, MatrixCase
from lowbit_conformance.suite.inputs import FLOAT32_INTEGERS

SHAPES = ((1024, 9, 64), (4096, 7, 128), (11008, 5, 11008))
"""K, N and the group size."""

WIDE = ((1024, 1100, 64), (96, 1500, 32))
TALL = (33, 131)
"""Numbers of columns and of rows of x for which kernels switch to another path; other cases with these have operands of
two bits."""

WIDTHS = {"activations": (3, 4), "scales": (3, 4), "sums": (8, 1), "subnormal": (3, 1)}
"""For each kind, the number of nonzero activations in a row, and how far apart the scales of groups are."""

KINDS = tuple(WIDTHS)
LEAST_SUBNORMAL, LEAST_HALF = 2.0**-149, 2.0**-24


def matrices(clause: str, tier: str = "lattice") -> Iterator[MatrixCase]:
    """Each kind at every K with every width and convention, and with common group sizes; few have many columns or rows
    of x.

    With the common group sizes, *scales* also has scales below the least normal number of float16.
    """
    wide = clause.startswith("linear.qgemm")
    for kind in KINDS:
        for bits in BITS:
            for convention in CONVENTIONS:
                for shape in SHAPES:
                    yield MatrixCase(clause, tier, f"deep-{kind}", bits, *shape, convention, vectors=8 * wide)
        for convention in CONVENTIONS:
            for size in GROUPS_IN_USE:
                yield MatrixCase(clause, tier, f"deep-{kind}", 4, 2048, 6, size, convention, "float16", 8 * wide)
    for convention in CONVENTIONS:
        for size in GROUPS_IN_USE:
            yield MatrixCase(clause, tier, "deep-subnormal-scales", 4, 2048, 6, size, convention, "float16", 8 * wide)
        for kind in ("activations", "scales"):
            for shape in WIDE:
                yield MatrixCase(clause, tier, f"wide-{kind}", 4, *shape, convention, vectors=8 * wide)
            for vectors in TALL if wide else ():
                for bits in BITS:
                    yield MatrixCase(clause, tier, f"tall-{kind}", bits, 256, 33, 64, convention, vectors=vectors)
            for vectors in TALL if wide else ():
                for size in GROUPS_IN_USE:
                    shape = (256, 33, size)
                    yield MatrixCase(clause, tier, f"tall-{kind}", 4, *shape, convention, "float16", vectors)


def places(rows: int, count: int, vectors: int) -> list[I64]:
    """The nonzero places of each row of x: neighbours at the start, in the middle and at the end, then anywhere."""
    step = np.arange(count)
    spread = step * (rows // count)
    found = [step[:1], rows - 1 - step[:1], step, rows - 1 - step, rows // 2 - count // 2 + step, spread]
    found += [rows - 1 - spread, (rows // 3 + 7 * step) % rows]
    return [np.sort(found[number % len(found)]) for number in range(vectors)]


def odd(rng: np.random.Generator, largest: int, size: Any) -> I64:
    """Odd integers of as many bits as fit, of both signs."""
    least = max(1, largest // 2 + 1)
    found: I64 = (rng.integers(least, largest + 1, size) - 1) | 1
    found *= rng.choice((-1, 1), size)
    return found


def activations(kind: str, rng: np.random.Generator, rows: int, vectors: int, largest: int) -> F32:
    """Activations, T × K, nearly all zeros; `largest` is the largest allowed magnitude."""
    x = np.zeros((vectors, rows))
    for row, place in zip(x, places(rows, WIDTHS[kind][0], vectors), strict=True):
        if kind == "sums":
            row[place] = np.resize((2 ** (largest.bit_length() - 1), 1, -1, 1), len(place))
        else:
            row[place] = odd(rng, largest, len(place))
    return x.astype(np.float32)


def lattice(case: MatrixCase) -> tuple[F32, QuantizedMatrix]:
    """Eight or more rows of activations and a matrix, such that every partial sum is exact in float32."""
    rng, kind, top = case.generator(), case.variant.partition("-")[2], 2**case.bits - 1
    tiny, kind = kind == "subnormal-scales", kind.removeprefix("subnormal-")
    count, apart = (3, 1) if tiny else WIDTHS[kind]
    shape = (-(-case.rows // case.group_size), case.columns)
    room = FLOAT32_INTEGERS // (count * apart * 2 * top)
    significand, amplitude = 1, room
    most = 2**11 - 1 if case.scale_dtype == "float16" else FLOAT32_INTEGERS  # what a stored number can hold
    if kind == "scales":
        amplitude, significand = 1, min(room, 2**10 - 1 if tiny else most)
    elif kind == "sums":
        amplitude = min(room, 2**12)
    octaves = apart.bit_length() - 1
    scales = np.abs(odd(rng, significand, shape)) * np.exp2(-rng.integers(0, octaves + 1, shape))
    codes = rng.integers(0, top + 1, (case.rows, case.columns))
    if case.convention == "minimum":  # odd multiples of the unit, of both signs and at most s times the top code
        zeros: Array = odd(rng, min(significand * top, most), shape) * 2.0**-octaves
    else:
        zeros = rng.integers(0, top + 1, shape)
    x = activations(kind, rng, case.rows, max(8, case.vectors), amplitude)
    if kind == "subnormal":
        x *= np.float32(LEAST_SUBNORMAL)
    if tiny:
        scales = scales * LEAST_HALF
        zeros = zeros * LEAST_HALF if case.convention == "minimum" else zeros
    return x, matrix_of(case, codes, scales, zeros)


def product(x: F32, matrix: QuantizedMatrix) -> F64:
    """``X W`` from the nonzero rows only, because equation 2 is slow on thousands of zeros; every partial sum is
    exact."""
    used = np.flatnonzero(x.any(axis=0))
    group = used // matrix.group_size
    codes = unpack(matrix.words, matrix.bits)[used]
    result: F64 = x[:, used] @ (matrix.scales.astype(np.float64)[group] * codes + group_offsets(matrix)[group])
    return result


def matrix_of(case: MatrixCase, codes: I64, scales: F64, zeros: Array) -> QuantizedMatrix:
    """A matrix with these minima or zero-points."""
    stored = scales.astype(case.scale_dtype)
    offsets = zeros.astype(case.scale_dtype if case.convention == "minimum" else np.uint8)
    words = pack(codes.astype(np.uint8), case.bits)
    return QuantizedMatrix(words, stored, offsets, case.bits, case.rows, case.group_size, case.convention)


def one_hot(case: MatrixCase) -> tuple[F32, QuantizedMatrix]:
    """Four rows with one 24-bit activation each, and a matrix whose scales and minima use all bits of their type.

    The declared roundings are those of K products, but the sum has a single one: rounding one operand to a narrower
    format is many times the bound.
    """
    rng, top = case.generator(), 2**case.bits - 1
    shape = (-(-case.rows // case.group_size), case.columns)
    scales = np.exp(rng.normal(-4, 1, shape))
    x = np.zeros((4, case.rows), np.float32)
    x[np.arange(4), [0, case.rows // 2, case.rows - case.group_size, case.rows - 1]] = rng.uniform(1, 2, 4)
    if case.convention == "minimum":
        zeros: Array = scales * rng.uniform(0.5, top, shape)  # above 0, so that no weight is a small difference
    else:
        zeros = np.zeros(shape)
    codes = rng.integers(max(1, top // 2), top + 1, (case.rows, case.columns))
    return x, matrix_of(case, codes, scales, zeros)


# **Real zeros.** As above, with zeros that are odd multiples of a half.


def hqq_lattice(
    rng: np.random.Generator, kind: str, bits: int, rows: int, columns: int, group_size: int, axis: Axis
) -> tuple[F32, HqqMatrix]:
    """Four rows of activations with two nonzero elements each, and a matrix."""
    top, groups = 2**bits - 1, rows * columns // group_size
    room = FLOAT32_INTEGERS // (2 * 2 * 2 * top)
    significand, amplitude = (room, 1) if kind == "scales" else (1, room)
    scales = np.abs(odd(rng, significand, groups)).astype(np.float32)
    zeros = (rng.integers(-top, top, groups) + 0.5).astype(np.float32)
    codes = rng.integers(0, top + 1, (rows, columns)).astype(np.uint8)
    x = np.zeros((4, rows))
    for row, (first, second) in zip(x, ((0, 1), (rows - 1, rows - 2), (rows // 2, 0), (0, rows - 1)), strict=True):
        row[[first, second]] = odd(rng, amplitude, 2)
    return x.astype(np.float32), HqqMatrix(pack(codes, bits), scales, zeros, bits, rows, group_size, axis)


def eight_bit(rng: np.random.Generator, count: int, dtype: str, *, above_zero: bool) -> EightBit:
    """Numbers in 8 bits in up to 8 groups, each with its own scale and zero.

    Zeros range from far below the codes to among them, so that code - zero is rounded, and its product with the scale
    is rounded again.
    """
    groups = max(size for size in range(1, 9) if count % size == 0)
    codes = rng.integers(2, 256, count).astype(np.uint8)
    zeros = np.where(rng.random(groups) < 0.5, rng.uniform(-300, 1.9, groups), rng.normal(size=groups) * 2.0**-9)
    if not above_zero:
        zeros = np.where(rng.random(groups) < 0.3, rng.uniform(2, 255, groups), zeros)
    return EightBit(codes, np.exp(rng.normal(-4, 1, groups)).astype(dtype), np.minimum(zeros, 1e4).astype(dtype))


# **Layers of routing.** All gates of an expert are 64, or some thousands more, so that silu is the identity.


def gate_lattice(rng: np.random.Generator, kind: str, tokens: int, hidden: int, experts: int) -> tuple[F32, F32]:
    """Logits of few channels: *activations* or *router* weights have 18 bits, the others three."""
    small, large = 7, FLOAT32_INTEGERS // (3 * 8)
    x, router = np.zeros((tokens, hidden)), odd(rng, small, (hidden, experts))
    for row, place in zip(x, places(hidden, min(3, hidden), tokens), strict=True):
        row[place] = odd(rng, large if kind == "activations" else small, len(place))
    if kind == "router":
        router = odd(rng, large, (hidden, experts))
    return x.astype(np.float32), router.astype(np.float32)


def expert_lattice(
    rng: np.random.Generator, kind: str, tokens: int, hidden: int, experts: int, inner: int
) -> tuple[F32, F32, F32, F32]:
    """Tokens of two channels, and experts in which *gate*, *up* or *down* has 13 bits and the others very few.

    A gate is 64, up has at most 13 bits or is 2, and four rows of down are nonzero: the sum stays below
    4 · 64 · 2^13 · 2 in units of 1, and with the gate of 13 bits below 4 · 2^13 · 2.
    """
    x = np.zeros((tokens, hidden))
    x[:, 0] = 1
    x[np.arange(tokens), 1 + (np.arange(tokens) * (hidden - 2) // max(1, tokens - 1)) % (hidden - 1)] = 1
    wide = (experts, hidden, inner)
    gate, up = np.zeros(wide), rng.choice((-1.0, 1.0), wide)
    gate[:, 0] = 64
    down = np.zeros((experts, inner, hidden))
    rows = np.unique(np.array([0, inner // 2, inner - 2, inner - 1]).clip(0))
    down[:, rows] = rng.choice((-1, 1), (experts, len(rows), hidden))
    if kind == "gate":
        gate[:, 0], gate[:, 1:] = 2**12, odd(rng, 2**11, (experts, hidden - 1, inner))
    elif kind == "up":
        up = 1.0 * odd(rng, 2**12, wide)
    else:
        down[:, rows] = odd(rng, 2**13, (experts, len(rows), hidden))
    return tuple(np.ascontiguousarray(part, np.float32) for part in (x, gate, up, down))  # type: ignore[return-value]  # there are four of them
