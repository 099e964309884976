"""Codes and words, all of them at once: numpy's own bit packing on an N × K × b array of single bits.

Matrices are transposed first, so that the bits of a column are contiguous, as numpy packs them fastest.
"""

import numpy as np

from lowbit.quantization.packing import Codes, Words


def pack_bits(codes: Codes, bits: int) -> Words:
    """uint8 K × N to uint32 K·b/32 × N: write every code as b bits along its column, then cut the column into words."""
    rows, columns = codes.shape
    columnwise, stream = np.ascontiguousarray(codes.T), np.empty((columns, rows, bits), np.uint8)
    for bit in range(bits):
        stream[:, :, bit] = columnwise >> np.uint8(bit) & 1
    octets = np.packbits(stream.reshape(columns, rows * bits), axis=1, bitorder="little")
    return np.ascontiguousarray(octets.view("<u4").T, dtype=np.uint32)


def unpack_bits(words: Words, bits: int) -> Codes:
    """uint32 K·b/32 × N to uint8 K × N: the same steps in reverse."""
    octets = np.ascontiguousarray(words.T, dtype="<u4").view(np.uint8)  # N × K·b/8
    stream = np.unpackbits(octets, axis=1, bitorder="little").reshape(words.shape[1], -1, bits)
    codes = stream[:, :, 0].copy()
    for bit in range(1, bits):
        codes |= stream[:, :, bit] << np.uint8(bit)
    return np.ascontiguousarray(codes.T)
