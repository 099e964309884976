r"""The generator: one micro-kernel program for every recipe.

This is QIGen's Algorithm 3 with Algorithm 2 inside it, for groups (equation 2). Over one panel of columns it computes,
for each of its rows of x and each column j,

.. math:: y_j \mathrel{+}= \sum_g s_{gj} \Bigl(\sum_{k \in g} x_k\, q_{kj}\Bigr) + o_{gj}\, X_g ,
   \qquad X_g = \sum_{k \in g} x_k ,

where the offset :math:`o` is the group's minimum, or minus scale times zero-point. Lanes are columns, so no register is
ever summed across its lanes. The kernel reads two streams, each once from front to back:

- ``w``, of 32-bit elements (`lowbit_cppyy.layout.panels`): for each group its units of words, its scales and its zeros,
  each row as wide as the panel. ``s`` and ``z`` point into the same stream, for scales and zeros;
- ``x``, of float32 (`lowbit_cppyy.runtime.activations`): for each group the values that its codes are multiplied by,
  then :math:`X_g`. With several rows of x their elements lie side by side.

A group is whole units, padded with zeros on both sides, so the program has no tails. The number of groups (``groups``)
and the iterations of the inner loop for each group (``turns``) are arguments of the call: one kernel serves every group
size.

`lowbit_cppyy.codegen.floats` has the loop of the float32 contract, `lowbit_cppyy.codegen.integers` that of the integer
contract, `lowbit_cppyy.codegen.steps` what both share.

Source: QIGen §3, Algorithms 2 and 3, equation 2; errata Q3, Q5, Q7.
"""

from collections.abc import Iterator

from lowbit.kernels.program import Address, Advance, Instruction, Program, Step
from lowbit_cppyy.codegen.floats import groups_loop
from lowbit_cppyy.codegen.integers import segments_loop
from lowbit_cppyy.codegen.steps import TABLE, added_to_results, raising, zero
from lowbit_cppyy.codegen.unpacking import constants
from lowbit_cppyy.recipe import Recipe


def micro_kernel(recipe: Recipe, lanes: int) -> Program:
    """The program of a recipe.

    Args:
        recipe: one that fits registers of this length.
        lanes: numbers in one vector register.
    """
    assert not recipe.fits(lanes)
    if recipe.integer:
        body: list[Step] = [*(zero(f"acc_{r}_{j}_0") for r, j in recipe.places), segments_loop(recipe, lanes)]
    else:
        body = [groups_loop(recipe, lanes)]
    steps = added_to_results(recipe, lanes, body)
    return Program(lanes, (*_code_table(recipe), *constants(steps), *raising(recipe.method), *steps))


def _code_table(recipe: Recipe) -> Iterator[Step]:
    """Load the numbers 0 to 15, which precede x in memory, into a register."""
    if recipe.method == "table":
        yield Instruction("load_float", "table", (Address("x"),))
        yield Advance("x", TABLE)
