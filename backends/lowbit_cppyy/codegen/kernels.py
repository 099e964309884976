"""The kernels of matrices: their names, their programs and their C++.

**The grammar of a name** (this is the only place where it is written)::

    <product>_<activations>_<codes>_<scales>_<method>_<tile>_<stream>_<instruction set>

    gemv_f32_u4_s16z_fold_1x4c2t1_p64a1024_avx512
    gemm_bfp16_u2_s32m_dot4_4x2c1t2_p64a1024_avxvnni

- product: `gemv` for one row of x, `gemm` for several;
- activations and accumulators: `f32`, or `bfp16` for blocks of 8-bit mantissas and integer sums;
- codes: `u4` for unsigned codes of 4 bits;
- scales: 16 or 32 bits, with minima (`m`) or zero-points (`z`);
- method: how codes become products (`lowbit_cppyy.recipe`);
- tile: rows of x × registers of columns, `c` chains of sums, `t` units in a loop iteration;
- stream: `p` columns of a panel, `a` prefetch distance in elements;
- instruction set: a table of `lowbit_cppyy.codegen.isa`.

The size of groups is an argument of the call. Kernels differ only in what their names say.
"""

from dataclasses import dataclass

from lowbit.errors import ArgumentError
from lowbit.kernels.program import Program
from lowbit_cppyy.caching import cached_property
from lowbit_cppyy.codegen.isa import InstructionSet
from lowbit_cppyy.codegen.lowering import Compilable, function, prelude
from lowbit_cppyy.codegen.microkernel import micro_kernel
from lowbit_cppyy.recipe import Recipe

_SUMMARY = """\
{name}: {rows} row(s) of x times {columns} columns of {bits}-bit codes (QIGen, Algorithm 3 with Algorithm 2 inside).
w: for each group its units of words, then scales, then zeros, in rows of {panel} columns. x: what the codes are
multiplied by, group after group, each with its sum X behind it. y: rows of {panel}, added to. A register is declared
where it is first used: w words, x and X activations, a, b and v codes, l codes or sums as float, d sums as integers,
acc the sum over a group, s scale, z zero-point, o offset, m and raise constants."""


@dataclass(frozen=True)
class Kernel:
    """One kernel: a recipe for an instruction set.

    Raises:
        ArgumentError: there is no kernel of this recipe for registers of this length.
    """

    recipe: Recipe
    table: InstructionSet

    def __post_init__(self) -> None:
        if problem := self.recipe.fits(self.table.lanes):
            raise ArgumentError("recipe", self.recipe.name, f"another one: {problem}")

    @property
    def columns(self) -> int:
        """The number of columns that one call computes."""
        return self.recipe.registers * self.table.lanes

    @property
    def name(self) -> str:
        """Its name, by the grammar above."""
        return f"{'gemv' if self.recipe.rows == 1 else 'gemm'}_{self.recipe.name}_{self.table.name}"

    @cached_property
    def program(self) -> Program:
        """Its program, in the vocabulary of `lowbit.kernels.vector`."""
        return micro_kernel(self.recipe, self.table.lanes)

    @property
    def source(self) -> str:
        """Its C++, which follows the prelude of its instruction set."""
        summary = _SUMMARY.format(name=self.name, columns=self.columns, **vars(self.recipe))
        return function(self.program, self.table, self.name, summary)


def kernel_source(kernel: Compilable) -> str:
    """The C++ of a kernel with the functions that it calls. No compiler is needed.

    >>> from lowbit_cppyy.codegen.isa import TABLES
    >>> recipe = Recipe(4, "float16", "zero_point", "shift")
    >>> source = kernel_source(Kernel(recipe, TABLES["avx2"]))
    >>> "l_0 = cvt_int_float(a_0);" in source
    True
    """
    return prelude(kernel.table) + "\n" + kernel.source
