"""Layouts: from the words of a `QuantizedMatrix` to the bytes that other libraries read, and back.

lowbit stores each column of codes end to end in words; the libraries store each *output* end to end in bytes. Both are
the same stream of bits, least significant first, cut into units of different sizes. So everything is converted through
one matrix of codes, N × K, one row for each output, and `pack_bits` packs it.
"""

import numpy as np

from lowbit.arrays import F32, U8, Array
from lowbit.quantization.affine import QuantizedMatrix
from lowbit.quantization.packing import Codes, Words


def code_rows(words: Words, bits: int) -> Codes:
    """The codes of each column as a row.

    >>> code_rows(np.array([[0x87654321]], np.uint32), bits=4)
    array([[1, 2, 3, 4, 5, 6, 7, 8]], dtype=uint8)

    Args:
        words: uint32, ``K * bits // 32`` × N.
        bits: 2, 3, 4 or 8.

    Returns:
        uint8, N × K.
    """
    octets = np.ascontiguousarray(words.T).astype("<u4").view(np.uint8)
    stream = np.unpackbits(octets, axis=-1, bitorder="little")
    return np.packbits(stream.reshape(len(octets), -1, bits), axis=-1, bitorder="little")[..., 0]


def pack_bits(codes: Codes, bits: int) -> U8:
    """The codes of the last axis end to end in bytes, the first at the least significant end; the last byte is padded
    with zeros.

    >>> pack_bits(np.array([[1, 2, 3]], np.uint8), bits=4)
    array([[33,  3]], dtype=uint8)

    Args:
        codes: uint8, … × M.
        bits: of a code.

    Returns:
        uint8, … × ⌈M · bits / 8⌉.
    """
    stream = np.unpackbits(codes[..., None], axis=-1, count=bits, bitorder="little")
    return np.packbits(stream.reshape(*codes.shape[:-1], -1), axis=-1, bitorder="little")


def words_of_rows(codes: Codes, bits: int) -> Words:
    """The inverse of `code_rows`: uint32, ``K * bits // 32`` × N, from uint8, N × K."""
    return np.ascontiguousarray(pack_bits(codes, bits).view("<u4").T.astype(np.uint32))


def padded(rows: Array, multiple: int, value: int) -> Array:
    """Rows padded at their ends to a multiple of a length; the same array, not a copy, if they have such a length."""
    if rows.shape[1] % multiple == 0:
        return rows
    return np.pad(rows, ((0, 0), (0, -rows.shape[1] % multiple)), constant_values=value)


def group_rows(numbers: Array) -> Array:
    """Scales or zeros, G × N, as N × G."""
    return np.ascontiguousarray(numbers.T)


def offsets_of_code(matrix: QuantizedMatrix, code: int) -> F32:
    """The value of a code in each group, N × G: float64 arithmetic, rounded to float32 once."""
    scales, zeros = matrix.scales.astype(np.float64), matrix.zeros.astype(np.float64)
    values = zeros + scales * code if matrix.convention == "minimum" else scales * (code - zeros)
    return group_rows(values.astype(np.float32))
