r"""A key-value cache in Block Floating Point.

The cache is what grows with a conversation: for each token of each layer, :math:`G` keys and :math:`G` values of
:math:`d_h` channels. In float16 a channel takes 16 bits; in BFP12 with blocks of 32 it takes 4.25. What is stored is
the cast of what came, once; nothing is ever cast twice.

**Before or after the rotation** (errata B6). The paper stores keys *before* RoPE and rotates what it reads back, in
float, at the keys' own positions. Most engines store them *after* RoPE, so that a score is an integer dot product.
This cache stores what it is given: hand it keys before or after the rotation, and rotate what comes back or do not.

Source: K-sort §II.B, §III; errata B6, B9.
"""

import numpy as np

from lowbit.attention import KeyValueCache, Reals
from lowbit.bfp import Blocks, Format, cast, decode
from lowbit.bfp_storage import StoredBlocks, load, row_bytes, store
from lowbit.check import check_integer


class BfpRows:
    """Rows of one length, stored as blocks, one after another."""

    def __init__(self, columns: int, format: Format) -> None:
        self.columns, self.format = columns, format
        self._parts: list[StoredBlocks] = []

    def append(self, rows: Reals) -> None:
        """Cast rows (float64, R × n, finite in float32) and store them."""
        self._parts.append(store(cast(np.ascontiguousarray(rows, np.float32), self.format)))

    @property
    def blocks(self) -> Blocks:
        """All rows so far, as the integers of an integer dot product."""
        mantissas = np.concatenate([part.mantissas for part in self._parts])
        exponents = np.concatenate([part.exponents for part in self._parts])
        return load(StoredBlocks(mantissas, exponents, self.columns, self.format))

    @property
    def values(self) -> Reals:
        """All rows so far, decoded: float64, R × n."""
        return decode(self.blocks).astype(np.float64)

    @property
    def nbytes(self) -> int:
        """Bytes of mantissas and exponents."""
        return sum(part.nbytes for part in self._parts)


class BfpKeyValueCache(KeyValueCache):
    """Keys and values of one layer, in Block Floating Point; the decoder uses it like any other cache.

    >>> from lowbit.bfp import bfp12, bfp16
    >>> cache = BfpKeyValueCache(kv_heads=2, head_dim=64, key_format=bfp12(32), value_format=bfp16(64))
    >>> cache.append(np.ones((3, 2, 64)), np.ones((3, 2, 64)))
    >>> len(cache), cache.keys.shape, cache.nbytes
    (3, (2, 3, 64), 594)
    >>> bytes_per_token(2, 64, bfp12(32)), bytes_per_token(2, 64, bfp16(64))
    (68, 130)

    Raises:
        ArgumentError: an argument below 1, or a format that cannot be stored.
    """

    def __init__(self, kv_heads: int, head_dim: int, key_format: Format, value_format: Format) -> None:
        super().__init__(kv_heads, head_dim, capacity=1)
        self._key_rows = [BfpRows(head_dim, key_format) for _ in range(kv_heads)]
        self._value_rows = [BfpRows(head_dim, value_format) for _ in range(kv_heads)]

    @property
    def keys(self) -> Reals:
        """float64, G × S × d_h, decoded."""
        return np.stack([rows.values for rows in self._key_rows])

    @property
    def values(self) -> Reals:
        """float64, G × S × d_h, decoded."""
        return np.stack([rows.values for rows in self._value_rows])

    @property
    def key_blocks(self) -> list[Blocks]:
        """The keys of each head as blocks, for integer scores (`lowbit.bfp_dot.dot`)."""
        return [rows.blocks for rows in self._key_rows]

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(rows.nbytes for rows in (*self._key_rows, *self._value_rows))

    def append(self, keys: Reals, values: Reals) -> None:
        """Add T tokens after the ones that are there; arguments as for `lowbit.attention.KeyValueCache.append`."""
        self._check(keys, values)
        for j, (key_rows, value_rows) in enumerate(zip(self._key_rows, self._value_rows, strict=True)):
            key_rows.append(keys[:, j])
            value_rows.append(values[:, j])
        self._length += len(keys)


def bytes_per_token(kv_heads: int, head_dim: int, format: Format) -> int:
    """Bytes that the keys, or the values, of one token take in one layer.

    Raises:
        ArgumentError: an argument below 1.
    """
    check_integer("kv_heads", kv_heads, least=1)
    check_integer("head_dim", head_dim, least=1)
    return kv_heads * (row_bytes(head_dim, format.mantissa) + format.blocks(head_dim))
