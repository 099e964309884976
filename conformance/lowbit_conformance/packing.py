"""Codes in words, a whole matrix at once: how the suite packs its inputs, and what the defects of packing change.

The chapter `lowbit.quantization.packing` says where each bit lies, in a loop over rows. Here the same is done with
arrays of places, which takes a fraction of the time; the tests of the defects compare the two.
"""

import numpy as np
import numpy.typing as npt

from lowbit.arrays import I64
from lowbit.quantization.packing import WORD_BITS, Codes, Words

Place = tuple[I64, I64]
"""For each code of a column, its word and its shift there."""


def places(rows: int, bits: int) -> Place:
    """The places of the codes of a column, end to end from the least significant bit."""
    position = np.arange(rows) * bits
    return position // WORD_BITS, position % WORD_BITS


def straddling(shift: I64, bits: int) -> npt.NDArray[np.bool_]:
    """A mask of the codes that end in the word after the one in which they begin."""
    return shift + bits > WORD_BITS


def read(words: Words, place: Place, bits: int) -> Codes:
    """The codes at these places."""
    word, shift = place
    codes = words[word] >> shift[:, None].astype(np.uint32)
    over = straddling(shift, bits)
    codes[over] |= words[np.minimum(word[over] + 1, len(words) - 1)] << (WORD_BITS - shift[over])[:, None].astype(
        np.uint32
    )
    return (codes & np.uint32(2**bits - 1)).astype(np.uint8)


def write(codes: Codes, place: Place, bits: int) -> Words:
    """Words with the codes at these places."""
    word, shift = place
    words = np.zeros((len(codes) * bits // WORD_BITS, codes.shape[1]), np.uint32)
    wide = codes.astype(np.uint32)
    np.bitwise_or.at(words, word, wide << shift[:, None].astype(np.uint32))
    over = straddling(shift, bits)
    rest = wide[over] >> (WORD_BITS - shift[over])[:, None].astype(np.uint32)
    np.bitwise_or.at(words, np.minimum(word[over] + 1, len(words) - 1), rest)
    return words


def unpack(words: Words, bits: int) -> Codes:
    """All codes of all columns."""
    return read(words, places(len(words) * WORD_BITS // bits, bits), bits)


def pack(codes: Codes, bits: int) -> Words:
    """The inverse of `unpack`."""
    return write(codes, places(len(codes), bits), bits)
