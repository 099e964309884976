r"""HQQ: codes of 8, 4, 3, 2 or 1 bits for a matrix that was reshaped into groups.

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

Codes may also be viewed as floats; view them as integers first.

**Computing in float16**, as hqq does by default, rounds twice: :math:`\mathrm{fl}(s\,\mathrm{fl}(q - z))`. A kernel
whose result is float16 may do the same.

**Quantised scales and zeros** (``-meta``) are the form in which Mixtral was published; they make groups of 16
affordable. Scales are 8-bit codes in groups of ``scale_group``, reshaped along axis 0 whatever the axis of the weights:
with M groups, number *f* belongs to group *f* mod M. Zeros are 8-bit codes, too, in a single group. Each group has a
float16 scale and a float16 zero of its own:

.. math:: s_f = s'_{f \bmod M}\,(q'_f - z'_{f \bmod M}), \qquad z_f = s''\,(q''_f - z'').

Later versions of hqq read such files but do not write them. The product :math:`s z` may need more bits than float64
has; it is rounded there, far below any bound.

Source: hqq ``core/bitpack.py`` (BitPack) and ``core/quantize.py`` (Quantizer.quantize, Quantizer.dequantize).
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt

from lowbit.arrays import F64, Array
from lowbit.numbers.floats import rounded
from lowbit.tensor_formats.bits import exact
from lowbit.tensor_formats.table import Field, Format, Sizes, Tensors, Terms

CodesOf = Callable[[Tensors, Sizes], npt.NDArray[np.int64]]
"""Decodes fields to the codes of the reshaped matrix."""

SLABS = 10
"""The number of 3-bit codes in a word."""


def slabs(packed: Array, bits: int, count: int) -> npt.NDArray[np.int64]:
    """The codes of integers, from the highest bits down, one slab below the other: ``count`` × rows high."""
    shifts = bits * np.arange(count - 1, -1, -1)
    codes: npt.NDArray[np.int64] = packed.astype(np.int64) >> shifts[:, None, None] & 2**bits - 1
    return codes.reshape(-1, packed.shape[1])


def of_groups(tensors: Tensors) -> tuple[F64, F64]:
    """The scale and the zero of every group, float64, in a shape that broadcasts to the reshaped matrix."""
    if "scale" in tensors:
        return exact(tensors["scale"]), exact(tensors["zero"])
    of_scales = exact(tensors["meta_scale_scale"]) * (exact(tensors["scale_q"]) - exact(tensors["meta_scale_zero"]))
    zeros = exact(tensors["meta_zero_scale"]) * (exact(tensors["zero_q"]) - exact(tensors["meta_zero_zero"]))
    return of_scales.reshape(zeros.shape), zeros


def _bytes(tensors: Tensors, at: Sizes) -> npt.NDArray[np.int64]:
    return slabs(tensors["W_q"], at["bits"], 8 // at["bits"])


def _words(axis: int, tensors: Tensors, at: Sizes) -> npt.NDArray[np.int64]:
    rows = at["group_size"] if axis == 0 else at.N * at.K // at["group_size"]
    return slabs(tensors["W_q"], 3, SLABS)[:rows]


def _decode(codes_of: CodesOf, tensors: Tensors, at: Sizes) -> Terms:
    codes, (scales, zeros) = codes_of(tensors, at), of_groups(tensors)
    products, offsets = scales * codes, np.broadcast_to(-scales * zeros, codes.shape)
    return Terms(products.reshape(at.N, at.K).T, offsets.reshape(at.N, at.K).T)


def _stepwise(codes_of: CodesOf, tensors: Tensors, at: Sizes) -> Array:
    differences = rounded(codes_of(tensors, at) - exact(tensors["zero"]), "float16")
    return rounded(exact(tensors["scale"]) * exact(differences), "float16").reshape(at.N, at.K).T


GROUPS = "N*K/group_size"


def _numbers(axis: int, meta: bool) -> tuple[Field, ...]:
    shape = (1, GROUPS) if axis == 0 else (GROUPS, 1)
    strides = f"{GROUPS}/scale_group"
    if meta:
        return (
            Field("scale_q", "uint8", ("scale_group", strides), "other", "codes of the scales, row by row"),
            Field("meta_scale_scale", "float16", (1, strides), "scale", "one for each group of scales"),
            Field("meta_scale_zero", "float16", (1, strides), "zero", "one for each group of scales"),
            Field("zero_q", "uint8", shape, "other", "codes of the zeros"),
            Field("meta_zero_scale", "float16", (1,), "scale", "of all zeros; hqq keeps it without a dimension"),
            Field("meta_zero_zero", "float16", (1,), "zero", "of all zeros; hqq keeps it without a dimension"),
        )
    return (
        Field("scale", "float16", shape, "scale", "one for each group"),
        Field("zero", "float16", shape, "zero", "one for each group, not whole in general"),
    )


def _format(axis: int, *, words: bool = False, meta: bool = False) -> Format:
    high, wide = ("group_size", GROUPS) if axis == 0 else (GROUPS, "group_size")
    if words:
        packed = Field("W_q", "int32", (f"{high}//{SLABS}", wide), "codes", "ten slabs; bits 30 and 31 are 0", 2**30)
    else:
        packed = Field(
            "W_q", "uint8", (f"{high}*bits/8", wide), "codes", "slabs of rows, the first in the highest bits"
        )
    codes_of: CodesOf = partial(_words, axis) if words else _bytes
    options: dict[str, tuple[int, ...] | None] = {} if words else {"bits": (4, 2, 8, 1)}
    return Format(
        name=f"hqq-axis{axis}" + "-3bit" * words + "-meta" * meta,
        title=f"HQQ along axis {axis}" + ", 3 bits" * words + ", quantised scales" * meta,
        fields=(packed, *_numbers(axis, meta)),
        decode=partial(_decode, codes_of),
        stepwise=None if meta else partial(_stepwise, codes_of),
        options=options | {"group_size": None} | ({"scale_group": None} if meta else {}),
        source="hqq, core/bitpack.py and core/quantize.py",
        traps=(
            "Neighbours in a byte are a whole slab of rows apart, and the first slab lies in the highest bits.",
            "A zero is a float, and subtracted before the scale is applied.",
        ),
    )


HQQ_0 = _format(0)
HQQ_1 = _format(1)
HQQ_0_3BIT = _format(0, words=True)
HQQ_1_3BIT = _format(1, words=True)
HQQ_0_META = _format(0, meta=True)
HQQ_1_META = _format(1, meta=True)
HQQ_0_3BIT_META = _format(0, words=True, meta=True)
HQQ_1_3BIT_META = _format(1, words=True, meta=True)
