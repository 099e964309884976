r"""A key-value cache in Block Floating Point.

The cache grows with a conversation: each token adds to each layer :math:`G` keys and :math:`G` values of :math:`d_h`
channels. In float16 a channel takes 16 bits; in BFP12 with blocks of 32 it takes 4.25. Each key and value is cast once,
when it is appended, and never again.

**Before or after the rotation** (errata B6). The paper stores keys *before* RoPE and rotates what it reads back, in
float, at the keys' own positions. Most engines store them *after* RoPE, so that a score is an integer dot product.
This cache stores what it is given: callers may append keys before the rotation and rotate what they read, or append
rotated keys.

**As an operation** the cache is stateful (`lowbit.backend.session`): it is opened empty, and a step adds tokens and
returns all that attention would then read.

Source: K-sort §II.B, §III; errata B6, B9.
"""

from collections.abc import Callable
from typing import Annotated

import numpy as np

from lowbit.arrays import F32, F64
from lowbit.attention.attention import MOST_CHANNELS, KeyValueCache, check_heads
from lowbit.contract.checks import check_array, check_finite
from lowbit.contract.operation import EXACT, Parameters, operation
from lowbit.contract.signature import CHOICE, In, Valid, checked
from lowbit.quantization.bfp import Blocks, Format, cast, decode
from lowbit.quantization.bfp_storage import StoredBlocks, check_stored_format, load, store


class BfpRows:
    """Rows of one length, stored as blocks, one after another."""

    def __init__(self, columns: int, format: Format) -> None:
        self.columns, self.format = columns, format
        self._parts: list[StoredBlocks] = []

    def stored(self, rows: F64) -> StoredBlocks:
        """The stored form of rows (float64, R × n, finite in float32)."""
        return store(cast(np.ascontiguousarray(rows, np.float32), self.format))

    def add(self, part: StoredBlocks) -> None:
        """Append stored rows."""
        self._parts.append(part)

    @property
    def blocks(self) -> Blocks:
        """All rows so far, as the integers of an integer dot product."""
        mantissas = np.concatenate([part.mantissas for part in self._parts])
        exponents = np.concatenate([part.exponents for part in self._parts])
        return load(StoredBlocks(mantissas, exponents, self.columns, self.format))

    @property
    def values(self) -> F64:
        """All rows so far, decoded: float64, R × n."""
        if not self._parts:
            return np.zeros((0, self.columns))
        return decode(self.blocks).astype(np.float64)

    @property
    def nbytes(self) -> int:
        """Bytes of mantissas and exponents."""
        return sum(part.nbytes for part in self._parts)


class BfpKeyValueCache(KeyValueCache):
    """Keys and values of one layer, in Block Floating Point; the decoder uses it like any other cache.

    >>> from lowbit.quantization.bfp import bfp12, bfp16
    >>> cache = BfpKeyValueCache(kv_heads=2, head_dim=64, key_format=bfp12(32), value_format=bfp16(64))
    >>> cache.keys.shape
    (2, 0, 64)
    >>> cache.append(np.ones((3, 2, 64)), np.ones((3, 2, 64)))
    >>> len(cache), cache.keys.shape, cache.nbytes
    (3, (2, 3, 64), 594)

    Raises:
        ArgumentError: an argument below 1, more channels than `lowbit.attention.attention.MOST_CHANNELS`, or a format
            that cannot be stored.
    """

    def __init__(self, kv_heads: int, head_dim: int, key_format: Format, value_format: Format) -> None:
        super().__init__(kv_heads, head_dim, capacity=1)
        self._key_rows = [BfpRows(head_dim, key_format) for _ in range(kv_heads)]
        self._value_rows = [BfpRows(head_dim, value_format) for _ in range(kv_heads)]

    @property
    def keys(self) -> F64:
        """float64, G × S × d_h, decoded."""
        return np.stack([rows.values for rows in self._key_rows])

    @property
    def values(self) -> F64:
        """float64, G × S × d_h, decoded."""
        return np.stack([rows.values for rows in self._value_rows])

    @property
    def key_blocks(self) -> list[Blocks]:
        """The keys of each head as blocks, for integer scores (`lowbit.quantization.bfp_dot.dot`)."""
        return [rows.blocks for rows in self._key_rows]

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(rows.nbytes for rows in (*self._key_rows, *self._value_rows))

    def append(self, keys: F64, values: F64) -> None:
        """Append T tokens; arguments as for `KeyValueCache.append`.

        Raises:
            ArgumentError: other heads or channels than the cache's, numbers that float32 cannot hold, or a format that
                cannot be stored; the cache is unchanged.
        """
        self._check(keys, values)
        parts = [rows.stored(keys[:, j]) for j, rows in enumerate(self._key_rows)]
        parts += [rows.stored(values[:, j]) for j, rows in enumerate(self._value_rows)]
        for rows, part in zip((*self._key_rows, *self._value_rows), parts, strict=True):
            rows.add(part)
        self._length += len(keys)

    def step(self, keys: F32, values: F32) -> tuple[F32, F32]:
        """Append T tokens and return the keys and the values of all tokens so far.

        >>> from lowbit.quantization.bfp import bfp12
        >>> cache = BfpKeyValueCache(kv_heads=1, head_dim=2, key_format=bfp12(2), value_format=bfp12(2))
        >>> token = np.array([[[1.0, 0.4]]], np.float32)
        >>> for _ in range(2):
        ...     keys, values = cache.step(token, token)
        >>> keys
        array([[[1. , 0.5],
                [1. , 0.5]]], dtype=float32)

        Args:
            keys: float32, T × G × d_h, finite.
            values: float32, T × G × d_h, finite.

        Returns:
            float32, G × S × d_h, twice.

        Raises:
            ArgumentError: another dtype, shape or layout, or a number that is not finite; the cache is unchanged.
        """
        check_tokens(keys, values, *self._keys.shape[::2])
        self.append(keys.astype(np.float64), values.astype(np.float64))
        return self.keys.astype(np.float32), self.values.astype(np.float32)  # decoded from float32, so no rounding


Heads = Annotated[int, In(1, MOST_CHANNELS), CHOICE]
StoredFormat = Annotated[Format, Valid(check_stored_format)]


def _check_cache(kv_heads: int, head_dim: int, *formats: Format) -> None:
    check_heads(kv_heads, head_dim)


@checked(also=_check_cache)
def cache(kv_heads: Heads, head_dim: Heads, key_format: StoredFormat, value_format: StoredFormat) -> BfpKeyValueCache:
    """An empty cache of one layer, whose `step` takes tokens.

    Args:
        kv_heads: G.
        head_dim: d_h.
        key_format: of the keys, with exponents of at most 8 bits.
        value_format: of the values, likewise.

    Raises:
        ArgumentError: an argument below 1, more channels than `lowbit.attention.attention.MOST_CHANNELS`, or a format
            that cannot be stored.

    Source: K-sort §II.B; errata B9.
    """
    return BfpKeyValueCache(kv_heads, head_dim, key_format, value_format)


# **Steps** have checks of their own, and a cache names the choices of both its formats.


def check_tokens(keys: F32, values: F32, kv_heads: int, head_dim: int) -> None:
    """The checks of a step: as many values as keys, all of them finite."""
    check_array("keys", keys, np.float32, (None, kv_heads, head_dim))
    check_array("values", values, np.float32, keys.shape)
    check_finite("keys", keys)
    check_finite("values", values)


def check_steps(kv_heads: int, head_dim: int, key_format: Format, value_format: Format) -> Callable[[F32, F32], None]:
    """The check of the steps of one cache; it keeps no state."""
    return lambda keys, values: check_tokens(keys, values, kv_heads, head_dim)


def cache_parameters(kv_heads: int, head_dim: int, key_format: Format, value_format: Format) -> Parameters:
    """The choices of a cache, by the names under which a backend declares what it handles."""
    own: dict[str, object] = {"kv_heads": kv_heads, "head_dim": head_dim}
    for name, format in (("key", key_format), ("value", value_format)):
        own |= {f"{name}_{choice}": given for choice, given in format.parameters.items()}
    return own


# **What a backend promises.**

operation(
    "kvcache.bfp",
    "Keys and values in Block Floating Point",
    cache,
    promise=EXACT,
    source="K-sort §II.B, §III; errata B6, B9",
    check_step=check_steps,
    parameters=cache_parameters,
    clauses={
        "C1": "Each step answers with the keys and the values of all tokens since the cache was opened, in the order "
        "in which they came, float32, G × S × d_h; the row of a token in a head is `bfp.decode` of `bfp.cast` of the "
        "row that was given.",
        "C2": "A token has the same bits in every answer from its own on, however many tokens come after it.",
        "C3": "Tokens that come in one step and tokens that come one by one have equal bits.",
        "C4": "A format that cannot be stored is refused when the cache is opened, and a step that is refused changes "
        "nothing.",
        "C5": "Caches that are open at once do not disturb each other, and a new one is empty.",
    },
)
