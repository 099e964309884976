"""Mistakes in what remains after whole tiles, and of x in a part of the rows: a branch of its own in unrolled code."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from lowbit.arrays import Array
from lowbit.tensor_formats.stored import FORMATS, Stored
from lowbit_conformance.defects.places import ORDERS, Order
from lowbit_conformance.defects.stored_codes import like, numbers_of
from lowbit_conformance.defects.stored_fields import of_types, with_field
from lowbit_conformance.defects.stored_parts import Named
from lowbit_conformance.defects.stored_some import cores, in_half, partly

Kept = Callable[[Stored], Array]
TILES = (2, 4, 8, 16, 32, 64, 128)
VECTORS = ("one-later", "one-earlier", "first-for-all", "exchanged-in-pairs")


def beyond(run: int, axis: int, weights: Stored) -> Array:
    """The rows (axis 0) or columns past the last whole tile; none where all tiles are whole."""
    count = (weights.rows, weights.columns)[axis]
    there = np.arange(count) >= count // run * run
    return np.asarray(there[:, np.newaxis] if axis == 0 else there[np.newaxis])


def tails() -> Iterator[tuple[str, Kept]]:
    """Remainders of rows or columns."""
    for axis, things in enumerate(("rows", "columns")):
        for run in TILES:
            yield f"in the {things} past the last whole {run}", partial(beyond, run, axis)


def of_tails(format: str) -> Named:
    """Scales of other types, and the kinds of `stored_some`, in what remains of rows or columns."""
    kinds = list(cores())
    for row in FORMATS[format].fields:
        for name, words, change in of_types(row) if row.role == "scale" else ():
            cause = f"The field {row.name} is taken {words}."
            kinds.append((f"stored-scale-{name}", cause, partial(with_field, row.name, change)))
    for where, kept in tails():
        for name, cause, changed in kinds:
            yield f"{name}-in-part", f"{cause.removesuffix('.')}, {where} only.", partial(partly, changed, kept)


def of_other_vectors(order: Order, kept: Kept, x: Any, weights: Stored, result: Any = "float32") -> Array:
    """The product in which some rows or columns use x of another vector.

    Raises:
        ValueError: there is one vector.
    """
    numbers, values = numbers_of(x), weights.values
    if len(numbers) == 1:
        raise ValueError("there is one vector")
    others = numbers[order(np.arange(len(numbers)), len(numbers)) % len(numbers)]
    there = kept(weights)
    with np.errstate(all="ignore"):
        return like(x, numbers @ np.where(there, 0.0, values) + others @ np.where(there, values, 0.0))


def of_vectors() -> Iterator[tuple[str, str, Callable[..., Array]]]:
    """x of other vectors in half of each run of rows or columns, or in their remainder."""
    parts = [*tails()]
    for axis, things in enumerate(("rows", "columns")):
        for run in (2, 4, 8, 16, 32, 64, 128, 256):
            for half, word in enumerate(("first", "second")):
                parts.append((f"in the {word} half of each {run} {things}", partial(in_half, run, half, axis)))
    for name, words, order in ORDERS:
        for where, kept in parts if name in VECTORS else ():
            cause = f"x is taken {words}, along the vectors, {where} only."
            yield f"x-of-other-vectors-{name}", cause, partial(of_other_vectors, order, kept)
