r"""HQQ: codes of 8, 4, 3, 2 or 1 bits of a matrix that was reshaped into groups.

HQQ reshapes the matrix N × K, row by row, before it does anything else. Along *axis 1* each row of the new matrix is a
group, along *axis 0* each column is one:

====== ============================ ================================
axis   new matrix                   scale and zero
====== ============================ ================================
0      group_size × N K/group_size  1 × N K/group_size
1      N K/group_size × group_size  N K/group_size × 1
====== ============================ ================================

An element is :math:`s\,(q - z)` with the scale and the zero of its group, both float16; the zero need not be whole. A
group may cross rows of the matrix, and along axis 0 its elements lie :math:`N K / \mathrm{group\_size}` apart.

**Codes** are packed across the rows of the new matrix, whole slabs at a time. With 4 bits the upper half of the rows
lies in the high nibbles and the lower half in the low nibbles, so that neighbours in a byte are half the matrix apart;
2 bits and 1 bit do the same with four and eight slabs, and 8 bits are bytes. With 3 bits ten slabs lie in 32-bit words,
the first in bits 27 to 29 and the last in bits 0 to 2. The rows are padded to a multiple of ten first, so each slab is
as high as the padded matrix demands, and the last may be padding in part or whole.

Codes may also be viewed as floats; view them as integers first. Scales and zeros that are quantised themselves are not
here: hqq has deprecated them, and does not write them to files.

Source: hqq ``core/bitpack.py`` (BitPack) and ``core/quantize.py`` (Quantizer.quantize, Quantizer.dequantize).
"""

from functools import partial

import numpy as np
import numpy.typing as npt

from lowbit.arrays import Array
from lowbit.tensor_formats.bits import exact
from lowbit.tensor_formats.table import Decode, Field, Format, Sizes, Tensors, Terms

SLABS = 10
"""The codes of 3 bits in a word."""


def slabs(packed: Array, bits: int, count: int) -> npt.NDArray[np.int64]:
    """The codes of integers, the highest first, one slab below the other: ``count`` × rows high."""
    shifts = bits * np.arange(count - 1, -1, -1)
    codes: npt.NDArray[np.int64] = packed.astype(np.int64) >> shifts[:, None, None] & 2**bits - 1
    return codes.reshape(-1, packed.shape[1])


def _terms(codes: npt.NDArray[np.int64], tensors: Tensors, at: Sizes) -> Terms:
    scales, zeros = exact(tensors["scale"]), exact(tensors["zero"])
    products, offsets = scales * codes, np.broadcast_to(-scales * zeros, codes.shape)
    return Terms(products.reshape(at.N, at.K).T, offsets.reshape(at.N, at.K).T)


def _bytes(tensors: Tensors, at: Sizes) -> Terms:
    return _terms(slabs(tensors["W_q"], at["bits"], 8 // at["bits"]), tensors, at)


def _words(axis: int, tensors: Tensors, at: Sizes) -> Terms:
    rows = at["group_size"] if axis == 0 else at.N * at.K // at["group_size"]
    return _terms(slabs(tensors["W_q"], 3, SLABS)[:rows], tensors, at)


GROUPS = "N*K/group_size"


def _numbers(axis: int) -> tuple[Field, Field]:
    shape = (1, GROUPS) if axis == 0 else (GROUPS, 1)
    return (
        Field("scale", "float16", shape, "scale", "one for each group"),
        Field("zero", "float16", shape, "zero", "one for each group, not whole in general"),
    )


def _format(name: str, title: str, axis: int, *, words: bool = False) -> Format:
    high, wide = ("group_size", GROUPS) if axis == 0 else (GROUPS, "group_size")
    if words:
        packed = Field("W_q", "int32", (f"{high}//{SLABS}", wide), "codes", "ten slabs; bits 30 and 31 are 0", 2**30)
    else:
        packed = Field(
            "W_q", "uint8", (f"{high}*bits/8", wide), "codes", "slabs of rows, the first in the highest bits"
        )
    decode: Decode = partial(_words, axis) if words else _bytes
    return Format(
        name=name,
        title=title,
        fields=(packed, *_numbers(axis)),
        decode=decode,
        options={"group_size": None} if words else {"bits": (4, 2, 8, 1), "group_size": None},
        source="hqq, core/bitpack.py and core/quantize.py",
        traps=(
            "Neighbours in a byte are a whole slab of rows apart, and the first slab lies in the highest bits.",
            "A zero is a float, and subtracted before the scale is applied.",
        ),
    )


HQQ_0 = _format("hqq-axis0", "HQQ along axis 0", 0)
HQQ_1 = _format("hqq-axis1", "HQQ along axis 1", 1)
HQQ_0_3BIT = _format("hqq-axis0-3bit", "HQQ along axis 0, 3 bits", 0, words=True)
HQQ_1_3BIT = _format("hqq-axis1-3bit", "HQQ along axis 1, 3 bits", 1, words=True)
