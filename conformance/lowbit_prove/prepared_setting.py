"""The setting of a proof about a kernel of a prepared matrix, in the package's own layout.

The stream of weights is unknown to the last bit. The layout says where the codes, scales and zeros of a row and column
lie in it (`lowbit_cppyy.layout.panels.PanelLayout.index`). The stream of activations is as
`lowbit_cppyy.runtime.activations` declares it.
"""

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import z3

from lowbit.arrays import F64, U32
from lowbit.quantization.packing import CODES_PER_UNIT
from lowbit_cppyy.codegen.steps import TABLE
from lowbit_cppyy.layout.panels import PanelLayout
from lowbit_cppyy.recipe import Recipe
from lowbit_cppyy.runtime.activations import ActivationStream, Segment
from lowbit_prove import terms
from lowbit_prove.machine import Prover, Range
from lowbit_prove.reals import REAL, Polynomial, constant, sum_of
from lowbit_prove.setting import BYTES, FLOAT, Meaning, Scale, Setting, activation, bits_of, variable
from lowbit_prove.solver import with_numbers
from lowbit_prove.symbols import Symbols, unknowns


def smallest(recipe: Recipe) -> PanelLayout:
    """A matrix of two groups for a recipe. Its groups are not whole units and, with integers, end inside segments.

    If an iteration has several units, groups are whole iterations.
    """
    unit = CODES_PER_UNIT[recipe.bits]
    rows, group = (96, 44) if recipe.integer else (2 * unit, 3 * unit // 2)
    sizes = recipe.bits, rows, recipe.panel, group, recipe.scales, recipe.convention, recipe.panel
    if ActivationStream(recipe, PanelLayout(*sizes)).whole:
        return PanelLayout(*sizes)
    group = max(unit * recipe.unroll, 32 * recipe.integer)
    return PanelLayout(recipe.bits, 2 * group, recipe.panel, group, *sizes[4:])


@dataclass(frozen=True)
class PreparedSetting(Setting):
    """One program with the memories of a prepared matrix."""

    recipe: Recipe
    layout: PanelLayout
    mantissas: ClassVar[Range] = (-127, 127)
    """The range of mantissas of `lowbit.linear.integer.ACTIVATIONS`."""

    @cached_property
    def activations(self) -> ActivationStream:
        return ActivationStream(self.recipe, self.layout)

    @cached_property
    def stream(self) -> Symbols:
        """The stream of weights: one panel. Each variable is a word of codes, a scale or a zero of one column."""
        found = unknowns("w", self.layout.panel_elements, np.uint32)
        for group in range(self.layout.groups):
            start = self.layout.index_scale(group, 0)
            zeros = start + self.layout.scale_elements
            for first, count, each in (
                (start, self.layout.scale_elements, self.layout.scales_each),
                (zeros, self.layout.zero_elements, self.layout.zeros_each),
            ):
                for element in range(first, first + count):
                    parts = [z3.BitVec(f"w_{element}_{part}", 32 // each) for part in range(each)]
                    found.data[element] = terms.joined(parts, 32 // each)
        return found

    @property
    def rows(self) -> int:
        return self.layout.rows

    @property
    def each(self) -> tuple[int, int]:
        return self.layout.scales_each, self.layout.zeros_each

    @property
    def sizes(self) -> dict[str, Any]:
        found: dict[str, Any] = {"turns": self.activations.iterations.tolist(), "groups": self.layout.groups}
        if self.recipe.integer:
            segments = self.activations.segments
            found |= {"segments": len(segments), "back": [int(s.back) for s in segments]}
            found["ends"] = [int(s.ends) for s in segments]
        return found

    # The stream of activations.

    @property
    def head(self) -> list[int]:
        return [bits_of(number, FLOAT) for number in range(TABLE)] if self.activations.head else []

    def meanings(self) -> Iterator[Meaning]:
        if self.recipe.integer:
            yield from self._integers()
        else:
            yield from ((FLOAT, [meaning]) for meaning in self._floats())

    def _floats(self) -> Iterator[Polynomial]:
        """For float32: the values of each group or its tables of sums, then the sum of its activations."""
        for group in range(self.layout.groups):
            rows = self._rows(group)
            for unit in range(self.layout.group_units(group)):
                first = rows.start + unit * self.layout.unit_codes
                yield from self._tables(first, rows) if self.recipe.method == "sums" else self._values(first, rows)
            for r in range(self.recipe.rows):
                yield self._sum(Polynomial(), [activation(r, row) for row in rows])

    def _rows(self, group: int) -> range:
        first = group * self.layout.group_size
        return range(first, min(first + self.layout.group_size, self.layout.rows))

    def _values(self, first: int, rows: range) -> Iterator[Polynomial]:
        for code, factor in enumerate(self.activations.factors.tolist()):
            for r in range(self.recipe.rows):
                yield activation(r, first + code) * constant(factor) if first + code in rows else Polynomial()

    def _tables(self, first: int, rows: range) -> Iterator[Polynomial]:
        for codes, weights in zip(*(each.tolist() for each in self.activations.terms), strict=True):
            for index in range(TABLE):
                total = Polynomial()
                for bit in range(4):
                    if index >> bit & 1 and first + codes[bit] in rows:
                        total = total + activation(0, first + codes[bit]) * constant(weights[bit])
                yield total

    def _integers(self) -> Iterator[Meaning]:
        """For integers: the mantissas of each segment and its power of two; where a group ends, its sum."""
        sums = [Polynomial()] * self.recipe.rows
        for number, segment in enumerate(self.activations.segments):
            for quarter in range(segment.units * self.layout.unit_codes // 4):
                for r in range(self.recipe.rows):
                    yield BYTES, [self._mantissa(segment, r, 4 * quarter + byte) for byte in range(4)]
            for r in range(self.recipe.rows):
                power = variable(f"e_{r}_{number}")
                rows = range(segment.first, segment.first + segment.length)
                sums[r] = self._sum(sums[r], [activation(r, row) * power for row in rows])
                yield FLOAT, [power]
            if segment.ends:
                yield from ((FLOAT, [each]) for each in sums)
                sums = [Polynomial()] * self.recipe.rows

    def _mantissa(self, segment: Segment, r: int, place: int) -> Polynomial:
        row = place - segment.start
        return activation(r, segment.first + row) if 0 <= row < segment.length else Polynomial()

    def _sum(self, total: Polynomial, numbers: list[Polynomial]) -> Polynomial:
        """The sum of activations as the stream holds it; negated for zero-points."""
        sign = constant(-1.0 if self.recipe.convention == "zero_point" else 1.0)
        return sum_of((total, *(each * sign for each in numbers)))

    # The expected result.

    def code(self, row: int, column: int) -> Any:
        """The code of a row and column, assembled from its fields: a float64 without leaves."""
        bits = z3.BitVecVal(0, 8)
        for element, field in self.layout.index(row, column):
            part = z3.Extract(field.position + field.width - 1, field.position, self.stream.data[element])
            bits = bits | terms.extended(part, 8) << field.first
        return terms.cast(z3.simplify(bits), np.dtype(np.uint8), REAL)

    def variables(self, column: int) -> tuple[list[Any], Hashable]:
        found = []
        for group in range(self.layout.groups):
            found += [*self._words(group, column), *(each.data[()] for each in self._numbers(group, column))]
        places = [place for row in range(self.layout.rows) for place in self.layout.index(row, column)]
        return found, tuple((element - column, field) for element, field in places)

    def integers(self, column: int) -> list[Any]:
        return [word for group in range(self.layout.groups) for word in self._words(group, column)]

    def _words(self, group: int, column: int) -> list[Any]:
        """The words of a group and column."""
        rows = range(self.layout.group_start(group, 0), self.layout.index_scale(group, 0), self.recipe.panel)
        return [self.stream.data[row + column] for row in rows]

    def scales(self, column: int) -> Iterator[Scale]:
        dtype = self.recipe.scales
        for group in range(self.layout.groups):
            scale, zero = self._numbers(group, column)
            for each, usual in ((scale, 2), (zero, 0)) if self.recipe.convention == "minimum" else ((scale, 2),):
                number = each.view(dtype).astype(FLOAT).data[()]
                yield Scale(each.data[()], number, bits_of(1, dtype), bits_of(usual, dtype))

    def weights(self, prover: Prover, group: int, column: int) -> tuple[Polynomial, Polynomial]:
        """The scale of a group and column, and the number added to each of its codes times the scale."""
        scale, zero = self._numbers(group, column)
        read = prover.reader.read
        number = read(scale.view(self.recipe.scales).astype(FLOAT).data[()])
        if self.recipe.convention == "minimum":
            return number, read(zero.view(self.recipe.scales).astype(FLOAT).data[()])
        return number, number * constant(terms.applied(np.negative, REAL, REAL, zero.astype(REAL).data[()]))

    def _numbers(self, group: int, column: int) -> tuple[Symbols, Symbols]:
        """The bits of the scale and of the zero of a group and column."""
        place = self.layout.index_scale(group, 0)
        between = place + self.layout.scale_elements
        bits = [f"u{4 // each}" for each in (self.layout.scales_each, self.layout.zeros_each)]
        scales = self.stream[place:between].view(bits[0])
        return scales[column], self.stream[between : between + self.layout.zero_elements].view(bits[1])[column]

    def expected(self, prover: Prover, r: int, column: int) -> Polynomial:
        return sum_of(self._products(prover, r, column))

    def _products(self, prover: Prover, r: int, column: int) -> Iterator[Polynomial]:
        for group in range(self.layout.groups):
            scale, offset = self.weights(prover, group, column)
            for row in self._rows(group):
                weight = scale * constant(self.code(row, column)) + offset
                yield self._power(r, row) * activation(r, row) * weight

    def _power(self, r: int, row: int) -> Polynomial:
        """The factor of a mantissa; 1 for a float32."""
        if not self.recipe.integer:
            return constant(1.0)
        number = next(n for n, s in enumerate(self.activations.segments) if s.first <= row < s.first + s.length)
        return variable(f"e_{r}_{number}")

    # On numbers.

    def words(self, bits: Mapping[str, int]) -> U32:
        return np.array([with_numbers(each, bits).as_long() for each in self.stream.data], np.uint32)

    def matrix(self, bits: Mapping[str, int]) -> F64:
        w, layout = self.words(bits), self.layout
        found = np.zeros((layout.rows, layout.columns))
        kind = layout.scales if layout.convention == "minimum" else np.uint8
        for row, column in np.ndindex(found.shape):
            first = layout.index_scale(row // layout.group_size, 0)
            between, end = first + layout.scale_elements, first + layout.scale_elements + layout.zero_elements
            scale, zero = float(w[first:between].view(layout.scales)[column]), float(w[between:end].view(kind)[column])
            code = sum(
                (int(w[element]) >> field.position & (1 << field.width) - 1) << field.first
                for element, field in layout.index(row, column)
            )
            found[row, column] = scale * code + zero if layout.convention == "minimum" else scale * (code - zero)
        return found
