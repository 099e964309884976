r"""What the cases of `linear.qgemm_bfp` are made of: shapes with formats, and blocks whose integers go to the limits.

**Lattice.** As in `inputs`, with blocks in place of activations: scales are powers of two, neighbouring blocks never
have the same exponent if there is room for several, and every partial sum of any term, integer or scaled, is a multiple
of the least unit and below :math:`2^{24}` of them. A kernel that has its integers right has no freedom left.

**Extreme** cases lie on the lattice too. All mantissas are the largest there are, all codes too, and signs and zeros
come in the patterns that fill an accumulator of 16 bits soonest.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace

import numpy as np

from lowbit.arrays import F64, Array
from lowbit.linear.linear import group_offsets
from lowbit.quantization.affine import CONVENTIONS, QuantizedMatrix, ScaleDtype
from lowbit.quantization.bfp import Blocks, Format, cast
from lowbit.quantization.packing import BITS
from lowbit_conformance.packing import unpack
from lowbit_conformance.suite import inputs
from lowbit_conformance.suite.cases import MatrixCase, drawn, edges, in_use, large, systematic
from lowbit_conformance.suite.inputs import FLOAT32_INTEGERS
from lowbit_conformance.suite.marking import Settings


@dataclass(frozen=True)
class IntegerCase(MatrixCase):
    """A case with a matrix of codes and rows of blocks.

    Attributes:
        block: elements of a block.
        mantissa: bits of a mantissa.
        exponent: bits of an exponent.
    """

    block: int = 32
    mantissa: int = 8
    exponent: int = 8

    @property
    def label(self) -> str:
        return f"{super().label}-n{self.block}-p{self.mantissa}-e{self.exponent}"

    @property
    def format(self) -> Format:
        return Format(self.block, self.mantissa, self.exponent)


FORMATS = ((16, 8, 8), (64, 8, 8), (128, 8, 8), (32, 4, 8), (20, 6, 7), (7, 12, 8), (1, 8, 8), (3, 25, 10))
"""Block, mantissa and exponent, besides the usual 32, 8 and 8."""

VECTORS = (1, 2, 3, 4, 5, 8, 17)
ROWS = {2: 160, 3: 160, 4: 136, 8: 100}
"""K of the cases of all formats: whole blocks of each, and a short one."""


def of(case: MatrixCase, vectors: int, format: tuple[int, int, int] = (32, 8, 8)) -> IntegerCase:
    """The case as one with this number of rows of blocks."""
    own = {part.name: getattr(case, part.name) for part in fields(case) if part.name != "vectors"}
    block, mantissa, exponent = format
    return IntegerCase(**own, vectors=vectors, block=block, mantissa=mantissa, exponent=exponent)


def with_vectors(cases: Iterator[MatrixCase]) -> Iterator[IntegerCase]:
    """Each case with another number of rows."""
    for number, case in enumerate(cases):
        yield of(case, 5 if case.variant == "large" else VECTORS[number % len(VECTORS)])


def formats(clause: str, tier: str, variant: str) -> Iterator[IntegerCase]:
    """All formats, with groups that are multiples of a block, that divide one, and neither."""
    for choice in FORMATS:
        for bits in BITS:
            for number, group_size in enumerate((16, 24, 64, ROWS[bits])):
                shape = (ROWS[bits], 9 + number, group_size)
                case = MatrixCase(clause, tier, variant, bits, *shape, CONVENTIONS[number % 2], "float32")
                yield of(case, 1 + number, choice)


def shapes(clause: str, settings: Settings) -> Iterator[IntegerCase]:
    """Shapes for the lattice: the systematic ones, those of every random case and of a model, and all formats."""
    yield from with_vectors(systematic(clause))
    for bits in BITS:
        for convention in CONVENTIONS:
            yield of(MatrixCase(clause, "lattice", "tall", bits, 96, 40, 48, convention), 131)
    for groups, tail in ((1, 0), (1, 8), (2, 24), (4, 0)):
        yield from with_vectors(in_use(clause, "lattice", "in-use", groups, tail))
    yield from formats(clause, "lattice", "formats")
    for seed in settings.seeds:
        yield from (of(case, max(1, case.vectors)) for case in drawn(clause, "lattice", seed))
    yield from model_cases(clause, settings)


def model_cases(clause: str, settings: Settings) -> Iterator[IntegerCase]:
    """The shapes of a model's own matrices."""
    yield from (of(case.of(clause), max(1, case.vectors)) for case in settings.model)


EXTREME_ROWS = {2: 512, 3: 512, 4: 512, 8: 128}
"""K of the extreme cases, whose sums are all still exact in float32."""


def extreme_cases(clause: str, settings: Settings) -> Iterator[IntegerCase]:
    """All groups that kernels treat differently, and the formats whose mantissas fill a byte."""
    for bits in BITS:
        for convention in CONVENTIONS:
            for group_size in (16, 32, 40, 128, EXTREME_ROWS[bits]):
                case = MatrixCase(clause, "lattice", "extreme", bits, EXTREME_ROWS[bits], 6, group_size, convention)
                yield of(case, len(SIGNS), (32, 8, 8))
            for choice in ((16, 8, 8), (64, 8, 8), (128, 8, 8), (32, 4, 8)):
                case = MatrixCase(clause, "lattice", "extreme", bits, EXTREME_ROWS[bits], 6, 128, convention)
                yield of(case, len(SIGNS), choice)


LEAST_EXPONENTS, FAR_EXPONENTS, ANY_BLOCKS, TOP_OF_ALL = "least-exponents", "far-exponents", "any-blocks", "top-of-all"
OWN_EDGES = (LEAST_EXPONENTS, FAR_EXPONENTS, ANY_BLOCKS, TOP_OF_ALL)
CAST_EDGES = tuple(name for name in inputs.EDGES if not name.startswith(("zero-x", "one-hot", "subnormal-x")))


def special_cases(clause: str, settings: Settings) -> Iterator[IntegerCase]:
    """Every special input at a small shape, and again at one of several blocks and groups."""
    variants = (*CAST_EDGES, *OWN_EDGES)
    yield from (of(case, 3) for case in edges(clause, variants))
    for variant in variants:
        for number, bits in enumerate(BITS):
            scale_dtype: ScaleDtype = "float16" if "half" in variant else "float32"
            case = MatrixCase(clause, "edge", variant, bits, 160, 19, (24, 64)[number % 2], CONVENTIONS[number % 2])
            yield of(replace(case, scale_dtype=scale_dtype), 2)
        if variant != inputs.SUBNORMAL_RESULT:  # scales would underflow float16
            yield from (of(case, 2) for case in in_use(clause, "edge", variant))


def random_cases(clause: str, settings: Settings) -> Iterator[IntegerCase]:
    """Special inputs, shapes and inputs drawn from the seeds, all formats, and a model's own weights."""
    yield from special_cases(clause, settings)
    for seed in settings.seeds:
        yield from (of(case, max(1, case.vectors)) for case in drawn(clause, "random", seed))
    yield from formats(clause, "random", "formats")
    yield from (of(case, 3) for case in in_use(clause, "random", "in-use"))
    for convention in CONVENTIONS:
        yield from (of(case, 2) for case in large(clause, 4, convention, tier="random"))
    yield from model_cases(clause, settings)


# **Inputs.**


def lattice(case: IntegerCase, *, dense: bool) -> tuple[Blocks, QuantizedMatrix]:
    """Blocks and a matrix, such that every partial sum is exact in float32.

    Without `dense`, mantissas and codes may be zero, and some blocks are all zeros with the exponent that a cast gives.
    """
    _, matrix = inputs.lattice(case, dense=dense)
    rng, format = case.generator(), case.format
    room = FLOAT32_INTEGERS // _heaviest(matrix)
    octaves = 2 if room >= 8 else 1 if room >= 2 else 0
    most = int(min(format.top, room >> octaves))
    shape = (case.vectors, case.rows)
    mantissas = rng.integers(1, most + 1, shape) * rng.choice((-1, 1), shape)
    base, first = rng.integers(-12, 9, (case.vectors, 1)), rng.integers(0, octaves + 1, (case.vectors, 1))
    exponents = base + (first + np.arange(format.blocks(case.rows))) % (octaves + 1)
    if not dense:
        mantissas *= rng.integers(0, 3, shape) > 0
        emptied = rng.integers(0, 4, exponents.shape) == 0
        mantissas[np.repeat(emptied, format.block, axis=1)[:, : case.rows]] = 0
        exponents[emptied] = -format.reach
    return _blocks(mantissas, exponents, format), matrix


def _heaviest(matrix: QuantizedMatrix) -> int:
    """The largest sum of magnitudes of any column for mantissas of 1, in units of the least product."""
    codes = unpack(matrix.words, matrix.bits).astype(np.float64)
    group = np.arange(matrix.rows) // matrix.group_size
    scales, offsets = matrix.scales.astype(np.float64), np.abs(group_offsets(matrix))
    unit = scales.min() / (2 if matrix.convention == "minimum" else 1)
    return int((scales[group] * codes + offsets[group]).sum(axis=0).max() / unit)


SIGNS: Mapping[str, Callable[[Array], Array]] = {
    "all": lambda k: np.ones(len(k)),
    "none": lambda k: -np.ones(len(k)),
    "pairs": lambda k: np.where(k // 2 % 2, -1, 1),
    "every-second": lambda k: np.where(k % 2, -1, 1),
    "fours": lambda k: np.where(k // 4 % 2, -1, 1),
    "halves": lambda k: np.where(k < len(k) // 2, 1, -1),
}
"""The signs of the mantissas of each row of an extreme case."""


def extreme(case: IntegerCase) -> tuple[Blocks, QuantizedMatrix]:
    """Largest mantissas times largest codes: a row for each pattern of signs, a column for each pattern of codes."""
    k, top, format = np.arange(case.rows), 2**case.bits - 1, case.format
    mantissas = np.stack([format.top * signs(k) for signs in SIGNS.values()])
    patterns = (np.ones(len(k)), np.zeros(len(k)), k % 2, 1 - k % 2, k // 2 % 2, k % 16 < 8)
    codes = np.stack([pattern * top for pattern in patterns], axis=1)
    scales = np.ones((-(-case.rows // case.group_size), case.columns))
    halves = case.convention == "minimum"
    zeros: F64 = np.resize([top - 0.5, 0.5, -0.5] if halves else [float(top), 1.0, 0.0], scales.shape)
    exponents = np.full((len(mantissas), format.blocks(case.rows)), -5)
    return _blocks(mantissas, exponents, format), inputs.build(case, codes.astype(np.uint8), scales, zeros)


def random(case: IntegerCase) -> tuple[Blocks, QuantizedMatrix]:
    """Typical activations, cast; or the special input that the variant names."""
    if case.variant in OWN_EDGES:
        return _own_edge(case)
    x, matrix = inputs.edge(case) if case.tier == "edge" else inputs.random(case)
    return cast(x, case.format), matrix


def _own_edge(case: IntegerCase) -> tuple[Blocks, QuantizedMatrix]:
    """Blocks that a cast never or seldom gives: with exponents far apart or at the ends of the range, or not
    normalised."""
    rng, format = case.generator(), case.format
    variant = "top-codes" if case.variant == TOP_OF_ALL else "random"
    matrix = (inputs.edge if variant == "top-codes" else inputs.random)(replace(case, variant=variant))[1]
    shape, blocks = (case.vectors, case.rows), (case.vectors, format.blocks(case.rows))
    mantissas = rng.integers(-format.top, format.top + 1, shape)
    exponents = rng.integers(-min(format.reach, 30), min(format.reach, 30) + 1, blocks)
    if case.variant == LEAST_EXPONENTS:
        exponents = rng.integers(-format.reach, 4 - format.reach, blocks)
    elif case.variant == FAR_EXPONENTS:
        exponents = np.where((np.arange(blocks[1]) + np.arange(blocks[0])[:, None]) % 2, 20, -40)
    elif case.variant == TOP_OF_ALL:
        mantissas = format.top * rng.choice((-1, 1, 1, 1), shape)
    return _blocks(mantissas, exponents, format), matrix


def empty(case: IntegerCase) -> Blocks:
    """Rows of zeros whose blocks have exponents of all sizes."""
    blocks, reach = (case.vectors, case.format.blocks(case.rows)), case.format.reach
    exponents = case.generator().choice((-reach, -20, 0, min(reach, 100)), blocks)
    return _blocks(np.zeros((case.vectors, case.rows)), exponents, case.format)


def one_hot(case: IntegerCase, row: int) -> Blocks:
    """A single mantissa in each row of X: 1, the largest and the least, each with its own exponents."""
    mantissas = np.zeros((case.vectors, case.rows))
    mantissas[:, row] = np.resize([1, case.format.top, -case.format.top], case.vectors)
    exponents = case.generator().integers(-9, 9, (case.vectors, case.format.blocks(case.rows)))
    return _blocks(mantissas, exponents, case.format)


def _blocks(mantissas: Array, exponents: Array, format: Format) -> Blocks:
    return Blocks(mantissas.astype(format.dtype), exponents.astype(np.int16), format)
