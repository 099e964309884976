"""Mistakes in the sums that activations carry, which meet zeros or minima: read wrong, or added up to others.

A kernel whose runs of weights are longer than those of the sums adds several of them, and may take the wrong ones.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from lowbit.arrays import F64, Array
from lowbit.tensor_formats.stored import FORMATS, Stored
from lowbit.tensor_formats.table import Field, Format
from lowbit_conformance.defects.places import ORDERS, Order
from lowbit_conformance.defects.stored_bits import of_beginnings
from lowbit_conformance.defects.stored_fields import of_field
from lowbit_conformance.defects.stored_parts import INSIDE, parts_of

Wrong = Callable[..., F64]


def with_sums(name: str, change: Callable[..., Array], x: Stored, weights: Stored, result: Any = "float32") -> F64:
    """The product in which offsets of weights are multiplied by sums stored with activations, and these sums are read
    wrongly.

    Raises:
        ValueError: activations have no stored sums.
    """
    table = x.table
    fields = table.fields_of(x.by_name)
    row = next((each for each in table.fields if each.name == name), None)
    if row is None or (table.sums is None and row.role != "sum"):
        raise ValueError("there are no sums")
    fields[name] = change(row, np.ascontiguousarray(fields[name]), x)
    if table.sums is not None:
        sums = table.sums(fields)
    else:  # sums of codes, which the scale turns into numbers
        of_codes = fields[name].reshape(x.columns, -1).astype(np.float64)
        sums = of_codes * parts_of(x).scale[:: x.rows // of_codes.shape[1]].T
    terms = weights.terms
    offsets = np.broadcast_to(terms.offsets, terms.products.shape)
    first = offsets[:: weights.rows // sums.shape[1]]
    return np.asarray(x.values.T @ terms.products + sums @ first)


def sums_of(table: Format) -> bool:
    """Whether blocks have stored sums."""
    return table.sums is not None or any(row.role == "sum" for row in table.fields)


def of_sums(format: str) -> Iterator[tuple[str, str, Callable[..., F64]]]:
    table = FORMATS[format]
    for row in table.fields if sums_of(table) else ():
        for name, words, change in of_field(row, table.block is not None):
            slug, cause = f"x-{row.role}-{name}", f"Of x: the field {row.name} is taken {words}, where it gives sums."
            yield slug, cause, partial(with_sums, row.name, change)
    for name, words, row, moved in of_beginnings(table) if sums_of(table) else ():
        cause = f"Of x: {words[0].lower()}{words[1:].removesuffix('.')}, where it gives sums."
        yield f"x-{name}", cause, partial(with_sums, row.name, moved)


def pairs_of_sums(order: Order, odd: bool, row: Field, array: Array, weights: Stored) -> Array:
    """Sums at odd or even places of a block in another order."""
    count = array.shape[-1]
    places = np.arange(count)
    taken = np.where(places % 2 == odd, order(places, count) % count, places)
    return np.asarray(array[..., taken])


def of_pairs(format: str) -> Iterator[tuple[str, str, Callable[..., F64]]]:
    """Kernels add two stored sums of activations; one of the two may belong to other codes."""
    table = FORMATS[format]
    kinds = (
        *ORDERS,
        *INSIDE,
        ("halves-apart", "half of the block further on", lambda at, n: at // 2 + n // 2),
        ("halves-near", "from place i / 2", lambda at, n: at // 2),
    )
    for row in table.fields if sums_of(table) else ():
        for name, words, order in kinds if row.role == "sum" and row.shape else ():
            for odd in (False, True):
                cause = f"Of x: of two added numbers of {row.name}, the {('first', 'second')[odd]} is taken {words}."
                yield (
                    f"x-one-sum-of-two-{name}",
                    cause,
                    partial(with_sums, row.name, partial(pairs_of_sums, order, odd)),
                )
        for name, words, one, other in TWO if row.role == "sum" and row.shape else ():
            change = partial(two_sums, one, other)
            yield f"x-sums-{name}", f"Of x: {words} are added of {row.name}.", partial(with_sums, row.name, change)


def two_sums(one: Order, other: Order, row: Field, array: Array, weights: Stored) -> Array:
    """Two numbers are added that do not belong together."""
    half = array.shape[-1] // 2
    places = np.arange(half)
    found = np.empty_like(array)
    found[..., 0::2] = array[..., one(places, half) % (2 * half)]
    found[..., 1::2] = array[..., other(places, half) % (2 * half)]
    return found


TWO: tuple[tuple[str, str, Order, Order], ...] = (
    ("of-halves", "j and j + n/2", lambda j, n: j, lambda j, n: j + n),
    ("mixed", "2 j and j + n/2", lambda j, n: 2 * j, lambda j, n: j + n),
    ("in-order", "j and j + 1", lambda j, n: j, lambda j, n: j + 1),
    ("twice", "2 j and 2 j", lambda j, n: 2 * j, lambda j, n: 2 * j),
    ("late", "2 j + 1 and 2 j + 2", lambda j, n: 2 * j + 1, lambda j, n: 2 * j + 2),
)


# **Totals**: what replaces the sum of each pair of runs, or each sum.


def totalled(total: Callable[[Array], Array], row: Field, array: Array, weights: Stored) -> Array:
    """Each run of two sums has another total.

    Raises:
        ValueError: blocks have no pairs of sums.
    """
    if array.ndim < 3 or array.shape[-1] % 4:
        raise ValueError("blocks have no pairs of sums")
    found = np.zeros(array.shape)
    found[..., 0::2] = total(array.astype(np.float64))
    return found


def replaced(change: Callable[[Array], Array], row: Field, array: Array, weights: Stored) -> Array:
    """Each sum is another number.

    Raises:
        ValueError: blocks have no pairs of sums.
    """
    if array.ndim < 3 or array.shape[-1] % 4:
        raise ValueError("blocks have no pairs of sums")
    return np.asarray(np.broadcast_to(change(array.astype(np.float64)), array.shape))


def in_runs(count: int, sums: Array) -> Array:
    """The totals of runs of `count` sums."""
    return np.asarray(sums.reshape(*sums.shape[:-1], -1, count).sum(axis=-1))


OF_RUNS: tuple[tuple[str, str, Callable[[Array], Array]], ...] = (
    ("first-of-two", "2 j alone", lambda s: s[..., 0::2]),
    ("second-of-two", "2 j + 1 alone", lambda s: s[..., 1::2]),
    ("one-for-two", "j alone", lambda s: s[..., : s.shape[-1] // 2]),
    ("one-of-the-second-half", "j + n/2 alone", lambda s: s[..., s.shape[-1] // 2 :]),
    ("difference", "2 j less 2 j + 1", lambda s: s[..., 0::2] - s[..., 1::2]),
    ("larger-of-two", "2 j or 2 j + 1, whichever is larger,", lambda s: np.maximum(s[..., 0::2], s[..., 1::2])),
    ("running", "0 to 2 j + 1", lambda s: np.cumsum(in_runs(2, s), axis=-1)),
    ("of-four-for-two", "4 (j / 2) to 4 (j / 2) + 3", lambda s: np.repeat(in_runs(4, s), 2, axis=-1)),
    ("of-four", "4 j to 4 j + 3, modulo the number of sums,", lambda s: np.tile(in_runs(4, s), 2)),
    ("of-the-block", "of the whole block", lambda s: np.repeat(in_runs(s.shape[-1], s), s.shape[-1] // 2, axis=-1)),
    ("halved", "2 j and 2 j + 1, halved,", lambda s: in_runs(2, s) / 2),
    ("halved-down", "2 j and 2 j + 1, halved and rounded down,", lambda s: np.floor(in_runs(2, s) / 2)),
    ("doubled", "2 j and 2 j + 1, twice,", lambda s: in_runs(2, s) * 2),
    ("of-the-first-run", "0 and 1", lambda s: np.repeat(in_runs(2, s)[..., :1], s.shape[-1] // 2, axis=-1)),
)
OF_EACH: tuple[tuple[str, str, Callable[[Array], Array]], ...] = (
    ("of-two-for-one", "the sum of its pair", lambda s: np.repeat(in_runs(2, s), 2, axis=-1)),
    ("of-the-block-for-one", "the sum of its block", lambda s: s.sum(axis=-1, keepdims=True)),
    ("running-for-each", "the sum of all up to it", lambda s: np.cumsum(s, axis=-1)),
    ("mean-for-each", "the mean of its 16 codes", lambda s: s / 16),
    ("even-for-both", "the first of its pair", lambda s: np.repeat(s[..., 0::2], 2, axis=-1)),
    ("odd-for-both", "the second of its pair", lambda s: np.repeat(s[..., 1::2], 2, axis=-1)),
    ("quotient-for-each", "number i / 2 for number i", lambda s: np.repeat(s[..., : s.shape[-1] // 2], 2, axis=-1)),
)


def of_totals(format: str) -> Iterator[tuple[str, str, Wrong]]:
    """Other totals of the sums of a block."""
    for row in FORMATS[format].fields:
        for name, words, total in OF_RUNS if row.role == "sum" and row.shape else ():
            cause = f"Of x: numbers {words} of {row.name} stand for the sum of run j of two."
            yield f"x-sums-{name}", cause, partial(with_sums, row.name, partial(totalled, total))
        for name, words, change in OF_EACH if row.role == "sum" and row.shape else ():
            cause = f"Of x: {words} stands for each number of {row.name}."
            yield f"x-sums-{name}", cause, partial(with_sums, row.name, partial(replaced, change))


def of_carried(format: str) -> Iterator[tuple[str, str, Wrong]]:
    """All kinds of this module for one format."""
    yield from of_totals(format)
    yield from of_pairs(format)
    yield from of_sums(format)
