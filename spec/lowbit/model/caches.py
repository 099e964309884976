r"""Key-value caches of a decoder, by the number format of keys and values.

The cache grows with a conversation: each token leaves :math:`G` keys and :math:`G` values of :math:`d_h` channels in
every layer. A decoder chooses their number format.

float32
   as a backend computes them: :math:`8\,d_h` bytes for a head of a token.
float16
   keys and values rounded to nearest, ties to even: :math:`4\,d_h` bytes.
bfp12
   keys in Block Floating Point with 4-bit mantissas and blocks of 32 channels (`lowbit.quantization.bfp`), and values
   in float16: about :math:`2.53\,d_h` bytes.

A key or value is rounded once, when it is appended, after the rotation. Attention then reads the stored numbers, all of
which float32 represents exactly. So a cache of this chapter holds these numbers in float32, and any attention can read
it; a backend that keeps the bytes themselves reads the same numbers, and gives the same bits.

**Numbers that cannot be kept.** float16 ends at 65504. A larger key or value is an error.

Source: llama.cpp's ``--cache-type-k``; K-sort §II.B, §III; errata B9.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, get_args

import numpy as np

from lowbit.arrays import F32, F64
from lowbit.attention.attention import KeyValueCache
from lowbit.errors import ArgumentError
from lowbit.quantization.bfp import bfp12, cast, decode
from lowbit.quantization.bfp_storage import row_bytes

Keys = Literal["float16", "bfp12", "float32"]
KEYS: tuple[Keys, ...] = get_args(Keys)
"""Number formats of keys and values."""

BLOCK = 32
"""Channels of a block of BFP12."""


class Float32Cache(KeyValueCache):
    """Keys and values of one layer in float32. A head is a contiguous run of rows, so attention reads it in place.

    >>> cache = Float32Cache(kv_heads=2, head_dim=4)
    >>> cache.append(np.ones((3, 2, 4)), np.ones((3, 2, 4)))
    >>> cache.keys.dtype, cache.keys[1].flags.c_contiguous
    (dtype('float32'), True)
    """

    dtype = np.dtype(np.float32)


class Float16Cache(Float32Cache):
    """Keys and values of one layer, rounded to float16.

    >>> cache = Float16Cache(kv_heads=1, head_dim=2)
    >>> cache.append(np.full((1, 1, 2), 1 + 2.0**-11), np.full((1, 1, 2), 0.1))
    >>> cache.keys[0, 0], cache.values[0, 0]
    (array([1., 1.], dtype=float32), array([0.09997559, 0.09997559], dtype=float32))
    """

    def append(self, keys: F64, values: F64) -> None:
        """As `KeyValueCache.append`.

        Raises:
            ArgumentError: as that, or a number beyond float16; the cache is unchanged.
        """
        self._check(keys, values)
        super().append(in_float16("keys", keys), in_float16("values", values))


class Bfp12Cache(Float32Cache):
    """Keys of one layer in BFP12, and values in float16.

    >>> cache = Bfp12Cache(kv_heads=1, head_dim=2)
    >>> cache.append(np.array([[[1.0, 0.4]]]), np.array([[[1.0, 0.4]]]))
    >>> cache.keys[0, 0], cache.values[0, 0]
    (array([1. , 0.5], dtype=float32), array([1.        , 0.39990234], dtype=float32))
    """

    def append(self, keys: F64, values: F64) -> None:
        """As `KeyValueCache.append`.

        Raises:
            ArgumentError: as that, a key that is not finite, or a value beyond float16; the cache is unchanged.
        """
        self._check(keys, values)
        super().append(in_bfp12(keys), in_float16("values", values))


CACHES: Mapping[Keys, type[KeyValueCache]] = MappingProxyType(
    {"float32": Float32Cache, "float16": Float16Cache, "bfp12": Bfp12Cache}
)
"""The cache of each number format."""


def in_float16(argument: str, rows: F32 | F64) -> F64:
    """Numbers rounded to float16, in float64.

    Raises:
        ArgumentError: a finite number that float16 rounds to infinity.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = rows.astype(np.float32).astype(np.float16)
    if (np.isinf(rounded) & np.isfinite(rows)).any():
        raise beyond_float16(argument)
    return rounded.astype(np.float64)


def beyond_float16(argument: str) -> ArgumentError:
    """The error for keys or values beyond float16."""
    return ArgumentError(argument, "too large for float16", "numbers up to 65504, or keys in another number format")


def in_bfp12(keys: F32 | F64) -> F64:
    """Keys rounded to BFP12, T × G × d_h in float64: each head of a token in its own blocks.

    Raises:
        ArgumentError: a key that is not finite.
    """
    rows = np.ascontiguousarray(keys.reshape(-1, keys.shape[2]), np.float32)
    if not np.isfinite(rows).all():
        raise ArgumentError("keys", "infinite or NaN", "finite numbers, which BFP12 has")
    return decode(cast(rows, bfp12(BLOCK))).astype(np.float64).reshape(keys.shape)


def stored_bytes(keys: Keys, head_dim: int) -> tuple[int, int]:
    """Bytes of a key and of a value of one head in a cache that keeps its number format in memory.

    >>> [stored_bytes(keys, 64) for keys in KEYS]
    [(128, 128), (34, 128), (256, 256)]
    """
    if keys == "bfp12":
        return row_bytes(head_dim, mantissa=4) + bfp12(BLOCK).blocks(head_dim), 2 * head_dim
    size = np.dtype(keys).itemsize * head_dim
    return size, size
