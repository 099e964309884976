"""Defects of attention over stored tokens and new ones: a part that is lost, moved or read as the other."""

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
from lowbit_conformance.defects.stored import neighbour, with_fields
from lowbit_conformance.defects.types import TYPES

DEFECTS: list[Defect] = []
OPERATION = "attention.attend_residual"

Join = Callable[[F64, F64], F64]
"""All tokens, G × S × d_h, of stored ones and new ones."""


def attend(
    join: Join,
    queries: Array,
    keys: Stored,
    values: Stored,
    newest_keys: Array,
    newest_values: Array,
    read: Callable[[Stored], Terms] = lambda stored: stored.terms,
) -> Array:
    """Attention over parts that are read or joined differently."""
    head_dim = queries.shape[2]
    with np.errstate(all="ignore"):
        own_keys, own_values = (
            join(in_heads(read(stored).values, head_dim), newest.astype(np.float64).swapaxes(0, 1))
            for stored, newest in ((keys, newest_keys), (values, newest_values))
        )
        return in_type(attended(queries.astype(np.float64), own_keys, own_values, None), queries.dtype.name)


def joined(*parts: F64) -> F64:
    """Stored and new tokens, one after the other."""
    return np.concatenate(parts, axis=1)


of_residual = of_operation(DEFECTS, OPERATION, inputs=TYPES)
of_joining = of_operation(DEFECTS, OPERATION, lambda join: partial(attend, join), inputs=TYPES)


@of_joining("C1 C2 C3", verdicts=MOVES)
def residual_first(stored: F64, newest: F64) -> F64:
    """New tokens are placed before the stored ones."""
    return joined(newest, stored)


@of_joining("C1 C2 C3", verdicts=MOVES)
def residual_backwards(stored: F64, newest: F64) -> F64:
    """New tokens are read backwards."""
    return joined(stored, newest[:, ::-1])


@of_joining("C1 C2")
def residual_next_head(stored: F64, newest: F64) -> F64:
    """New tokens are read from the next head."""
    return joined(stored, np.roll(newest, 1, axis=0))


@of_joining("C1 C2")
def residual_last_forgotten(stored: F64, newest: F64) -> F64:
    """The last token is read as the one before it."""
    every = joined(stored, newest)
    return joined(every[:, :-1], every[:, -2:-1])


@of_joining("C1 C2 C3", verdicts=MOVES)
def residual_one_step_for_all_tokens(stored: F64, newest: F64) -> F64:
    """All tokens are rounded with one common step, from the largest of them."""
    every = joined(stored, newest)
    step = np.abs(every).max() * 2.0**-6
    return np.rint(every / step) * step if step > 0 else every


@of_residual("C1 C2")
def residual_two_softmaxes(
    queries: Array, keys: Stored, values: Stored, newest_keys: Array, newest_values: Array
) -> Array:
    """Stored and new tokens have a softmax each."""
    given = queries, keys, values, newest_keys, newest_values
    border = min(keys.columns, keys.columns + len(newest_keys) - len(queries))
    old = attend(lambda stored, newest: joined(stored, newest)[:, :border], *given)
    new = attend(lambda stored, newest: joined(stored, newest)[:, border:], *given)
    return np.asarray((old + new) / 2, old.dtype)


@of_residual("C1 C2 C3", verdicts=MOVES)
def residual_sees_later_tokens(queries: Array, *cached: Any) -> Array:
    """A query sees new tokens after it."""
    return np.concatenate([attend(joined, row[None], *cached) for row in queries])


of_residual.add(
    "residual-scale-of-neighbour",
    "A group or block of stored tokens has the scale of the previous one.",
    "C1 C2",
    partial(attend, joined, read=partial(with_fields, neighbour, "scale")),
)
