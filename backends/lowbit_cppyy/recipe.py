"""Recipes: the choices by which one kernel differs from another.

A recipe, with an instruction set, is all that the generator needs to know. It is also what a search varies. In the
paper's terms the registers side by side are :math:`t_u`, and the codes of a loop iteration :math:`m_u`.

**The method** says how codes become products. Each method is a transformation of the plain one, `shift`. A test states
in which sense the two are equal:

=========== ======================================================== ===============================================
method      what it does                                             equal to `shift`
=========== ======================================================== ===============================================
`shift`     shift, mask, convert, multiply-add: the paper's
            Algorithm 2
`fold`      no shift: a code masked in place is too large by a       to the bit, unless an activation is so small that
            power of two, and its activation too small by the same   the power of two makes it subnormal
`subnormal` the same without a conversion: the bits of a masked code to the bit, for activations whose magnitude is
            are those of a float, the code times a power of two      from 2^-76 to 2^29
`table`     4 bits: the code looked up in a register of sixteen      to the bit
            floats
`sums`      four bits of a word looked up among sixteen sums of      exactly on the lattice; elsewhere fewer roundings
            activations, computed once a call: no multiplication     in another order
`dot4`      integers: four codes by four mantissas in one step       (another contract: `linear.qgemm_bfp`)
`pairs`     integers: the same through 16 bits, for codes of at      to the bit of `dot4`
            most 4 bits
=========== ======================================================== ===============================================

`sums` reads a table of 64 bytes for each four bits: for one activation at 4 bits, for two at 2 bits. It needs registers
of sixteen lanes. `chains` independent sums of a group keep a multiply-add from waiting for the one before it.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from lowbit.quantization.affine import Convention, ScaleDtype
from lowbit.quantization.packing import CODES_PER_UNIT, WORDS_PER_UNIT

Method = Literal["shift", "fold", "subnormal", "table", "sums", "dot4", "pairs"]
METHODS: tuple[Method, ...] = ("shift", "fold", "subnormal", "table", "sums", "dot4", "pairs")
INTEGER: tuple[Method, ...] = ("dot4", "pairs")

Purpose = Literal["vector", "rows", "many rows", "integer vector", "integer rows"]
PURPOSES: tuple[Purpose, ...] = ("vector", "rows", "many rows", "integer vector", "integer rows")
"""The purposes of kernels: one row of x or several, in float32 or in integers."""

METHODS_FOR: Mapping[Purpose, tuple[Method, ...]] = MappingProxyType(
    {
        "vector": ("shift", "fold", "subnormal", "table", "sums"),
        "rows": ("shift", "fold", "subnormal", "table"),
        "many rows": ("shift", "fold", "subnormal", "table"),
        "integer vector": INTEGER,
        "integer rows": INTEGER,
    }
)
"""The methods that keep the backend's guarantees for a purpose.

The result for a row must not depend on the number of rows. So several rows allow only methods that give the same bits
as `shift`.
"""

PANELS = (64, 128)
"""Widths of a panel in columns. The tile of every default recipe divides them, and a tile in C++ has room for them."""

FAR, NEAR, NONE = 2048, 1024, 0
"""Prefetch distances in elements, among which `lowbit_cppyy.runtime.prefetching` chooses."""

SEGMENT = 32
"""The number of elements of a block of activations, by `lowbit.linear.integer.ACTIVATIONS`."""


@dataclass(frozen=True, kw_only=True)
class Tile(ABC):
    """The choices common to all kernels of a matrix.

    Attributes:
        rows: rows of x at once.
        registers: t_u, registers of columns.
        chains: independent sums of a group, or of a run of rows that is summed separately.
        panel: P, columns of a panel.
        ahead: prefetch distance in elements; 0 for no prefetch.
    """

    rows: int = 1
    registers: int = 4
    chains: int = 1
    panel: int = 64
    ahead: int = FAR

    @property
    @abstractmethod
    def unit_words(self) -> int:
        """The number of rows of words of a unit."""

    @property
    def places(self) -> list[tuple[int, int]]:
        """The registers of y: rows of x by registers of columns."""
        return [(r, j) for r in range(self.rows) for j in range(self.registers)]


@dataclass(frozen=True)
class Recipe(Tile):
    """The choices of one micro-kernel, in addition to its tile.

    Attributes:
        bits: b, the width of a code.
        scales: dtype of scales and minima in memory.
        convention: whether zeros are minima or zero-points.
        method: how codes become products.
        unroll: units in a loop iteration; m_u in units.
    """

    bits: int
    scales: ScaleDtype
    convention: Convention
    method: Method
    unroll: int = 1

    @property
    def integer(self) -> bool:
        """Whether it follows the integer contract rather than the float32 one."""
        return self.method in INTEGER

    @property
    def unit_codes(self) -> int:
        """The number of codes of a unit."""
        return CODES_PER_UNIT[self.bits]

    @property
    def unit_words(self) -> int:
        return WORDS_PER_UNIT[self.bits]

    @property
    def name(self) -> str:
        """The middle of a kernel's name; the grammar is in `lowbit_cppyy.codegen.kernels`."""
        activations = "bfp16" if self.integer else "f32"
        scales = {"float32": "s32", "float16": "s16"}[self.scales]
        zeros = {"minimum": "m", "zero_point": "z"}[self.convention]
        tile = f"{self.rows}x{self.registers}c{self.chains}t{self.unroll}"
        return f"{activations}_u{self.bits}_{scales}{zeros}_{self.method}_{tile}_p{self.panel}a{self.ahead}"

    def fits(self, lanes: int) -> str:
        """Why there is no kernel of this recipe for registers with this many lanes; empty if there is one."""
        if self.panel % (self.registers * lanes):
            return f"{self.registers} registers of {lanes} lanes do not divide a panel of {self.panel} columns"
        if self.method == "sums" and lanes != 16:
            return "sums are looked up in registers of 16 lanes"
        if self.method == "sums" and self.bits == 8:
            return "an 8-bit code takes two look-ups, so it would be rounded more often than is declared"
        if self.method == "table" and (lanes != 16 or self.bits != 4):
            return "the table is for 4-bit codes in registers of 16 lanes"
        if self.method == "pairs" and self.bits == 8:
            return "products of 8-bit codes saturate in 16 bits"
        if self.method == "sums" and self.rows > 1:
            return "tables of sums are made for one row of x"
        return ""
