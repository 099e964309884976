r"""AWQ: codes of 4 bits in 32-bit words, in two layouts.

The layouts of AutoAWQ, which its configuration calls *gemm* and *gemv*. Both store codes :math:`q`, zeros :math:`z`
and scales of runs of ``group_size`` rows:

.. math:: w_{kn} = s_{gn}\,(q_{kn} - z_{gn}), \qquad g = \lfloor k / \mathrm{group\_size} \rfloor .

**gemm.** The matrix is K × N, and a word holds 8 *columns*. From its lowest nibble up these are columns 0, 2, 4, 6, 1,
3, 5, 7, so that a kernel that masks the even and the odd bytes of a word gets neighbouring columns. Zeros are packed in
the same order.

**gemv.** The matrix is N × K, and a word holds 8 *rows* in their order, the first in its lowest nibble. Zeros are
packed along the groups in the same way. Their arrays are wider than necessary: the groups of a column are padded as if
K were a multiple of 1024, and so are the scales. The padding has no meaning. So the last group may be shorter than the
others; in *gemm* ``group_size`` divides K. AutoAWQ itself writes only groups that divide K.

Both store zeros unchanged.

Source: AutoAWQ ``awq/modules/linear/gemm.py``, ``gemv.py`` and ``awq/utils/packing_utils.py``.
"""

from lowbit.tensor_formats.bits import INTERLEAVED, exact, split
from lowbit.tensor_formats.table import Field, Format, Sizes, Tensors, Terms

PADDED = "K//1024*1024/group_size"
"""The groups of gemv's arrays, including padding."""

GEMM_FIELDS = (
    Field(
        "qweight", "int32", ("K", "N/8"), "codes", "codes of 8 columns; from the lowest nibble 0, 2, 4, 6, 1, 3, 5, 7"
    ),
    Field("qzeros", "int32", ("K/group_size", "N/8"), "zero", "zeros of 8 columns in the same order"),
    Field("scales", "float16", ("K/group_size", "N"), "scale", "one scale for each group and column"),
)
GEMV_FIELDS = (
    Field("qweight", "int32", ("N", "K/8"), "codes", "codes of 8 rows, the first in the lowest nibble"),
    Field("qzeros", "int32", ("N", f"{PADDED}/8"), "zero", "zeros of 8 groups, the first in the lowest nibble; padded"),
    Field("scales", "float16", ("N", PADDED), "scale", "one scale for each column and group; padded"),
)


def _gemm(tensors: Tensors, at: Sizes) -> Terms:
    scales, group = exact(tensors["scales"]), at.group_of_row()
    zeros = split(tensors["qzeros"], 4, INTERLEAVED)
    return Terms(scales[group] * split(tensors["qweight"], 4, INTERLEAVED), (-scales * zeros)[group])


def _gemv(tensors: Tensors, at: Sizes) -> Terms:
    scales, group = exact(tensors["scales"]).T, at.group_of_row()
    zeros = split(tensors["qzeros"], 4).T
    return Terms(scales[group] * split(tensors["qweight"], 4).T, (-scales * zeros)[group])


AWQ_GEMM = Format(
    name="awq-gemm",
    title="AWQ, layout gemm",
    fields=GEMM_FIELDS,
    decode=_gemm,
    options={"group_size": None},
    source="AutoAWQ, awq/modules/linear/gemm.py",
    traps=("Columns lie in a word in the order 0, 2, 4, 6, 1, 3, 5, 7, and zeros do too.",),
)
AWQ_GEMV = Format(
    name="awq-gemv",
    title="AWQ, layout gemv",
    fields=GEMV_FIELDS,
    decode=_gemv,
    options={"group_size": (32, 64, 128)},
    source="AutoAWQ, awq/modules/linear/gemv.py",
    traps=("The stride of zeros and scales is padded, and is not the number of groups.",),
)
