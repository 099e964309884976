r"""GGUF's basic blocks of 32: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0.

ggml cuts each row into blocks of 32 numbers with a float16 scale *d* and codes of 4, 5 or 8 bits. The types that end in
0 are symmetric, :math:`w = d\,(q - 2^{b-1})`; those that end in 1 have a minimum *m*, :math:`w = d\,q + m`. Q8_0 has
signed codes, with neither shift nor minimum.

**Nibbles.** Byte :math:`i` of ``qs`` holds element :math:`i` in its low half and element :math:`i + 16` in its high
half: neighbours in a byte are 16 elements apart. The fifth bits of Q5_0 and Q5_1 lie in ``qh``, a 32-bit word whose bit
:math:`i` belongs to element :math:`i`.

Source: ggml, ``ggml-common.h`` and ``ggml-quants.c``.
"""

from functools import partial

import numpy as np
import numpy.typing as npt

from lowbit.arrays import F64
from lowbit.tensor_formats.bits import exact, planes, split
from lowbit.tensor_formats.casts import TIES, choices, contractions
from lowbit.tensor_formats.gguf import QS, D, gguf
from lowbit.tensor_formats.gguf_encode import QUOTIENTS, q8_0, symmetric, with_minimum
from lowbit.tensor_formats.table import Field, Sizes, Tensors, Terms

M = Field("m", "float16", (), "scale", "the minimum of the block", signed=True)
QH = Field("qh", "uint8", (4,), "codes", "the fifth bit of element i in bit i, little-endian")


def _codes(tensors: Tensors) -> npt.NDArray[np.int64]:
    """N × blocks × 32 codes of 4 or 5 bits."""
    codes = planes(tensors["qs"], 4, 16)
    if "qh" in tensors:
        codes = codes | split(tensors["qh"], 1) << 4
    return codes


def _scaled(tensors: Tensors, codes: npt.NDArray[np.int64]) -> F64:
    products: F64 = exact(tensors["d"])[..., None] * codes
    return products


def _symmetric(tensors: Tensors, at: Sizes) -> Terms:
    center = 16 if "qh" in tensors else 8
    return Terms(_scaled(tensors, _codes(tensors)), -center * exact(tensors["d"])[..., None])


def _with_minimum(tensors: Tensors, at: Sizes) -> Terms:
    return Terms(_scaled(tensors, _codes(tensors)), exact(tensors["m"])[..., None])


def _signed(tensors: Tensors, at: Sizes) -> Terms:
    return Terms(_scaled(tensors, tensors["qs"].astype(np.int64)))


Q4_0 = gguf("Q4_0", block=32, fields=(D, QS), decode=_symmetric, encode=contractions(partial(symmetric, 4)))
Q4_1 = gguf("Q4_1", block=32, fields=(D, M, QS), decode=_with_minimum, encode=contractions(partial(with_minimum, 4)))
Q5_0 = gguf("Q5_0", block=32, fields=(D, QH, QS), decode=_symmetric, encode=contractions(partial(symmetric, 5)))
Q5_1 = gguf(
    "Q5_1", block=32, fields=(D, M, QH, QS), decode=_with_minimum, encode=contractions(partial(with_minimum, 5))
)
Q8_0 = gguf(
    "Q8_0",
    block=32,
    fields=(D, Field("qs", "int8", (32,), "codes", "the codes in order, two's complement")),
    decode=_signed,
    encode=choices(q8_0, QUOTIENTS, TIES),
)
