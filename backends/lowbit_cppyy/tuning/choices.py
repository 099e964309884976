"""Which recipe a matrix gets: what a search on this machine found, or else the default.

The defaults are the outcomes of the search (``lowbit tune``) on the machine of ``docs/benchmarks.rst``, written as
rules. The outcome of a search on this machine, kept on disk (`lowbit_cppyy.tuning.outcomes`), takes their place.

- **One row of x, float32.** A kernel needs enough independent sums that no multiply-add waits for the one before: eight
  registers where one takes four cycles and two begin in each cycle. With registers of sixteen lanes that is four
  registers of columns and two chains. Where subnormal numbers cost nothing, codes are multiplied as such; on a Zen 4
  that is 1.2 times as fast as *sums* with 2 and 3 bits (*measured*). Elsewhere, codes of 2 and 3 bits are looked up in
  sums, in registers of sixteen lanes, because converting them one by one takes longer than reading them. On an Ice Lake
  codes of 4 bits are looked up as floats in such registers: 1.04 to 1.2 times as fast as masked and converted in the
  second-level cache, and 1.2 times from memory while another virtual machine uses the same core (*measured*).
- **Several rows.** Each row has its own sums, so there is one chain. A code is unpacked once for all rows. Then the
  multiply-adds bound the speed, at 86 % of what the processor can do, so unpacking a panel first and calling a library
  has nothing to gain. Where unpacking takes the ports of the multiply-adds, many rows share a code: with 32 registers
  sixteen rows and one register of columns, which is 1.06 to 1.3 times as fast as eight rows and two registers on
  Emerald Rapids and 1.0 to 1.1 times on Zen 4; with 16 registers eight rows and one register, which is 1.05 times as
  fast as four rows and two registers on Emerald Rapids and 0.95 to 1.2 times on Zen 4. With more sums g++ moves some to
  memory. (*Measured* in the second-level cache; the largest figures are of formats that take longest to unpack.) An Ice
  Lake begins one broadcast in a cycle and two multiply-adds, so each broadcast serves two registers there, with eight
  rows: 1.35 to 1.6 times as fast as sixteen by one with 4 bits, 1.04 times with Q6_K (*measured*, AVX-512). Few
  tokens keep four rows, because whole tiles are computed: 32 rows for 20 tokens
  (`lowbit_cppyy.runtime.products.few_are_faster`). A row has the same bits whatever rows stand beside it.
- **Several rows of integers.** A result needs three registers: the sum of a block, that of a group and the result.
  Four rows and two registers of columns need 24 of them; twice as many rows or columns do not fit. *Measured* on Zen 4,
  in the second-level cache, with AVX-512: 1.3 times as fast as four by four with 4 bits and groups of 32, 1.13 times
  with groups of 128; whole prompts of SmolLM2 1.18 to 1.28 times. Smaller tiles, which 16 registers would need, unpack
  too often.
- **Integers** are multiplied through 16 bits where the processor has no product of bytes into 32 bits.
- **One row of x reads a whole row of the panel at once.** A narrower tile goes through the panel several times and
  reads memory in pieces: measured at half the speed.
"""

from dataclasses import replace

from lowbit.quantization.affine import QuantizedMatrix
from lowbit_cppyy.codegen.isa import InstructionSet
from lowbit_cppyy.codegen.unpacking import two_planes
from lowbit_cppyy.layout.panels import PanelLayout
from lowbit_cppyy.recipe import Method, Purpose, Recipe
from lowbit_cppyy.runtime.activations import ActivationStream
from lowbit_cppyy.runtime.prefetching import distance_of_integers, distance_of_subnormals, usual_distance
from lowbit_cppyy.runtime.tiles import tile_of
from lowbit_cppyy.runtime.vendor import fast_lookups, fast_subnormals
from lowbit_cppyy.tuning import outcomes

PANEL = 64
"""Columns of a panel: the smallest number for which rows of words, scales and zeros of every type are whole cache
lines."""


def layout_for(matrix: QuantizedMatrix, table: InstructionSet) -> PanelLayout:
    """The layout for a matrix, with the panel from the search for one row of x, or else with `PANEL`."""
    layout = PanelLayout.of(matrix, PANEL)
    recipe = outcomes.tuned("vector", layout, table)
    if recipe is None:
        return layout
    tuned = PanelLayout.of(matrix, recipe.panel)
    return tuned if usable(recipe, tuned, table) else layout


def recipe_for(purpose: Purpose, layout: PanelLayout, table: InstructionSet) -> Recipe:
    """The recipe for a matrix: the result of a search if this layout allows it, or else the default.

    Args: as `default_recipe`.
    """
    recipe = outcomes.tuned(purpose, layout, table)
    if recipe is not None and usable(recipe, layout, table):
        return recipe
    return default_recipe(purpose, layout, table)


def usable(recipe: Recipe, layout: PanelLayout, table: InstructionSet) -> bool:
    """Whether a recipe is possible for a matrix: its panel and the length of registers fit, and iterations are
    whole."""
    fits = recipe.panel == layout.panel and not recipe.fits(table.lanes)
    return fits and ActivationStream(recipe, layout).whole


def default_recipe(purpose: Purpose, layout: PanelLayout, table: InstructionSet) -> Recipe:
    """The default recipe for a matrix on this processor.

    Args:
        purpose: one row of x or several, in float32 or in integers.
        layout: of the matrix.
        table: the instruction set.
    """
    recipe = Recipe(layout.bits, layout.scales, layout.convention, "fold", panel=layout.panel)
    if purpose.startswith("integer"):
        method: Method = "dot4" if table.byte_dots or layout.bits == 8 else "pairs"
        recipe = replace(recipe, method=method)
    if not purpose.endswith("vector"):
        rows, registers = tile_of(purpose, table.registers)
        recipe = replace(recipe, rows=rows, registers=registers)
    if purpose == "integer vector":
        recipe = replace(recipe, registers=layout.panel // table.lanes, ahead=distance_of_integers())
    if purpose == "vector":
        wide = table.lanes == 16
        registers, chains = (4, 2) if wide else (8, 1)
        recipe = replace(recipe, registers=registers, chains=chains, ahead=usual_distance())
        if fast_subnormals():
            in_order = not two_planes(layout.bits) or table.registers == 32
            ahead = distance_of_subnormals(table.registers, in_order=in_order)
            return replace(recipe, method="subnormal", ahead=ahead)
        if wide and layout.bits in (2, 3):
            return replace(recipe, method="sums")
        if wide and layout.bits == 4 and fast_lookups():
            return replace(recipe, method="table")
    return most_unrolled(recipe, layout) if recipe.integer else recipe


def most_unrolled(recipe: Recipe, layout: PanelLayout) -> Recipe:
    """The recipe with the most units in an iteration, at most four with 32 codes in all, that divide every group or
    segment.

    Eight units of 8-bit codes would be 32 codes too, but take 1.2 to 1.3 times as long from memory as four (measured).
    """
    unroll = min(4, 32 // recipe.unit_codes)
    while unroll > 1:
        candidate = replace(recipe, unroll=unroll)
        if ActivationStream(candidate, layout).whole:
            return candidate
        unroll //= 2
    return recipe
