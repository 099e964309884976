"""Defects of attention over a stored cache: numbers of a format that are read wrongly, and heads that are exchanged."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from lowbit.arrays import F64, Array
from lowbit.attention.attention import attended
from lowbit.attention.stored import in_heads
from lowbit.backend.reference import in_type
from lowbit.tensor_formats.stored import Stored
from lowbit.tensor_formats.table import Terms
from lowbit_conformance.defects.defect import MOVES, Defect, of_operation
from lowbit_conformance.defects.roundings import in_steps
from lowbit_conformance.defects.stored import first, neighbour, nibbles, offset_dropped, with_fields
from lowbit_conformance.defects.types import TYPES

DEFECTS: list[Defect] = []
of_cache = of_operation(DEFECTS, "attention.attend_stored", inputs=TYPES)

Read = Callable[[Stored], Terms]
Heads = Callable[[F64, int], F64]


def right(cache: Stored) -> Terms:
    return cache.terms


def attend(
    queries: Array,
    keys: Stored,
    values: Stored,
    window: Any = None,
    *,
    read: Read = right,
    heads: Heads = in_heads,
    scale: float | None = None,
) -> Array:
    """Attention, in which one step at a time can be replaced."""
    head_dim = queries.shape[2]
    with np.errstate(all="ignore"):
        own_keys, own_values = (heads(read(each).values, head_dim) for each in (keys, values))
        result = attended(queries.astype(np.float64), own_keys, own_values, window, scale)
        return in_type(result, queries.dtype.name)


def channel_major(numbers: F64, head_dim: int) -> F64:
    """Channel c of head j in row ``c G + j``: the channels of the heads lie between each other."""
    heads: F64 = numbers.reshape(head_dim, -1, numbers.shape[1]).transpose(1, 2, 0)
    return heads


def other_head(numbers: F64, head_dim: int) -> F64:
    """Each group of queries reads the head of the next group."""
    return np.roll(in_heads(numbers, head_dim), 1, axis=0)


@of_cache("C1 C2 C3")
def cache_keys_as_values(queries: Array, keys: Stored, values: Stored, window: Any = None) -> Array:
    """Keys and values are exchanged."""
    return attend(queries, values, keys, window)


@of_cache("C1 C3 C4", verdicts=MOVES)
def cache_window_ignored(queries: Array, keys: Stored, values: Stored, window: Any = None) -> Array:
    """The window is ignored."""
    return attend(queries, keys, values, None)


@of_cache("C1 C2 C3 C4", verdicts=MOVES)
def cache_sees_the_next(queries: Array, keys: Stored, values: Stored, window: Any = None) -> Array:
    """A token sees the one after it."""
    tokens, length = len(queries), keys.columns
    found = attend(queries, keys, values, window)
    for t in range(tokens - 1):
        end = length - tokens + t + 2
        first = 0 if window is None else max(0, end - 1 - window)
        with np.errstate(all="ignore"):
            read, own = (in_heads(each.values, queries.shape[2])[:, first:end] for each in (keys, values))
            found[t] = in_type(attended(queries[t : t + 1].astype(np.float64), read, own, None), queries.dtype.name)[0]
    return found


@of_cache("C3 C4", verdicts=MOVES)
def cache_one_step_for_all_tokens(queries: Array, keys: Stored, values: Stored, window: Any = None) -> Array:
    """Values are rounded with one common step, from the largest of all tokens, visible or not."""
    head_dim = queries.shape[2]
    own_keys, own_values = (in_heads(each.values, head_dim) for each in (keys, values))
    return in_type(attended(queries.astype(np.float64), own_keys, in_steps(own_values), window), queries.dtype.name)


of_cache.add(
    "cache-scale-of-neighbour",
    "A group or block of the cache has the scale of the one before.",
    "C1 C2 C3",
    partial(attend, read=partial(with_fields, neighbour, "scale")),
)
of_cache.add(
    "cache-scale-of-first",
    "All groups or blocks of the cache have the scale of the first.",
    "C1 C2 C3",
    partial(attend, read=partial(with_fields, first, "scale")),
)
of_cache.add(
    "cache-nibbles-swapped",
    "The two codes of a byte of the cache are swapped.",
    "C1 C2 C3",
    partial(attend, read=partial(with_fields, nibbles, "codes")),
)
of_cache.add(
    "cache-minimum-forgotten", "The minimum of a group is not added.", "C1 C2 C3", partial(attend, read=offset_dropped)
)
of_cache.add(
    "cache-channels-interleaved",
    "Channels of the heads lie between each other.",
    "C1 C2 C3",
    partial(attend, heads=channel_major),
)
of_cache.add(
    "cache-head-of-neighbour",
    "A query head reads the next key-value head.",
    "C1 C2 C3",
    partial(attend, heads=other_head),
)
of_cache.add("cache-scores-not-scaled", "Scores are not divided by the root of d_h.", "C3", partial(attend, scale=1.0))
