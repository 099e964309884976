"""Codes and words, all of them at once: numpy's own bit packing on a K·b × N matrix of single bits."""

import numpy as np

from lowbit.quantization.packing import WORD_BITS, Codes, Words


def pack_bits(codes: Codes, bits: int) -> Words:
    """uint8 K × N to uint32 K·b/32 × N: write every code as b bits down its column, then cut the column into words."""
    rows, columns = codes.shape
    stream = np.unpackbits(codes[:, None, :], axis=1, count=bits, bitorder="little")  # K × b × N
    octets = np.packbits(stream.reshape(rows * bits, columns), axis=0, bitorder="little")
    words = octets.T.reshape(columns, rows * bits // WORD_BITS, 4).copy().view("<u4")[:, :, 0]
    return np.ascontiguousarray(words.T, dtype=np.uint32)


def unpack_bits(words: Words, bits: int) -> Codes:
    """uint32 K·b/32 × N to uint8 K × N: the same steps backwards."""
    word_rows, columns = words.shape
    octets = np.ascontiguousarray(words.T, dtype="<u4").view(np.uint8).T  # word_rows·4 × N
    stream = np.unpackbits(octets, axis=0, bitorder="little")
    codes = np.packbits(stream.reshape(word_rows * WORD_BITS // bits, bits, columns), axis=1, bitorder="little")
    return np.ascontiguousarray(codes[:, 0, :])
