"""The mistakes of `stored_parts` and `stored_fields` as defects, for the formats of the failures at hand.

`diagnosis` looks here where neither the bank nor `families` explains results of a stored matrix. There are thousands of
members, so they multiply by BLAS: sums of the lattice tier are exact in any order, and others are compared by bounds.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import numpy as np

from lowbit.arrays import F64, Array
from lowbit.tensor_formats.stored import FORMATS, Stored
from lowbit.tensor_formats.table import Terms
from lowbit_conformance.defects.defect import Defect, arithmetical
from lowbit_conformance.defects.stored import PRODUCTS, dequantized
from lowbit_conformance.defects.stored_fields import of_field, of_fields
from lowbit_conformance.defects.stored_parts import of_parts

Numbers = Callable[[Stored], Terms]
MOST_FORMATS = 2
"""Of failures, whose fields are looked at one by one."""


def numbers_of(x: Any) -> F64:
    """float64, T × K."""
    return np.asarray(x.values.T if isinstance(x, Stored) else np.atleast_2d(x).astype(np.float64))


def like(x: Any, total: F64) -> Array:
    return total[0] if not isinstance(x, Stored) and x.ndim == 1 else total


def multiplied(terms_of: Numbers, x: Any, weights: Stored, result: Any = "float32") -> Array:
    """The product with a matrix that is read wrong."""
    with np.errstate(all="ignore"):
        return like(x, numbers_of(x) @ terms_of(weights).values)


def with_activations(sums: bool, terms_of: Numbers, x: Stored, weights: Stored, result: Any = "float32") -> F64:
    """The product with activations that are read wrong; where `sums`, offsets of weights meet them as they are."""
    with np.errstate(all="ignore"):
        other = terms_of(x).values.T
        if not sums:
            return np.asarray(other @ weights.values)
        terms = weights.terms
        offsets = np.broadcast_to(terms.offsets, terms.products.shape)
        return np.asarray(other @ terms.products + x.values.T @ offsets)


def with_sums(name: str, change: Callable[..., Array], x: Stored, weights: Stored, result: Any = "float32") -> F64:
    """The product where offsets of weights meet sums that activations carry, and these are read wrong.

    Raises:
        ValueError: they carry none.
    """
    table, at = x.table, x.sizes
    fields = table.fields_of(x.by_name, at)
    row = next((each for each in table.fields if each.name == name), None)
    if table.sums is None or row is None:
        raise ValueError("there are no sums")
    fields[name] = change(row, np.ascontiguousarray(fields[name]), x)
    sums, terms = table.sums(fields), weights.terms
    offsets = np.broadcast_to(terms.offsets, terms.products.shape)
    first = offsets[:: weights.rows // sums.shape[1]]
    return np.asarray(x.values.T @ terms.products + sums @ first)


def _of_sums(format: str) -> Iterator[tuple[str, str, Callable[..., F64]]]:
    table = FORMATS[format]
    for row in table.fields if table.sums is not None else ():
        for name, words, change in of_field(row, table.block is not None):
            slug, cause = f"x-{row.role}-{name}", f"Of x: the field {row.name} is taken {words}, where it gives sums."
            yield slug, cause, partial(with_sums, row.name, change)


def _kinds(formats: tuple[str, ...]) -> Iterator[tuple[str, str, Numbers]]:
    yield from of_parts()
    if len(formats) <= MOST_FORMATS:
        for format in formats:
            yield from of_fields(format)


@cache
def members(operation: str, formats: tuple[str, ...], of_x: tuple[str, ...]) -> tuple[Defect, ...]:
    """All members for an operation on matrices in some formats and, where x is stored, x in others."""
    if operation not in ("formats.dequantize", *PRODUCTS):
        return ()
    function = dequantized if operation == "formats.dequantize" else multiplied
    found = [
        arithmetical(name, cause, "", {operation: partial(function, change)}) for name, cause, change in _kinds(formats)
    ]
    if not of_x:
        return tuple(found)
    for name, cause, change in _kinds(of_x):
        slug, said = (
            f"x-{name.removeprefix('stored-')}",
            f"Of x: {cause[0].lower()}{cause[1:]}".replace("columns", "vectors"),
        )
        for sums in (False, True):
            found.append(arithmetical(slug, said, "", {operation: partial(with_activations, sums, change)}))
    for format in of_x:
        found += [arithmetical(name, cause, "", {operation: wrong}) for name, cause, wrong in _of_sums(format)]
    return tuple(found)


def of_matrices(failures: list[Any], operation: str) -> tuple[Defect, ...]:
    """The members for the formats of failures, each with `arguments`."""
    stored = [[each for each in failure.arguments if isinstance(each, Stored)] for failure in failures]
    weights = tuple(sorted({each[-1].format for each in stored if each}))
    return members(operation, weights, tuple(sorted({each[0].format for each in stored if len(each) > 1})))
