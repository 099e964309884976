r"""A key-value cache of KIVI: old tokens in 2 or 4 bits, the newest in full precision.

The chapter `lowbit.tensor_formats.kivi` says how KIVI stores keys and values. Keys are grouped *along tokens*, so a key
can only be stored when its group is complete; until then it stays unchanged, in 16 bits. Values are grouped along the
channels of a token and could be stored at once. KIVI keeps the newest of them in 16 bits, too, because attention reads
them most.

**Which tokens** follows from their number :math:`S` and from the *residual length* :math:`R` alone, a multiple of the
group size. In 16 bits are the newest

.. math:: S \bmod R \ \text{keys}, \qquad \min(S, R) \ \text{values},

and all tokens before them are stored. Keys are stored R at a time, whenever R of them have accumulated; a value is
stored when it is no longer among the newest R. A prompt of many tokens leaves the same state as the same tokens one by
one.

**What a step reads.** KIVI's code multiplies the queries of a step by the new tokens before it stores any. A step here
returns what the cache holds *after* it, which is what the next step reads.

**Numbers.** Tokens are float16 or bfloat16, as the model computes. A stored number is :math:`s\,q + m` with :math:`s`
and :math:`m` of that type and a code :math:`q` of at most 4 bits. The product is exact in float32, so the sum is
rounded once, and its bits are the same for every kernel.

Source: KIVI (arXiv 2402.02750) §3.3, algorithm 1; its ``models/llama_kivi.py``.
"""

from collections.abc import Callable
from typing import Annotated, Literal

import numpy as np

from lowbit.arrays import BF16, F16, F32
from lowbit.attention.attention import MOST_CHANNELS, check_heads
from lowbit.contract.checks import check_array, check_finite
from lowbit.contract.operation import EXACT, operation
from lowbit.contract.signature import CHOICE, In, checked
from lowbit.errors import ArgumentError
from lowbit.numbers.floats import FLOATS
from lowbit.tensor_formats.kivi import SUFFIX
from lowbit.tensor_formats.stored import Stored, quantized

Tokens = F16 | BF16
Bits = Literal[2, 4]
Dtype = Literal["float16", "bfloat16"]


class Kept:
    """Keys or values, tokens × channels: the quantised ones, decoded, followed by the newest in 16 bits.

    Attributes:
        stored: float32, tokens × channels.
        newest: float16 or bfloat16, tokens × channels.
    """

    def __init__(self, channels: int, dtype: Dtype, store: Callable[[Tokens], Stored]) -> None:
        self.stored = np.zeros((0, channels), np.float32)
        self.newest: Tokens = np.zeros((0, channels), FLOATS[dtype].dtype)
        self._store = store

    def add(self, tokens: Tokens) -> None:
        """Append tokens."""
        self.newest = np.concatenate([self.newest, tokens])

    def store(self, count: int) -> None:
        """Quantise the oldest `count` of the tokens in 16 bits."""
        if count:
            part, self.newest = self.newest[:count], self.newest[count:]
            self.stored = np.concatenate([self.stored, self._store(part).values.T.astype(np.float32)])

    def in_heads(self, kv_heads: int) -> F32:
        """All tokens: float32, G × S × d_h."""
        tokens = np.concatenate([self.stored, self.newest.astype(np.float32)])
        return np.ascontiguousarray(tokens.reshape(len(tokens), kv_heads, -1).swapaxes(0, 1))


class KiviCache:
    """Keys and values of one layer; `choice` is a choice of the casts of `lowbit.tensor_formats.kivi`."""

    def __init__(
        self,
        kv_heads: int,
        head_dim: int,
        bits: Bits,
        group_size: int,
        residual: int,
        dtype: Dtype = "float16",
        choice: str | None = None,
    ) -> None:
        self.kv_heads, self.head_dim, self.residual, self.dtype = kv_heads, head_dim, residual, dtype
        channels, suffix = kv_heads * head_dim, SUFFIX[dtype]
        keys, values = (("bits", int(bits)), ("tokens", group_size)), (("bits", int(bits)), ("group_size", group_size))
        self.keys = Kept(channels, dtype, lambda part: quantized(part, f"kivi-keys{suffix}", keys, choice))
        self.values = Kept(channels, dtype, lambda part: quantized(part, f"kivi-values{suffix}", values, choice))

    def step(self, keys: Tokens, values: Tokens) -> tuple[F32, F32]:
        """Append T tokens and return the keys and the values of all tokens so far.

        A key alone in its group is kept as it is; the second completes the group, whose scale is a third of its range:

        >>> opened = KiviCache(kv_heads=1, head_dim=2, bits=2, group_size=2, residual=2)
        >>> for channel in (0.25, 3.25):
        ...     keys, values = opened.step(*np.full((2, 1, 1, 2), channel, np.float16))
        >>> keys[0, :, 0], len(opened.keys.stored), len(opened.values.stored)
        (array([0.25, 3.25], dtype=float32), 2, 0)

        Args:
            keys: of the type of the cache, T × G × d_h, of at most half the magnitude of its largest number.
            values: T × G × d_h, likewise.

        Returns:
            float32, G × S × d_h, twice.

        Raises:
            ArgumentError: another dtype, shape or layout, or a larger number; the cache is unchanged.
        """
        check_tokens(keys, values, self.kv_heads, self.head_dim, self.dtype)
        for kept, tokens in ((self.keys, keys), (self.values, values)):
            kept.add(tokens.reshape(len(tokens), -1))
        gathered = len(self.keys.newest)
        self.keys.store(gathered - gathered % self.residual)
        self.values.store(max(0, len(self.values.newest) - self.residual))
        return self.keys.in_heads(self.kv_heads), self.values.in_heads(self.kv_heads)


Count = Annotated[int, In(1, MOST_CHANNELS), CHOICE]


def _check_cache(
    kv_heads: int, head_dim: int, bits: Bits, group_size: int, residual: int, dtype: Dtype = "float16"
) -> None:
    check_heads(kv_heads, head_dim)
    if head_dim % group_size:
        raise ArgumentError("group_size", group_size, f"a divisor of head_dim, {head_dim}")
    if residual % group_size:
        raise ArgumentError("residual", residual, f"a multiple of group_size, {group_size}")


@checked(also=_check_cache)
def cache(
    kv_heads: Count, head_dim: Count, bits: Bits, group_size: Count, residual: Count, dtype: Dtype = "float16"
) -> KiviCache:
    """An empty cache of one layer, whose `step` takes tokens.

    Args:
        kv_heads: G.
        head_dim: d_h.
        bits: of a code: 2 or 4.
        group_size: the tokens of a group of keys, and the channels of a group of values; divides head_dim.
        residual: R, a multiple of `group_size`.
        dtype: of the tokens, and of the scales and minima of the quantised ones.

    Raises:
        ArgumentError: an argument below 1, more channels than `lowbit.attention.attention.MOST_CHANNELS`, other bits or
            types, groups that do not divide heads, a residual length that is not a multiple of the group size.

    Source: KIVI §3.3.
    """
    return KiviCache(kv_heads, head_dim, bits, group_size, residual, dtype)


# **Steps** have a check of their own.


def check_tokens(keys: Tokens, values: Tokens, kv_heads: int, head_dim: int, dtype: Dtype) -> None:
    """The check of a step: as many values as keys, and no number so large that the range of its group might
    overflow."""
    kind = FLOATS[dtype]
    check_array("keys", keys, kind.dtype.type, (None, kv_heads, head_dim))
    check_array("values", values, kind.dtype.type, keys.shape)
    for name, tokens in (("keys", keys), ("values", values)):
        check_finite(name, tokens)
        largest = np.abs(tokens.astype(np.float32)).max()
        if largest > kind.largest / 2:
            raise ArgumentError(name, f"as large as {largest}", f"at most {kind.largest / 2:g} in magnitude")


def check_steps(
    kv_heads: int, head_dim: int, bits: Bits, group_size: int, residual: int, dtype: Dtype = "float16"
) -> Callable[[Tokens, Tokens], None]:
    """The check of the steps of one cache; it keeps no state."""
    return lambda keys, values: check_tokens(keys, values, kv_heads, head_dim, dtype)


# **What a backend promises.**

operation(
    "kvcache.kivi",
    "Keys and values by KIVI, the newest in 16 bits",
    cache,
    promise=EXACT,
    source="KIVI (arXiv 2402.02750) §3.3; its llama_kivi.py",
    check_step=check_steps,
    clauses={
        "C1": "Each step answers with the keys and the values of all S tokens since the cache was opened, float32, "
        "G × S × d_h. The newest S mod R keys and the newest R values are the numbers that were given.",
        "C2": "All other keys and values are those of `formats.dequantize` of `formats.quantize` of their groups, in "
        "kivi-keys and kivi-values of the type of the tokens, by one of its choices, the same in every step; later "
        "tokens do not change them.",
        "C3": "Tokens that come in one step and tokens that come one by one have equal bits.",
        "C4": "A step that is refused changes nothing.",
        "C5": "Caches that are open at once do not disturb each other, and a new one is empty.",
    },
)
