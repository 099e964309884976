"""The kernels: their names, their programs and their C++.

**The grammar of a name**, the only place where it is written down:

    <operation>_<activations>_<codes>_<groups>_<rows>x<columns>_<instruction set>

    qgemv_f32_u4_gany_1x32_avx2      one row of x times 32 columns of 4-bit codes
    qgemm_f32_u4_gany_4x16_avx2      four rows of x times 16 columns

`f32`: float32 activations and float32 accumulators. `u4`: unsigned codes of 4 bits. `gany`: groups of any size, given
when the kernel is called. The kernels of an operation differ in nothing but what their names say.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from lowbit.check import check_choice
from lowbit.errors import ArgumentError
from lowbit.packing import BITS
from lowbit.program import Program
from lowbit_cppyy.isa import TABLES, InstructionSet
from lowbit_cppyy.lowering import function, prelude
from lowbit_cppyy.microkernel import micro_kernel

Operation = Literal["qgemv", "qgemm"]
OPERATIONS: tuple[Operation, ...] = ("qgemv", "qgemm")

PANEL = 32
"""Columns of a panel. Measured: 16 leave the multiply-adds waiting for each other, 64 are no faster and pad more."""

ROWS = {"qgemv": 1, "qgemm": 4}
"""Rows of x at once."""

_SUMMARY = """\
{name}: {rows} row(s) of x times {columns} columns of {bits}-bit codes (QIGen, Algorithm 3 with Algorithm 2 inside).
w: for each group its units of words, then scales, then offsets; rows of {panel}. x: for each group the activations of
its codes, then their sum X. y: rows of {panel}. A register is declared where it is first used: w words, x and X
activations, a and b codes, l codes as float, acc the sum over a group, s scale, o offset."""


@dataclass(frozen=True)
class Kernel:
    """One kernel: an operation on codes of `bits` bits, for an instruction set."""

    operation: Operation
    bits: int
    table: InstructionSet

    @property
    def rows(self) -> int:
        """Rows of x at once."""
        return ROWS[self.operation]

    @property
    def columns(self) -> int:
        """Columns at once: the whole panel for one row of x; two registers for four, whose sums are eight already."""
        return PANEL if self.operation == "qgemv" else 2 * self.table.lanes

    @property
    def name(self) -> str:
        """Its name, by the grammar above."""
        return f"{self.operation}_f32_u{self.bits}_gany_{self.rows}x{self.columns}_{self.table.name}"

    @cached_property
    def program(self) -> Program:
        """What it does, in the vocabulary."""
        return micro_kernel(self.bits, lanes=self.table.lanes, panel=PANEL, columns=self.columns, rows=self.rows)

    @property
    def source(self) -> str:
        """Its C++, to stand after the prelude of its instruction set."""
        summary = _SUMMARY.format(name=self.name, rows=self.rows, columns=self.columns, bits=self.bits, panel=PANEL)
        return function(self.program, self.table, self.name, summary)


def kernel_source(*, bits: int, isa: str = "avx2", operation: str = "qgemv") -> str:
    """The C++ of a kernel, complete with the functions that it calls; no compiler is needed to see it.

    >>> source = kernel_source(bits=4, isa="avx2")
    >>> "l_0 = cvt_int_float(a_0);" in source
    True

    Args:
        bits: 2, 3, 4 or 8.
        isa: ``avx2`` or ``plain``.
        operation: ``qgemv`` (one row of activations) or ``qgemm`` (several).

    Raises:
        ArgumentError: any of them is another.
    """
    check_choice("bits", bits, BITS)
    check_choice("isa", isa, tuple(TABLES))
    for known in OPERATIONS:
        if operation == known:
            kernel = Kernel(known, bits, TABLES[isa])
            return prelude(kernel.table) + "\n" + kernel.source
    raise ArgumentError("operation", repr(operation), " or ".join(OPERATIONS))
