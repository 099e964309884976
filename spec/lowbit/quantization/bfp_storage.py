r"""Blocks in memory: a stream of mantissas, a byte for each exponent.

The bytes decide the size of a key cache, so they are part of the specification (errata B9).

**Mantissas** are in two's complement, :math:`p` bits each, laid end to end in the little-endian stream of the chapter
`packing`, block after block: mantissa :math:`i` of a row takes the bits :math:`pi, \dots, pi + p - 1` of the row's
stream, least significant first, and bit :math:`j` of the stream is bit :math:`j \bmod 8` of byte
:math:`\lfloor j/8 \rfloor`. Every row begins at a byte of its own, so that tokens can be added one by one; where a row
does not fill its last byte, the bits left over are 0.

**Exponents** are one byte for each block, :math:`e + 127`. That leaves no room for exponents of more than 8 bits:
blocks with these can be used in a computation but not stored.

A row of :math:`n` elements in :math:`P` blocks takes :math:`\lceil np/8 \rceil + P` bytes. With BFP12 and blocks of 32
that is 4.25 bits an element, with BFP16 8.25.

**Relation to OCP MX.** MXINT8 has blocks of 32 integers of 8 bits and a scale :math:`X` in *E8M0*: one byte, which
stands for :math:`2^{\mathrm{byte} - 127}`, with 255 for NaN. Its integers are read as :math:`M \cdot 2^{-6}`, so a
value is :math:`2^{\mathrm{byte} - 127 - 6} M`, and the standard's suggested conversion takes
:math:`X = 2^{\lfloor \log_2 \max|x| \rfloor}`, rounds to nearest even and saturates. That is BFP16 with a block of 32,
where the byte is that of :math:`e + 6`. The two differ in three places only:

- the integer −128, which MX can hold and BFP cannot;
- the ends of the exponent: MX counts down to :math:`e + 6 = -127`, BFP to :math:`e = -127`, so blocks whose largest
  element is below :math:`2^{-121}` differ;
- NaN, which is a scale in MX and an error here.

A byte of exponent of *any* BFP format is a number of E8M0 as it stands, never 255.

Source: errata B9; OCP Microscaling Formats (MX) v1.0, §5.3, §5.4, §6.3.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lowbit.arrays import U8
from lowbit.contract.checks import check_array, check_instance, check_integer
from lowbit.contract.operation import EXACT, Parameters, operation
from lowbit.contract.signature import checked
from lowbit.errors import ArgumentError
from lowbit.quantization.bfp import Blocks, Format, Mantissas

EXPONENT_BIAS = 127
STORED_EXPONENT_BITS = 8


@dataclass(frozen=True, eq=False)
class StoredBlocks:
    """R rows of n elements as they are stored in memory.

    Attributes:
        mantissas: uint8, R × ⌈n·p/8⌉.
        exponents: uint8, R × P.
        columns: n.
        format: block, mantissa and exponent.

    Raises:
        ArgumentError: arrays of other dtypes or shapes; a format that cannot be stored.
    """

    mantissas: U8
    exponents: U8
    columns: int
    format: Format

    def __post_init__(self) -> None:
        check_integer("columns", self.columns, least=1)
        check_stored_format(self.format)
        check_array("mantissas", self.mantissas, np.uint8, (None, row_bytes(self.columns, self.format.mantissa)))
        check_array("exponents", self.exponents, np.uint8, (len(self.mantissas), self.format.blocks(self.columns)))

    @property
    def nbytes(self) -> int:
        """All bytes of mantissas and exponents."""
        return self.mantissas.nbytes + self.exponents.nbytes

    @property
    def parameters(self) -> Parameters:
        """The choices of the format."""
        return self.format.parameters


def row_bytes(columns: int, mantissa: int) -> int:
    """Bytes of the mantissas of one row.

    >>> row_bytes(64, mantissa=4), row_bytes(5, mantissa=3)
    (32, 2)
    """
    return -(-columns * mantissa // 8)


def check_stored_format(format: Format) -> None:
    """Refuse a format whose exponents do not fit a byte."""
    check_instance("format", format, Format)
    check_integer("bits of a stored exponent", format.exponent, 1, STORED_EXPONENT_BITS)


def _check_store(blocks: Blocks) -> None:
    check_stored_format(blocks.format)


@checked(also=_check_store)
def store(blocks: Blocks) -> StoredBlocks:
    """Lay out blocks as bytes.

    Two 4-bit mantissas share a byte, the first in its low half; −1 is 1111 in two's complement:

    >>> from lowbit.quantization.bfp import bfp12, cast
    >>> stored = store(cast(np.array([[5.0, -1.0, 2.0]], np.float32), bfp12(32)))
    >>> [f"{byte:08b}" for byte in stored.mantissas[0]], stored.exponents[0].tolist()
    (['11110101', '00000010'], [127])

    Args:
        blocks: R rows of n elements, with exponents of at most 8 bits.

    Raises:
        ArgumentError: exponents of more bits.

    Source: errata B9.
    """
    mantissas = pack_signed(blocks.mantissas, blocks.format.mantissa)
    exponents = (blocks.exponents + EXPONENT_BIAS).astype(np.uint8)
    return StoredBlocks(mantissas, exponents, blocks.columns, blocks.format)


def _check_load(stored: StoredBlocks) -> None:
    """Refuse what `store` cannot write."""
    reach, bits, exponents = stored.format.reach, stored.format.mantissa, stored.exponents
    least, most = EXPONENT_BIAS - reach, EXPONENT_BIAS + reach
    if (exponents < least).any() or (exponents > most).any():
        given = f"from {exponents.min()} to {exponents.max()}"
        raise ArgumentError("bytes of exponents", given, f"{least} to {most}")
    if (unpack_signed(stored.mantissas, stored.columns, stored.format) == -(2 ** (bits - 1))).any():
        raise ArgumentError("mantissas", f"-{2 ** (bits - 1)} somewhere", f"±{stored.format.top}")
    used = stored.columns * bits % 8
    if used and (stored.mantissas[:, -1] >> used).any():
        raise ArgumentError("bits after the last mantissa of a row", "set", "all 0")


@checked(also=_check_load)
def load(stored: StoredBlocks) -> Blocks:
    """Read blocks back: the inverse of `store`, which refuses what `store` cannot write.

    >>> from lowbit.quantization.bfp import bfp12
    >>> stored = StoredBlocks(np.array([[0b11110101, 0b0010]], np.uint8), np.array([[127]], np.uint8), 3, bfp12(32))
    >>> load(stored).mantissas
    array([[ 5, -1,  2]], dtype=int8)

    Args:
        stored: R rows.

    Raises:
        ArgumentError: a mantissa of −2^(p−1), an exponent outside the format's range (255 always is), or a bit that is
            not 0 after the last mantissa of a row.

    Source: errata B9.
    """
    mantissas = unpack_signed(stored.mantissas, stored.columns, stored.format)
    exponents = stored.exponents.astype(np.int16) - np.int16(EXPONENT_BIAS)
    return Blocks(mantissas, exponents, stored.format)


# **The stream**, one mantissa after another as in the chapter `packing`: bit j of mantissa i is bit i·bits + j.


def pack_signed(mantissas: Mantissas, bits: int) -> U8:
    """Signed integers, R × n, as the bytes of one stream a row: uint8, R × ⌈n·bits/8⌉."""
    rows, columns = mantissas.shape
    each = mantissas[:, :, None].astype(np.int64) >> np.arange(bits) & 1  # two's complement in `bits` bits
    stream = each.astype(np.uint8).reshape(rows, columns * bits)
    return np.packbits(stream, axis=1, bitorder="little")


def unpack_signed(stream: U8, columns: int, format: Format) -> Mantissas:
    """The inverse of `pack_signed`: signed integers of the format's dtype, R × n."""
    bits = format.mantissa
    each = np.unpackbits(stream, axis=1, count=columns * bits, bitorder="little")
    weights = 2 ** np.arange(bits)
    weights[-1] *= -1  # the sign bit stands for −2^(p−1)
    return (each.reshape(len(stream), columns, bits) @ weights).astype(format.dtype)


# **MXINT8.** Where the two formats coincide, only the encoding of the exponents differs.


@checked
def to_mxint8(blocks: Blocks) -> tuple[U8, npt.NDArray[np.int8]]:
    """The same numbers as MXINT8: E8M0 scales, uint8, R × P, and elements, int8, R × n.

    >>> from lowbit.quantization.bfp import bfp16, cast
    >>> scales, elements = to_mxint8(cast(np.array([[1.0, -0.5]], np.float32), bfp16(32)))
    >>> print(scales.tolist(), elements.tolist())  # 2^(127 − 127) · 64 · 2^−6 is 1
    [[127]] [[64, -32]]

    Args:
        blocks: in blocks of 32 with mantissas of 8 bits.

    Raises:
        ArgumentError: another block or mantissa, or an exponent that E8M0 cannot hold.

    Source: OCP MX v1.0 §5.3, §5.4.
    """
    if (blocks.format.block, blocks.format.mantissa) != (32, 8):
        raise ArgumentError("format", blocks.format.name, "blocks of 32 with 8-bit mantissas")
    scales = blocks.exponents.astype(np.int64) + 6 + EXPONENT_BIAS
    if (scales < 0).any() or (scales > 254).any():
        raise ArgumentError("exponents", f"from {blocks.exponents.min()} to {blocks.exponents.max()}", "-133 to 121")
    return scales.astype(np.uint8), blocks.mantissas.astype(np.int8)


# **What a backend promises.**

operation(
    "bfp.store",
    "Blocks to bytes",
    store,
    promise=EXACT,
    source="errata B9",
    clauses={
        "C1": "Mantissa i of a row is bits p·i to p·i + p − 1 of the row's stream in two's complement, least "
        "significant first; bit j of the stream is bit j mod 8 of byte ⌊j/8⌋; bits left over are 0.",
        "C2": "The byte of a block's exponent is e + 127.",
    },
)

operation(
    "bfp.load",
    "Bytes to blocks",
    load,
    promise=EXACT,
    source="errata B9",
    clauses={
        "C1": "For all that `bfp.store` writes, the mantissas and exponents are the ones that were stored.",
    },
)
