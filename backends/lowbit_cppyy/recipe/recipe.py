"""Recipes: the choices by which one kernel differs from another.

A recipe is all that the generator needs to know beside the instruction set, and it is what a search varies. In the
paper's terms the registers side by side are :math:`t_u`, and the codes of a turn of the loop :math:`m_u`.

**How codes become products** is the method. Each is a transformation of the plain one, `shift`, and has a test that
says in which sense it is equal:

=========== ======================================================== ===============================================
method      what it does                                             equal to `shift`
=========== ======================================================== ===============================================
`shift`     shift, mask, convert, multiply-add: the paper's
            Algorithm 2
`fold`      no shift: a code masked where it stands is a power of    to the bit, if no activation is so small that
            two too large, and its activation as much too small      the power of two makes it subnormal
`mantissa`  shifted into the top bits of a float's mantissa, where   exactly on the lattice; else with the rounding of
            it is :math:`2^b + q`; the sum of x takes the rest away  a sum larger by :math:`2^b \\sum x`
`table`     4 bits: the code looked up in a register of sixteen      to the bit
            floats
`sums`      four bits of a word looked up in sixteen sums of         exactly on the lattice; else fewer roundings in
            activations, made once a call: no multiplication left    another order
`dot4`      integers: four codes by four mantissas in one step       (other contract: `linear.qgemm_bfp`)
`pairs`     integers: the same through 16 bits, for codes of at      to the bit of `dot4`
            most 4 bits
=========== ======================================================== ===============================================

`sums` goes by a table for each four bits, 64 bytes for one activation at 4 bits and for two at 2 bits, so it needs
registers of sixteen lanes. `chains` sums of a group side by side keep multiply-adds from waiting for each other.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from lowbit.quantization.affine import Convention, ScaleDtype
from lowbit.quantization.packing import CODES_PER_UNIT, WORDS_PER_UNIT

Method = Literal["shift", "fold", "mantissa", "table", "sums", "dot4", "pairs"]
METHODS: tuple[Method, ...] = ("shift", "fold", "mantissa", "table", "sums", "dot4", "pairs")
INTEGER: tuple[Method, ...] = ("dot4", "pairs")

Purpose = Literal["vector", "rows", "many rows", "integer vector", "integer rows"]
PURPOSES: tuple[Purpose, ...] = ("vector", "rows", "many rows", "integer vector", "integer rows")
"""What a kernel is for: one row of x or several, in float32 or in integers."""

METHODS_FOR: Mapping[Purpose, tuple[Method, ...]] = MappingProxyType(
    {
        "vector": ("shift", "fold", "table", "sums"),
        "rows": ("shift", "fold", "table"),
        "many rows": ("shift", "fold", "table"),
        "integer vector": INTEGER,
        "integer rows": INTEGER,
    }
)
"""The methods that keep what the backend promises of a purpose.

`mantissa` is for none: its error is not within the bound that the backend declares. Results for a row must not depend
on how many rows there are, so for several rows there are only methods that are equal to `shift` to the bit.
"""

PANELS = (64, 128)
"""Columns that a panel may have: what the tile of every default recipe divides, and a tile in C++ has room for."""

SEGMENT = 32
"""Elements of a block of activations, by `lowbit.linear.integer.ACTIVATIONS`."""


@dataclass(frozen=True)
class Recipe:
    """The choices of one micro-kernel.

    Attributes:
        bits: b, the width of a code.
        scales: dtype of scales and minima in memory.
        convention: whether zeros are minima or zero-points.
        method: how codes become products.
        rows: rows of x at once.
        registers: t_u, registers side by side.
        chains: sums of a group side by side.
        turn: units of a turn of the loop; m_u in units.
        panel: P, columns of a panel.
        ahead: elements from a word to the one that is asked for while it is used; 0 for none.
    """

    bits: int
    scales: ScaleDtype
    convention: Convention
    method: Method
    rows: int = 1
    registers: int = 4
    chains: int = 1
    turn: int = 1
    panel: int = 64
    ahead: int = 2048

    @property
    def integer(self) -> bool:
        """Whether it keeps the integer contract; if not, the float32 one."""
        return self.method in INTEGER

    @property
    def unit_codes(self) -> int:
        """Codes of a unit."""
        return CODES_PER_UNIT[self.bits]

    @property
    def unit_words(self) -> int:
        """Rows of words of a unit."""
        return WORDS_PER_UNIT[self.bits]

    @property
    def name(self) -> str:
        """The middle of a kernel's name; `lowbit_cppyy.codegen.kernels` tells the grammar."""
        activations = "bfp16" if self.integer else "f32"
        scales = {"float32": "s32", "float16": "s16"}[self.scales] + {"minimum": "m", "zero_point": "z"}[
            self.convention
        ]
        tile = f"{self.rows}x{self.registers}c{self.chains}t{self.turn}"
        return f"{activations}_u{self.bits}_{scales}_{self.method}_{tile}_p{self.panel}a{self.ahead}"

    def fits(self, lanes: int) -> str:
        """Why this recipe cannot be made for registers of so many lanes; empty if it can."""
        if self.panel % (self.registers * lanes):
            return f"{self.registers} registers of {lanes} lanes do not divide a panel of {self.panel} columns"
        if self.method == "sums" and lanes != 16:
            return "sums are looked up in registers of 16 lanes"
        if self.method == "sums" and self.bits == 8:
            return "an 8-bit code would be looked up in two sums, and be rounded more often than is declared"
        if self.method == "table" and (lanes != 16 or self.bits != 4):
            return "the table is for 4-bit codes in registers of 16 lanes"
        if self.method == "mantissa" and self.bits == 3:
            return "a 3-bit code lies in two places, so it is not shifted as one"
        if self.method == "pairs" and self.bits == 8:
            return "products of 8-bit codes saturate in 16 bits"
        if self.method == "sums" and self.rows > 1:
            return "sums are made for one row of x"
        return ""
