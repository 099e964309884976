"""Mistakes in a part of a stored matrix: in some rows of each run, or in some columns.

Unrolled code has several branches, and a mistake is often in one of them. So kinds of other modules are also tried in
half of the rows of each run, or in some columns.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache, partial

import numpy as np

from lowbit.arrays import F64, Array
from lowbit.tensor_formats.stored import Stored
from lowbit.tensor_formats.table import Terms
from lowbit_conformance.defects.stored import DECODES
from lowbit_conformance.defects.stored_codes import run_of
from lowbit_conformance.defects.stored_parts import (
    DIFFERENCES,
    READ,
    Named,
    Numbers,
    Parts,
    changed,
    in_codes,
    in_difference,
    in_integers,
    in_scale_of_codes,
    in_zero,
)


@lru_cache(maxsize=512)
def _once(change: Numbers, weights: Stored) -> F64:
    values: F64 = np.broadcast_to(change(weights).values, (weights.rows, weights.columns))
    return values


def partly(change: Numbers, kept: Callable[[Stored], Array], weights: Stored) -> Terms:
    """Wrong numbers where `kept` is true, and right ones elsewhere."""
    with np.errstate(all="ignore"):
        return Terms(np.where(kept(weights), _once(change, weights), weights.values))


def in_half(run: int, half: int, axis: int, weights: Stored) -> Array:
    """The rows (axis 0) or columns in one half of each run."""
    count = (weights.rows, weights.columns)[axis]
    there = np.arange(count) % run // (run // 2) == half
    return np.asarray(there[:, np.newaxis] if axis == 0 else there[np.newaxis])


def past(run: int, axis: int, weights: Stored) -> Array:
    """The rows or columns past the last whole run; the last run where all are whole."""
    count = (weights.rows, weights.columns)[axis]
    there = np.arange(count) >= (count - 1) // run * run
    return np.asarray(there[:, np.newaxis] if axis == 0 else there[np.newaxis])


def in_short_group(weights: Stored) -> Array:
    """The rows of a last group that is not whole.

    Raises:
        ValueError: rows have an index of groups.
    """
    if "g_idx" in weights.by_name:
        raise ValueError("groups are not runs of rows")
    return np.asarray((np.arange(weights.rows) >= weights.rows // run_of(weights) * run_of(weights))[:, np.newaxis])


def first_of(run: int, axis: int, weights: Stored) -> Array:
    count = (weights.rows, weights.columns)[axis]
    there = np.arange(count) < run
    return np.asarray(there[:, np.newaxis] if axis == 0 else there[np.newaxis])


def at_place(run: int, place: int, axis: int, weights: Stored) -> Array:
    """The rows or columns at one place of each word of some codes."""
    there = np.arange((weights.rows, weights.columns)[axis]) % run == place
    return np.asarray(there[:, np.newaxis] if axis == 0 else there[np.newaxis])


def places_of_words() -> Iterator[tuple[str, Callable[[Stored], Array]]]:
    """The two ends of a word, where shifts and masks are often special."""
    for axis, things in enumerate(("rows", "columns")):
        for run in (2, 4, 8, 16):
            for place, word in ((0, "first"), (run - 1, "last")):
                yield f"in the {word} of each {run} {things}", partial(at_place, run, place, axis)


def parts_of_a_matrix() -> Iterator[tuple[str, Callable[[Stored], Array]]]:
    yield "in a last group that is not whole", in_short_group
    for axis, things in enumerate(("rows", "columns")):
        yield f"in odd {things}", partial(in_half, 2, 1, axis)
        yield f"in even {things}", partial(in_half, 2, 0, axis)
        for run in (4, 8, 16, 32, 64, 128, 256) if axis == 0 else (4, 8, 16):
            for half, word in enumerate(("first", "second")):
                yield f"in the {word} half of each {run} {things}", partial(in_half, run, half, axis)
        for run in (1, 8, 16, 32, 128):
            yield f"in the last {things}, from the last multiple of {run}", partial(past, run, axis)
            yield f"in the first {run} {things}", partial(first_of, run, axis)


def scaled(factor: float, array: F64, parts: Parts) -> F64:
    return factor * array


def plain(array: F64, parts: Parts) -> F64:
    return np.ones_like(array)


def doubled(weights: Stored) -> Terms:
    return Terms(2 * weights.values)


def negated(weights: Stored) -> Terms:
    return Terms(-weights.values)


def none(weights: Stored) -> Terms:
    return Terms(0.0 * weights.values)


def cores() -> Named:
    """The kinds that are tried in a part of a matrix."""
    yield from ((name, cause, change) for name, (cause, change) in DECODES.items() if "transposed" not in name)
    for factor, said in ((16.0, "16 times as large: they are not shifted down"), (1 / 16, "a 16th: shifted twice")):
        change = partial(changed, in_codes, partial(scaled, factor))
        yield "stored-codes-not-shifted", f"Codes are {said}.", change
    yield "stored-scale-forgotten", "The scale is not applied.", partial(changed, in_scale_of_codes, plain)
    yield "stored-numbers-doubled", "Numbers are twice as large.", doubled
    yield "stored-numbers-negated", "Numbers have the other sign.", negated
    yield "stored-numbers-left-out", "Numbers are left out.", none
    for name, words, read in READ:
        yield (
            f"stored-codes-{name}",
            f"Codes are taken {words}.",
            partial(changed, in_codes, partial(in_integers, read)),
        )
    for name, words, number in DIFFERENCES:
        yield (
            f"stored-code-less-zero-{name}",
            f"The difference of code and zero {words}.",
            partial(in_difference, number),
        )


def sign_extended(least: int, array: F64, bits: int) -> F64:
    """Zeros from `least` on as negative numbers; they may be stored minus one."""
    return np.where(array >= 2.0 ** (bits - 1) + least, array - 2.0**bits, array)


def zeros_of_words() -> Named:
    """The kinds that are tried in zeros at the ends of a word."""
    for least in (0, 1):
        change = partial(changed, in_zero, partial(in_integers, partial(sign_extended, least)))
        stored = ", which are stored less one" if least else ""
        yield "stored-zero-in-twos-complement", f"Zeros{stored}, are taken as two's complement.", change
    for name, words, read in READ:
        change = partial(changed, in_zero, partial(in_integers, read))
        yield f"stored-zero-{name}", f"Zeros are taken {words}.", change


def of_some() -> Named:
    places = tuple(places_of_words())
    kinds = ((cores(), (*parts_of_a_matrix(), *places)), (zeros_of_words(), places))
    for some, parts in kinds:
        for name, cause, change in some:
            for where, kept in parts:
                yield f"{name}-in-part", f"{cause.removesuffix('.')}, {where} only.", partial(partly, change, kept)
