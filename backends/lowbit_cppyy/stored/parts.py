r"""Parts: a stored matrix as kernels see it, whatever its format is.

Every format that has a kernel says the same of a weight, with a code :math:`q` of a few bits:

.. math:: w = d_g\, t_s\, v(q) + o_s .

A *group* is a run of rows that share the scale :math:`d_g`. In some formats it is cut into *runs* of 16 or 32 rows,
each with a small integer :math:`t_s`; in the others :math:`t_s = 1` and a run is a group. The *value* :math:`v(q)` is
the code itself, a signed byte, one of sixteen numbers of a table, or the float of 16 or 32 bits whose pattern the code
is; matrices of such floats have neither scales nor groups, :math:`d_g = 1`. The *offset* :math:`o_s` is

- 0 (``none``);
- :math:`-c\, d_g\, t_s` with a constant :math:`c` (``center``): codes that are stored plus :math:`c`;
- a number of its own for each group (``number``);
- :math:`-z\, d_g` with an integer :math:`z` for each group (``zero``);
- :math:`-m_s\, d'_g` with an integer for each run and a second scale for each group (``minimum``).

A `Structure` is the choice among these. It determines a kernel; the numbers in `Parts` determine a matrix.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

import numpy as np
import numpy.typing as npt

from lowbit.arrays import F32, F64, I64, U8, U32, Array

U16 = npt.NDArray[np.uint16]

Values = Literal["codes", "signed", "table", "float16", "bfloat16", "float32"]
Scale = Literal["float16", "float32", "exponent", "one"]
Inner = Literal["", "uint8", "int8"]
Offset = Literal["none", "center", "number", "zero", "minimum"]

FLOATS: Mapping[Values, int] = MappingProxyType({"float16": 16, "bfloat16": 16, "float32": 32})
"""The bits of the values that are floats."""
UNIT = 32
"""The number of rows that a kernel unpacks together: one bit of a word for each row, and as many words as a code has
bits."""


@dataclass(frozen=True)
class Structure:
    """What a kernel needs to know about a matrix.

    Attributes:
        bits: width of a code: 2, 3, 4, 5, 6 or 8; 16 or 32 for floats.
        values: what a code stands for; ``signed`` for 8 bits, ``table`` for 4.
        scale: type of the scales of groups, of a second scale and of offsets that are numbers; ``exponent``, in formats
            without offset, for a byte E that stands for :math:`2^{E - 127}`; ``one`` if there are no scales.
        inner: type of the integers :math:`t_s`; empty if there are none.
        run: rows of a run, 16 or 32; 0 if a run is a group.
        offset: see the top of this chapter.
    """

    bits: int
    values: Values = "codes"
    scale: Scale = "float16"
    inner: Inner = ""
    run: int = 0
    offset: Offset = "none"

    @property
    def is_floats(self) -> bool:
        """Whether codes are floats, which a kernel multiplies directly."""
        return self.values in FLOATS

    @property
    def name(self) -> str:
        """Its name in the name of a kernel."""
        scale = {"float16": "_s16", "float32": "_s32", "exponent": "_e8", "one": ""}[self.scale]
        inner = f"{self.inner[0]}{self.run}" if self.inner else ""
        letters = {"codes": "u", "signed": "i", "table": "t", "float16": "f", "bfloat16": "b", "float32": "f"}
        values = letters[self.values]
        offset = "" if self.offset == "none" else self.offset[0]
        return f"{values}{self.bits}{scale}{inner}{offset}"


@dataclass(frozen=True, eq=False)
class Parts:
    """The numbers of a matrix of K rows and N columns.

    Attributes:
        structure: the kinds of numbers present.
        codes: uint8, or uint16 or uint32 for floats, K × N, in the order of `order`.
        lengths: rows of each group, G of them.
        scales: G × N; float32 holding numbers of the structure's type, or uint8 for exponents; G × 0 if there are none.
        inner: runs × N, uint8 or int8.
        offsets: numbers that float32 holds, G × N; zeros, uint8, G × N; minima, uint8, runs × N.
        offset_scales: G × N, the second scale, of minima.
        center: c.
        table: float32, 16.
        order: the row of the matrix for each row of `codes`; None if they are in order.
    """

    structure: Structure
    codes: U8 | U16 | U32
    lengths: Sequence[int]
    scales: F32 | U8
    inner: Array | None = None
    offsets: F32 | F64 | U8 | None = None
    offset_scales: F32 | None = None
    center: int = 0
    table: F32 | None = None
    order: I64 | None = None

    @property
    def rows(self) -> int:
        """K."""
        return len(self.codes)

    @property
    def columns(self) -> int:
        """N."""
        return int(self.codes.shape[1])

    def without_numbers(self) -> "Parts":
        """The parts that determine the layout of activations: without codes, scales and offsets, which are in the
        stream, and with no columns."""
        codes, scales = np.empty((self.rows, 0), self.codes.dtype), self.scales[:, :0].copy()
        return replace(self, codes=codes, scales=scales, inner=None, offsets=None, offset_scales=None)
