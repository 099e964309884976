"""Which part of a stored matrix was read wrong, where no list has the mistake: the part is solved for from the results.

A product is linear in the scales, in the zeros, and in how often each row counts. If other scales and nothing else
explain the results, least squares finds these scales, and they leave no residual. That says something where there are
more results than scales: a hypothesis counts only then. So a mistake that nobody has thought of is located, and the
report says what stands in place of the right numbers.

`diagnosis` comes here last, and the hypotheses with the fewest numbers go first.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit.arrays import F64, Array
from lowbit.tensor_formats.stored import Stored
from lowbit.tensor_formats.table import Field
from lowbit_conformance.defects.defect import Defect, arithmetical
from lowbit_conformance.defects.stored import PRODUCTS, right_terms
from lowbit_conformance.defects.stored_codes import joined, like, numbers_of
from lowbit_conformance.defects.stored_family import multiplied
from lowbit_conformance.defects.stored_kinds import bits_of, with_fields
from lowbit_conformance.defects.stored_parts import parts_of

ENOUGH = 32
"""Least number of results beyond the number of unknowns, over all failures, for a hypothesis to count."""
MOST_ROWS = 1024
SNAPPED = 64
"""Row counts are rounded to multiples of one over this."""
NEAR = 1e-3
CLEAR = 0.25
"""Relative to the distance between two codes: values that are nearer to a code are read as that code."""
WORD = 32
CHOICES = 5
"""Number of results that count as much as the choice of a bit of a word; each result has more than one binary digit."""
MOST_CODE = 32
"""Relative to the largest right code: larger numbers are not codes."""
FAR = 16.0
"""How many times larger the squared distance from the right result must be than from the best fit."""
FINE = 16
"""The number of rows of a run that may have its own number."""
SAID = 3

Labels = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Fit:
    """The best fit of a hypothesis for one failure.

    Attributes:
        results: T × N.
        spare: results beyond the number of unknowns; not above 0 if the unknowns could give any results.
        said: the numbers in a few words.
        nothing: whether all wrong ones are 0; None if none is wrong, or if this has no meaning.
    """

    results: F64
    spare: int
    said: str
    nothing: bool | None = None


def lost(found: F64, right: F64) -> bool | None:
    """Whether all wrong numbers are 0; None if all are right."""
    with np.errstate(all="ignore"):
        wrong = np.isfinite(found) & (np.abs(found - right) > CLEAR * np.abs(right))
    return bool((np.abs(found[wrong]) <= CLEAR * np.abs(right[wrong])).all()) if wrong.any() else None


def alike(*arrays: F64) -> Labels:
    """For each row the number of its run; rows of one run are equal in all arrays."""
    _, labels = np.unique(np.concatenate(arrays, axis=1), axis=0, return_inverse=True)
    return labels.reshape(-1)


def summed(x: F64, matrix: F64, labels: Labels) -> F64:
    """The sums over the rows of each run: N × T × runs."""
    return np.stack([x[:, labels == run] @ matrix[labels == run] for run in range(labels.max() + 1)], axis=-1).swapaxes(
        0, 1
    )


def solve(design: F64, target: F64) -> tuple[F64, F64, int]:
    """For each problem the best numbers, their results, and the number of results minus that of numbers.

    Args:
        design: problems × results × numbers.
        target: problems × results.
    """
    sizes = np.abs(design).max(axis=1, keepdims=True)
    scaled = np.divide(design, sizes, out=np.zeros_like(design), where=sizes > 0)
    found = np.linalg.pinv(scaled, rcond=1e-9) @ target[..., np.newaxis]
    spare = len(design) * (design.shape[1] - design.shape[2])
    numbers = np.divide(found[..., 0], sizes[:, 0], out=np.full(found.shape[:2], np.nan), where=sizes[:, 0] > 0)
    return numbers, (scaled @ found)[..., 0], spare


def spoken(what: str, column: str, found: F64, right: F64) -> str:
    """The first wrong numbers in words; arrays are columns × runs."""
    with np.errstate(all="ignore"):
        other = np.argwhere(np.isfinite(found) & (np.abs(found - right) > NEAR * np.abs(right) + 1e-12))
    each = [f"{found[n, g]:.4g} where {right[n, g]:.4g} is right ({column} {n}, run {g})" for n, g in other[:SAID]]
    more = f", and {len(other) - SAID} others" if len(other) > SAID else ""
    return f"{what}: {', '.join(each)}{more}" if each else ""


# **Hypotheses**: the best fit for x, the matrix and the results.


def scales(x: Any, weights: Stored, given: F64) -> Fit:
    parts, numbers = parts_of(weights), numbers_of(x)
    scale = np.broadcast_to(parts.scale, parts.units.shape)
    labels = alike(scale, np.broadcast_to(parts.zero, scale.shape))
    found, results, spare = solve(summed(numbers, parts.units - parts.zero, labels), given.T)
    return Fit(results.T, spare, spoken("scales are", "column", found, scale[firsts(labels)].T))


def scales_of_fine_runs(x: Any, weights: Stored, given: F64) -> Fit:
    """The scales of short runs of rows, as if groups began elsewhere."""
    parts, numbers = parts_of(weights), numbers_of(x)
    scale = np.broadcast_to(parts.scale, parts.units.shape)
    fine = np.asarray(np.arange(len(scale))[:, np.newaxis] // FINE, np.float64)
    labels = alike(scale, np.broadcast_to(parts.zero, scale.shape), fine)
    found, results, spare = solve(summed(numbers, parts.units - parts.zero, labels), given.T)
    return Fit(results.T, spare, spoken("scales are", "column", found, scale[firsts(labels)].T))


def scales_of_codes(x: Any, weights: Stored, given: F64) -> Fit:
    parts, numbers = parts_of(weights), numbers_of(x)
    scale = np.broadcast_to(parts.scale, parts.units.shape)
    labels, rest = alike(scale), numbers @ np.broadcast_to(parts.offsets, scale.shape)
    found, results, spare = solve(summed(numbers, parts.units, labels), (given - rest).T)
    right = scale[firsts(labels)].T
    said = spoken("scales that meet codes are", "column", found, right)
    return Fit(results.T + rest, spare, said, lost(found, right))


def offsets(x: Any, weights: Stored, given: F64) -> Fit:
    parts, numbers = parts_of(weights), numbers_of(x)
    shape = parts.units.shape
    scale, own = np.broadcast_to(parts.scale, shape), np.broadcast_to(parts.offsets, shape)
    labels, rest = alike(scale, own), numbers @ (parts.units * scale)
    found, results, spare = solve(summed(numbers, np.ones(shape), labels), (given - rest).T)
    first = firsts(labels)
    with np.errstate(all="ignore"):
        zeros, right = -found / scale[first].T, -own[first].T / scale[first].T
    return Fit(results.T + rest, spare, spoken("zeros are", "column", zeros, right))


def scales_and_offsets(x: Any, weights: Stored, given: F64) -> Fit:
    parts, numbers = parts_of(weights), numbers_of(x)
    scale = np.broadcast_to(parts.scale, parts.units.shape)
    labels = alike(scale, np.broadcast_to(parts.offsets, scale.shape))
    both = [summed(numbers, parts.units, labels), summed(numbers, np.ones(scale.shape), labels)]
    found, results, spare = solve(np.concatenate(both, axis=-1), given.T)
    of_codes, right = found[:, : len(found[0]) // 2], scale[firsts(labels)].T
    return Fit(results.T, spare, spoken("scales are", "column", of_codes, right), lost(of_codes, right))


def firsts(labels: Labels) -> Labels:
    return np.unique(labels, return_index=True)[1]


def rows(x: Any, weights: Stored, given: F64) -> Fit:
    """How often each row counts, for all columns and vectors alike."""
    numbers, values = numbers_of(x), weights.values
    if len(values) > MOST_ROWS:
        return Fit(given, 0, "")
    gram = (numbers.T @ numbers) * (values @ values.T)
    asked = (numbers.T @ given * values).sum(axis=1)
    sizes = np.sqrt(np.diagonal(gram))
    met = sizes > 0
    sizes = np.where(met, sizes, 1.0)
    found = np.linalg.lstsq(gram / np.outer(sizes, sizes), asked / sizes, rcond=1e-10)[0] / sizes
    snapped = np.round(found * SNAPPED) / SNAPPED
    other = np.flatnonzero((snapped != 1) & met)
    each = [f"row {k} {snapped[k]:g} times" for k in other[:SAID]]
    more = f", and {len(other) - SAID} others" if len(other) > SAID else ""
    spare = given.size - len(values)
    return Fit(numbers * snapped @ values, spare, f"counted: {', '.join(each)}{more}")


def columns(x: Any, weights: Stored, given: F64) -> Fit:
    """A factor for each column."""
    right = (numbers_of(x) @ weights.values).T
    found, results, spare = solve(right[:, :, np.newaxis], given.T)
    return Fit(results.T, spare, spoken("factors are", "column", found, np.ones_like(found)))


def vectors(x: Any, weights: Stored, given: F64) -> Fit:
    """A factor for each vector."""
    right = numbers_of(x) @ weights.values
    found, results, spare = solve(right[:, :, np.newaxis], given)
    return Fit(results, spare, spoken("factors are", "vector", found, np.ones_like(found)))


def scales_of_x(which: str, x: Any, weights: Stored, given: F64) -> Fit:
    """The scales of stored activations, for all of the weights, for codes only, or for zeros only.

    Raises:
        ValueError: x is not stored.
    """
    if not isinstance(x, Stored):
        raise ValueError("x has no scales")
    parts, terms = parts_of(x), weights.terms
    added = np.broadcast_to(terms.offsets, terms.products.shape)
    meets = {"all": weights.values, "codes": terms.products, "zeros": added}[which]
    rest = x.values.T @ (weights.values - meets)
    scale = np.broadcast_to(parts.scale, parts.units.shape)
    labels = alike(scale)
    units = (parts.units - parts.zero).T
    design = np.stack([units[:, labels == run] @ meets[labels == run] for run in range(labels.max() + 1)], axis=-1)
    found, results, spare = solve(design, given - rest)
    return Fit(results + rest, spare, spoken("scales of x are", "vector", found, scale[firsts(labels)].T))


def sums_of_x(x: Any, weights: Stored, given: F64) -> Fit:
    """The sums of x for zeros or minima, for each run of rows that is equal in every column.

    Raises:
        ValueError: there are no zeros.
    """
    terms, numbers = weights.terms, numbers_of(x)
    added = np.broadcast_to(terms.offsets, terms.products.shape)
    if not added.any():
        raise ValueError("there are no zeros")
    labels, rest = alike(added), numbers @ terms.products
    design = np.broadcast_to(added[firsts(labels)].T, (len(numbers), added.shape[1], labels.max() + 1))
    found, results, spare = solve(np.ascontiguousarray(design), given - rest)
    right = np.stack([numbers[:, labels == run].sum(axis=1) for run in range(labels.max() + 1)], axis=-1)
    return Fit(results + rest, spare, spoken("sums of x that meet zeros are", "vector", found, right))


# **Words** of several columns: each column is read from the bits that explain it best.


def at_bit(bit: int, row: Field, array: Array, weights: Stored) -> Array:
    """The same code at all places of a word."""
    bits = bits_of(weights)
    wide = np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}").astype(np.uint64)
    code = wide >> np.uint64(bit) & np.uint64(2**bits - 1)
    return joined(np.stack([code] * (8 * array.dtype.itemsize // bits), axis=-1), array, bits)


def bits_of_words(roles: tuple[str, ...], x: Any, weights: Stored, given: F64) -> Fit:
    """For each place of a word, the bits that its columns are read from.

    Raises:
        ValueError: words do not hold several columns.
    """
    own = [each for each in weights.table.fields if each.role in roles]
    places = WORD // bits_of(weights)
    if {each.role for each in own} != set(roles) or any(each.dtype != "int32" for each in own):
        raise ValueError("there are no words")
    if weights.columns % places:
        raise ValueError("there are no whole words")
    numbers = numbers_of(x)
    read = np.stack([numbers @ with_fields(partial(at_bit, bit), roles, weights).values for bit in range(WORD)])
    away = np.square(read - given).sum(axis=1).reshape(WORD, -1, places).sum(axis=1)
    chosen = away.argmin(axis=0)
    results = read[np.tile(chosen, weights.columns // places), :, np.arange(weights.columns)].T
    said = f"bits {', '.join(map(str, chosen))} on for the columns of a word"
    return Fit(results, given.size - places * CHOICES, said)


# **Codes**, which are integers or numbers of a table; if x is invertible, each can be determined.


def matrix_of(x: Any, given: F64) -> F64:
    """The matrix that the backend multiplied by.

    Raises:
        ValueError: x does not determine it.
    """
    numbers = numbers_of(x)
    if numbers.shape[0] != numbers.shape[1] or np.linalg.matrix_rank(numbers) < len(numbers):
        raise ValueError("x says only sums")
    return np.asarray(np.linalg.solve(numbers, given), np.float64)


def codes(with_zeros: bool, x: Any, weights: Stored, given: F64) -> Fit:
    """Other codes, or other differences of codes and zeros.

    Raises:
        ValueError: the fitted codes are not integers, or not values of a code.
    """
    parts = parts_of(weights)
    scale, shape = np.broadcast_to(parts.scale, parts.units.shape), parts.units.shape
    try:
        matrix = matrix_of(x, given)
    except ValueError:
        return Fit(given, 0, "")
    if with_zeros and not parts.bits:
        raise ValueError("there are no zeros")
    right = parts.units - parts.zero if with_zeros else parts.units
    base = np.zeros(shape) if with_zeros else np.broadcast_to(parts.offsets, shape)
    there = scale != 0
    seen = np.divide(matrix - base, scale, out=right.copy(), where=there)
    table = np.unique(parts.units) if not parts.bits else None
    nearest = np.round(seen) if table is None else table[np.abs(seen[..., np.newaxis] - table).argmin(axis=-1)]
    found = np.asarray(nearest, np.float64)
    gap = np.ones(shape) if table is None else np.maximum(np.diff(table).min(), np.abs(found) / 16)
    signless = not with_zeros and right.min() >= 0
    if (np.abs(seen - found) > CLEAR * gap).any() or (signless and found.min() < 0):
        raise ValueError("these are no codes")
    if np.abs(found).max() > MOST_CODE * (1 + np.abs(right).max()):
        raise ValueError("these are no codes")
    return Fit(numbers_of(x) @ (found * scale + base), int(there.sum()), moved(found, right))


def moved(found: F64, right: F64) -> str:
    """The rows or columns whose codes were used in place of the right ones, or these codes."""
    for axis, line in enumerate(("row", "column")):
        theirs, ours = np.moveaxis(found, axis, 0), np.moveaxis(right, axis, 0)
        wrong = np.flatnonzero((theirs != ours).any(axis=1))
        same = (theirs[wrong, np.newaxis] == ours).all(axis=2)
        if len(wrong) and same.any(axis=1).all():
            pairs = [f"{line} {k} has those of {line} {same[i].argmax()}" for i, k in enumerate(wrong[:SAID])]
            return ", ".join(pairs) + (f", and {len(wrong) - SAID} others" if len(wrong) > SAID else "")
    other = np.argwhere(found != right)
    each = [f"{found[k, n]:.4g} where {right[k, n]:.4g} is right (row {k}, column {n})" for k, n in other[:SAID]]
    return ", ".join(each) + (f", and {len(other) - SAID} others" if len(other) > SAID else "")


Hypothesis = Callable[[Any, Stored, F64], Fit]
HYPOTHESES: tuple[tuple[str, str, Hypothesis], ...] = (
    ("result-columns-times-factors", "Each column of the result is multiplied by a number", columns),
    ("result-vectors-times-factors", "Each vector of the result is multiplied by a number", vectors),
    ("stored-rows-counted-otherwise", "Rows are not counted exactly once", rows),
    *(
        (f"x-scale-other-numbers{end}", f"Only the scales of x are wrong{said}", partial(scales_of_x, which))
        for which, end, said in (
            ("all", "", ""),
            ("codes", "-for-codes", ", where they meet codes"),
            ("zeros", "-for-zeros", ", where they meet zeros or minima"),
        )
    ),
    ("x-sums-other-numbers", "Only the sums of x that meet zeros or minima are wrong", sums_of_x),
    ("stored-scale-other-numbers", "Only the scales are wrong", scales),
    ("stored-scale-other-numbers", "Only the scales that meet codes are wrong", scales_of_codes),
    *(
        (f"stored-{'-and-'.join(said)}-of-other-bits", f"The {' and '.join(said)} of a word are read from", change)
        for said, change in (
            (("codes",), partial(bits_of_words, ("codes",))),
            (("zeros",), partial(bits_of_words, ("zero",))),
            (("codes", "zeros"), partial(bits_of_words, ("codes", "zero"))),
        )
    ),
    ("stored-zero-other-numbers", "Only the zeros or minima are wrong", offsets),
    ("stored-scale-other-numbers", "Only the scales are wrong, also inside of groups", scales_of_fine_runs),
    ("stored-codes-other-numbers", "Only the codes are wrong, or they meet x of other rows", partial(codes, False)),
    ("stored-scale-and-zero-other-numbers", "Scales and zeros are wrong, and codes are right", scales_and_offsets),
    ("stored-codes-and-zeros-other-numbers", "Codes and zeros are wrong, and scales are right", partial(codes, True)),
)


CODES_LOST = ("stored-codes-left-out", "Codes count as nothing where they are wrong")


# **As defects**: each gives the fitted results for its failures, and right results elsewhere.


def replayed(fits: list[tuple[Any, Stored, F64]], x: Any, weights: Stored, result: Any = "float32") -> Array:
    for own, matrix, results in fits:
        if own is x and matrix is weights:
            return like(x, results)
    return multiplied(right_terms, x, weights, result)


def of_solved(failures: list[Any], operation: str) -> Iterator[Defect]:
    """The hypotheses that the failures allow; those without evidence are left out."""
    if operation not in PRODUCTS or any(np.shape(each.given) != np.shape(each.right) for each in failures):
        return
    for name, cause, hypothesis in HYPOTHESES:
        found = fitted(hypothesis, sorted(failures, key=lambda each: int(each.size)))
        telling = [fit for _, fit in found if fit.spare > 0]
        if sum(fit.spare for fit in telling) < ENOUGH:
            continue
        if {fit.nothing for fit in telling} - {None} == {True}:
            name, cause = CODES_LOST
        said = next((fit.said for fit in telling if fit.said), "")
        fits = [(one.arguments[0], one.arguments[1], fit.results) for one, fit in found]
        words = f"{cause}{f': {said}' if said else ''}."
        yield arithmetical(name, words, "", {operation: partial(replayed, fits)})


def fitted(hypothesis: Hypothesis, failures: list[Any]) -> list[tuple[Any, Fit]]:
    """Each failure with its best fit; None if one fit is bad.

    Failures with fewer results than unknowns, or with non-finite results, are no evidence.
    """
    found = []
    for one in failures:
        given = np.atleast_2d(one.given).astype(np.float64)
        fit = Fit(given, 0, "")
        if np.isfinite(given).all():
            try:
                best = hypothesis(one.arguments[0], one.arguments[1], given)
            except (ValueError, np.linalg.LinAlgError):
                return []
            fit = best if best.spare > 0 else fit
        away, wrong = np.square(fit.results - given), np.square(np.atleast_2d(one.right).astype(np.float64) - given)
        if np.nansum(away) * FAR > np.nansum(wrong) and fit.spare > 0:
            return []
        found.append((one, fit))
    return found
