"""The setting of a proof about a kernel: what its memories hold, for all matrices and activations at once.

The stream of weights is unknown to the last bit, scales and zeros included. Where the codes, the scales and the zeros
of a row and column lie in it, the layout says (`lowbit_cppyy.layout.panels.PanelLayout.index`). The activations are
variables, and each element of their stream is what `lowbit_cppyy.runtime.activations` lays there: an activation times a
power of two, a sum of four of them, four mantissas, or the sum of a group.

With these, the result of each column is known as a polynomial (`Setting.expected`): the sum, over the rows of the
matrix, of activation times weight.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import z3

from lowbit.kernels.program import Program
from lowbit.quantization.packing import CODES_PER_UNIT
from lowbit_cppyy.codegen.steps import TABLE
from lowbit_cppyy.layout.interleaving import Field
from lowbit_cppyy.layout.panels import PanelLayout
from lowbit_cppyy.recipe import Recipe
from lowbit_cppyy.runtime.activations import ActivationStream, Segment
from lowbit_prove import terms
from lowbit_prove.machine import Prover
from lowbit_prove.reals import REAL, Polynomial, constant, sum_of
from lowbit_prove.symbols import Symbols, unknowns

MANTISSA = (-127, 127)
"""Between which numbers the mantissas of `lowbit.linear.integer.ACTIVATIONS` lie."""
FLOAT = np.dtype(np.float32)


def smallest(recipe: Recipe) -> PanelLayout:
    """A matrix of two groups for a recipe, whose groups are no whole units and, with integers, end inside segments.

    Where an iteration is several units, groups are whole iterations.
    """
    unit = CODES_PER_UNIT[recipe.bits]
    rows, group = (96, 44) if recipe.integer else (2 * unit, 3 * unit // 2)
    sizes = recipe.bits, rows, recipe.panel, group, recipe.scales, recipe.convention, recipe.panel
    if ActivationStream(recipe, PanelLayout(*sizes)).whole:
        return PanelLayout(*sizes)
    group = max(unit * recipe.unroll, 32 * recipe.integer)
    return PanelLayout(recipe.bits, 2 * group, recipe.panel, group, *sizes[4:])


@dataclass(frozen=True)
class Setting:
    """One program with its memories.

    Attributes:
        recipe: of the kernel.
        program: what is to be proved, usually the program of the recipe.
        layout: of the matrix.
    """

    recipe: Recipe
    program: Program
    layout: PanelLayout

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
    def first_column(self) -> int:
        """The first column of the last tile of the panel, which the program computes."""
        return self.recipe.panel - self.recipe.registers * self.program.lanes

    @property
    def sizes(self) -> dict[str, Any]:
        """What the kernel is told of the matrix."""
        found: dict[str, Any] = {"turns": self.activations.iterations.tolist(), "groups": self.layout.groups}
        if self.recipe.integer:
            segments = self.activations.segments
            found |= {"segments": len(segments), "back": [int(s.back) for s in segments]}
            found["ends"] = [int(s.ends) for s in segments]
        return found

    def ready(self) -> tuple[Prover, Symbols]:
        """The machine in front of the first instruction, with the meanings of its memory; and the results."""
        elements = list(self.x_elements())
        x = Symbols(np.array([*(bits for bits, _ in elements), None], object)[:-1], np.uint32)
        y = unknowns("y", self.recipe.rows * self.recipe.panel, FLOAT)
        first = self.first_column
        memory = {"w": self.stream[first:], "x": x, "y": y[first:]}
        memory["s"] = self.stream[first // self.layout.scales_each :]
        memory["z"] = self.stream[first // self.layout.zeros_each :]
        prover = Prover(self.program, memory, self.sizes)
        for bits, meanings in elements:
            for each, (number, meaning) in enumerate(meanings):
                if not terms.known(number):
                    prover.reader.means(number, partial(Polynomial, meaning.parts))
                if len(meanings) == 4 and not terms.known(number):
                    prover.declare(terms.part(bits, 8 * each, 8), *MANTISSA)
        return prover, y

    # The stream of activations: for each element its bits, and the numbers in it with what they mean.

    def x_elements(self) -> Iterator[tuple[Any, list[tuple[Any, Polynomial]]]]:
        if self.activations.head:
            for number in range(TABLE):
                yield terms.bits_of(float(number), FLOAT), []
        numbered = self._integers() if self.recipe.integer else self._groups()
        for place, meaning in enumerate(numbered):
            if isinstance(meaning, list):  # four mantissas
                names = [z3.BitVec(f"m_{place}_{byte}", 8) if each.parts else 0 for byte, each in enumerate(meaning)]
                yield terms.joined(names, 8), list(zip(names, meaning, strict=True))
            else:
                bits = z3.BitVec(f"x_{place}", 32)
                yield bits, [(terms.from_bits(bits, FLOAT), meaning)]

    def _groups(self) -> Iterator[Polynomial]:
        """Of float32: for each group its values or its tables of sums, and then the sum of its activations."""
        for group in range(self.layout.groups):
            rows = range(group * self.layout.group_size, min((group + 1) * self.layout.group_size, self.layout.rows))
            for unit in range(self.layout.group_units(group)):
                first = rows.start + unit * self.layout.unit_codes
                yield from self._tables(first, rows) if self.recipe.method == "sums" else self._values(first, rows)
            for r in range(self.recipe.rows):
                yield self._sum(Polynomial(), [activation(r, row) for row in rows])

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

    def _integers(self) -> Iterator[Polynomial | list[Polynomial]]:
        """Of integers: for each segment its mantissas and its power of two; where a group ends, its sum."""
        sums = [Polynomial()] * self.recipe.rows
        for number, segment in enumerate(self.activations.segments):
            for quarter in range(segment.units * self.layout.unit_codes // 4):
                for r in range(self.recipe.rows):
                    yield [self._mantissa(segment, r, 4 * quarter + byte) for byte in range(4)]
            for r in range(self.recipe.rows):
                power = variable(f"e_{r}_{number}")
                rows = range(segment.first, segment.first + segment.length)
                sums[r] = self._sum(sums[r], [activation(r, row) * power for row in rows])
                yield power
            if segment.ends:
                yield from sums
                sums = [Polynomial()] * self.recipe.rows

    def _mantissa(self, segment: Segment, r: int, place: int) -> Polynomial:
        row = place - segment.start
        return activation(r, segment.first + row) if 0 <= row < segment.length else Polynomial()

    def _sum(self, total: Polynomial, numbers: list[Polynomial]) -> Polynomial:
        """The sum of activations as the stream holds it: of zero-points, less than nothing."""
        sign = constant(-1.0 if self.recipe.convention == "zero_point" else 1.0)
        return sum_of((total, *(each * sign for each in numbers)))

    # What the result must be.

    def code(self, row: int, column: int) -> Any:
        """The code of a row and column, as its fields say: a float64 without leaves."""
        bits = z3.BitVecVal(0, 8)
        for element, field in self.layout.index(row, column):
            part = z3.Extract(field.position + field.width - 1, field.position, self.stream.data[element])
            bits = bits | terms.extended(part, 8) << field.first
        return terms.cast(z3.simplify(bits), np.dtype(np.uint8), REAL)

    def variables(self, column: int) -> tuple[list[Any], list[tuple[int, Field]]]:
        """All variables of a column, in an order that is the same in each, and where its codes lie in them.

        What is expected of a column is made of these and of nothing else; so two columns whose codes lie at the same
        places are expected to be the same but for the names of their variables.
        """
        found = []
        for group in range(self.layout.groups):
            words = range(self.layout.group_start(group, 0), self.layout.index_scale(group, 0), self.recipe.panel)
            found += [self.stream.data[row + column] for row in words]
            found += [each.data[()] for each in self._numbers(group, column)]
        places = [place for row in range(self.layout.rows) for place in self.layout.index(row, column)]
        return found, [(element - column, field) for element, field in places]

    def weights(self, prover: Prover, group: int, column: int) -> tuple[Polynomial, Polynomial]:
        """The scale of a group and column, and what is added to each of its codes times the scale."""
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
        """``y + Σ x w`` of a row of x and a column of the matrix."""
        return sum_of(self._products(prover, r, column))

    def _products(self, prover: Prover, r: int, column: int) -> Iterator[Polynomial]:
        for group in range(self.layout.groups):
            scale, offset = self.weights(prover, group, column)
            for row in range(
                group * self.layout.group_size, min((group + 1) * self.layout.group_size, self.layout.rows)
            ):
                weight = scale * constant(self.code(row, column)) + offset
                yield self._power(r, row) * activation(r, row) * weight

    def _power(self, r: int, row: int) -> Polynomial:
        """What a mantissa is multiplied by; 1 of a float32."""
        if not self.recipe.integer:
            return constant(1.0)
        number = next(n for n, s in enumerate(self.activations.segments) if s.first <= row < s.first + s.length)
        return variable(f"e_{r}_{number}")


def variable(name: str) -> Polynomial:
    """A real number of this name."""
    return Polynomial({(name,): 1.0})


def activation(r: int, row: int) -> Polynomial:
    """Row `row` of row `r` of x: a float32, or the mantissa of one."""
    return variable(f"x_{r}_{row}")
