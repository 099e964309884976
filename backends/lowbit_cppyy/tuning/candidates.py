"""The candidates of a search: recipes that fit the registers.

QIGen's Algorithm 4 tries tiles in line 2. A recipe is more than a tile, and all its choices together would be
thousands of kernels. So they are tried one after the other, in the order in which they depend on each other. Each step
begins with the best of the step before:

1. *tile*: the method, registers side by side (t_u), chains of sums, rows of x at once. Of all that fit, those that
   `lowbit_cppyy.tuning.prediction` ranks fastest, some of each method, because the model may be wrong about a method;
2. *unroll*: units in a loop iteration, m_u in units;
3. *ahead*: the prefetch distance; from here on, only measurements from memory count;
4. *panel*: the width of a panel, for one row of x; a matrix is prepared once for all purposes.

Line 3, the block of the cache, is not tried: blocks along the Z-curve lost to column panels (see the page on tuning).

Only recipes that keep the backend's promises are tried (`lowbit_cppyy.recipe.METHODS_FOR`).

Source: QIGen algorithm 4, line 2; equation 4.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from lowbit_cppyy.codegen.isa import InstructionSet
from lowbit_cppyy.layout.panels import PanelLayout
from lowbit_cppyy.recipe import METHODS_FOR, PANELS, PURPOSES, Purpose, Recipe
from lowbit_cppyy.tuning.choices import default_recipe, usable
from lowbit_cppyy.tuning.prediction import predict

MOST_OF_A_METHOD = 6
"""The largest number of tiles tried for each method."""

ROWS: Mapping[Purpose, tuple[int, ...]] = {
    "vector": (1,),
    "rows": (2, 4),
    "many rows": (4, 6, 8, 12, 16),
    "integer vector": (1,),
    "integer rows": (2, 4),
}
"""Rows of x at once, by purpose."""

REGISTERS = (1, 2, 4, 8)
CHAINS = (1, 2, 4)
AHEAD = (0, 256, 512, 1024, 2048, 4096)
MOST_PRODUCTS = 512
"""The largest number of products of a loop iteration: longer ones take long to compile and do not fit the instruction
cache."""

assert set(ROWS) == set(PURPOSES)


def tiles(purpose: Purpose, layout: PanelLayout, table: InstructionSet) -> list[Recipe]:
    """The default recipe, then the tiles to try: all are usable and fit the registers.

    Args:
        purpose: what for.
        layout: of the matrix.
        table: the instruction set.
    """
    default = default_recipe(purpose, layout, table)
    found = [default]
    for method in METHODS_FOR[purpose]:
        ranked = []
        for recipe in _of_a_method(replace(default, method=method), purpose):
            sums = recipe.rows * recipe.registers * recipe.chains
            if sums > table.registers:  # each sum needs a register throughout: no further count is needed
                continue
            if recipe != default and usable(recipe, layout, table):
                prediction = predict(recipe, layout, table)
                if prediction.registers <= table.registers:
                    ranked.append((prediction.cycles, prediction.registers, recipe.name, recipe))
        found += [recipe for *_, recipe in sorted(ranked)[:MOST_OF_A_METHOD]]
    return found


def _of_a_method(recipe: Recipe, purpose: Purpose) -> Iterator[Recipe]:
    for rows in ROWS[purpose]:
        for registers in REGISTERS:
            for chains in CHAINS if purpose == "vector" else (1,):
                yield replace(recipe, rows=rows, registers=registers, chains=chains)


def unrolled(recipe: Recipe, layout: PanelLayout, table: InstructionSet) -> list[Recipe]:
    """The recipe with each other number of units in an iteration that divides the units of every group."""
    unit = recipe.unit_codes * recipe.rows * recipe.registers
    numbers = [unroll for unroll in (1, 2, 4, 8, 16) if unroll == 1 or unroll * unit <= MOST_PRODUCTS]
    others = [replace(recipe, unroll=unroll) for unroll in numbers if unroll != recipe.unroll]
    return [other for other in others if usable(other, layout, table)]


def aheads(recipe: Recipe) -> list[Recipe]:
    """The recipe with other prefetch distances."""
    return [replace(recipe, ahead=ahead) for ahead in AHEAD if ahead != recipe.ahead]


def panels(recipe: Recipe, layout: PanelLayout, table: InstructionSet) -> list[Recipe]:
    """The recipe with other panels."""
    others = [replace(recipe, panel=panel) for panel in PANELS if panel != recipe.panel]
    return [other for other in others if usable(other, replace(layout, panel=other.panel), table)]
