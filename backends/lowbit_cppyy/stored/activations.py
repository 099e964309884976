"""The stream of activations of a stored product: what stands in it, as lists for ``cpp/stored.h``.

For each run of rows that is summed by itself (`StoredRecipe.run`; without one, for each group): minus the center times
the sum of its activations, if the recipe is centered; its activations, padded to a whole unit; for integers the scale
of its activations. The sum that an offset is multiplied by follows each run where offsets are minima, and each group
where they are numbers or zeros. It is negative for minima and zeros, which are subtracted.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lowbit.arrays import F32, I64, Array
from lowbit_cppyy.caching import cached_property
from lowbit_cppyy.codegen.unpacking import LOWERED
from lowbit_cppyy.runtime.activations import bits_of_range
from lowbit_cppyy.stored.kernel import BYTE_CENTER
from lowbit_cppyy.stored.layout import StoredLayout
from lowbit_cppyy.stored.parts import UNIT, Parts
from lowbit_cppyy.stored.recipe import HEAD, StoredRecipe


def elements_of(recipe: StoredRecipe) -> tuple[int, int]:
    """The number of elements of the stream for each unit and, in addition, for each group, of one row of x."""
    each, runs = UNIT // 4 if recipe.integer else UNIT, UNIT // recipe.run if recipe.run else 0
    offset = recipe.structure.offset
    unit = each + runs * (recipe.centered + recipe.integer + (offset == "minimum"))
    return unit, (recipe.centered and not recipe.run) + (offset in ("number", "zero"))


@dataclass(frozen=True, eq=False)
class StoredActivations:
    """The stream for the kernel of a recipe and a matrix."""

    recipe: StoredRecipe
    layout: StoredLayout
    parts: Parts
    route: ClassVar = "stored_route"

    @property
    def firsts(self) -> list[int]:
        """The first group of each block, followed by the number of groups."""
        return self.layout.firsts

    @cached_property
    def factors(self) -> F32:
        """The power of two that multiplies the activation of each code of a unit."""
        powers = [0 if self.recipe.integer else self.recipe.power(code) for code in range(UNIT)]
        return np.exp2(-np.array(powers, np.float32)).astype(np.float32)

    @property
    def lowered(self) -> int:
        """By which power of two sums of products are too small."""
        return LOWERED if self.recipe.method == "subnormal" else 0

    @property
    def center(self) -> int:
        """The number that multiplies sums of activations, if a run begins with one."""
        if not self.recipe.centered:
            return 0
        return self.parts.center if self.recipe.structure.offset == "center" else BYTE_CENTER

    @property
    def group_elements(self) -> list[int]:
        """Elements of each group, for one row of x."""
        unit, group = elements_of(self.recipe)
        return [units * unit + group for units in self.layout.units]

    @cached_property
    def starts(self) -> list[int]:
        """The start of each block in the stream of one row of x, followed by the end of the stream."""
        starts = np.concatenate(([0], np.cumsum(self.group_elements)))
        head = HEAD if self.recipe.headed else 0  # before each block
        return [int(starts[first]) + head * block for block, first in enumerate(self.layout.firsts)]

    def lists(self) -> list[Array]:
        """The lists of a route, in the order of ``create_stored_route``."""
        head = self.recipe.head(self.parts.table) if self.recipe.headed else np.zeros(HEAD, np.float32)
        order = np.zeros(1, np.int64) if self.parts.order is None else self.parts.order
        units, lengths = np.array(self.layout.units, np.int32), np.array(self.layout.lengths, np.int64)
        starts = np.array(self.starts[:-1], np.int64)
        return [np.ascontiguousarray(each) for each in (self.factors, head, starts, units, lengths, order)]

    def numbers(self, columns: int) -> I64:
        """The numbers of a route, in the order of ``create_stored_route``, for a kernel with this many columns."""
        recipe, offset = self.recipe, self.recipe.structure.offset
        flags = [
            recipe.headed,
            recipe.integer,
            recipe.centered,
            self.parts.order is not None,
        ]
        sums = [offset == "minimum", offset in ("number", "zero"), -1 if offset in ("minimum", "zero") else 1]
        sizes = [recipe.rows, columns, self.starts[-1], recipe.run, self.center]
        powers = [self.lowered, *bits_of_range(recipe.method, self.factors)]
        return np.array([*sizes, *map(int, flags), *map(int, sums), *powers], np.int64)
