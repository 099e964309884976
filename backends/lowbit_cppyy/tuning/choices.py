"""Which recipe a matrix gets: what a search on this machine found, or else the default.

The defaults are the outcomes of the search (`lowbit tune`) on the machine that `docs/benchmarks` describes, written
down as rules; a search on another machine, kept on disk (`lowbit_cppyy.tuning.outcomes`), takes their place.

- **One row of x, float32.** A kernel needs enough sums side by side that no multiply-add waits for the one before:
  eight registers where one takes four cycles and two are begun in each. With registers of sixteen lanes that is four
  registers of columns and two chains. Codes of 2 and 3 bits are looked up in sums, because converting them one by one
  takes longer than reading them.
- **Several rows.** Each row has sums of its own, so there is one chain; a code is taken out once for all rows. Then the
  multiply-adds bound the speed, at 86 % of what the processor can do, so nothing is left to win by unpacking a panel
  first and handing it to a library; and a row has the same bits whatever rows it stands among.
- **Integers.** Through 16 bits where the processor has no product of bytes into 32 bits.
- **One row reads a whole row of the panel at once.** A narrower tile goes through the panel several times, and then
  memory is asked for in pieces: measured, half the speed.
"""

from collections.abc import Iterator
from dataclasses import replace

from lowbit.quantization.affine import QuantizedMatrix
from lowbit_cppyy.codegen.isa import InstructionSet
from lowbit_cppyy.layout.layout import PanelLayout
from lowbit_cppyy.layout.streams import Stream
from lowbit_cppyy.recipe.recipe import PURPOSES, Method, Purpose, Recipe
from lowbit_cppyy.tuning import outcomes

__all__ = ["PANEL", "PURPOSES", "Purpose", "default_recipe", "layout_for", "recipe_for", "usable", "widest_turn"]

PANEL = 64
"""Columns of a panel: the least of which scales, zeros and words of every kind are whole lines of the cache."""


def layout_for(matrix: QuantizedMatrix, table: InstructionSet) -> PanelLayout:
    """The layout for a matrix: that of the search for one row of x, or else column panels of `PANEL`."""
    layout = PanelLayout.of(matrix, PANEL)
    found = outcomes.tuned("vector", layout, table)
    if found is None:
        return layout
    panel, down, across = found.recipe.panel, found.block_groups, found.block_panels
    if down is None or down >= layout.groups:  # one block a panel: column panels
        other = PanelLayout.of(matrix, panel)
    else:
        other = PanelLayout.of(matrix, panel, block_groups=down, block_panels=across)
    return other if usable(found.recipe, other, table) else layout


def recipe_for(purpose: Purpose, layout: PanelLayout, table: InstructionSet) -> Recipe:
    """The recipe for a matrix: what a search found, if it can be used with this layout, or else the default.

    Args: as `default_recipe`.
    """
    found = outcomes.tuned(purpose, layout, table)
    if found is not None and usable(found.recipe, layout, table):
        return found.recipe
    return default_recipe(purpose, layout, table)


def usable(recipe: Recipe, layout: PanelLayout, table: InstructionSet) -> bool:
    """Whether a recipe can be made for a matrix: its panel, registers of this length, and whole turns."""
    fits = recipe.panel == layout.panel and not recipe.fits(table.lanes)
    return fits and Stream(recipe, layout).whole


def default_recipe(purpose: Purpose, layout: PanelLayout, table: InstructionSet) -> Recipe:
    """The recipe for a matrix.

    Args:
        purpose: one row of x or several, in float32 or in integers.
        layout: of the matrix.
        table: the instruction set.
    """
    recipe = Recipe(layout.bits, layout.scales, layout.convention, "fold", panel=layout.panel)
    if purpose.startswith("integer"):
        method: Method = "dot4" if table.byte_dots or layout.bits == 8 else "pairs"
        recipe = replace(recipe, method=method, rows=4, registers=4 if table.registers >= 32 else 2)
        if purpose == "integer vector":
            recipe = replace(recipe, rows=1, registers=layout.panel // table.lanes)
        return widest_turn(recipe, layout)
    if purpose == "vector":
        wide = table.lanes == 16
        method = "sums" if wide and layout.bits in (2, 3) else "fold"
        recipe = replace(recipe, method=method, registers=4 if wide else 8, chains=2 if wide else 1)
        return recipe
    rows, registers = _TILES[table.registers >= 32, purpose]
    return replace(recipe, rows=rows, registers=registers)


_TILES: dict[tuple[bool, Purpose], tuple[int, int]] = {
    (True, "rows"): (4, 4),
    (True, "many rows"): (4, 4),
    (False, "rows"): (4, 2),
    (False, "many rows"): (6, 2),
}
"""Rows of x and registers of columns, by whether there are 32 registers."""


def widest_turn(recipe: Recipe, layout: PanelLayout) -> Recipe:
    """The recipe with as many units in a turn as every group or segment is whole turns of, at most 32 codes."""
    for turn in _turns(recipe):
        widened = replace(recipe, turn=turn)
        if Stream(widened, layout).whole:
            return widened
    return recipe


def _turns(recipe: Recipe) -> Iterator[int]:
    turn = 32 // recipe.unit_codes
    while turn > 1:
        yield turn
        turn //= 2
