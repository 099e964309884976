"""The setting of a proof about a kernel of a stored matrix.

What is unknown are the parts of a matrix (`lowbit_cppyy.stored.parts.Parts`): each code, scale, integer and offset has
a variable. The stream of weights is what `lowbit_cppyy.stored.layout.StoredLayout.write` makes of them, so the theorem
covers it. That the parts are the numbers of a format's `decode` is the theorem of storage.

The stream of activations is as ``cpp/stored.h`` lays it, with the factors and the table of
`lowbit_cppyy.stored.activations`. Activations of 8 bits lie between -128 and 127: any byte may be stored.
"""

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import z3

from lowbit.arrays import F32, F64, U32
from lowbit.numbers.floats import FLOATS
from lowbit_cppyy.stored.activations import StoredActivations
from lowbit_cppyy.stored.formats import GGUF, TABLES
from lowbit_cppyy.stored.layout import StoredLayout
from lowbit_cppyy.stored.parts import UNIT, Parts, Structure
from lowbit_cppyy.stored.recipe import StoredRecipe
from lowbit_prove import storage, terms
from lowbit_prove.machine import Prover, Range
from lowbit_prove.reals import Polynomial, constant, sum_of
from lowbit_prove.setting import BYTES, FLOAT, WHOLE, Meaning, Scale, Setting, activation, bits_of, variable
from lowbit_prove.symbols import Symbols

EXPONENT = np.dtype(np.uint8)
SCALES: Mapping[str, terms.Dtype] = {
    "float16": np.dtype(np.float16),
    "float32": FLOAT,
    "exponent": EXPONENT,
    "one": FLOAT,
}
"""The types of scales in the parts of a matrix; a scale of ``one`` has no entry."""
MANTISSA = 23
"""Bits of a float32 below its exponent."""


def smallest(recipe: StoredRecipe) -> StoredLayout:
    """A matrix of two groups of two units and one; these are not whole units, unless groups are blocks that are divided
    into runs."""
    lengths = (2 * UNIT, UNIT) if recipe.structure.run else (44, 20)
    return StoredLayout(recipe.structure, recipe.panel, lengths, recipe.panel)


def constants(structure: Structure) -> tuple[int, F32 | None]:
    """The center and the table of the formats of a structure; 0 and None if they have none.

    A table without float16 scales may hold multiples of 1/2, so the table of float4, which has them, is used.
    """
    if structure.values == "signed":
        return 128, None
    if structure.values == "table":
        return 0, TABLES["non-linear" if structure.scale == "float16" else "float4"]
    return next((blocks.center for blocks in GGUF.values() if blocks.structure == structure), 0), None


@cache
def unknown_parts(layout: StoredLayout) -> Parts:
    """Parts that stand for all matrices of a layout at once."""
    structure, columns, groups = layout.structure, layout.columns, len(layout.lengths)
    runs = sum(layout.units) * UNIT // structure.run if structure.run else 0
    center, table = constants(structure)
    code = np.dtype(f"u{structure.bits // 8}" if structure.is_floats else np.uint8)
    found: dict[str, Any] = {"codes": _unknown("q", sum(layout.lengths), columns, code, structure.bits)}
    dtype = SCALES[structure.scale]
    found["scales"] = (
        np.empty((groups, 0), dtype) if structure.scale == "one" else _unknown("d", groups, columns, dtype)
    )
    if structure.inner:
        found["inner"] = _unknown("t", runs, columns, np.dtype(structure.inner))
    if structure.offset in ("number", "zero"):
        found["offsets"] = _unknown("o", groups, columns, dtype if structure.offset == "number" else EXPONENT)
    if structure.offset == "minimum":
        found["offsets"] = _unknown("o", runs, columns, np.dtype(np.uint8))
        found["offset_scales"] = _unknown("m", groups, columns, dtype)
    return Parts(structure, lengths=layout.lengths, center=center, table=table, **found)


@cache
def unknown_stream(layout: StoredLayout) -> Symbols:
    """The stream of all these matrices."""
    stream = Symbols(np.full(layout.nbytes // 4, 0, object), np.uint32)
    written: Any = stream
    layout.write(unknown_parts(layout), written)
    return Symbols(np.array([each if terms.known(each) else z3.simplify(each) for each in stream.data], object), "u4")


def _unknown(name: str, rows: int, columns: int, dtype: terms.Dtype, bits: int = 0) -> Symbols:
    """An array of variables, possibly integers with fewer bits than the dtype."""
    width = terms.width(dtype)
    data = np.empty((rows, columns), object)
    for row, column in np.ndindex(data.shape):
        own = z3.BitVec(f"w_{name}_{row}_{column}", bits or width)
        data[row, column] = terms.from_bits(own if own.size() == width else terms.extended(own, width), dtype)
    return Symbols(data, dtype)


def _variable(number: Any) -> Any:
    """The variable of a number that `_unknown` made."""
    return number.arg(0) if number.num_args() else number


@dataclass(frozen=True)
class StoredSetting(Setting):
    """One program with the memories of a stored matrix."""

    recipe: StoredRecipe
    layout: StoredLayout
    mantissas: ClassVar[Range] = (-128, 127)

    @property
    def parts(self) -> Parts:
        return unknown_parts(self.layout)

    @property
    def stream(self) -> Symbols:
        return unknown_stream(self.layout)

    @cached_property
    def activations(self) -> StoredActivations:
        return StoredActivations(self.recipe, self.layout, self.parts)

    @property
    def rows(self) -> int:
        return sum(self.layout.lengths)

    @property
    def each(self) -> tuple[int, int]:
        return 2, 4

    @property
    def sizes(self) -> dict[str, Any]:
        return {"groups": len(self.layout.lengths), "turns": self.layout.units}

    # The stream of activations.

    @property
    def head(self) -> list[int]:
        return self.recipe.head(self.parts.table).view(np.uint32).tolist() if self.recipe.headed else []

    def meanings(self) -> Iterator[Meaning]:
        of_run = self._integers if self.recipe.integer else self._floats
        offset = self.recipe.structure.offset
        for group, rows in enumerate(self._groups()):
            for run in self._runs(group, rows):
                yield from of_run(group, run)
                if offset == "minimum":
                    yield from self._sums(group, [run])
            if offset in ("number", "zero"):
                yield from self._sums(group, self._runs(group, rows))

    def _groups(self) -> list[range]:
        """The rows of each group."""
        ends = np.cumsum([0, *self.layout.lengths]).tolist()
        return [range(first, end) for first, end in pairwise(ends)]

    def _runs(self, group: int, rows: range) -> list[range]:
        """The rows of each run of a group; the whole group if there are no runs."""
        padded = self.layout.units[group] * UNIT
        return [rows[first : first + self._length(group)] for first in range(0, padded, self._length(group))]

    def _length(self, group: int) -> int:
        """The number of rows of a run of a group, including missing ones."""
        return self.recipe.run or self.layout.units[group] * UNIT

    def _floats(self, group: int, run: range) -> Iterator[Meaning]:
        """For a run of float32: minus the center times their sum, and the activations."""
        if self.recipe.centered:
            center = constant(-self.activations.center * 2.0**-self.activations.lowered)
            for r in range(self.recipe.rows):
                yield FLOAT, [sum_of(activation(r, row) * center for row in run)]
        factors = self.activations.factors.tolist()
        for place in range(self._length(group)):
            for r in range(self.recipe.rows):
                factor = constant(factors[place % UNIT])
                yield FLOAT, [activation(r, run[place]) * factor if place < len(run) else Polynomial()]

    def _integers(self, group: int, run: range) -> Iterator[Meaning]:
        """For a run of mantissas: minus the center times their sum, the mantissas, and their scale."""
        if self.recipe.centered:
            center = constant(-float(self.activations.center))
            for r in range(self.recipe.rows):
                yield WHOLE, [sum_of(activation(r, row) * center for row in run)]
        for first in range(0, self._length(group), 4):
            for r in range(self.recipe.rows):
                four = [activation(r, row) for row in run[first : first + 4]]
                yield BYTES, [*four, *[Polynomial()] * (4 - len(four))]
        for r in range(self.recipe.rows):
            yield FLOAT, [self._power(r, group, run)]

    def _power(self, r: int, group: int, run: range) -> Polynomial:
        """The factor of the mantissas of a run; 1 for a float32."""
        return variable(f"e_{r}_{group}_{run.start}") if self.recipe.integer else constant(1.0)

    def _sums(self, group: int, runs: list[range]) -> Iterator[Meaning]:
        """The factor of an offset: a sum of activations, negated if the offset is subtracted."""
        sign = constant(-1.0 if self.recipe.structure.offset in ("minimum", "zero") else 1.0)
        for r in range(self.recipe.rows):
            yield FLOAT, [sum_of(activation(r, row) * self._power(r, group, run) * sign for run in runs for row in run)]

    # The expected result.

    def variables(self, column: int) -> tuple[list[Any], Hashable]:
        return [*self.integers(column), *(each.variable for each in self.scales(column))], None

    def integers(self, column: int) -> list[Any]:
        codes: Any = None if self.parts.structure.is_floats else self.parts.codes
        named: tuple[Any, ...] = (codes, self.parts.inner, self.parts.offsets)
        return [
            _variable(number)
            for each in named
            if each is not None and each.dtype.kind in "ui"
            for number in each.data[:, column]
        ]

    def scales(self, column: int) -> Iterator[Scale]:
        if self.parts.structure.is_floats:
            dtype = FLOATS[self.parts.structure.values].dtype
            one, by_default = (bits_of(number, dtype) for number in (1, 2))
            weights: Any = self.parts.codes
            for number in weights[:, column]:
                yield Scale(_variable(number.data[()]), widened(number, self.parts).data[()], one, by_default)
            return
        offsets: Any = self.parts.offsets if self.recipe.structure.offset == "number" else None
        named: tuple[Any, ...] = (self.parts.scales, offsets, self.parts.offset_scales)
        for part, usual in zip(named, (2, 0, 0), strict=True):
            if part is None:
                continue
            exponent = part.dtype == EXPONENT
            for number in part[:, column]:
                one, by_default = (127, 128) if exponent else (bits_of(n, part.dtype) for n in (1, usual))
                yield Scale(_variable(number.data[()]), _float(number).data[()], one, by_default)

    def expected(self, prover: Prover, r: int, column: int) -> Polynomial:
        return sum_of(self._products(prover, r, column))

    def _products(self, prover: Prover, r: int, column: int) -> Iterator[Polynomial]:
        """``x · (d t v(q) + o)`` for every row, by the formula of `lowbit_cppyy.stored.parts`."""
        parts, offset = self.parts, self.recipe.structure.offset
        codes: Any = parts.codes
        if parts.structure.is_floats:
            for row in range(parts.rows):
                weight = prover.reader.read(widened(codes[row, column], parts).data[()])
                yield activation(r, row) * weight
            return
        values = storage.values(replace(parts, codes=codes[:, column : column + 1])).data[:, 0]
        structure = self.recipe.structure

        def real(part: Any, place: int) -> Polynomial:
            return constant(storage.exact(part[place, column]).data[()])

        def float_(part: Any, group: int) -> Polynomial:
            return prover.reader.read(_float(part[group, column]).data[()])

        for group, rows in enumerate(self._groups()):
            scale = float_(parts.scales, group)
            for run in self._runs(group, rows):
                for row in run:
                    place = row // structure.run if structure.run else group
                    value = constant(values[row]) + constant(-float(parts.center) if offset == "center" else 0.0)
                    weight = scale * value
                    if structure.inner:
                        weight = scale * (value * real(parts.inner, place))
                    if offset == "number":
                        weight = weight + float_(parts.offsets, group)
                    if offset == "zero":
                        weight = weight + scale * real(parts.offsets, group) * constant(-1.0)
                    if offset == "minimum":
                        minimum = float_(parts.offset_scales, group) * real(parts.offsets, place)
                        weight = weight + minimum * constant(-1.0)
                    yield self._power(r, group, run) * activation(r, row) * weight

    # On numbers.

    def words(self, bits: Mapping[str, int]) -> U32:
        return self.layout.apply(self._known(bits))

    def matrix(self, bits: Mapping[str, int]) -> F64:
        return storage.values_of(self._known(bits))

    def _known(self, bits: Mapping[str, int]) -> Parts:
        """The parts with numbers for their variables."""

        def known(part: Any) -> Any:
            if part is None or isinstance(part, np.ndarray):
                return part
            own = np.array([bits.get(str(_variable(each)), 0) for each in part.data.reshape(-1)], np.uint32)
            numbers = own.astype(f"u{part.dtype.itemsize}").view(part.dtype).reshape(part.shape)
            return numbers.astype(np.float32) if part.dtype.kind == "f" else numbers

        names = "codes", "scales", "inner", "offsets", "offset_scales"
        return replace(self.parts, **{name: known(getattr(self.parts, name)) for name in names})


def widened(codes: Symbols, parts: Parts) -> Symbols:
    """Codes that are floats, as float32; bfloat16 is the upper half of a float32."""
    if parts.structure.values != "bfloat16":
        return codes.view(FLOATS[parts.structure.values].dtype).astype(FLOAT)
    shifted: Symbols = codes.astype(np.uint32) << np.uint32(16)
    return shifted.view(FLOAT)


def _float(number: Symbols) -> Symbols:
    """A scale as a float32: for an exponent E the float with the exponent bits E, :math:`2^{E - 127}`."""
    if number.dtype != EXPONENT:
        return number.astype(FLOAT)
    shifted: Symbols = number.astype(np.uint32) << np.uint32(MANTISSA)
    return shifted.view(FLOAT)
