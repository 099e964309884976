r"""compressed-tensors: integers of 2 to 8 bits, packed or one a byte.

The formats of vLLM's compressor store N × K, and integers are *signed*: with *b* bits from :math:`-2^{b-1}` to
:math:`2^{b-1} - 1`. A weight is

.. math:: w_{kn} = s_{ng}\,(q_{nk} - z_{ng}), \qquad g = \lfloor k / \mathrm{group\ size} \rfloor,

with :math:`z = 0` in the symmetric formats.

**ct-pack** adds :math:`2^{b-1}` to each integer and lays the results end to end in 32-bit words along K, least
significant bit first, as one stream a row; the last word may be used in part. **ct-pack-asym** packs the zeros in the
same way along N, one stream for each group. **ct-int** holds an integer in each byte (``int-quantized``, and
``naive-quantized`` for fewer than 8 bits).

**Scales** have the type of the model. In bfloat16 these formats have the names above; for models in float16 they are
``ct-pack-f16``, ``ct-pack-asym-f16`` and ``ct-int-f16``.

**Casts** are defined for models in bfloat16: they compute in that type, and each step is rounded to it; the formats
with float16 scales have no cast. With the largest and the least number of a group and 0, *max* and *min*:

=============== ================================================= =====================================================
step            symmetric                                         with zeros
=============== ================================================= =====================================================
scale *s*       :math:`\max |x| / ((2^b - 1) / 2)`                 :math:`(\max - \min) / (2^b - 1)`
zero *z*        0                                                 :math:`-2^{b-1} - \min / s`, rounded
integer         :math:`x / s`, rounded                            :math:`x / s + z`, rounded
=============== ================================================= =====================================================

Integers and zeros are rounded to nearest, ties to even, and stay within the range of *b* bits. A scale of 0 becomes the
epsilon of bfloat16, :math:`2^{-7}`; the zero of such a group is 0.

Source: compressed-tensors, ``pack-quantized``, ``int-quantized`` and ``naive-quantized``; its
``calculate_qparams`` and ``quantize``.
"""

from collections.abc import Mapping
from functools import partial

import numpy as np

from lowbit.arrays import F64, Array
from lowbit.numbers.floats import rounded
from lowbit.tensor_formats.bits import end_to_end, exact, stream
from lowbit.tensor_formats.casts import in_groups, nearest, stepped
from lowbit.tensor_formats.table import Encode, Field, Format, Sizes, Tensors, Terms

OPTIONS = {"bits": (2, 3, 4, 5, 6, 7, 8), "group_size": None}


def _signed(words: Array, bits: int, count: int) -> F64:
    """The first `count` integers of each row of words."""
    return exact(stream(words, bits, count)) - 2.0 ** (bits - 1)


def _terms(integers: F64, zeros: F64 | float, tensors: Tensors, at: Sizes) -> Terms:
    """The terms of N × K integers and N × G zeros."""
    group, scales = at.group_of_row(), exact(tensors["weight_scale"])
    offsets = np.broadcast_to(-scales * zeros, scales.shape)
    return Terms((integers * scales[:, group]).T, offsets[:, group].T)


def _packed(tensors: Tensors, at: Sizes) -> Terms:
    return _terms(_signed(tensors["weight_packed"], at["bits"], at.K), 0.0, tensors, at)


def _packed_with_zeros(tensors: Tensors, at: Sizes) -> Terms:
    zeros = _signed(tensors["weight_zero_point"].T, at["bits"], at.N).T
    return _terms(_signed(tensors["weight_packed"], at["bits"], at.K), zeros, tensors, at)


def _plain(tensors: Tensors, at: Sizes) -> Terms:
    return _terms(exact(tensors["weight"]), 0.0, tensors, at)


# **Casts.**

EPSILON = np.float32(2.0**-7)
_bfloat16 = partial(stepped, "bfloat16")


def _cast(asymmetric: bool, bits: int, numbers: F64, at: Sizes) -> tuple[Array, Array, Array]:
    """The integers, N × K, and the scale and zero of each group, N × groups."""
    x, lowest, highest = _bfloat16(numbers.T.astype(np.float32)), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    x = in_groups(x, at["group_size"])
    low, high = np.minimum(x.min(-1, keepdims=True), 0), np.maximum(x.max(-1, keepdims=True), 0)
    if asymmetric:
        scale = _bfloat16(_bfloat16(high - low) / np.float32(2**bits - 1))
        offsets = _bfloat16(lowest - _bfloat16(low / np.where(scale == 0, EPSILON, scale)))
        zero = np.where(scale == 0, 0, np.rint(offsets.clip(lowest, highest))).astype(np.float32)
    else:
        scale = _bfloat16(np.maximum(high, -low) / np.float32((2**bits - 1) / 2))
        zero = np.zeros_like(scale)
    scale = np.where(scale == 0, EPSILON, scale)
    integers = nearest(_bfloat16(_bfloat16(x / scale) + zero).clip(lowest, highest), "even")
    return integers.reshape(at.N, -1)[:, : at.K], rounded(exact(scale[..., 0]), "bfloat16"), zero[..., 0]


def _pack(asymmetric: bool, numbers: F64, at: Sizes) -> dict[str, Array]:
    bits = at["bits"]
    integers, scale, zero = _cast(asymmetric, bits, numbers, at)
    fields = {"weight_packed": end_to_end(integers + 2 ** (bits - 1), bits, np.int32), "weight_scale": scale}
    if asymmetric:
        words = end_to_end((zero.T + 2 ** (bits - 1)).astype(np.int64), bits, np.int32)
        fields["weight_zero_point"] = np.ascontiguousarray(words.T)
    return fields


def _to_bytes(numbers: F64, at: Sizes) -> dict[str, Array]:
    integers, scale, _ = _cast(False, 8, numbers, at)
    return {"weight": integers.astype(np.int8), "weight_scale": scale}


# **The formats.**

PACKED = Field("weight_packed", "int32", ("N", "K*bits//32"), "codes", "one stream of codes a row, 2^(bits-1) added")
ZEROS = Field("weight_zero_point", "int32", ("N*bits//32", "G"), "zero", "one stream of zeros a group, along N")
BYTES = Field("weight", "int8", ("N", "K"), "codes", "two's complement")


def _scale(type: str) -> Field:
    return Field("weight_scale", type, ("N", "G"), "scale", "one scale for each row and group")


def _symmetric(name: str, title: str, scale: str, encode: Mapping[str, Encode]) -> Format:
    return Format(
        name=name,
        title=title,
        fields=(PACKED, _scale(scale)),
        decode=_packed,
        encode=encode,
        options=OPTIONS,
        source="compressed-tensors, pack-quantized",
        traps=("Packed integers are offset by 2^(bits-1), and there is no field that says so.",),
    )


def _asymmetric(name: str, title: str, scale: str, encode: Mapping[str, Encode]) -> Format:
    return Format(
        name=name,
        title=title,
        fields=(PACKED, _scale(scale), ZEROS),
        decode=_packed_with_zeros,
        encode=encode,
        options=OPTIONS,
        source="compressed-tensors, pack-quantized",
        traps=("Codes are packed along K, zeros along N.",),
    )


def _in_bytes(name: str, title: str, scale: str, encode: Mapping[str, Encode]) -> Format:
    return Format(
        name=name,
        title=title,
        fields=(BYTES, _scale(scale)),
        decode=_plain,
        encode=encode,
        options={"group_size": None},
        source="compressed-tensors, int-quantized and naive-quantized",
    )


SYMMETRIC, WITH_ZEROS = "compressed-tensors, packed, symmetric", "compressed-tensors, packed, with zeros"
A_BYTE, F16 = "compressed-tensors, an integer a byte", "float16 scales"

CT_PACK = _symmetric("ct-pack", SYMMETRIC, "bfloat16", {"reference": partial(_pack, False)})
CT_PACK_ASYM = _asymmetric("ct-pack-asym", WITH_ZEROS, "bfloat16", {"reference": partial(_pack, True)})
CT_INT = _in_bytes("ct-int", A_BYTE, "bfloat16", {"reference": _to_bytes})
CT_PACK_F16 = _symmetric("ct-pack-f16", f"{SYMMETRIC}, {F16}", "float16", {})
CT_PACK_ASYM_F16 = _asymmetric("ct-pack-asym-f16", f"{WITH_ZEROS}, {F16}", "float16", {})
CT_INT_F16 = _in_bytes("ct-int-f16", f"{A_BYTE}, {F16}", "float16", {})
