r"""GGUF's K-quants: Q2_K to Q6_K, blocks of 256 with quantised scales.

A block of 256 numbers is cut into sub-blocks of 16 or 32. Sub-block :math:`j` has a scale :math:`s_j` of 4, 6 or 8
bits, which a float16 number *d* of the block multiplies. Q2_K, Q4_K and Q5_K also have a minimum :math:`m_j` for each
sub-block and a float16 number :math:`d_{\min}` for the minima. A code :math:`q` of :math:`b` bits stands for

.. math:: w = d\, s_j\, q - d_{\min}\, m_j, \qquad\text{or, for Q3_K and Q6_K,}\qquad w = d\, s_j\,(q - 2^{b-1}).

====== ============ ======================= ==================
type   sub-blocks   scale :math:`s_j`       minimum
====== ============ ======================= ==================
Q2_K   16 of 16     4 bits                  4 bits
Q3_K   16 of 16     6 bits, less 32         none
Q4_K   8 of 32      6 bits                  6 bits
Q5_K   8 of 32      6 bits                  6 bits
Q6_K   16 of 16     8 bits, two's           none
                    complement
====== ============ ======================= ==================

**Codes** lie in planes (`lowbit.tensor_formats.bits.planes`): in each run of 32 bytes of ``qs``, the lowest bits of the
bytes are 32 codes, the next bits the next 32. So in Q4_K, byte :math:`32 r + i` holds element :math:`64 r + i` in its
low half and element :math:`64 r + 32 + i` in its high half. In Q6_K a run of ``ql`` is 64 bytes. Higher bits lie in
planes over 32 bytes of ``qh`` (in Q3_K ``hmask``, whose bit is a third bit of the code: where it is 0, 4 is
subtracted).

**The 12 bytes of scales** are packed in two ways. In Q4_K and Q5_K, bytes 0 to 3 hold scales 0 to 3 and bytes 4 to 7
minima 0 to 3, in their low 6 bits. Byte :math:`8 + i` holds the low four bits of scale :math:`4 + i` (low half) and of
minimum :math:`4 + i` (high half); their two high bits are the top two bits of byte :math:`i` and of byte :math:`4 + i`.
In Q3_K, bytes 0 to 7 are the low nibbles of the 16 scales, and bytes 8 to 11 their high bits, both in planes.

A writer chooses scales by a search for a small error: ``make_qkx2_quants`` in llama.cpp's reference, and another where
an importance matrix is given. The search is not part of the format, so there is no `encode`; a writer promises a valid
matrix, whose numbers the table defines (`gguf_encode`).

Source: ggml, ``ggml-common.h`` and ``ggml-quants.c`` (``dequantize_row_q2_K`` to ``dequantize_row_q6_K``).
"""

import numpy as np
import numpy.typing as npt

from lowbit.arrays import F64, Array
from lowbit.tensor_formats.bits import exact, planes
from lowbit.tensor_formats.gguf import gguf
from lowbit.tensor_formats.table import Field, Sizes, Tensors, Terms

BLOCK = 256
D = Field("d", "float16", (), "scale", "what the scales of sub-blocks are multiplied by", signed=True)
DMIN = Field("dmin", "float16", (), "scale", "what the minima of sub-blocks are multiplied by", signed=True)
SCALES_AND_MINIMA = Field("scales", "uint8", (12,), "scale", "8 scales and 8 minima of 6 bits")
HIGH = Field("qh", "uint8", (32,), "codes", "the fifth bit of each code, in planes")
LOW = Field("qs", "uint8", (128,), "codes", "the low four bits of each code, in planes over 32 bytes")

Integers = npt.NDArray[np.int64]


def across(block: Array, of_sub_blocks: Integers, codes: Integers | None = None) -> F64:
    """A float of each block, N × blocks, times an integer of each sub-block, N × blocks × sub-blocks, for each element;
    and times its code, N × blocks × elements. The products are exact.
    """
    scales = exact(block)[..., None] * of_sub_blocks
    each = np.repeat(scales, BLOCK // of_sub_blocks.shape[-1], axis=-1)
    return each if codes is None else each * codes


def scales_and_minima(packed: Array) -> tuple[Integers, Integers]:
    """The scales and the minima of Q4_K and Q5_K, N × blocks × 8 each."""
    low, minima, shared = np.split(packed.astype(np.int64), 3, axis=-1)
    scales = np.concatenate([low & 63, shared & 15 | low >> 6 << 4], axis=-1)
    return scales, np.concatenate([minima & 63, shared >> 4 | minima >> 6 << 4], axis=-1)


def scales_of_q3(packed: Array) -> Integers:
    """The scales of Q3_K, N × blocks × 16."""
    return (planes(packed[..., :8], 4, 8) | planes(packed[..., 8:], 2, 4) << 4) - 32


def _q2(tensors: Tensors, at: Sizes) -> Terms:
    scales = tensors["scales"].astype(np.int64)
    codes = planes(tensors["qs"], 2, 32)
    return Terms(across(tensors["d"], scales & 15, codes), -across(tensors["dmin"], scales >> 4))


def _q3(tensors: Tensors, at: Sizes) -> Terms:
    scales = scales_of_q3(tensors["scales"])
    codes = planes(tensors["qs"], 2, 32) | planes(tensors["hmask"], 1, 32) << 2
    return Terms(across(tensors["d"], scales, codes), -4 * across(tensors["d"], scales))


def _q4_or_q5(tensors: Tensors, at: Sizes) -> Terms:
    scales, minima = scales_and_minima(tensors["scales"])
    codes = planes(tensors["qs"], 4, 32)
    if "qh" in tensors:
        codes = codes | planes(tensors["qh"], 1, 32) << 4
    return Terms(across(tensors["d"], scales, codes), -across(tensors["dmin"], minima))


def _q6(tensors: Tensors, at: Sizes) -> Terms:
    scales = tensors["scales"].astype(np.int64)
    codes = planes(tensors["ql"], 4, 64) | planes(tensors["qh"], 2, 32) << 4
    return Terms(across(tensors["d"], scales, codes), -32 * across(tensors["d"], scales))


MINIMA = "The minimum is subtracted, and its scale dmin is not the scale d."

Q2_K = gguf(
    "Q2_K",
    block=BLOCK,
    fields=(
        Field("scales", "uint8", (16,), "scale", "the scale of a sub-block in the low half, its minimum in the high"),
        Field("qs", "uint8", (64,), "codes", "codes of 2 bits, in planes over 32 bytes"),
        D,
        DMIN,
    ),
    decode=_q2,
    traps=(MINIMA, "d and dmin lie at the end of the block, and in Q4_K and Q5_K at its start."),
)
Q3_K = gguf(
    "Q3_K",
    block=BLOCK,
    fields=(
        Field("hmask", "uint8", (32,), "codes", "the third bit of each code, in planes"),
        Field("qs", "uint8", (64,), "codes", "the low two bits of each code, in planes over 32 bytes"),
        Field("scales", "uint8", (12,), "scale", "16 scales of 6 bits, each stored plus 32"),
        D,
    ),
    decode=_q3,
    traps=(
        "A bit of hmask that is 0 subtracts 4; one that is 1 subtracts nothing.",
        "The two high bits of the 16 scales lie in planes over bytes 8 to 11, not beside their low nibbles.",
    ),
)
Q4_K = gguf(
    "Q4_K",
    block=BLOCK,
    fields=(D, DMIN, SCALES_AND_MINIMA, LOW),
    decode=_q4_or_q5,
    traps=(MINIMA, "Scales and minima 4 to 7 take their high bits from the bytes of scales and minima 0 to 3."),
)
Q5_K = gguf(
    "Q5_K",
    block=BLOCK,
    fields=(D, DMIN, SCALES_AND_MINIMA, HIGH, LOW),
    decode=_q4_or_q5,
    traps=(MINIMA, "The fifth bit of element i is bit i / 32 of byte i mod 32, and not bit i mod 8 of byte i / 8."),
)
Q6_K = gguf(
    "Q6_K",
    block=BLOCK,
    fields=(
        Field("ql", "uint8", (128,), "codes", "the low four bits of each code, in planes over 64 bytes"),
        Field("qh", "uint8", (64,), "codes", "the high two bits of each code, in planes over 32 bytes"),
        Field("scales", "int8", (16,), "scale", "the scales of sub-blocks, two's complement"),
        D,
    ),
    decode=_q6,
    traps=("The low bits lie in planes over 64 bytes, the high bits in planes over 32.", "Scales are signed."),
)
