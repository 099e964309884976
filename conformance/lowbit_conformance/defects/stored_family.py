"""The mistakes of `stored_parts` and `stored_fields` as defects, for the formats of the failures at hand.

`diagnosis` looks here where neither the bank nor `families` explains results of a stored matrix. There are thousands of
members, so they multiply by BLAS: sums of the lattice tier are exact in any order, and others are compared by bounds.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import numpy as np

from lowbit.arrays import F64, Array
from lowbit.numbers.floats import FLOATS
from lowbit.tensor_formats.stored import FORMATS, Stored
from lowbit.tensor_formats.table import Field, Format, Terms
from lowbit_conformance.defects.defect import Defect, arithmetical
from lowbit_conformance.defects.places import ORDERS, Order
from lowbit_conformance.defects.stored import PRODUCTS, dequantized
from lowbit_conformance.defects.stored_addresses import read_at, ways, written
from lowbit_conformance.defects.stored_bits import of_beginnings, of_blocks
from lowbit_conformance.defects.stored_codes import like, numbers_of
from lowbit_conformance.defects.stored_fields import of_field, of_fields
from lowbit_conformance.defects.stored_parts import INSIDE, of_parts, parts_of
from lowbit_conformance.defects.stored_rows import of_rows
from lowbit_conformance.defects.stored_some import of_some
from lowbit_conformance.defects.stored_sums import of_sums
from lowbit_conformance.defects.stored_words import of_words

Numbers = Callable[[Stored], Terms]
MEETS = {"all": ".", "codes": ", where it meets codes.", "zeros": ", where it meets zeros or minima."}
MOST_FORMATS = 2
"""Of failures, whose fields are looked at one by one."""


def multiplied(terms_of: Numbers, x: Any, weights: Stored, result: Any = "float32") -> Array:
    """The product with a matrix that is read wrong."""
    with np.errstate(all="ignore"):
        return like(x, numbers_of(x) @ terms_of(weights).values)


def at_address(row: str, column: str, shift: int, x: Array, weights: Stored, result: Any = "float32") -> Array:
    """The product where x is read at other addresses.

    Raises:
        ValueError: x is one vector.
    """
    with np.errstate(all="ignore"):
        read = read_at(row, column, shift, x, weights.rows, weights.columns)
        return np.asarray(read.astype(np.float64) @ weights.values)


def misread(own: str, other: str, x: Array, weights: Stored, result: Any = "float32") -> Array:
    """The product where the bytes of 16-bit activations are read as another type.

    Raises:
        ValueError: they are of no such type.
    """
    narrow = x.astype(FLOATS[own].dtype)
    if (narrow.astype(np.float64) != x).any():
        raise ValueError(f"x is not in {own}")
    with np.errstate(all="ignore"):
        read = narrow.view(FLOATS[other].dtype).astype(np.float64)
        return like(x, np.atleast_2d(read) @ weights.values)


def with_activations(which: str, terms_of: Numbers, x: Stored, weights: Stored, result: Any = "float32") -> F64:
    """The product with activations that are read wrong where they meet all of the weights, codes, or zeros."""
    with np.errstate(all="ignore"):
        other, right = terms_of(x).values.T, x.values.T
        if which == "all":
            return np.asarray(other @ weights.values)
        terms = weights.terms
        offsets = np.broadcast_to(terms.offsets, terms.products.shape)
        first, second = (other, right) if which == "codes" else (right, other)
        return np.asarray(first @ terms.products + second @ offsets)


def with_sums(name: str, change: Callable[..., Array], x: Stored, weights: Stored, result: Any = "float32") -> F64:
    """The product where offsets of weights meet sums that activations carry, and these are read wrong.

    Raises:
        ValueError: they carry none.
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
    """Whether blocks carry sums."""
    return table.sums is not None or any(row.role == "sum" for row in table.fields)


def _of_sums(format: str) -> Iterator[tuple[str, str, Callable[..., F64]]]:
    table = FORMATS[format]
    for row in table.fields if sums_of(table) else ():
        for name, words, change in of_field(row, table.block is not None):
            slug, cause = f"x-{row.role}-{name}", f"Of x: the field {row.name} is taken {words}, where it gives sums."
            yield slug, cause, partial(with_sums, row.name, change)
    for name, words, row, moved in of_beginnings(table) if sums_of(table) else ():
        cause = f"Of x: {words[0].lower()}{words[1:].removesuffix('.')}, where it gives sums."
        yield f"x-{name}", cause, partial(with_sums, row.name, moved)


def pairs_of_sums(order: Order, odd: bool, row: Field, array: Array, weights: Stored) -> Array:
    """Sums at odd or at even places of a block in another order."""
    count = array.shape[-1]
    places = np.arange(count)
    taken = np.where(places % 2 == odd, order(places, count) % count, places)
    return np.asarray(array[..., taken])


def _of_pairs(format: str) -> Iterator[tuple[str, str, Callable[..., F64]]]:
    """Kernels add two sums that activations carry; one of the two may be that of other codes."""
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


def _kinds(formats: tuple[str, ...]) -> Iterator[tuple[str, str, Numbers]]:
    yield from of_parts()
    yield from of_rows()
    yield from of_some()
    if len(formats) <= MOST_FORMATS:
        for format in formats:
            yield from of_fields(format)
            yield from of_blocks(format)
            yield from of_words(format)


@cache
def members(operation: str, formats: tuple[str, ...], of_x: tuple[str, ...]) -> tuple[Defect, ...]:
    """All members for an operation on matrices in some formats and, where x is stored, x in others."""
    if operation not in ("formats.dequantize", *PRODUCTS):
        return ()
    function = dequantized if operation == "formats.dequantize" else multiplied
    found = [
        arithmetical(name, cause, "", {operation: partial(function, change)}) for name, cause, change in _kinds(formats)
    ]
    if operation != "formats.dequantize":
        found += [arithmetical(name, cause, "", {operation: wrong}) for name, cause, wrong in of_sums()]
    if not of_x:
        for own, other in (("float16", "bfloat16"), ("bfloat16", "float16")):
            read = partial(misread, own, other)
            found.append(arithmetical(f"x-read-as-{other}", f"x is read as {other}.", "", {operation: read}))
        for row, column, shift in ways() if operation == "linear.gemm" else ():
            cause = f"Element (i, j) of x, which has I x J, is read at {written(row, column, shift)}."
            moved = partial(at_address, row, column, shift)
            found.append(arithmetical("x-of-another-stride", cause, "", {operation: moved}))
        return tuple(found)
    for name, cause, change in _kinds(of_x):
        slug, said = (
            f"x-{name.removeprefix('stored-')}",
            f"Of x: {cause[0].lower()}{cause[1:]}".replace("columns", "vectors"),
        )
        for which, end in (
            MEETS.items() if not name.endswith(("-in-part", "-stride", "-of-other-bits")) else (("all", "."),)
        ):
            words = said.removesuffix(".") + end
            found.append(arithmetical(slug, words, "", {operation: partial(with_activations, which, change)}))
    for format in of_x:
        for name, cause, wrong in _of_pairs(format):
            found.append(arithmetical(name, cause, "", {operation: wrong}))
        found += [arithmetical(name, cause, "", {operation: wrong}) for name, cause, wrong in _of_sums(format)]
    return tuple(found)


def of_scales(failures: list[Any], operation: str) -> tuple[Defect, ...]:
    """The few members that change other fields than codes, for failures that are too large for all members."""
    if operation not in PRODUCTS:
        return ()
    weights = [each.arguments[1] for each in failures if isinstance(each.arguments[1], Stored)]
    formats = sorted({each.format for each in weights})
    return tuple(
        arithmetical(name, cause, "", {operation: partial(multiplied, change)})
        for format in formats[:MOST_FORMATS]
        for name, cause, change in of_fields(format)
        if not name.startswith(("stored-codes", "stored-field"))
    )


def of_matrices(failures: list[Any], operation: str) -> tuple[Defect, ...]:
    """The members for the formats of failures, each with `arguments`."""
    stored = [[each for each in failure.arguments if isinstance(each, Stored)] for failure in failures]
    weights = tuple(sorted({each[-1].format for each in stored if each}))
    return members(operation, weights, tuple(sorted({each[0].format for each in stored if len(each) > 1})))
