"""Recipes of stored products: how one structure becomes a program.

=========== ================================================================ ==========================================
method      what it does                                                     for
=========== ================================================================ ==========================================
`shift`     shift, mask, convert, multiply-add                               codes of any width
`fold`      no shift: a code masked in place is too large by a power of      the same
            two, and its activation too small by it
`subnormal` the same without a conversion: the bits of a masked code are     the same
            those of a float, the code times a power of two
`table`     the value or code is looked up in one or two registers of        3 to 5 bits, registers of sixteen lanes
            sixteen floats
`bytes`     four values are looked up as bytes, and each is converted        tables of integers, or of halves
`high`      the same, each in the highest byte of its lane: too large by     the same
            2^24, and its activation too small by it
`dot4`      integers: four codes by four activations in one step             activations of 8 bits
`float`     floats of 16 bits are widened, those of 32 taken as they are     matrices of them
=========== ================================================================ ==========================================
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

import numpy as np

from lowbit.arrays import F32
from lowbit_cppyy.codegen.isa import InstructionSet
from lowbit_cppyy.codegen.unpacking import lowest_bit, power, two_planes
from lowbit_cppyy.recipe import FAR, NONE, PURPOSES, Purpose, Tile
from lowbit_cppyy.runtime.prefetching import distance_of_integers, distance_of_subnormals, usual_distance
from lowbit_cppyy.runtime.tiles import tile_of
from lowbit_cppyy.runtime.vendor import fast_lookups, fast_subnormals, made_by_intel
from lowbit_cppyy.stored.parts import UNIT, Structure

Method = Literal["shift", "fold", "subnormal", "table", "bytes", "high", "dot4", "float"]
HEAD = 32
"""The number of elements before the activations: floats to be looked up, or sixteen bytes, repeated to that length."""

TABULAR: Mapping[Purpose, tuple[int, ...]] = MappingProxyType({"vector": (3, 4, 5), "many rows": (3, 4)})
"""For each purpose the widths of codes that `table` looks up where look-ups are fast.

Codes of 2 bits are masked and converted as fast. Codes of 5 bits are looked up in two registers; many rows that share
them take 1.05 times as long as with `fold`. A few rows take as long either way (*measured*, Ice Lake).
"""


@dataclass(frozen=True)
class StoredRecipe(Tile):
    """The choices of one kernel, in addition to its tile.

    Attributes:
        structure: of the matrix.
        method: see the top of this chapter.
    """

    structure: Structure
    method: Method

    @property
    def bits(self) -> int:
        """The width of a code."""
        return self.structure.bits

    @property
    def unit_words(self) -> int:
        return self.structure.bits

    def lowest_bit(self, code: int) -> int:
        """The bit of its lane at which a code of a unit begins before it becomes a float."""
        if self.method in ("float", "high"):
            return 24 if self.method == "high" else 0
        return lowest_bit(self, code)

    def power(self, code: int) -> int:
        """By which power of two a code of a unit is too large, or too small, in its product."""
        return power(self.method, self.lowest_bit(code))

    @property
    def exact(self) -> "StoredRecipe":
        """The recipe that gives the same bits without powers of two in the activations."""
        if self.method not in ("fold", "subnormal", "high"):
            return self
        return replace(self, method="bytes" if self.structure.values == "table" else "shift")

    @property
    def integer(self) -> bool:
        """Whether activations are integers of 8 bits."""
        return self.method == "dot4"

    @property
    def run(self) -> int:
        """The number of rows whose products are summed before a scale is applied; 0 for a whole group."""
        return self.structure.run or (UNIT if self.integer else 0)

    @property
    def halved(self) -> bool:
        """Whether a table of multiples of 1/2 is used as integers, so that scales are halved.

        Tables of integers have float16 scales; a table of halves has exponents, or float32 if one of them is the
        smallest.
        """
        return self.structure.values == "table" and self.method != "table" and self.structure.scale != "float16"

    @property
    def centered(self) -> bool:
        """Whether a sum begins with minus the center times the sum of its activations."""
        return self.structure.offset == "center" or (self.integer and self.structure.values != "codes")

    @property
    def sums(self) -> bool:
        """Whether offsets are multiplied by sums of activations."""
        return self.structure.offset in ("number", "zero", "minimum")

    @property
    def headed(self) -> bool:
        """Whether a table precedes the activations."""
        return self.structure.values == "table" or self.method == "table"

    def head(self, table: F32 | None) -> F32:
        """The table before the activations: floats, or signed bytes, or bytes plus 128. It repeats, so that the bits
        above a code do not change what is found.

        Args:
            table: the sixteen values; None if codes are values.
        """
        if table is None:
            return np.arange(HEAD, dtype=np.float32) % np.float32(2**self.bits)
        if self.method == "table":
            return np.resize(table, HEAD)
        integers = (table * (2 if self.halved else 1)).astype(np.int16) + (128 if self.integer else 0)
        return np.resize(integers.astype(np.uint8).view(np.float32), HEAD)

    @property
    def name(self) -> str:
        """The middle of a kernel's name; the grammar is in `lowbit_cppyy.stored.kernel`."""
        tile = f"{self.rows}x{self.registers}c{self.chains}"
        activations = "q8" if self.integer else "f32"
        return f"{activations}_{self.structure.name}_{self.method}_{tile}_p{self.panel}a{self.ahead}"


def default_recipe(structure: Structure, table: InstructionSet, purpose: Purpose, panel: int) -> StoredRecipe:
    """The recipe for a structure on an instruction set of this processor.

    Args:
        structure: of the matrix.
        table: the instruction set.
        purpose: one row of x or several, in float32 or in integers; for a matrix of floats, one of `purposes_of`.
        panel: columns of a panel.
    """
    wide, integer = table.lanes == 16, purpose.startswith("integer")
    method: Method = "float" if structure.is_floats else "dot4" if integer else "fold"
    if structure.values == "table" and not integer:
        method = "table" if wide else "high"
    if method == "fold" and wide and fast_lookups() and structure.bits in TABULAR.get(purpose, ()):
        method = "table"
    if not purpose.endswith("vector"):
        rows, registers = tile_of(purpose, table.registers)
        return StoredRecipe(structure, method, rows=rows, registers=registers, panel=panel)
    if method == "fold" and fast_subnormals():
        method = "subnormal"
    chains = 2 if wide and not integer and not structure.run else 1  # short runs overlap anyway
    recipe = StoredRecipe(structure, method, registers=panel // table.lanes, chains=chains, panel=panel)
    return replace(recipe, ahead=prefetch_distance(recipe, table))


def purposes_of(structure: Structure) -> tuple[Purpose, ...]:
    """The purposes that have kernels: floats are not multiplied by integers."""
    return tuple(each for each in PURPOSES if not (structure.is_floats and each.startswith("integer")))


def prefetch_distance(recipe: StoredRecipe, table: InstructionSet) -> int:
    """The distance in elements between a prefetch and the current read, for one row of x; the chapter `kernels` has the
    times.

    Whole bytes that one instruction multiplies take so little work that loads run far ahead anyway, but not far enough
    on Intel's processors.
    """
    if not recipe.integer and recipe.method != "subnormal":
        return usual_distance(FAR + 1024 if table.lanes == 16 else FAR)
    in_order = not two_planes(recipe.bits) or table.registers == 32
    if not recipe.integer:
        return distance_of_subnormals(table.registers, in_order=in_order)
    if recipe.bits == 8 and table.lanes == 16 and table.byte_dots and not made_by_intel():
        return NONE
    return distance_of_integers(in_order=in_order)


def separate_recipe(structure: Structure, panel: int) -> StoredRecipe:
    """The recipe for activations of 8 bits if the rows of a run have several scales.

    They are converted to floats. Eight chains round a term no more often than is declared for integers.
    """
    method: Method = "bytes" if structure.values == "table" else "float" if structure.is_floats else "shift"
    return StoredRecipe(structure, method, registers=1, chains=8, panel=panel)
