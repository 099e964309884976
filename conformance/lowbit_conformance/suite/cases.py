"""Which cases there are: shapes, widths, groups and conventions, each with an id that stays the same.

Four tiers. *Lattice* cases walk systematically over shapes that end inside a word, a register, a panel or a group,
and their inputs make every partial sum exact. *Edge* cases take the values that arithmetic treats specially.
*Random* cases draw a shape and inputs from a seed, and beside each of them stands a lattice case of the same shape.
*Exhaustive* cases leave nothing out: each stands for a whole range, where that is small.

A case is a value; everything about it, its arrays included, follows from its id.
"""

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Self

import numpy as np

from lowbit.quantization.affine import CONVENTIONS, SCALE_DTYPES, Convention, ScaleDtype
from lowbit.quantization.packing import BITS, CODES_PER_UNIT


@dataclass(frozen=True)
class Case:
    """One case of one clause; subclasses add the parameters of a chapter's operations.

    Attributes:
        clause: ``linear.qgemv/C1``.
        tier: ``lattice``, ``edge``, ``random``, ``exhaustive`` or ``model``.
        variant: a word for what is special about the case; may be empty.
        seed: with the rest of the id, it determines all random draws.
    """

    clause: str
    tier: str
    variant: str
    seed: int = field(default=0, kw_only=True)

    @property
    def operation(self) -> str:
        """``linear.qgemv``."""
        return self.clause.partition("/")[0]

    @property
    def label(self) -> str:
        """The parameters of the case in a few words."""
        own = [part for part in fields(self) if part.name not in ("clause", "tier", "variant", "seed")]
        return "-".join(f"{part.name}={getattr(self, part.name)}" for part in own)

    @cached_property
    def id(self) -> str:
        """The id of the case on one line, for example ``linear.qgemv/C1/lattice/b4-64x33-g16-minimum-float32-s0``."""
        words = [word for word in (self.variant, self.label) if word]
        return f"{self.clause}/{self.tier}/{'-'.join(words)}-s{self.seed}"

    @property
    def large(self) -> bool:
        """Whether the variant marks the case as slow: ``--quick`` leaves it out, and it is not repeated."""
        return "large" in self.variant

    @property
    def movable(self) -> Mapping[str, str]:
        """The sizes that `lowbit_conformance.suite.fitting` may change: from the name of a declared limit to the
        attribute of the case. Empty unless a subclass says otherwise."""
        return {}

    def with_sizes(self, sizes: Mapping[str, int]) -> Self:
        """The same case at other sizes, by the attributes that `movable` names."""
        changes: dict[str, Any] = dict(sizes)
        return replace(self, **changes)

    @property
    def possible(self) -> bool:
        """Whether the case is possible at its sizes."""
        return True

    def parameters(self) -> dict[str, object]:
        """The choices of the case, by the names that a backend's declaration uses."""
        return {part.name: getattr(self, part.name) for part in fields(self)}

    def generator(self) -> np.random.Generator:
        """A random generator that depends on the id alone, on every host."""
        return np.random.Generator(np.random.PCG64(zlib.crc32(self.id.encode())))

    def of(self, clause: str) -> Self:
        """The same case for another clause."""
        return replace(self, clause=clause)


@dataclass(frozen=True)
class MatrixCase(Case):
    """A case with a matrix of codes.

    Attributes:
        bits: width of a code.
        rows: K.
        columns: N.
        group_size: rows of a group; 0 for packing, which has none.
        convention: of the quantisation.
        scale_dtype: of the scales.
        vectors: T, the rows of x; 0 for a single vector.
    """

    bits: int
    rows: int
    columns: int
    group_size: int = 0
    convention: Convention = "minimum"
    scale_dtype: ScaleDtype = "float32"
    vectors: int = 0

    @property
    def label(self) -> str:
        parts = [f"b{self.bits}", f"{self.rows}x{self.columns}"]
        if self.group_size:
            parts += [f"g{self.group_size}", self.convention, self.scale_dtype]
        if self.vectors:
            parts.append(f"t{self.vectors}")
        return "-".join(parts)


# **Shapes.** A kernel's tile is a word deep and a register or a panel wide; these numbers are at and around both sizes.

CONCURRENT = "concurrent"
"""The variant of cases for backends that declare calls from several threads."""

LOADING = "backend"
"""The name used in place of an operation in the case that loads the backend."""

HABIT = "habit"
"""The tier of cases that repeat the calls of an operation's other cases, and so have no parameters."""

COLUMNS = (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 65, 100)
UNITS = (1, 2, 3, 5, 8, 9)
# Deep, wide and model-like shapes; 11008 and 4096 are those of a 7-billion-parameter Llama.
# The last is so large that a backend will use all its threads.
LARGE = (
    (576, 192, 64),
    (1536, 40, 128),
    (4096, 24, 128),
    (11008, 9, 128),
    (4096, 9, 4096),
    (96, 1500, 32),
    (1024, 1100, 64),
)


def conventions(clause: str) -> tuple[Convention, ...]:
    """The conventions that a clause is about; each clause of `affine.dequantize` is about one."""
    own: dict[str, tuple[Convention, ...]]
    own = {"affine.dequantize/C1": ("minimum",), "affine.dequantize/C2": ("zero_point",)}
    return own.get(clause, CONVENTIONS)


def group_sizes(rows: int, unit: int) -> list[int]:
    """Group sizes to try: one row, part of a word, a word, the paper's, one with a short last group, the whole
    column."""
    candidates = (1, 3, unit, unit + 1, 16, 32, 64, 128, rows // 2 + 1, rows - 1, rows)
    return sorted({size for size in candidates if 1 <= size <= rows})


def systematic(clause: str) -> Iterator[MatrixCase]:
    """Small shapes in which every K meets every group size, and every N meets every bit width."""
    for bits in BITS:
        unit = CODES_PER_UNIT[bits]
        for convention in CONVENTIONS:
            turn = 0
            for units in UNITS:
                for group_size in group_sizes(units * unit, unit):
                    columns, scale_dtype = COLUMNS[turn % len(COLUMNS)], SCALE_DTYPES[turn % 2]
                    shape = (units * unit, columns, group_size)
                    yield MatrixCase(clause, "lattice", "", bits, *shape, convention, scale_dtype)
                    turn += 1
            for columns in COLUMNS:
                yield MatrixCase(clause, "lattice", "wide", bits, 2 * unit, columns, unit, convention)
            if clause.startswith("linear."):
                yield from large(clause, bits, convention)


def large(clause: str, bits: int, convention: Convention, tier: str = "lattice") -> Iterator[MatrixCase]:
    """The large shapes with alternating dtypes of scales; the alternation is reversed for the other convention."""
    for turn, shape in enumerate(LARGE):
        scale_dtype = SCALE_DTYPES[(turn + CONVENTIONS.index(convention)) % 2]
        yield MatrixCase(clause, tier, "large", bits, *shape, convention, scale_dtype)


def drawn(clause: str, tier: str, seed: int) -> Iterator[MatrixCase]:
    """One shape drawn from the seed for each width and convention; the same for every clause and tier."""
    for bits in BITS:
        for convention in CONVENTIONS:
            rng = np.random.Generator(np.random.PCG64(zlib.crc32(f"{bits}/{convention}/{seed}".encode())))
            unit = CODES_PER_UNIT[bits]
            rows = unit * int(rng.integers(1, 1 + 512 // unit))
            columns = int(rng.integers(1, 101))
            group_size = int(rng.choice(group_sizes(rows, unit)))
            scale_dtype = SCALE_DTYPES[int(rng.integers(2))]
            vectors = int(rng.integers(1, 10)) if clause.startswith("linear.qgemm") else 0
            shape = (rows, columns, group_size)
            yield MatrixCase(clause, tier, "drawn", bits, *shape, convention, scale_dtype, vectors, seed=seed)


def edges(clause: str, variants: tuple[str, ...], vectors: int = 0) -> Iterator[MatrixCase]:
    """Each special input at one small shape with a remainder in every dimension, for each width and convention."""
    for variant in variants:
        scale_dtype: ScaleDtype = "float16" if "half" in variant else "float32"
        for bits in BITS:
            rows = 3 * CODES_PER_UNIT[bits]
            for convention in CONVENTIONS:
                shape = (rows, 19, rows // 2 + 1)
                yield MatrixCase(clause, "edge", variant, bits, *shape, convention, scale_dtype, vectors)


# **Models.** Shapes of real layers: a vocabulary of 131,072, an inner width of 28,672. Each has one width of codes, so
# that all together take seconds. Words of more than 2 GiB, whose offsets exceed 32 bits, are not included.

MODELS: tuple[tuple[int, int, int, int, Convention, ScaleDtype, str], ...] = (
    (4, 64, 131072, 32, "zero_point", "float16", "dense"),
    (4, 28672, 64, 128, "minimum", "float16", "dense"),
    (4, 2048, 11008, 128, "zero_point", "float16", "sparse"),
    (2, 64, 70001, 32, "minimum", "float32", "dense"),
    (3, 28672, 33, 64, "zero_point", "float16", "dense"),
    (8, 28672, 24, 128, "minimum", "float32", "sparse"),
    (8, 64, 66000, 64, "zero_point", "float16", "dense"),
)
"""Bits, rows, columns, group size, convention, scales, and whether all products are nonzero."""


def models(clause: str, vectors: int = 0) -> Iterator[MatrixCase]:
    """Cases with the shapes of models."""
    for bits, rows, columns, group_size, convention, scale_dtype, density in MODELS:
        shape = (rows, columns, group_size)
        yield MatrixCase(clause, "lattice", f"large-model-{density}", bits, *shape, convention, scale_dtype, vectors)


# **In use.** A backend that handles only the group sizes of published weights would get few of the cases above.

GROUPS_IN_USE = (32, 64, 128)


def in_use(
    clause: str, tier: str, variant: str, groups: int = 1, tail: int = CODES_PER_UNIT[4]
) -> Iterator[MatrixCase]:
    """4 bits and float16 scales in groups of 32, 64 and 128: this many groups, and a short one of `tail` rows."""
    for convention in CONVENTIONS:
        for size in GROUPS_IN_USE:
            yield MatrixCase(clause, tier, variant, 4, groups * size + tail, 19, size, convention, "float16")
