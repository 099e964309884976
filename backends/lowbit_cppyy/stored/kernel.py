r"""The program of a stored product: one generator for every structure.

Over one panel of columns it computes, for each of its rows of x and each column,

.. math:: y \mathrel{+}= \sum_g d_g \sum_{s \in g} t_s \Bigl(\sum_{k \in s} x_k\, v(q_k) - c \sum_{k \in s} x_k\Bigr)
   + \sum_s o_s \sum_{k \in s} x_k ,

where the parts that a structure lacks are left out (`lowbit_cppyy.stored.parts`). Lanes are columns. A unit of 32 rows
is unpacked at once. The kernel reads two streams, each once from front to back:

- ``w`` (`lowbit_cppyy.stored.layout`): for each group its units, each with the integers of its runs behind its words,
  then scales and offsets. ``s`` and ``z`` point into the same stream, for numbers of 16 and of 8 bits;
- ``x`` (`lowbit_cppyy.stored.activations`): a table, where values are looked up; then for each run :math:`-c` times the
  sum of its activations, the activations, and their sum, each where the structure needs it. With several rows of x
  their elements lie side by side.

**Integers.** Four codes are multiplied by four activations in a step. A run then has the scale of its activations,
:math:`e`, and ``f = e · float(d)`` takes the place of the sum. That product is exact or a normal float32, because it is
a multiple of :math:`e`; so scales of weights that are very small or large come after it.

A group is whole units, padded with zeros on both sides, so the program has no tails.

**The grammar of a name**: ``stored_<activations>_<structure>_<method>_<tile>_<stream>_<instruction set>``.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lowbit.kernels.program import Address, Advance, Comment, Element, Instruction, Loop, Program, Step
from lowbit_cppyy.caching import cached_property
from lowbit_cppyy.codegen.isa import InstructionSet
from lowbit_cppyy.codegen.lowering import function
from lowbit_cppyy.codegen.steps import (
    added_to_results,
    advance,
    combined,
    load_words,
    prefetched,
    raised,
    raising,
    words_of,
    zero,
)
from lowbit_cppyy.codegen.unpacking import LOOKED_UP, SUBNORMAL, constants, four_codes, mask, unpack
from lowbit_cppyy.layout.panels import row_elements
from lowbit_cppyy.stored.layout import code_elements, inner_rows, offset_elements, scale_elements
from lowbit_cppyy.stored.parts import UNIT
from lowbit_cppyy.stored.recipe import HEAD, StoredRecipe

BYTE_CENTER = 128
"""The number added to a signed byte so that it can be stored or multiplied as an unsigned byte."""

_SUMMARY = """\
{name}: {rows} row(s) of x times {columns} columns of {bits}-bit codes of a stored matrix.
w: for each group its units of words with the integers of runs, then scales and offsets, in rows of {panel} columns.
x: for each run what its codes are multiplied by, with the sums that its offset needs. y: rows of {panel}, added to. A
register is declared where it is first used: w words, x and X activations, a, b and v codes, l values as float, d sums
as integers, acc the sum of a run, blk and low those of a group, s scale, t and n integers of a run, o offset, m, c and
raise constants."""


@dataclass(frozen=True)
class StoredKernel:
    """One kernel: a recipe for an instruction set."""

    recipe: StoredRecipe
    table: InstructionSet

    @property
    def columns(self) -> int:
        """The number of columns that one call computes."""
        return self.recipe.registers * self.table.lanes

    @property
    def name(self) -> str:
        """Its name, by the grammar above."""
        return f"stored_{self.recipe.name}_{self.table.name}"

    @cached_property
    def program(self) -> Program:
        """Its program, in the vocabulary of `lowbit.kernels.vector`."""
        return _Writer(self.recipe, self.table.lanes).program()

    @property
    def source(self) -> str:
        """Its C++, which follows the prelude of its instruction set."""
        summary = _SUMMARY.format(name=self.name, columns=self.columns, bits=self.recipe.bits, **vars(self.recipe))
        return function(self.program, self.table, self.name, summary)


class _Writer:
    """Writes the program of one recipe; `at` is the element of x that the next step reads."""

    def __init__(self, recipe: StoredRecipe, lanes: int) -> None:
        self.recipe, self.structure, self.lanes = recipe, recipe.structure, lanes
        self.at = 0

    # Pointers into the stream of weights: the column of a register, in elements that hold one, two or four numbers.

    def row(self, offset: int, j: int) -> Address:
        return Address("w", offset + j * self.lanes)

    def halves(self, offset: int, j: int) -> Address:
        return Address("s", offset + j * self.lanes // 2)

    def bytes(self, offset: int, j: int) -> Address:
        return Address("z", offset + j * self.lanes // 4)

    def next_x(self) -> list[Address]:
        """The next element of each row of x."""
        first, self.at = self.at, self.at + self.recipe.rows
        return [Address("x", first + r) for r in range(self.recipe.rows)]

    # The program.

    def program(self) -> Program:
        steps = added_to_results(self.recipe, self.lanes, [Loop("g", "groups", tuple(self.group()))])
        return Program(self.lanes, (*self.constants(steps), *steps))

    def constants(self, steps: list[Step]) -> Iterator[Step]:
        """The table that precedes x, and the constants that integers and floats need in every iteration."""
        if self.recipe.headed:
            load = "load_float" if self.recipe.method == "table" else "load_int"
            yield Instruction(load, "table", (Address("x"),))
            if self.recipe.method == "table" and 2**self.recipe.bits > LOOKED_UP:
                yield Instruction(load, "table_2", (Address("x", LOOKED_UP),))
            yield Advance("x", HEAD)
        yield from constants(steps)
        yield from raising(self.recipe.method)
        if self.structure.inner == "int8":
            yield Instruction("broadcast_float", "c", (-float(BYTE_CENTER),))
        unit = 2.0**-SUBNORMAL if self.recipe.method == "subnormal" else 1.0
        for bit in sorted({self.recipe.lowest_bit(code) for code in range(UNIT)} if self.signed else ()):
            yield Instruction("broadcast_float", f"c_{bit}", (-BYTE_CENTER * 2.0**bit * unit,))
        if self.recipe.halved:
            yield Instruction("broadcast_float", "half", (0.5,))

    @property
    def signed(self) -> bool:
        """Whether codes are signed bytes, which become floats."""
        return self.structure.values == "signed" and not self.recipe.integer

    def group(self) -> Iterator[Step]:
        """The units of a group, then its scales and offsets."""
        recipe = self.recipe
        for r, j in recipe.places:
            if recipe.run:
                yield zero(f"blk_{r}_{j}")
            if self.structure.offset == "minimum":
                yield zero(f"low_{r}_{j}")
        if not recipe.run:
            yield from self.begin("acc", "_0")
            yield Advance("x", self.at)
            self.at = 0
        yield Loop("u", Element("turns", "g"), tuple(self.unit()))
        self.at = 0
        if not recipe.run:
            yield from combined(recipe)
        yield from self.end_of_group()

    def begin(self, sums: str, suffix: str) -> Iterator[Step]:
        """Start sums at 0, or at minus the center times the sum of the activations."""
        recipe = self.recipe
        word = "broadcast_int" if recipe.integer else "broadcast_float"
        starts = self.next_x() if recipe.centered else [0] * recipe.rows if recipe.integer else [0.0] * recipe.rows
        for r, j in recipe.places:
            yield Instruction(word, f"{sums}_{r}_{j}{suffix}", (starts[r],))
            for chain in range(1, 1 if recipe.integer else recipe.chains):
                yield zero(f"{sums}_{r}_{j}_{chain}")

    # A unit.

    def unit(self) -> Iterator[Step]:
        """The 32 rows of a unit; then the pointers move past them."""
        self.at = 0
        yield from prefetched(self.recipe, self.rows_of_unit(), 0, self.unit_elements)
        yield from advance(self.unit_elements)
        yield Advance("x", self.at)

    def rows_of_unit(self) -> Iterator[Step]:
        """The words and products of the rows, and the integers of runs that end in the unit."""
        recipe = self.recipe
        runs = UNIT // recipe.run if recipe.run else 1
        if not self.structure.is_floats:  # words of floats are loaded at their use: 16 rows of words are too many
            yield from load_words(recipe, self.lanes)
        length = UNIT // runs
        for run in range(runs):
            if recipe.run:
                yield from self.begin(*(("d", "") if recipe.integer else ("acc", "_0")))
            codes = range(run * length, (run + 1) * length)
            yield from self.integers(codes) if recipe.integer else self.floats(codes)
            if recipe.run:
                yield from self.end_of_run(run, runs)

    @property
    def unit_elements(self) -> int:
        """The number of elements of the stream of weights in a unit."""
        inner = inner_rows(self.structure) * row_elements(self.recipe.panel, "uint8")
        return code_elements(self.structure, self.recipe.panel) + inner

    def floats(self, codes: range) -> Iterator[Step]:
        """Each code is unpacked once, multiplied by each row of x, and added."""
        recipe = self.recipe
        for code in codes:
            yield Comment(f"code {code}")
            for r, address in enumerate(self.next_x()):
                yield Instruction("broadcast_float", f"x_{r}", (address,))
            for j in range(recipe.registers):
                yield from self.value(code, j)
                for r in range(recipe.rows):
                    acc = f"acc_{r}_{j}_{code % recipe.chains}"
                    yield Instruction("fmadd", acc, (f"x_{r}", f"l_{j}", acc))

    def value(self, code: int, j: int) -> Iterator[Step]:
        """The value of a code as a float."""
        if self.recipe.method == "float":
            yield from self.float(code, j)
            return
        if self.recipe.method in ("bytes", "high"):
            yield from self.signed_byte(code, j)
            return
        yield from unpack(self.recipe, code, words_of(self.recipe, j), j)
        if self.signed:
            yield Instruction("add", f"l_{j}", (f"l_{j}", f"c_{self.recipe.lowest_bit(code)}"))

    def float(self, code: int, j: int) -> Iterator[Step]:
        """A float as float32: a bfloat16 is the upper half of a float32, and a word holds two rows of bfloat16."""
        if self.structure.values == "float32":
            yield Instruction("load_float", f"l_{j}", (self.row(code * self.recipe.panel, j),))
            return
        if self.structure.values == "float16":
            place = code * row_elements(self.recipe.panel, np.float16)
            yield Instruction("load_half", f"l_{j}", (self.halves(place, j),))
            return
        if code % 2 == 0:
            yield Instruction("load_int", f"v_{j}", (self.row(code // 2 * self.recipe.panel, j),))
            yield Instruction("slli", f"a_{j}", (f"v_{j}", 16))
        else:
            yield Instruction("and", f"a_{j}", (f"v_{j}", mask(0xFFFF << 16)))
        yield Instruction("as_float", f"l_{j}", (f"a_{j}",))

    def signed_byte(self, code: int, j: int) -> Iterator[Step]:
        """A value of a table: four values are looked up at once, and one of them is converted.

        Shifts and conversions compete for the same ports of recent processors; masks do not.
        """
        if code % 4 == 0:
            yield from self.looked_up(code // 4, j, f"v_{j}")
        shift = 24 - 8 * (code % 4)
        moved = f"a_{j}" if shift else f"v_{j}"
        if shift:
            yield Instruction("slli", moved, (f"v_{j}", shift))
        if self.recipe.method == "bytes":
            yield Instruction("srai", f"a_{j}", (moved, 24))
        elif shift < 24:
            yield Instruction("and", f"a_{j}", (moved, mask(0xFF << 24)))
        yield Instruction("cvt_signed_float", f"l_{j}", (f"a_{j}",))

    def looked_up(self, quarter: int, j: int, to: str) -> Iterator[Step]:
        """Four values as bytes."""
        steps, codes = four_codes(self.recipe.bits, quarter, words_of(self.recipe, j), f"a_{j}", f"b_{j}")
        yield from steps
        yield Instruction("lookup_bytes", to, ("table", codes))

    def integers(self, codes: range) -> Iterator[Step]:
        """Four codes are unpacked once and multiplied by the activations of each row of x."""
        recipe = self.recipe
        for quarter in range(codes.start // 4, codes.stop // 4):
            yield Comment(f"codes {4 * quarter} to {4 * quarter + 3}")
            for r, address in enumerate(self.next_x()):
                yield Instruction("broadcast_int", f"x_{r}", (address,))
            for j in range(recipe.registers):
                if self.structure.values == "table":
                    values = f"v_{j}"
                    yield from self.looked_up(quarter, j, values)
                else:
                    steps, values = four_codes(recipe.bits, quarter, words_of(self.recipe, j), f"a_{j}", f"b_{j}")
                    yield from steps
                for r in range(recipe.rows):
                    yield Instruction("dot4", f"d_{r}_{j}", (f"d_{r}_{j}", values, f"x_{r}"))

    # The end of a run, and of a group.

    def end_of_run(self, run: int, runs: int) -> Iterator[Step]:
        """``blk += t * acc``, and ``low += m * X`` where there are minima."""
        recipe, structure = self.recipe, self.structure
        yield Comment("blk += t * acc")
        if recipe.integer:
            scales = self.next_x()
            for r in range(recipe.rows):
                yield Instruction("broadcast_float", f"e_{r}", (scales[r],))
            for r, j in recipe.places:
                yield Instruction("cvt_signed_float", f"f_{j}", (f"d_{r}_{j}",))
                if structure.inner:
                    yield Instruction("multiply", f"acc_{r}_{j}_0", (f"f_{j}", f"e_{r}"))
                else:
                    yield Instruction("fmadd", f"blk_{r}_{j}", (f"f_{j}", f"e_{r}", f"blk_{r}_{j}"))
        else:
            yield from combined(recipe)
        if structure.inner:
            yield from self.apply("t", "acc_{}_{}_0", "blk", run, signed=structure.inner == "int8")
        if structure.offset == "minimum":
            yield from self.sums()
            yield from self.apply("n", "X_{}", "low", runs + run, signed=False)

    def apply(self, name: str, factor: str, to: str, place: int, *, signed: bool) -> Iterator[Step]:
        """Multiply by the integers of a run, which are row `place` of the bytes after the words."""
        offset = self.recipe.unit_words * self.recipe.panel + place * row_elements(self.recipe.panel, "uint8")
        for j in range(self.recipe.registers):
            yield Instruction("load_byte", f"i_{j}", (self.bytes(offset, j),))
            yield Instruction("cvt_int_float", f"{name}_{j}", (f"i_{j}",))
            if signed:
                yield Instruction("add", f"{name}_{j}", (f"{name}_{j}", "c"))
            for r in range(self.recipe.rows):
                operands = (factor.format(r, j), f"{name}_{j}", f"{to}_{r}_{j}")
                yield Instruction("fmadd", f"{to}_{r}_{j}", operands)

    def sums(self) -> Iterator[Step]:
        for r, address in enumerate(self.next_x()):
            yield Instruction("broadcast_float", f"X_{r}", (address,))

    def end_of_group(self) -> Iterator[Step]:
        """``y += d * blk`` and ``y += o * X``; then the pointers move past the group."""
        recipe, structure = self.recipe, self.structure
        total = "blk_{}_{}" if recipe.run else "acc_{}_{}_0"
        if recipe.method == "subnormal":
            yield from raised(recipe, total)
        scale = scale_elements(structure, recipe.panel)
        tail = scale + offset_elements(structure, recipe.panel)
        yield from prefetched(recipe, self.scaled(total, scale), 0, tail)
        yield from advance(tail)
        if self.at:
            yield Advance("x", self.at)
            self.at = 0

    def scaled(self, total: str, scale: int) -> Iterator[Step]:
        """The scaled sums of a group, and its offsets, which lie `scale` elements after the scales."""
        recipe, structure = self.recipe, self.structure
        yield Comment("y += d * blk")
        if structure.offset in ("number", "zero"):
            yield from self.sums()
        for j in range(recipe.registers):
            if structure.scale == "one":
                for r in range(recipe.rows):
                    yield Instruction("add", f"y_{r}_{j}", (f"y_{r}_{j}", total.format(r, j)))
                continue
            yield from self.number("s", structure.scale, 0, j)
            if recipe.halved:
                yield Instruction("multiply", f"s_{j}", (f"s_{j}", "half"))
            for r in range(recipe.rows):
                yield Instruction("fmadd", f"y_{r}_{j}", (total.format(r, j), f"s_{j}", f"y_{r}_{j}"))
            if recipe.sums:
                yield from self.offset(scale, j)

    def offset(self, place: int, j: int) -> Iterator[Step]:
        """``y += o * X``; for zeros and minima the sums of activations are negated."""
        structure = self.structure
        if structure.offset == "zero":
            yield Instruction("load_byte", f"i_{j}", (self.bytes(place, j),))
            yield Instruction("cvt_int_float", f"o_{j}", (f"i_{j}",))
            yield Instruction("multiply", f"o_{j}", (f"o_{j}", f"s_{j}"))
        else:
            yield from self.number("o", structure.scale, place, j)
        for r in range(self.recipe.rows):
            factor = f"low_{r}_{j}" if structure.offset == "minimum" else f"X_{r}"
            yield Instruction("fmadd", f"y_{r}_{j}", (factor, f"o_{j}", f"y_{r}_{j}"))

    def number(self, name: str, scale: str, offset: int, j: int) -> Iterator[Step]:
        """A register of numbers of the structure's type."""
        if scale == "exponent":
            yield Instruction("load_byte", f"i_{j}", (self.bytes(offset, j),))
            yield Instruction("slli", f"i_{j}", (f"i_{j}", 23))
            yield Instruction("as_float", f"{name}_{j}", (f"i_{j}",))
            return
        load, place = ("load_half", self.halves) if scale == "float16" else ("load_float", self.row)
        yield Instruction(load, f"{name}_{j}", (place(offset, j),))
