"""Defects of attention over a stored cache: numbers of a format that are read wrongly, and heads that are exchanged."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from lowbit.arrays import F64, Array
from lowbit.attention.attention import attended
from lowbit.attention.stored import in_heads
from lowbit.backend.reference import in_type
from lowbit.tensor_formats.stored import Stored
from lowbit.tensor_formats.table import Terms
from lowbit_conformance.defects.defect import MOVES, Defect, of
from lowbit_conformance.defects.stored import first, neighbour, nibbles, offset_dropped, with_fields
from lowbit_conformance.defects.types import TYPES

Read = Callable[[Stored], Terms]
Heads = Callable[[F64, int], F64]
Scale = Callable[[int], float]


def right(cache: Stored) -> Terms:
    return cache.terms


def attend(
    read: Read,
    heads: Heads,
    scale: Scale,
    queries: Array,
    keys: Stored,
    values: Stored,
    window: Any = None,
) -> Array:
    """Attention with one thing at a time to be replaced."""
    head_dim = queries.shape[2]
    with np.errstate(all="ignore"):
        own_keys, own_values = (heads(read(each).values, head_dim) for each in (keys, values))
        result = attended(queries.astype(np.float64), own_keys, own_values, window, scale(head_dim))
        return in_type(result, queries.dtype.name)


def usual(head_dim: int) -> float:
    return 1 / float(np.sqrt(head_dim))


def unscaled(head_dim: int) -> float:
    return 1.0


def channel_major(numbers: F64, head_dim: int) -> F64:
    """Channel c of head j in row ``c G + j``: the channels of the heads lie between each other."""
    heads: F64 = numbers.reshape(head_dim, -1, numbers.shape[1]).transpose(1, 2, 0)
    return heads


def other_head(numbers: F64, head_dim: int) -> F64:
    """Each group of queries reads the heads of the next."""
    return np.roll(in_heads(numbers, head_dim), 1, axis=0)


def exchanged(queries: Array, keys: Stored, values: Stored, window: Any = None) -> Array:
    """Keys are read as values, and values as keys."""
    return attend(right, in_heads, usual, queries, values, keys, window)


def unwindowed(queries: Array, keys: Stored, values: Stored, window: Any = None) -> Array:
    return attend(right, in_heads, usual, queries, keys, values, None)


def sees_the_next(queries: Array, keys: Stored, values: Stored, window: Any = None) -> Array:
    """A token sees the one after it, where there is one."""
    tokens, length = len(queries), keys.columns
    found = attend(right, in_heads, usual, queries, keys, values, window)
    for t in range(tokens - 1):
        end = length - tokens + t + 2
        first = 0 if window is None else max(0, end - 1 - window)
        with np.errstate(all="ignore"):
            read, own = (in_heads(each.values, queries.shape[2])[:, first:end] for each in (keys, values))
            found[t] = in_type(attended(queries[t : t + 1].astype(np.float64), read, own, None), queries.dtype.name)[0]
    return found


def one_step(queries: Array, keys: Stored, values: Stored, window: Any = None) -> Array:
    """Values are rounded with one step, that of the largest of all tokens."""
    head_dim = queries.shape[2]
    own_keys, own_values = (in_heads(each.values, head_dim) for each in (keys, values))
    step = np.abs(own_values).max() * 2.0**-21
    if step > 0:
        own_values = np.rint(own_values / step) * step
    return in_type(attended(queries.astype(np.float64), own_keys, own_values, window), queries.dtype.name)


def _defect(
    name: str, cause: str, clauses: str, read: Read = right, heads: Heads = in_heads, scale: Scale = usual
) -> Defect:
    return of("attention.attend_stored", name, cause, clauses, partial(attend, read, heads, scale))


DEFECTS = tuple(
    replace(each, inputs=TYPES)
    for each in (
        _defect(
            "cache-scale-of-neighbour",
            "A group or block of the cache has the scale of the one before.",
            "C1 C2 C3",
            partial(with_fields, neighbour, "scale"),
        ),
        _defect(
            "cache-scale-of-first",
            "All groups or blocks of the cache have the scale of the first.",
            "C1 C2 C3",
            partial(with_fields, first, "scale"),
        ),
        _defect(
            "cache-nibbles-swapped",
            "The two codes of a byte of the cache are swapped.",
            "C1 C2 C3",
            partial(with_fields, nibbles, "codes"),
        ),
        _defect("cache-minimum-forgotten", "The minimum of a group is not added.", "C1 C2 C3", offset_dropped),
        _defect(
            "cache-channels-interleaved",
            "Channels of the heads lie between each other.",
            "C1 C2 C3",
            heads=channel_major,
        ),
        _defect("cache-head-of-neighbour", "A query head reads the next key-value head.", "C1 C2 C3", heads=other_head),
        _defect("cache-scores-not-scaled", "Scores are not divided by the root of d_h.", "C3", scale=unscaled),
        of("attention.attend_stored", "cache-keys-as-values", "Keys and values are exchanged.", "C1 C2 C3", exchanged),
        of(
            "attention.attend_stored",
            "cache-window-ignored",
            "The window is ignored.",
            "C1 C3 C4",
            unwindowed,
            verdicts=MOVES,
        ),
        of(
            "attention.attend_stored",
            "cache-sees-the-next",
            "A token sees the one after it.",
            "C1 C2 C3 C4",
            sees_the_next,
            verdicts=MOVES,
        ),
        of(
            "attention.attend_stored",
            "cache-one-step-for-all-tokens",
            "Values are rounded with one step, that of the largest of all tokens, seen or not.",
            "C3 C4",
            one_step,
            verdicts=MOVES,
        ),
    )
)
