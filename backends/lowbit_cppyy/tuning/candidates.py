"""What is tried in a search: recipes that fit, and blocks of the cache.

QIGen's Algorithm 4 tries tiles in line 2 and computes the block of the cache in line 3. A recipe is more than a tile,
and all of its choices together would be thousands of kernels. So they are tried one after the other, in the order in
which they depend on each other, and each step begins with the best of the one before:

1. *tile*: the method, registers side by side (t_u), chains of sums, rows of x at once. Out of all that fit, those that
   `lowbit_cppyy.tuning.prediction` holds for fastest, some of each method, since the model may be wrong about a method;
2. *turn*: units in a turn of the loop, m_u in units;
3. *ahead*: how far ahead lines are asked for; from here on, only memory can tell;
4. *panel*: how wide a panel is, for one row of x; a matrix is prepared once for all purposes;
5. *block*: the Z-curve with the block of equation 5, against column panels.

Only what keeps the backend's promises is tried (`lowbit_cppyy.recipe.recipe.METHODS_FOR`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from lowbit.errors import ArgumentError
from lowbit.kernels.blocking import solve_extended
from lowbit_cppyy.codegen.isa import InstructionSet
from lowbit_cppyy.layout.layout import PanelLayout
from lowbit_cppyy.recipe.recipe import METHODS_FOR, PANELS, PURPOSES, Purpose, Recipe
from lowbit_cppyy.tuning.choices import default_recipe, usable
from lowbit_cppyy.tuning.prediction import Prediction, predict, rank

MOST_OF_A_METHOD = 6
"""Tiles of one method that are tried."""

ROWS: Mapping[Purpose, tuple[int, ...]] = {
    "vector": (1,),
    "rows": (2, 4),
    "many rows": (4, 6, 8, 12, 16),
    "integer vector": (1,),
    "integer rows": (2, 4),
}
"""Rows of x at once, by purpose."""

VECTORS: Mapping[Purpose, int] = {"vector": 1, "rows": 4, "many rows": 16, "integer vector": 1, "integer rows": 4}
"""How many rows of x a purpose is measured with."""

REGISTERS = (1, 2, 4, 8)
CHAINS = (1, 2, 4)
AHEAD = (0, 256, 512, 1024, 2048, 4096)
MOST_PRODUCTS = 512
"""Products written out in a turn of the loop: longer ones take long to compile and leave the cache of instructions."""

assert set(ROWS) == set(VECTORS) == set(PURPOSES)


@dataclass(frozen=True)
class Candidate:
    """A kernel in a layout.

    Attributes:
        recipe: of the kernel; its panel is the layout's.
        block_groups: groups down a block of the Z-curve; ``None`` for column panels.
        block_panels: panels across it; 0 for column panels.
    """

    recipe: Recipe
    block_groups: int | None = None
    block_panels: int = 0

    def layout(self, layout: PanelLayout) -> PanelLayout:
        """The layout of a matrix for this candidate, from one in column panels."""
        down = min(self.block_groups or layout.block_groups, layout.groups)
        return replace(layout, panel=self.recipe.panel, block_groups=down, block_panels=self.block_panels)

    def __str__(self) -> str:
        block = f" blocks {self.block_groups} groups × {self.block_panels} panels" if self.block_groups else ""
        return self.recipe.name + block


def tiles(purpose: Purpose, layout: PanelLayout, table: InstructionSet) -> dict[Recipe, Prediction]:
    """The default recipe, and the tiles to try: all are usable, and fit the registers.

    Args:
        purpose: what for.
        layout: of the matrix.
        table: the instruction set.

    Returns:
        Each with what is predicted of it, the default first.

    Source: QIGen algorithm 4, line 2; equation 4.
    """
    default = default_recipe(purpose, layout, table)
    found = {default: predict(default, layout, table)}
    for method in METHODS_FOR[purpose]:
        ranked = []
        for recipe in _of_a_method(replace(default, method=method), purpose):
            if recipe != default and usable(recipe, layout, table):
                cycles, registers = rank(recipe, layout, table)
                if registers <= table.registers:
                    ranked.append((cycles, registers, recipe.name, recipe))
        best = [recipe for *_, recipe in sorted(ranked)[:MOST_OF_A_METHOD]]
        found |= {recipe: predict(recipe, layout, table) for recipe in best}
    return found


def _of_a_method(recipe: Recipe, purpose: Purpose) -> Iterator[Recipe]:
    for rows in ROWS[purpose]:
        for registers in REGISTERS:
            for chains in CHAINS if purpose == "vector" else (1,):
                yield replace(recipe, rows=rows, registers=registers, chains=chains)


def turns(recipe: Recipe, layout: PanelLayout, table: InstructionSet) -> list[Recipe]:
    """The recipe with every other number of units in a turn of the loop that every group is whole turns of."""
    unit = recipe.unit_codes * recipe.rows * recipe.registers
    numbers = [turn for turn in (1, 2, 4, 8, 16) if turn == 1 or turn * unit <= MOST_PRODUCTS]
    others = [replace(recipe, turn=turn) for turn in numbers if turn != recipe.turn]
    return [other for other in others if usable(other, layout, table)]


def aheads(recipe: Recipe) -> list[Recipe]:
    """The recipe with other distances ahead."""
    return [replace(recipe, ahead=ahead) for ahead in AHEAD if ahead != recipe.ahead]


def panels(recipe: Recipe, layout: PanelLayout, table: InstructionSet) -> list[Recipe]:
    """The recipe with other panels."""
    others = [replace(recipe, panel=panel) for panel in PANELS if panel != recipe.panel]
    return [other for other in others if usable(other, replace(layout, panel=other.panel), table)]


def block(candidate: Candidate, layout: PanelLayout, table: InstructionSet, cache_bits: int) -> Candidate | None:
    """The candidate in blocks along the Z-curve, of the size of equation 5.

    A block of this backend is whole groups and whole panels, so these are its m_u and t_u.

    Args:
        candidate: in column panels.
        layout: of the matrix.
        table: the instruction set.
        cache_bits: γ.

    Returns:
        ``None`` where not even one group of one panel fits the cache, or where the block is as high as the matrix: that
        is a column panel again.

    Source: QIGen algorithm 4, line 3; equation 5; errata Q8.
    """
    group, panel = min(layout.group_size, layout.rows), candidate.recipe.panel
    sizes = {"rows": layout.rows, "columns": layout.columns}
    try:
        found = solve_extended(layout.bits, cache_bits, group, group, panel // table.lanes, lanes=table.lanes, **sizes)
    except ArgumentError:
        return None
    if found.m_b >= layout.rows:
        return None
    return replace(candidate, block_groups=found.m_b // group, block_panels=found.t_b // panel)
