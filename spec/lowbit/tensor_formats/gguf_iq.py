r"""GGUF's types of grids: IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S.

A *grid* is a table of small vectors of 8 or 4 numbers. A block of 256 stores the index of a vector for each 8 or 4
elements, their signs, and a scale of three or four bits for each 16 or 32 elements.

======== ============== ===================== ========================== ======================================
type     grid           index                 scale of a run             signs
======== ============== ===================== ========================== ======================================
IQ2_XXS  256 × 8        8 bits                :math:`d (s + ½) / 4`      7 bits for 8 elements
IQ2_XS   512 × 8        9 bits                :math:`d (s + ½) / 4`      7 bits for 8 elements
IQ2_S    1024 × 8       8 bits and 2 in qh    :math:`d (s + ½) / 4`      8 bits for 8 elements
IQ3_XXS  256 × 4        8 bits                :math:`d (s + ½) / 2`      7 bits for 8 elements
IQ3_S    512 × 4        8 bits and 1 in qh    :math:`d (2s + 1)`         8 bits for 8 elements
IQ1_S    2048 × 8       8 bits and 3 in qh    :math:`d (2s + 1)`         none: the grid has −1, 0 and 1
IQ1_M    2048 × 8       8 bits and 3 in qh    :math:`d (2s + 1)`         none
======== ============== ===================== ========================== ======================================

**Seven bits of signs.** The sign of the eighth element makes the number of minus signs even: bit 7 is the parity of the
other seven.

**Shift.** IQ1_S and IQ1_M add :math:`\delta = \pm\tfrac18` to each number of the grid, with a sign for each 32 or each
8 elements: :math:`w = s\,(g + \delta)`. A kernel may sum the two parts apart.

**The scale of IQ1_M** has no place of its own. Its four nibbles are the high nibbles of the four 16-bit words of
``scales``, the lowest first; below them lie four scales of 3 bits.

The grids are ggml's data. They are taken from the package ``gguf`` when first needed, and their digests are compared
with those below, so that another version cannot change a number unnoticed.

Source: ggml, ``ggml-common.h`` and ``ggml-quants.c`` (``dequantize_row_iq1_s`` to ``dequantize_row_iq3_s``).
"""

from functools import cache
from hashlib import sha256

import numpy as np
import numpy.typing as npt

from lowbit.arrays import F64, Array
from lowbit.errors import ArgumentError
from lowbit.tensor_formats.bits import exact, split
from lowbit.tensor_formats.gguf import gguf
from lowbit.tensor_formats.table import Field, Sizes, Tensors, Terms

BLOCK = 256
DELTA = 0.125
DIGESTS = {
    "IQ1_S": "07540ffc1aeaf6ad4d97e96b0fcc765aae39671d4ae4a27bbd0e796fde167c6a",
    "IQ1_M": "07540ffc1aeaf6ad4d97e96b0fcc765aae39671d4ae4a27bbd0e796fde167c6a",
    "IQ2_XXS": "05826b5d3e472a3a78f196be62ac78acf81df0f909626e12ab9fa2a5d490dd54",
    "IQ2_XS": "06e47aaca60b4dc1d9b5a3f34540437058a6b142b4d7a59d5ded769b4d1bf1de",
    "IQ2_S": "e1aa1473412b0552c2174c30ef22ab4073f6a181b85a17056e8249bd2932fd88",
    "IQ3_XXS": "46e35f5a997efdee6c99ce57854c8a0d4f0ff8ca57e5e8a60c0793ea580acf5d",
    "IQ3_S": "bd1af4945a1717c65610b0284e4628b9a1ba3b306fae3a06f6e5f597356e349f",
}
"""SHA-256 of each grid as int8, row by row."""

Integers = npt.NDArray[np.int64]


@cache
def grid(name: str) -> F64:
    """The vectors of a grid, by the name of its type: float64, entries × 8 or 4.

    Raises:
        RuntimeError: the grid of the installed package differs from the one described in this chapter.
    """
    from gguf import quants  # slow to import, and few formats need it

    owner = getattr(quants, name)
    owner.init_grid()
    vectors = np.asarray(owner.grid).reshape(owner.grid_shape)
    found = sha256(vectors.astype(np.int8).tobytes()).hexdigest()
    if found != DIGESTS[name]:
        raise RuntimeError(f"the grid {name} of the installed package gguf has the digest {found}, not {DIGESTS[name]}")
    return np.asarray(vectors, np.float64)


EVEN_SIGNS = np.array([low | (low.bit_count() & 1) << 7 for low in range(128)], np.uint8)
"""The eight sign bits for each seven-bit index."""


def negated(signs: Array) -> F64:
    """-1 where a bit of signs is set, else 1: N × blocks × elements from N × blocks × bytes."""
    return 1.0 - 2.0 * exact(split(signs, 1))


def vectors(name: str, indices: Integers) -> F64:
    """The numbers of grid entries, concatenated: N × blocks × elements."""
    found: F64 = grid(name)[indices].reshape(*indices.shape[:-1], -1)
    return found


def runs(scales: F64) -> F64:
    """A scale for each run, repeated for its elements."""
    return np.repeat(scales, BLOCK // scales.shape[-1], axis=-1)


def by_block(tensors: Tensors) -> F64:
    """The scale of each block, N × blocks × 1."""
    return exact(tensors["d"])[..., None]


def _iq2_xxs(tensors: Tensors, at: Sizes) -> Terms:
    indices, words = split(tensors["qs"][..., 0], 8), tensors["qs"][..., 1]
    signs = EVEN_SIGNS[split(words, 7, range(4))]
    each = runs(by_block(tensors) * ((words >> 28) + 0.5) / 4)
    return Terms(each * vectors("IQ2_XXS", indices) * negated(signs))


def _iq2_xs(tensors: Tensors, at: Sizes) -> Terms:
    words = tensors["qs"].astype(np.int64)
    each = runs(by_block(tensors) * (split(tensors["scales"], 4) + 0.5) / 4)
    return Terms(each * vectors("IQ2_XS", words & 511) * negated(EVEN_SIGNS[words >> 9]))


def _iq2_s(tensors: Tensors, at: Sizes) -> Terms:
    indices = tensors["qs"] | split(tensors["qh"], 2) << 8
    each = runs(by_block(tensors) * (split(tensors["scales"], 4) + 0.5) / 4)
    return Terms(each * vectors("IQ2_S", indices) * negated(tensors["signs"]))


def _iq3_xxs(tensors: Tensors, at: Sizes) -> Terms:
    words = tensors["scales_and_signs"]
    signs = EVEN_SIGNS[split(words, 7, range(4))]
    each = runs(by_block(tensors) * ((words >> 28) + 0.5) / 2)
    return Terms(each * vectors("IQ3_XXS", tensors["qs"].astype(np.int64)) * negated(signs))


def _iq3_s(tensors: Tensors, at: Sizes) -> Terms:
    indices = tensors["qs"] | split(tensors["qh"], 1) << 8
    each = runs(by_block(tensors) * (2 * split(tensors["scales"], 4) + 1))
    return Terms(each * vectors("IQ3_S", indices) * negated(tensors["signs"]))


def _iq1_s(tensors: Tensors, at: Sizes) -> Terms:
    words = tensors["qh"].astype(np.int64)
    indices = tensors["qs"] | split(tensors["qh"], 3, range(4)) << 8
    each = runs(by_block(tensors) * (2 * (words >> 12 & 7) + 1))
    delta = runs(np.where(words >> 15, -DELTA, DELTA))
    return Terms(each * vectors("IQ1_S", indices), each * delta)


def scale_of_iq1_m(words: Array) -> F64:
    """The float16 scale of each block, N × blocks."""
    bits = ((words >> 12).astype(np.uint16) << np.arange(0, 16, 4, dtype=np.uint16)).sum(axis=-1, dtype=np.uint16)
    return exact(bits.view(np.float16))


def place_scale(tensors: Tensors, at: Sizes) -> dict[str, Array]:
    """The fields of IQ1_M from fields with a separate scale: its nibbles go to the top of the words of scales."""
    d = tensors["d"].view(np.uint16)[..., None] >> np.arange(0, 16, 4, dtype=np.uint16)
    words = tensors["scales"] & np.uint16(0x0FFF) | d << np.uint16(12)
    return {"qs": tensors["qs"], "qh": tensors["qh"], "scales": words}


def _iq1_m(tensors: Tensors, at: Sizes) -> Terms:
    scales, high = tensors["scales"], split(tensors["qh"], 4)
    each = runs(scale_of_iq1_m(scales)[..., None] * (2 * split(scales, 3, range(4)) + 1))
    delta = runs(np.where(high & 8, -DELTA, DELTA))
    return Terms(each * vectors("IQ1_M", tensors["qs"] | (high & 7) << 8), each * delta)


def _check_scale(tensors: Tensors, at: Sizes) -> None:
    if not np.isfinite(scale_of_iq1_m(tensors["scales"])).all():
        raise ArgumentError("scales", "nibbles of an infinity or a NaN", "a finite scale in the high nibbles")


D = Field("d", "float16", (), "scale", "what the scales of runs are multiplied by", signed=True)
SIGNS = Field("signs", "uint8", (32,), "codes", "bit j of byte i: element 8 i + j is negative")
IN_32 = Field("scales", "uint8", (8,), "scale", "scales of runs of 16 elements, the first in the low half of byte 0")

IQ2_XXS = gguf(
    "IQ2_XXS",
    block=BLOCK,
    fields=(D, Field("qs", "uint32", (8, 2), "codes", "four bytes of indices; four times 7 bits of signs, a scale")),
    decode=_iq2_xxs,
    traps=("The scale of a run is the top 4 bits of the word with its signs.",),
)
IQ2_XS = gguf(
    "IQ2_XS",
    block=BLOCK,
    fields=(D, Field("qs", "uint16", (32,), "codes", "9 bits of index, then 7 bits of signs"), IN_32),
    decode=_iq2_xs,
    traps=("A run of a scale is 16 elements: two vectors.",),
)
IQ2_S = gguf(
    "IQ2_S",
    block=BLOCK,
    fields=(
        D,
        Field("qs", "uint8", (32,), "codes", "the low 8 bits of each index"),
        SIGNS,
        Field("qh", "uint8", (8,), "codes", "the high two bits of four indices, the first in the lowest bits"),
        IN_32,
    ),
    decode=_iq2_s,
    traps=("ggml declares the signs as the second half of qs.",),
)
IQ3_XXS = gguf(
    "IQ3_XXS",
    block=BLOCK,
    fields=(
        D,
        Field("qs", "uint8", (64,), "codes", "an index for each 4 elements"),
        Field("scales_and_signs", "uint32", (8,), "codes", "four times 7 bits of signs, a scale"),
    ),
    decode=_iq3_xxs,
    traps=("ggml declares scales and signs as the end of qs.",),
)
IQ3_S = gguf(
    "IQ3_S",
    block=BLOCK,
    fields=(
        D,
        Field("qs", "uint8", (64,), "codes", "the low 8 bits of each index"),
        Field("qh", "uint8", (8,), "codes", "the ninth bit of eight indices, the first in the lowest bit"),
        SIGNS,
        Field("scales", "uint8", (4,), "scale", "scales of runs of 32 elements, the first in the low half of byte 0"),
    ),
    decode=_iq3_s,
)
IQ1_S = gguf(
    "IQ1_S",
    block=BLOCK,
    fields=(
        D,
        Field("qs", "uint8", (32,), "codes", "the low 8 bits of each index"),
        Field("qh", "uint16", (8,), "codes", "3 high bits of four indices, 3 bits of scale, the sign of the shift"),
    ),
    decode=_iq1_s,
    traps=("A zero of the grid is not 0: the shift of 1/8 is added to it.",),
)
IQ1_M = gguf(
    "IQ1_M",
    block=BLOCK,
    fields=(
        Field("qs", "uint8", (32,), "codes", "the low 8 bits of each index"),
        Field("qh", "uint8", (16,), "codes", "for each index 3 high bits and the sign of the shift, in a nibble"),
        Field("scales", "uint16", (4,), "other", "four scales of 3 bits of runs of 16 elements, a nibble of d"),
    ),
    spread=(D,),
    complete=place_scale,
    decode=_iq1_m,
    check=_check_scale,
    traps=("The block has no field for its scale.",),
)
