r"""Block Floating Point: integers that share one exponent.

A float spends bits on its own exponent, although its neighbours mostly have a similar size. Block Floating Point (BFP)
stores one exponent for a whole block and a small integer, the *mantissa*, for each element. A block takes little
memory, and the dot product of two blocks is a sum of integer products and one addition of exponents, which is cheap in
hardware. The small elements of a block with one large element lose accuracy: they share the steps of the large element,
and may all round to zero. The chapter `ksort` is about this loss.

**The format** has a block size :math:`n`, a mantissa precision :math:`p` and an exponent precision :math:`b`. The
mantissas :math:`M_i` are integers of the range :math:`[-(2^{p-1}-1),\ 2^{p-1}-1]` (errata B8), the exponent
:math:`e` is an integer of :math:`b` bits, and the values are

.. math:: \{2^e \cdot M_1, \dots, 2^e \cdot M_n\}. \tag{1}

Both ranges are symmetric: of the :math:`2^p` patterns of a mantissa one is never used, and :math:`e` lies in
:math:`[-(2^{b-1}-1),\ 2^{b-1}-1]`. *BFP12* has :math:`p = 4`, *BFP16* has :math:`p = 8`, both :math:`b = 8`; a block
takes :math:`np + b` bits. Any other choice works by the same code.

**The exponent** follows from the largest element of the block (errata B2). With
:math:`\max_i |x_i| = f \cdot 2^{E'}` and :math:`f \in [\tfrac12, 1)`,

.. math:: e = E' - 1 - (p - 2),

which puts the largest mantissa between :math:`2^{p-2}` and :math:`2^{p-1}`, so that it uses all its bits. It is read
from the float's own exponent and never computed by a logarithm, which is wrong exactly where it matters, at powers of
two.

**The error** of an element is at most half a step, :math:`2^{e-1}`, except at the very top: where rounding would give
:math:`2^{p-1}` the mantissa saturates, and the error may reach a whole step.

.. plot:: figures/bfp_block.py

**Relation to OCP MX.** MXINT8 is the same idea with :math:`n = 32`, :math:`p = 8` and a scale of 8 bits; the chapter
`bfp_storage` says where the two coincide.

Source: K-sort §II.B, equation 1; errata B2, B8.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from lowbit.arrays import F32, F64, I64
from lowbit.contract.checks import check_array, check_instance, check_integer
from lowbit.contract.operation import EXACT, Parameters, operation
from lowbit.contract.signature import FINITE, Shape, checked
from lowbit.errors import ArgumentError

Mantissas = npt.NDArray[np.signedinteger[Any]]
Exponents = npt.NDArray[np.int16]

MOST_MANTISSA_BITS = 25
"""With 25 bits the largest element of a block keeps all 24 bits of its float32 significand; more is never needed."""

MOST_EXPONENT_BITS = 10
"""Nine bits hold the exponent of every float32 block; with ten, products of two blocks still stay within float64."""


@dataclass(frozen=True)
class Format:
    """One choice of block, mantissa and exponent.

    >>> bfp12(64), bfp12(64).name, bfp12(64).top
    (Format(block=64, mantissa=4, exponent=8), 'BFP12_64', 7)

    Attributes:
        block: n, elements of a block, at least 1; the last block of a row may be shorter.
        mantissa: p, bits of a mantissa, 2 to 25.
        exponent: b, bits of an exponent, 1 to 10.

    Raises:
        ArgumentError: a number outside these ranges.
    """

    block: int
    mantissa: int
    exponent: int = 8

    def __post_init__(self) -> None:
        check_integer("block", self.block, least=1)
        check_integer("mantissa", self.mantissa, 2, MOST_MANTISSA_BITS)
        check_integer("exponent", self.exponent, 1, MOST_EXPONENT_BITS)

    @property
    def name(self) -> str:
        """``BFP12_64`` as the paper writes it: bits of mantissa and exponent together, then the block."""
        widths = {(4, 8): "BFP12", (8, 8): "BFP16"}
        return f"{widths.get((self.mantissa, self.exponent), f'BFP({self.mantissa}, {self.exponent})')}_{self.block}"

    @property
    def top(self) -> int:
        """The largest mantissa, 2^(p−1) − 1."""
        return int(2 ** (self.mantissa - 1) - 1)

    @property
    def reach(self) -> int:
        """The largest exponent, 2^(b−1) − 1; the least is its negative."""
        return int(2 ** (self.exponent - 1) - 1)

    @property
    def dtype(self) -> np.dtype[np.signedinteger[Any]]:
        """The dtype of mantissas in computation: int8 up to 8 bits, int16 up to 16, int32 beyond."""
        return np.dtype(np.int8 if self.mantissa <= 8 else np.int16 if self.mantissa <= 16 else np.int32)

    @property
    def parameters(self) -> Parameters:
        """Its choices, by the names under which a backend declares what it handles."""
        return {"block": self.block, "mantissa": self.mantissa, "exponent": self.exponent}

    def blocks(self, columns: int) -> int:
        """How many blocks a row of this many elements has."""
        return -(-columns // self.block)

    def spans(self, columns: int) -> Iterator[slice]:
        """The elements of each block of a row, in order.

        >>> [(span.start, span.stop) for span in bfp12(4).spans(10)]
        [(0, 4), (4, 8), (8, 10)]
        """
        for start in range(0, columns, self.block):
            yield slice(start, min(start + self.block, columns))


def bfp12(block: int) -> Format:
    """4-bit mantissas and an 8-bit exponent: the paper's format for keys."""
    return Format(block, mantissa=4)


def bfp16(block: int) -> Format:
    """8-bit mantissas and an 8-bit exponent: the paper's format for queries."""
    return Format(block, mantissa=8)


# **Blocks** divide each row of a matrix, from its first element on; a row is, for example, a token's key in one head.
# No block spans two rows.


@dataclass(frozen=True, eq=False)
class Blocks:
    """A matrix in Block Floating Point, R rows of n elements in P blocks each.

    Attributes:
        mantissas: R × n, of the format's dtype, from −`top` to `top`.
        exponents: int16, R × P, from −`reach` to `reach`.
        format: block, mantissa and exponent.

    Raises:
        ArgumentError: arrays that are not those of the format.
    """

    mantissas: Mantissas
    exponents: Exponents
    format: Format

    def __post_init__(self) -> None:
        check_instance("format", self.format, Format)
        check_array("mantissas", self.mantissas, self.format.dtype, (None, None))
        rows, columns = self.mantissas.shape
        check_array("exponents", self.exponents, np.int16, (rows, self.format.blocks(columns)))
        _check_range("mantissas", self.mantissas, self.format.top)
        _check_range("exponents", self.exponents, self.format.reach)

    @property
    def rows(self) -> int:
        """R."""
        return int(self.mantissas.shape[0])

    @property
    def columns(self) -> int:
        """n."""
        return int(self.mantissas.shape[1])

    @property
    def parameters(self) -> Parameters:
        """The choices of the format."""
        return self.format.parameters


def _check_range(argument: str, array: npt.NDArray[np.signedinteger[Any]], most: int) -> None:
    """Refuse a number beyond ±most, and say where the first one is."""
    outside = np.abs(array.astype(np.int64)) > most
    if outside.any():
        where = tuple(int(i) for i in np.unravel_index(int(np.argmax(outside)), array.shape))
        raise ArgumentError(f"{argument}{list(where)}", array[where], f"{-most} to {most}")


# **The cast and its inverse.**


@checked
def cast(x: Annotated[F32, Shape("R", "n"), FINITE], format: Format) -> Blocks:
    r"""Round each row to blocks: exponent from the largest element, then mantissas :math:`\mathrm{rint}(x / 2^e)`.

    The largest element, 5, is between 4 and 8, so a step is 1; 0.5 and 2.5 are ties and go to the even mantissa, and
    7.75 saturates:

    >>> x = np.array([[5.0, 0.5, 2.5, -1.0], [7.75, 0.0, 0.0, 0.0]], np.float32)
    >>> blocks = cast(x, bfp12(4))
    >>> print(blocks.mantissas.tolist(), blocks.exponents.tolist())
    [[5, 0, 2, -1], [7, 0, 0, 0]] [[0], [0]]

    One outlier costs the others their bits:

    >>> decode(cast(np.array([[1.0, 0.9, 0.8, 30.0]], np.float32), bfp12(4))).tolist()
    [[0.0, 0.0, 0.0, 28.0]]

    Args:
        x: float32, R × n, finite.
        format: block, mantissa and exponent.

    Raises:
        ArgumentError: x of another dtype, shape or layout, or not finite; not a `Format`.

    Source: K-sort §II.B; errata B2, B8.
    """
    mantissas = np.empty(x.shape, format.dtype)
    exponents = np.empty((x.shape[0], format.blocks(x.shape[1])), np.int16)
    for number, span in enumerate(format.spans(x.shape[1])):
        part = x[:, span].astype(np.float64)
        e = block_exponent(np.abs(part).max(axis=1), format)
        scaled = np.ldexp(part, -e[:, np.newaxis])  # x / 2^e, exact: only the exponent of the float64 changes
        mantissas[:, span] = np.clip(np.rint(scaled), -format.top, format.top)
        exponents[:, number] = e
    return Blocks(mantissas, exponents, format)


def block_exponent(largest: F64, format: Format) -> I64:
    r""":math:`e = E' - 1 - (p - 2)`, clamped to the exponent's range; a block of zeros takes the least exponent.

    >>> block_exponent(np.array([1.0, 0.75, 2.0**-200, 0.0]), bfp12(32))
    array([  -2,   -3, -127, -127])

    Args:
        largest: float64: the largest magnitude of each block.
        format: mantissa and exponent.

    Source: errata B2.
    """
    _, power = np.frexp(largest)
    e = np.clip(power.astype(np.int64) - 1 - (format.mantissa - 2), -format.reach, format.reach)
    return np.where(largest == 0, -format.reach, e)


@checked
def decode(blocks: Blocks) -> F32:
    r"""The values :math:`2^e \cdot M` of equation 1, in float32.

    Blocks that `cast` made from float32 decode without rounding. Only exponents that no such cast yields can leave the
    range of float32; the value is then rounded once, to a subnormal or zero at the bottom, to infinity at the top.

    >>> blocks = Blocks(np.array([[7, -1]], np.int8), np.array([[-2]], np.int16), bfp12(32))
    >>> decode(blocks)
    array([[ 1.75, -0.25]], dtype=float32)

    Args:
        blocks: R rows of n elements.

    Returns:
        float32, R × n; a mantissa of 0 gives +0.

    Raises:
        ArgumentError: not `Blocks`.

    Source: K-sort §II.B, equation 1.
    """
    values = np.empty(blocks.mantissas.shape, np.float32)
    for number, span in enumerate(blocks.format.spans(blocks.columns)):
        e = blocks.exponents[:, number : number + 1].astype(np.int64)
        with np.errstate(over="ignore", under="ignore"):
            values[:, span] = np.ldexp(blocks.mantissas[:, span].astype(np.float64), e)
    return values


# **What a backend promises.**

operation(
    "bfp.cast",
    "Float32 to Block Floating Point",
    cast,
    promise=EXACT,
    source="K-sort §II.B; errata B2, B8",
    clauses={
        "C1": "A block is a run of `block` elements of one row, counted from its first; the last of a row may be "
        "short; no block depends on another.",
        "C2": "The exponent is E′ − 1 − (p − 2), where the largest magnitude of the block is f·2^E′ with f in [½, 1).",
        "C3": "Each mantissa is x/2^e rounded to the nearest integer, ties to even, saturated at ±(2^(p−1) − 1).",
        "C4": "The exponent is clamped to ±(2^(b−1) − 1), and the mantissas are those of the clamped exponent.",
        "C5": "A block of zeros, of either sign, has mantissas 0 and the least exponent.",
    },
)

operation(
    "bfp.decode",
    "Block Floating Point to float32",
    decode,
    promise=EXACT,
    source="K-sort §II.B equation 1",
    clauses={
        "C1": "Each value is 2^e·M, rounded once to float32; a mantissa of 0 gives +0.",
        "C2": "Values beyond float32 become subnormal, zero or infinite as one rounding to nearest, ties to even, "
        "makes them.",
    },
)
