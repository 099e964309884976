"""Bits: how codes of a few bits are extracted from wider integers, for the formats of this folder."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lowbit.arrays import F64, U8, Array

INTERLEAVED = (0, 4, 1, 5, 2, 6, 3, 7)
"""The nibble of each code in a word of 8 4-bit codes, in the order in which one mask over the word yields
neighbours."""


def exact(numbers: Array) -> F64:
    """Numbers of any dtype of a table, as float64: exact for all of them."""
    return numbers.astype(np.float64)


def split(words: Array, bits: int, order: Sequence[int] | None = None) -> npt.NDArray[np.int64]:
    """The codes of integers along the last axis: those of the first, from its lowest bits up, then those of the next.

    >>> split(np.array([0x3210, 0x7654], np.uint16), 4)
    array([0, 1, 2, 3, 4, 5, 6, 7])
    >>> split(np.array([0x76543210], np.uint32), 4, order=INTERLEAVED)
    array([0, 4, 1, 5, 2, 6, 3, 7])

    Args:
        words: integers of any width and sign, any shape.
        bits: of a code.
        order: code i is in place ``order[i]``, counted from the lowest bits; each place is as wide as a code. By
            default all places in ascending order.
    """
    unsigned = words.view(f"u{words.dtype.itemsize}").astype(np.uint64)
    places = range(8 * words.dtype.itemsize // bits) if order is None else order
    codes = [unsigned >> np.uint64(bits * place) & np.uint64(2**bits - 1) for place in places]
    return np.stack(codes, axis=-1).reshape(*words.shape[:-1], -1).astype(np.int64)


def join(codes: Array, bits: int, dtype: npt.DTypeLike, order: Sequence[int] | None = None) -> Array:
    """The inverse of `split`.

    >>> [hex(word) for word in join(np.arange(8), 4, np.uint32)]
    ['0x76543210']

    Args:
        codes: non-negative integers below ``2**bits``; the last axis is a multiple of the codes in one integer.
        bits: of a code.
        dtype: of the integers.
        order: as for `split`.
    """
    kind = np.dtype(dtype)
    count = 8 * kind.itemsize // bits
    runs = codes.reshape(*codes.shape[:-1], -1, count).astype(np.uint64)
    places = range(count) if order is None else order
    words = np.zeros(runs.shape[:-1], np.uint64)
    for number, place in enumerate(places):
        words |= runs[..., number] << np.uint64(bits * place)
    return words.astype(f"u{kind.itemsize}").view(kind)


def stream(words: Array, bits: int, count: int) -> npt.NDArray[np.int64]:
    """The first `count` codes of each row of words, from the lowest bit of the first word on; codes may cross words.

    >>> stream(np.array([[0b101_100_011_010_001_000]], np.uint32), 3, 6)
    array([[0, 1, 2, 3, 4, 5]])

    Args:
        words: integers, … × words.
        bits: of a code, at most 8.
        count: of codes in a row.
    """
    octets = words.copy().view(np.uint8)
    places = np.unpackbits(octets, axis=-1, count=count * bits, bitorder="little")
    codes = np.packbits(places.reshape(*places.shape[:-1], count, bits), axis=-1, bitorder="little")
    return codes[..., 0].astype(np.int64)


def end_to_end(codes: Array, bits: int, dtype: npt.DTypeLike) -> Array:
    """The inverse of `stream`: each row of codes as words, the last of which may end in zeros.

    >>> [oct(word) for word in end_to_end(np.array([[0, 1, 2, 3, 4, 5]]), 3, np.uint32)[0]]
    ['0o543210']

    Args:
        codes: non-negative integers below ``2**bits``, … × codes.
        bits: of a code, at most 8.
        dtype: of the words.
    """
    kind = np.dtype(dtype)
    places = np.unpackbits(codes.astype(np.uint8)[..., np.newaxis], axis=-1, count=bits, bitorder="little")
    rows = places.reshape(*codes.shape[:-1], -1)
    filled = np.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, -rows.shape[-1] % (8 * kind.itemsize))])
    return np.packbits(filled, axis=-1, bitorder="little").view(kind)


def looked_up(table: Array, codes: Array) -> Array:
    """The entries of a table that codes index, in the shape of the codes.

    >>> looked_up(np.array([10.0, 11.0, 12.0, 13.0]), np.array([[3, 0]]))
    array([[13., 10.]])

    Args:
        table: of one dimension.
        codes: integers from 0 to one less than its length, any shape.
    """
    return np.take_along_axis(table, codes.reshape(-1), axis=0).reshape(codes.shape)


def planes(data: U8, bits: int, run: int) -> npt.NDArray[np.int64]:
    """The codes in each run of bytes: the lowest bits of all its bytes, then the next bits of all, along the last axis.

    This is ggml's order: codes adjacent in a byte are `run` elements apart.

    >>> planes(np.array([0x21, 0x43, 0x65, 0x87], np.uint8), 4, run=2)
    array([1, 3, 2, 4, 5, 7, 6, 8])

    Args:
        data: bytes; the last axis is a multiple of `run`.
        bits: of a code; divides 8.
        run: bytes that are read together.
    """
    runs = data.reshape(*data.shape[:-1], -1, 1, run)
    codes = runs >> np.arange(0, 8, bits, dtype=np.uint8)[:, None] & np.uint8(2**bits - 1)
    return codes.reshape(*data.shape[:-1], -1).astype(np.int64)
