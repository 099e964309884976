r"""GGUF's types of one and two bits: Q1_0, Q2_0, TQ1_0, TQ2_0.

Each block has one float16 scale and small codes, :math:`w = d\,(q - 1)`; for Q1_0, whose code is a sign,
:math:`w = d\,(2q - 1)`.

====== ========= ============ =============================================================
type   block     codes        order
====== ========= ============ =============================================================
Q1_0   128       0, 1         element *i* is bit *i* mod 8 of byte *i* / 8
Q2_0   64        0 to 3       element *i* is pair *i* mod 4 of byte *i* / 4
TQ2_0  256       0 to 3       in planes over 32 bytes, as in the K-quants
TQ1_0  256       0, 1, 2      five to a byte, in planes over 32, then 16, then 4 bytes
====== ========= ============ =============================================================

**Trits.** The codes in a byte of TQ1_0 are the digits of the fraction :math:`f = \mathrm{byte} / 256` in base 3: the
first is the whole part of :math:`3 f`, the next that of 3 times the rest. In bytes, digit *n* is
:math:`\lfloor 3\,(3^n\,\mathrm{byte} \bmod 256) / 256 \rfloor`. Every byte can be decoded, including those that no
writer makes. The last 16 elements lie four to a byte, in ``qh``.

The chapter `gguf_encode` defines the casts to TQ1_0 and TQ2_0.

Source: ggml, ``ggml-common.h`` and ``ggml-quants.c`` (``dequantize_row_q1_0``, ``_q2_0``, ``_tq1_0``, ``_tq2_0``).
"""

from functools import partial

import numpy as np
import numpy.typing as npt

from lowbit.arrays import U8
from lowbit.tensor_formats.bits import exact, planes, split
from lowbit.tensor_formats.gguf import D, gguf
from lowbit.tensor_formats.gguf_encode import pairs_in_planes, ternary, trits_in_planes
from lowbit.tensor_formats.table import Field, Sizes, Tensors, Terms


def trits(data: U8, count: int) -> npt.NDArray[np.int64]:
    """The first digits in base 3 of each byte, in planes: digit 0 of all bytes, then digit 1.

    >>> trits(np.array([86, 255], np.uint8), 2)
    array([1, 2, 0, 2])
    """
    powers = 3 ** np.arange(count, dtype=np.int64)[:, None]
    digits = 3 * (data[..., None, :] * powers % 256) // 256
    return digits.reshape(*data.shape[:-1], -1)


def less_one(tensors: Tensors, codes: npt.NDArray[np.int64], worth: int = 1) -> Terms:
    """The terms of ``d (worth * q - 1)``."""
    d = exact(tensors["d"])[..., None]
    return Terms(worth * d * codes, -d)


def _q1(tensors: Tensors, at: Sizes) -> Terms:
    return less_one(tensors, split(tensors["qs"], 1), worth=2)


def _q2(tensors: Tensors, at: Sizes) -> Terms:
    return less_one(tensors, split(tensors["qs"], 2))


def _tq1(tensors: Tensors, at: Sizes) -> Terms:
    qs = tensors["qs"]
    parts = trits(qs[..., :32], 5), trits(qs[..., 32:], 5), trits(tensors["qh"], 4)
    return less_one(tensors, np.concatenate(parts, axis=-1))


def _tq2(tensors: Tensors, at: Sizes) -> Terms:
    return less_one(tensors, planes(tensors["qs"], 2, 32))


Q1_0 = gguf(
    "Q1_0",
    block=128,
    fields=(D, Field("qs", "uint8", (16,), "codes", "one bit for each element: 1 is d, 0 is -d")),
    decode=_q1,
    traps=("There is no zero: a bit is the sign of d.",),
)
Q2_0 = gguf(
    "Q2_0",
    block=64,
    fields=(D, Field("qs", "uint8", (16,), "codes", "four neighbours to a byte, the first in its lowest bits")),
    decode=_q2,
    traps=("Code 3 is 2 d.", "Neighbours in a byte are neighbours in the row, as in no other type of GGUF but Q1_0."),
)
TQ1_0 = gguf(
    "TQ1_0",
    block=256,
    fields=(
        Field("qs", "uint8", (48,), "codes", "five elements to a byte, in planes over 32 bytes and over 16"),
        Field("qh", "uint8", (4,), "codes", "the last 16 elements, four to a byte, in planes"),
        D,
    ),
    decode=_tq1,
    encode={"reference": partial(ternary, trits_in_planes)},
    traps=("The scale lies at the end of the block.", "The product with a power of 3 must wrap at 8 bits."),
)
TQ2_0 = gguf(
    "TQ2_0",
    block=256,
    fields=(Field("qs", "uint8", (64,), "codes", "codes of 2 bits, in planes over 32 bytes"), D),
    decode=_tq2,
    encode={"reference": partial(ternary, pairs_in_planes)},
    traps=("The scale lies at the end of the block.", "Code 3 is 2 d. No writer makes it; every reader accepts it."),
)
