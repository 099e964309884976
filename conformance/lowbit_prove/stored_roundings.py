r"""The theorem of roundings for products with stored matrices.

The declared formulas (`lowbit_cppyy.stored.linear`) speak of K rows and of n, the rows of a group or of a block. As in
`lowbit_prove.roundings`, D comes from runs of the program on counts. A group of n rows is :math:`\lceil n/32 \rceil`
units, the last one padded with zeros. A zero in the place of a number never makes a count larger, so whole units bound
all n:

.. math:: D(K, n) \le D_1(32) + c_U\,(\lceil n/32 \rceil - 1) + c_G\,(\lceil K/n \rceil - 1) ,

with the growths c of the loops over units and over groups. If that is more than is declared, :math:`D_1(n)` is found
for each n up to 64 as well. Where groups are cut into runs with integers of their own,
they are a format's blocks, and n is these. Groups in another order of rows (GPTQ's ``g_idx``) have at most n rows as
well.

What C++ rounds (``cpp/stored.h``) is written down here: sums of activations as in `lowbit_prove.depths`, times a
center; of bytes, a scale times a sum of integers, and the total of a group's runs.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from inspect import getsource
from typing import Any

import z3

from lowbit.contract.rounding import Roundings
from lowbit.kernels.interpreter import Sizes
from lowbit.kernels.program import Instruction, Program
from lowbit.tensor_formats.stored import FORMATS
from lowbit_cppyy.stored import linear
from lowbit_cppyy.stored.formats import PARTS, structure_of
from lowbit_cppyy.stored.kernel import StoredKernel
from lowbit_cppyy.stored.parts import UNIT, Structure
from lowbit_cppyy.stored.recipe import HEAD, separate_recipe
from lowbit_prove.depths import EXACT, POWER, ZERO, Count, multiplied, of_sum
from lowbit_prove.roundings import (
    ROWS,
    RUNNING,
    SIZE,
    STATEMENT,
    Case,
    TooManyError,
    Watched,
    body_of,
    compared,
    compared_once,
    decided,
    float_groups,
    growth,
)
from lowbit_prove.theorem import Numbers, Refutation, Theorem, whole

ROUNDED = Count(1)
"""The count of an activation's byte times its scale, as a float."""


def of_kernel(kernel: StoredKernel, program: Program | None = None, declared: Roundings | None = None) -> Theorem:
    """The theorem about a kernel of a stored matrix; a program or a formula may replace the kernel's own."""
    bytes_ = kernel.recipe.integer or kernel.recipe == separate_recipe(kernel.recipe.structure, kernel.recipe.panel)
    formula = declared or (linear.cast_roundings if bytes_ else linear.roundings)

    def derived() -> Derived:
        return Derived(kernel, program or kernel.program, ROUNDED if bytes_ else EXACT)

    def text() -> str:
        return f"{kernel.recipe}\n{blocks(kernel.recipe.structure)}\n{derived().program}\n{getsource(linear)}"

    def ran(numbers: Numbers) -> Refutation | None:
        rows, size = whole(numbers, "rows"), whole(numbers, "group_size")
        found = derived().depth([min(size, rows - first) for first in range(0, rows, size)])
        return compared_once(found, formula(rows, size), {"rows": rows, "group_size": size})

    decision = partial(decided, lambda: _all(derived(), formula), ran)
    return Theorem("roundings", kernel.name, STATEMENT, text, decision, ran)


def blocks(structure: Structure) -> tuple[int, ...]:
    """The block sizes, in rows, of all formats of a structure with runs."""
    found = {
        block
        for name in PARTS
        if (block := FORMATS[name].block) and any(structure_of(name, bits) == structure for bits in (2, 3, 4, 8))
    }
    return tuple(sorted(found)) if structure.run else ()


class StoredDepths(Watched):
    """Depths in which bits as a float are a power of two if shifted to its exponent, and otherwise a stored weight.

    Attributes:
        bits: the count of a stored weight.
    """

    bits = POWER

    def execute(self, step: Instruction, operands: list[Any]) -> Any:
        return self.bits if step.word == "as_float" else super().execute(step, operands)


@dataclass(frozen=True)
class Derived:
    """What is derived from a program.

    Attributes:
        kernel: for its recipe and its instruction set.
        program: as it is lowered.
        activation: the count of an activation that is a float.
    """

    kernel: StoredKernel
    program: Program
    activation: Count

    def run(self, lengths: list[int], index: str = "g") -> tuple[int, list[dict[str, Count]]]:
        """D of a matrix with groups of these lengths, and the registers after each iteration of a loop."""
        recipe = self.kernel.recipe
        y = [ZERO] * recipe.rows * recipe.panel
        sizes: Sizes = {"groups": len(lengths), "turns": [-(-length // UNIT) for length in lengths]}
        machine = StoredDepths(
            self.program, {"x": list(self.activations(lengths)), "y": y}, sizes, once=self.kernel.table.fused
        )
        machine.bits = EXACT if recipe.structure.is_floats else POWER
        machine.watch(body_of(self.program.body, index)).block(self.program.body)
        return max(each.roundings for each in y), machine.seen

    def depth(self, lengths: list[int]) -> int:
        """D of a matrix with groups of these lengths."""
        return self.run(lengths)[0]

    @property
    def growth(self) -> tuple[int, int]:
        """The largest increase of D with another unit of a group, and with another group.

        Sums of activations grow with a unit, too. If a sum of products begins with one, both growths add up.
        """
        recipe = self.kernel.recipe
        sums = UNIT // recipe.run if recipe.integer else UNIT // RUNNING
        inside = growth(self.run([3 * UNIT], "u")[1])
        more = inside + sums if recipe.centered and not recipe.integer else max(inside, sums)
        return more, growth(self.run([UNIT] * 3)[1])

    def activations(self, lengths: list[int]) -> Iterator[Count]:
        """The counts of the stream of activations."""
        recipe = self.kernel.recipe
        yield from [EXACT] * (HEAD * recipe.headed)
        for length in lengths:
            padded = -(-length // UNIT) * UNIT
            runs = range(0, padded, recipe.run or padded)
            for first in runs:
                held = max(0, min(recipe.run or padded, length - first))
                for count in self._of_run(held, recipe.run or padded):
                    yield from [count] * recipe.rows
            if recipe.structure.offset in ("number", "zero"):
                total = Count(len(runs)) if recipe.integer else self._sum(length)
                yield from [total] * recipe.rows

    def _of_run(self, held: int, run: int) -> Iterator[Count]:
        """One row of a run: its initial value, its activations, their scale, their sum."""
        recipe = self.kernel.recipe
        if recipe.centered:
            yield EXACT if recipe.integer else multiplied(self._sum(held), EXACT)
        if recipe.integer:
            yield from [EXACT] * (run // 4)
            yield EXACT
        else:
            yield from [self.activation] * held
            yield from [ZERO] * (run - held)
        if recipe.structure.offset == "minimum":
            yield Count(1) if recipe.integer else self._sum(held)

    def _sum(self, terms: int) -> Count:
        """A sum of activations."""
        found = of_sum(terms)
        return found if found == ZERO else replace(found, roundings=found.roundings + self.activation.roundings)


def _all(derived: Derived, formula: Roundings) -> int:
    """Compare D with a formula for all sizes; returns the number of comparisons."""
    (more, each), structure = derived.growth, derived.kernel.recipe.structure
    if structure.run:
        cases: list[Case] = [
            (z3.IntVal(derived.depth([block])), (block == SIZE, ROWS % block == 0)) for block in blocks(structure)
        ]
        return compared(formula, cases, each)
    units, rows = z3.Int("units"), z3.If(ROWS < SIZE, ROWS, SIZE)
    facts = (UNIT * (units - 1) < rows, rows <= UNIT * units)
    try:
        return compared(formula, [(derived.depth([UNIT]) + more * (units - 1), facts)], each)
    except TooManyError:
        found = tuple((n, derived.depth([n])) for n in range(1, 2 * UNIT + 1))
        return float_groups(formula, found, UNIT, more, each)
