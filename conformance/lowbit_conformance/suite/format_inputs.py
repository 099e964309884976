r"""What the cases of stored matrices are run on: arrays drawn from the table of a format, and activations.

Nothing here knows a format. The table says of each field what it is for (`lowbit.tensor_formats.table.Role`), and that
decides how it is drawn: codes and zeros are any bits, indices run over their range, and scales depend on the tier.

**Lattice.** Float scales are powers of two, so that every weight is a small integer times the least of them. The
activations are -1, 0 and 1. Few of them are not 0, so that every partial sum is exact in each type that it passes
through (`lowbit_conformance.suite.exact_sums`). Then every kernel has one right answer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Literal

import numpy as np

from lowbit.arrays import F64, I64, Array
from lowbit.contract.checks import check_choice
from lowbit.contract.rounding import Arithmetic
from lowbit.numbers.floats import FLOATS, NAMES, FloatType, Overflow, rounded
from lowbit.tensor_formats.stored import FORMATS, Result, Stored
from lowbit.tensor_formats.table import Field, Format, Sizes
from lowbit_conformance.suite.cases import Case
from lowbit_conformance.suite.exact_sums import exact_sums


@dataclass(frozen=True)
class FormatCase(Case):
    """A case with a stored matrix.

    Attributes:
        format: its name.
        rows: K.
        columns: N.
        vectors: T; 1 for a single vector.
        activations: the type of x, or the name of a format.
        result: the type of the result.
        options: those of the format.
    """

    format: str
    rows: int
    columns: int
    vectors: int = 1
    activations: str = "float32"
    result: Result = "float32"
    options: tuple[tuple[str, int], ...] = ()

    @property
    def label(self) -> str:
        options = "-".join(f"{name[0]}{value}" for name, value in self.options)
        parts = [self.format, options, f"{self.rows}x{self.columns}"]
        if not self.operation.startswith("formats."):
            parts += [f"t{self.vectors}", self.activations]
        return "-".join(part for part in (*parts, self.result) if part)

    def parameters(self) -> dict[str, object]:
        own = {"format": self.format, **dict(self.options), "rows": self.rows, "columns": self.columns}
        return own | {"activations": self.activations, "result": self.result, "batch": self.vectors}

    @property
    def table(self) -> Format:
        return FORMATS[self.format]

    @property
    def movable(self) -> dict[str, str]:
        return {"rows": "rows", "columns": "columns", "batch": "vectors"}

    @property
    def possible(self) -> bool:
        """Whether its formats allow its sizes; casts of the edge tier need runs of 32 numbers."""
        if self.operation == "linear.gemv" and self.vectors != 1:
            return False
        if self.operation == "formats.quantize" and self.tier == "edge" and self.rows % 32:
            return False
        x = self.activations
        if x in FORMATS and not allows(FORMATS[x], self.rows, self.vectors, activation_options(x)):
            return False
        return allows(self.table, self.rows, self.columns, self.options)


@lru_cache(maxsize=4096)
def allows(table: Format, rows: int, columns: int, options: tuple[tuple[str, int], ...]) -> bool:
    """Whether a matrix in a format can have these sizes."""
    try:
        at = table.sizes(rows, columns, dict(options))
        for each in table.tensors:
            each.sizes(at)
    except ValueError:  # ArgumentError is one
        return False
    return True


def activation_options(name: str) -> tuple[tuple[str, int], ...]:
    """The options of the format of stored activations."""
    return tuple((option, 32) for option in FORMATS[name].options)


# **Fields.**


NONE: Mapping[str, tuple[int, ...]] = MappingProxyType({})
Codes = Literal["usual", "cast", "patterns", "largest"]
"""How codes are drawn: random bits for integers and floats of usual size; signed bytes from -127, as casts give; random
bits for floats too; or all codes the largest."""


def drawn(
    case: FormatCase,
    *,
    powers: bool,
    codes: Codes = "usual",
    scales: Mapping[str, tuple[int, ...]] = NONE,
    kept: Array | None = None,
) -> Stored:
    """A random matrix for the case; with `powers`, float scales are powers of two with exponents from `scales`.

    Only `kept` rows have nonzero codes; this needs a format with one code per byte.
    """
    at = case.table.sizes(case.rows, case.columns, dict(case.options))
    return stored_from(case, at, case.generator(), powers=powers, codes=codes, scales=scales, kept=kept)


def stored_from(
    case: FormatCase,
    at: Sizes,
    rng: np.random.Generator,
    *,
    powers: bool,
    codes: Codes = "usual",
    scales: Mapping[str, tuple[int, ...]] = NONE,
    kept: Array | None = None,
) -> Stored:
    table = case.table
    outer = () if table.block is None else (at.N, at.K // table.block)
    rows = (*table.fields, *table.spread)
    fields = {row.name: field(row, (*outer, *row.sizes(at)), at, rng, powers=powers) for row in rows}
    for row in rows:
        if row.role == "codes" and codes != "usual":
            fields[row.name] = other_codes(row, fields[row.name], rng, codes)
        if row.role == "codes" and kept is not None:
            fields[row.name] = without(fields[row.name], ~kept)
    for row in (row for row in rows if row.name in scales):
        numbers = np.exp2(rng.choice(scales[row.name], fields[row.name].shape).astype(np.float64))
        fields[row.name] = rounded(numbers, check_choice("dtype", row.dtype, NAMES))
    if table.complete is not None:
        fields = table.complete(fields, at)
    return Stored(case.format, case.rows, case.columns, table.tensors_of(fields, at), case.options)


def wide_scales(table: Format) -> list[Field]:
    """The fields of scales and minima whose type has a wider range than float16."""
    rows = [row for row in table.fields if row.role in ("scale", "zero") and row.dtype in FLOATS]
    return [row for row in rows if FLOATS[row.dtype].largest > FLOATS["float16"].largest]


def other_codes(row: Field, usual: Array, rng: np.random.Generator, codes: Codes) -> Array:
    """Other ways to draw codes that make sense for their type."""
    floats = row.dtype in FLOATS
    if codes == "cast" and usual.dtype == np.int8:
        return np.maximum(usual, np.int8(-127))
    if codes == "patterns" and floats:
        return finite_numbers(FLOATS[row.dtype], usual.shape, rng)
    if codes == "largest" and not floats and row.below is None and row.values is None:
        most = 127 if usual.dtype == np.int8 else -1 if usual.dtype.kind == "i" else np.iinfo(usual.dtype).max
        return np.full_like(usual, most)
    return usual


def finite_numbers(kind: FloatType, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Numbers of a type with uniformly random bit patterns."""
    if kind.bits == 32:  # too many to list
        signs = rng.integers(0, 2, shape, np.uint32) << np.uint32(31)
        patterns: Array = signs | rng.integers(0, kind.top, shape, np.uint32, endpoint=True)
        return patterns.view(np.float32)
    finite = np.flatnonzero(np.isfinite(kind.values)).astype(kind.pattern_dtype)
    return rng.choice(finite, shape).view(kind.dtype)


def without(codes: Array, rows: Array) -> Array:
    """Codes, N × K bytes, with some rows of the matrix set to 0."""
    octets = codes.view(np.uint8).reshape(-1, rows.size).copy()
    octets[:, rows] = 0
    return octets.view(codes.dtype).reshape(codes.shape)


def field(row: Field, shape: tuple[int, ...], at: Sizes, rng: np.random.Generator, *, powers: bool) -> Array:
    """The contents of one field."""
    kind = row.numpy_dtype
    if row.values is not None:
        return rng.choice(row.values, shape).astype(kind)
    if row.role == "index":
        return rng.permutation(at.group_of_row()).astype(kind).reshape(shape)
    if row.below is not None:
        return rng.integers(0, at.size(row.below, row.name), shape).astype(kind)
    if row.dtype in FLOATS:
        return real(row, shape, rng, powers=powers)
    octets = rng.integers(0, 256, (*shape, kind.itemsize), np.uint8)
    return octets.view(kind).reshape(shape)


def real(row: Field, shape: tuple[int, ...], rng: np.random.Generator, *, powers: bool) -> Array:
    """Floats of a field: powers of two, or numbers over several octaves; minima and the like have both signs."""
    kind = FLOATS[row.dtype]
    if powers:
        numbers = np.exp2(-rng.integers(0, 3, shape).astype(np.float64))
    else:
        numbers = np.exp2(rng.normal(-3, 1.5, shape))
    if kind.signed and (row.signed or row.role != "scale"):
        numbers *= rng.choice((-1.0, 1.0), shape)
    overflow: Overflow = "saturate" if kind.specials == "none" else "ieee"
    return rounded(numbers, check_choice("dtype", row.dtype, NAMES), overflow)


# **Activations.**


def activations(case: FormatCase, numbers: F64) -> Array:
    """T × K numbers in the type of the case; one vector for a product with a vector."""
    x = rounded(numbers, check_choice("activations", case.activations, NAMES))
    return x[0] if case.operation == "linear.gemv" else x


def random_numbers(case: FormatCase) -> F64:
    """Random numbers like activations, with some channels larger than others."""
    rng = case.generator()
    return rng.normal(size=(case.vectors, case.rows)) * np.exp(rng.normal(0, 1, case.rows))


def lattice_numbers(
    case: FormatCase, weights: Stored, arithmetic: Arithmetic, rows: I64 | None = None
) -> tuple[F64, Array]:
    """T × K numbers of -1, 0 and 1, and a mask of the T × N results that have one right answer; numbers of all other
    rows are 0."""
    types = (accumulated(arithmetic), case.result)
    return exact_sums(weights, case.vectors, arithmetic.weights, types, case.generator(), rows=rows)


def accumulated(arithmetic: Arithmetic) -> str:
    """The narrowest type in which a sum is kept."""
    return "float16" if arithmetic.promotion else arithmetic.accumulator
