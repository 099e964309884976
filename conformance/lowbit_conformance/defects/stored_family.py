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
from lowbit.tensor_formats.stored import Stored
from lowbit.tensor_formats.table import Terms
from lowbit_conformance.defects.defect import Defect, arithmetical
from lowbit_conformance.defects.stored import PRODUCTS, dequantized
from lowbit_conformance.defects.stored_addresses import read_at, sizes_of, ways, written
from lowbit_conformance.defects.stored_bits import of_blocks
from lowbit_conformance.defects.stored_carried import of_carried
from lowbit_conformance.defects.stored_codes import like, numbers_of
from lowbit_conformance.defects.stored_constants import of_constants
from lowbit_conformance.defects.stored_counted import of_counted
from lowbit_conformance.defects.stored_elsewhere import of_elsewhere
from lowbit_conformance.defects.stored_fields import of_fields
from lowbit_conformance.defects.stored_lanes import of_lanes
from lowbit_conformance.defects.stored_parts import of_parts, of_squares
from lowbit_conformance.defects.stored_rows import of_rows
from lowbit_conformance.defects.stored_some import of_some
from lowbit_conformance.defects.stored_split import of_choices, of_narrow_parts, of_pieces, of_split
from lowbit_conformance.defects.stored_sums import of_sums
from lowbit_conformance.defects.stored_tails import of_tails, of_vectors
from lowbit_conformance.defects.stored_words import of_words

Numbers = Callable[[Stored], Terms]
MEETS = {"all": ".", "codes": ", where it meets codes.", "zeros": ", where it meets zeros or minima."}
MOST_FORMATS = 2
"""Number of failures whose fields are examined one by one."""


def multiplied(terms_of: Numbers, x: Any, weights: Stored, result: Any = "float32") -> Array:
    """The product with a matrix that is read wrongly."""
    with np.errstate(all="ignore"):
        return like(x, numbers_of(x) @ terms_of(weights).values)


def at_address(row: str, column: str, shift: int, x: Array, weights: Stored, result: Any = "float32") -> Array:
    """The product in which x is read at other addresses.

    Raises:
        ValueError: x is one vector.
    """
    with np.errstate(all="ignore"):
        read = read_at(row, column, shift, x, sizes_of(weights))
        return np.asarray(read.astype(np.float64) @ weights.values)


def misread(own: str, other: str, x: Array, weights: Stored, result: Any = "float32") -> Array:
    """The product in which the bytes of 16-bit activations are read as another type.

    Raises:
        ValueError: activations are not of such a type.
    """
    narrow = x.astype(FLOATS[own].dtype)
    if (narrow.astype(np.float64) != x).any():
        raise ValueError(f"x is not in {own}")
    with np.errstate(all="ignore"):
        read = narrow.view(FLOATS[other].dtype).astype(np.float64)
        return like(x, np.atleast_2d(read) @ weights.values)


def with_activations(which: str, terms_of: Numbers, x: Stored, weights: Stored, result: Any = "float32") -> F64:
    """The product with activations that are read wrongly for all weights, for codes, or for zeros."""
    with np.errstate(all="ignore"):
        other, right = terms_of(x).values.T, x.values.T
        if which == "all":
            return np.asarray(other @ weights.values)
        terms = weights.terms
        offsets = np.broadcast_to(terms.offsets, terms.products.shape)
        first, second = (other, right) if which == "codes" else (right, other)
        return np.asarray(first @ terms.products + second @ offsets)


def _kinds(formats: tuple[str, ...]) -> Iterator[tuple[str, str, Numbers]]:
    yield from of_parts()
    yield from of_rows()
    yield from of_some()
    if len(formats) <= MOST_FORMATS:
        for format in formats:
            yield from of_fields(format)
            yield from of_blocks(format)
            yield from of_words(format)
            yield from of_elsewhere(format)
            yield from of_tails(format)
    yield from of_constants()
    yield from of_split()
    yield from of_pieces()
    yield from of_counted()


def _sums() -> Iterator[tuple[str, str, Callable[..., Array]]]:
    yield from of_sums()
    yield from of_narrow_parts()
    yield from of_lanes()
    yield from of_vectors()


def choices_of(operation: str) -> tuple[Defect, ...]:
    """Scales and zeros of other runs come last, because sums of x for zeros of other runs give the same."""
    function = dequantized if operation == "formats.dequantize" else multiplied
    return tuple(
        arithmetical(name, cause, "", {operation: partial(function, change)}) for name, cause, change in of_choices()
    )


@cache
def members(operation: str, formats: tuple[str, ...], of_x: tuple[str, ...]) -> tuple[Defect, ...]:
    """All members for an operation on matrices in some formats and, if x is stored, x in others."""
    if operation not in ("formats.dequantize", *PRODUCTS):
        return ()
    function = dequantized if operation == "formats.dequantize" else multiplied
    found = [
        arithmetical(name, cause, "", {operation: partial(function, change)}) for name, cause, change in _kinds(formats)
    ]
    if operation != "formats.dequantize":
        found += [arithmetical(name, cause, "", {operation: wrong}) for name, cause, wrong in _sums()]
    if not of_x:
        for own, other in (("float16", "bfloat16"), ("bfloat16", "float16")):
            read = partial(misread, own, other)
            found.append(arithmetical(f"x-read-as-{other}", f"x is read as {other}.", "", {operation: read}))
        for row, column, shift in ways() if operation == "linear.gemm" else ():
            cause = f"Element (i, j) of x, which has I x J, is read at {written(row, column, shift)}."
            moved = partial(at_address, row, column, shift)
            found.append(arithmetical("x-of-another-stride", cause, "", {operation: moved}))
        return (*found, *choices_of(operation))
    for format in of_x:  # before x itself: kernels add up stored sums of activations if there are any
        found += [arithmetical(name, cause, "", {operation: wrong}) for name, cause, wrong in of_carried(format)]
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
    return (*found, *choices_of(operation))


def of_scales(failures: list[Any], operation: str) -> tuple[Defect, ...]:
    """The few members that change fields other than codes, for failures that are too large for all members."""
    if operation not in PRODUCTS:
        return ()
    weights = [each.arguments[1] for each in failures if isinstance(each.arguments[1], Stored)]
    formats = sorted({each.format for each in weights})
    return tuple(
        arithmetical(name, cause, "", {operation: partial(multiplied, change)})
        for format in formats[:MOST_FORMATS]
        for name, cause, change in (*of_fields(format), *of_squares())
        if not name.startswith(("stored-codes", "stored-field"))
    )


def of_matrices(failures: list[Any], operation: str) -> tuple[Defect, ...]:
    """The members for the formats of failures, each with `arguments`."""
    stored = [[each for each in failure.arguments if isinstance(each, Stored)] for failure in failures]
    weights = tuple(sorted({each[-1].format for each in stored if each}))
    return members(operation, weights, tuple(sorted({each[0].format for each in stored if len(each) > 1})))
