r"""compressed-tensors: integers of 2 to 8 bits, packed or one a byte.

The formats of vLLM's compressor store N × K, and integers are *signed*: with *b* bits from :math:`-2^{b-1}` to
:math:`2^{b-1} - 1`. A weight is

.. math:: w_{kn} = s_{ng}\,(q_{nk} - z_{ng}), \qquad g = \lfloor k / \mathrm{group\ size} \rfloor,

with :math:`z = 0` in the symmetric formats.

**ct-pack** adds :math:`2^{b-1}` to each integer and lays the results end to end in 32-bit words along K, least
significant bit first, as one stream a row; the last word may be used in part. **ct-pack-asym** packs the zeros in the
same way along N, one stream for each group. **ct-int** holds an integer in each byte (``int-quantized``, and
``naive-quantized`` for fewer than 8 bits).

Source: compressed-tensors, ``pack-quantized``, ``int-quantized`` and ``naive-quantized``.
"""

import numpy as np

from lowbit.arrays import F64, Array
from lowbit.tensor_formats.bits import exact, stream
from lowbit.tensor_formats.table import Field, Format, Sizes, Tensors, Terms

OPTIONS = {"bits": (2, 3, 4, 5, 6, 7, 8), "group_size": None}
SCALE = Field("weight_scale", "bfloat16", ("N", "G"), "scale", "one scale for each row and group")


def _signed(codes: Array, bits: int) -> F64:
    return exact(codes) - 2.0 ** (bits - 1)


def _terms(integers: F64, zeros: F64 | float, tensors: Tensors, at: Sizes) -> Terms:
    """The terms of N × K integers and N × G zeros."""
    group, scales = at.group_of_row(), exact(tensors["weight_scale"])
    offsets = np.broadcast_to(-scales * zeros, scales.shape)
    return Terms((integers * scales[:, group]).T, offsets[:, group].T)


def _packed(tensors: Tensors, at: Sizes) -> Terms:
    integers = _signed(stream(tensors["weight_packed"], at["bits"], at.K), at["bits"])
    return _terms(integers, 0.0, tensors, at)


def _packed_with_zeros(tensors: Tensors, at: Sizes) -> Terms:
    integers = _signed(stream(tensors["weight_packed"], at["bits"], at.K), at["bits"])
    zeros = _signed(stream(np.ascontiguousarray(tensors["weight_zero_point"].T), at["bits"], at.N), at["bits"])
    return _terms(integers, zeros.T, tensors, at)


def _plain(tensors: Tensors, at: Sizes) -> Terms:
    return _terms(exact(tensors["weight"]), 0.0, tensors, at)


PACKED = Field("weight_packed", "int32", ("N", "K*bits//32"), "codes", "one stream of codes a row, 2^(bits-1) added")
CT_PACK = Format(
    name="ct-pack",
    title="compressed-tensors, packed, symmetric",
    fields=(PACKED, SCALE),
    decode=_packed,
    options=OPTIONS,
    source="compressed-tensors, pack-quantized",
    traps=("Packed integers are offset by 2^(bits-1), and there is no field that says so.",),
)
CT_PACK_ASYM = Format(
    name="ct-pack-asym",
    title="compressed-tensors, packed, with zeros",
    fields=(
        PACKED,
        SCALE,
        Field("weight_zero_point", "int32", ("N*bits//32", "G"), "zero", "one stream of zeros a group, along N"),
    ),
    decode=_packed_with_zeros,
    options=OPTIONS,
    source="compressed-tensors, pack-quantized",
    traps=("Codes are packed along K, zeros along N.",),
)
CT_INT = Format(
    name="ct-int",
    title="compressed-tensors, an integer a byte",
    fields=(Field("weight", "int8", ("N", "K"), "codes", "two's complement"), SCALE),
    decode=_plain,
    options={"group_size": None},
    source="compressed-tensors, int-quantized and naive-quantized",
)
