"""Mistakes in the sums of a product with a stored matrix: what is added up, in which type, and from where on."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from lowbit.arrays import F64, Array
from lowbit.numbers.floats import FLOATS
from lowbit.tensor_formats.stored import Stored
from lowbit_conformance.defects.places import ORDERS, Order
from lowbit_conformance.defects.stored_codes import like, numbers_of
from lowbit_conformance.defects.stored_groups import group_of_row, row_of_group
from lowbit_conformance.defects.stored_parts import parts_of

Wrong = Callable[..., Array]


def zeros_alone(of_rows: bool, x: Any, weights: Stored, result: Any = "float32") -> Array:
    """The product in which zeros are added without x, once for each group or once for each row."""
    terms = weights.terms
    offsets = np.broadcast_to(terms.offsets, terms.products.shape)
    kept = offsets if of_rows else offsets[row_of_group(weights)]
    with np.errstate(all="ignore"):
        return like(x, numbers_of(x) @ terms.products + kept.sum(axis=0))


def of_all_vectors(x: Any, weights: Stored, result: Any = "float32") -> Array:
    """The product in which zeros are multiplied by the sum of all vectors."""
    terms, numbers = weights.terms, numbers_of(x)
    offsets = np.broadcast_to(terms.offsets, terms.products.shape)
    with np.errstate(all="ignore"):
        return like(x, numbers @ terms.products + numbers.sum(axis=0) @ offsets)


def of_other_vectors(order: Order, x: Any, weights: Stored, result: Any = "float32") -> Array:
    """The product in which zeros are multiplied by the sums of another vector."""
    terms, numbers = weights.terms, numbers_of(x)
    offsets, count = np.broadcast_to(terms.offsets, terms.products.shape), len(numbers)
    others = numbers[order(np.arange(count), count) % count]
    with np.errstate(all="ignore"):
        return like(x, numbers @ terms.products + others @ offsets)


def of_vector(part: str, x: Any, weights: Stored, result: Any = "float32") -> Array:
    """The product in which vector t uses the scale (or zero) of column t."""
    parts, numbers = parts_of(weights), numbers_of(x)
    columns = np.arange(len(numbers)) % weights.columns
    scale = np.broadcast_to(parts.scale, parts.units.shape)
    offsets = np.broadcast_to(parts.offsets, parts.units.shape)
    with np.errstate(all="ignore"):
        rows = [
            row @ (parts.units * (scale[:, [n]] if part == "scale" else scale))
            + row @ (offsets[:, [n]] if part == "zero" else offsets)
            for row, n in zip(numbers, columns, strict=True)
        ]
    return like(x, np.stack([np.broadcast_to(each, weights.columns) for each in rows]))


def narrow_sums(kind: Any, run: int, x: Any, weights: Stored, result: Any = "float32") -> Array:
    """The product with sums that are rounded to a narrow type after every term, in the order of the rows."""
    numbers, values = numbers_of(x).astype(np.float32), weights.values.astype(np.float32)
    total = np.zeros((len(numbers), values.shape[1]), np.float32)
    with np.errstate(all="ignore"):
        for row in range(0, len(values), run):
            term = numbers[:, row : row + run].astype(np.float64) @ values[row : row + run].astype(np.float64)
            total = (total + term.astype(np.float32)).astype(kind).astype(np.float32)
    return like(x, total.astype(np.float64))


def narrow_sums_of_x(kind: Any, at_each: bool, x: Any, weights: Stored, result: Any = "float32") -> Array:
    """The product in which the sums of x for zeros are rounded to a narrow type, at each step or once."""
    terms, numbers, groups = weights.terms, numbers_of(x), group_of_row(weights)
    offsets, first = np.broadcast_to(terms.offsets, terms.products.shape), row_of_group(weights)
    totals = np.zeros((len(numbers), len(first)))
    with np.errstate(all="ignore"):
        for group in range(len(first)):
            rows = numbers[:, groups == group]
            steps = range(1, rows.shape[1] + 1) if at_each else ()
            for at in steps:
                totals[:, group] = (totals[:, group] + rows[:, at - 1]).astype(kind)
            if not at_each:
                totals[:, group] = rows.sum(axis=1).astype(kind)
        return like(x, numbers @ terms.products + totals @ offsets[first])


NARROW = tuple(np.dtype(FLOATS[name].dtype) for name in ("float16", "bfloat16"))
TYPES = tuple(np.dtype(FLOATS[name].dtype) for name in ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"))


def through(kind: Any, of_x: bool, x: Any, weights: Stored, result: Any = "float32") -> Array:
    """The product with weights or x rounded to a narrow type.

    Raises:
        ValueError: x is stored.
    """
    if of_x and isinstance(x, Stored):
        raise ValueError("x is stored")
    numbers, values = numbers_of(x), weights.values
    with np.errstate(all="ignore"):
        if of_x:
            return like(x, numbers.astype(np.float32).astype(kind).astype(np.float64) @ values)
        return like(x, numbers @ values.astype(np.float32).astype(kind).astype(np.float64))


SUMS: tuple[tuple[str, str, Callable[..., Array]], ...] = (
    *(
        (f"{what}-in-{kind.name}", f"{said} rounded to {kind.name} before products.", partial(through, kind, of_x))
        for kind in TYPES
        for what, said, of_x in (("stored-weights", "Weights are", False), ("x", "x is", True))
    ),
    ("stored-zero-without-x", "Zeros are added once for each group, without x.", partial(zeros_alone, False)),
    ("stored-zero-without-x", "Zeros are added once for each row, without x.", partial(zeros_alone, True)),
    ("stored-zero-times-all-vectors", "Zeros meet the sum of x over all vectors.", of_all_vectors),
    ("stored-scale-of-the-vector", "Vector t meets the scale of column t.", partial(of_vector, "scale")),
    ("stored-zero-of-the-vector", "Vector t meets the zero of column t.", partial(of_vector, "zero")),
    *(
        (
            f"sums-in-{kind.name}",
            f"Sums are rounded to {kind.name} after every {f'{run} rows' if run > 1 else 'row'}.",
            partial(narrow_sums, kind, run),
        )
        for kind in NARROW
        for run in (1, 2, 4, 8, 16, 32, 64, 128, 256)
    ),
)


# **Runs**: sums of a group or a block that are scaled and added to a total.


def sums_of_runs(run: int, x: Any, weights: Stored) -> tuple[F64, F64, F64]:
    """For each run of rows: sums of products before they are scaled, the terms of zeros, and scales; T x N x runs.

    Args:
        run: its rows; 0 for a group, or for a block, which is scaled once even if its runs have their own scales.
        x: the activations.
        weights: the matrix.

    Raises:
        ValueError: scales change inside a run.
    """
    parts = parts_of(weights)
    shape = parts.units.shape
    labels = runs_of(run, weights)
    of_weights = np.broadcast_to(parts.scale, shape) if run or not weights.table.block else once(weights)
    own = numbers_of(x).T
    of_x = np.ones(own.shape)
    if isinstance(x, Stored):
        of_x = once(x) if x.table.block else np.broadcast_to(parts_of(x).scale, own.shape)
    scale, scale_x = constant(of_weights, labels), constant(of_x, labels)
    units, numbers = quotient(parts.units * parts.scale, of_weights), quotient(own, of_x).T
    added = quotient(np.broadcast_to(parts.offsets, shape), of_weights)
    of_run = [labels == label for label in np.unique(labels)]
    dots, rest = (np.stack([numbers[:, at] @ each[at] for at in of_run], axis=-1) for each in (units, added))
    return dots, rest, scale[np.newaxis] * scale_x[:, np.newaxis]


def once(stored: Stored) -> F64:
    """The scale of each block: its first field of scales that is a number.

    Raises:
        ValueError: there is none.
    """
    table = stored.table
    row = next((each for each in table.fields if each.role == "scale" and not each.shape), None)
    if row is None or table.block is None:
        raise ValueError("a block has no one scale")
    return np.repeat(table.fields_of(stored.by_name)[row.name].astype(np.float64).T, table.block, axis=0)


def quotient(numbers: F64, scale: F64) -> F64:
    return np.asarray(np.divide(numbers, scale, out=np.zeros(np.shape(numbers)), where=scale != 0), np.float64)


def constant(wide: F64, labels: Array) -> F64:
    """The numbers of each run of rows: columns x runs.

    Raises:
        ValueError: they change inside a run.
    """
    names, first = np.unique(labels, return_index=True)
    if (wide[first][np.searchsorted(names, labels)] != wide).any():
        raise ValueError("a run has several numbers")
    return np.asarray(wide[first].T)


def carried(what: str, over: str, run: int, x: Any, weights: Stored, result: Any = "float32") -> Array:
    """Sums of runs that are not reset: they begin with sums of earlier runs of a column, of all columns, or of all."""
    dots, rest, scale = sums_of_runs(run, x, weights)

    def added(array: F64) -> F64:
        kept = {"runs": array.shape, "columns": (len(array), -1), "vectors": (-1,)}[over]
        return np.asarray(np.cumsum(np.ascontiguousarray(array).reshape(kept), axis=-1).reshape(array.shape))

    with np.errstate(all="ignore"):
        terms = added(dots + rest) if what == "all" else added(dots) + rest
        return like(x, (terms * scale).sum(axis=-1))


def x_scaled_with_total(run: int, x: Any, weights: Stored, result: Any = "float32") -> Array:
    """The running total is multiplied by the scale of x once for each run.

    Raises:
        ValueError: x has no scales, or they change inside a run.
    """
    dots, rest, scale = sums_of_runs(run, x, weights)
    own, labels = scale_of_x(x), runs_of(run, weights)
    of_x = constant(own.T, labels)[:, np.newaxis]
    terms, total = quotient((dots + rest) * scale, np.broadcast_to(of_x, dots.shape)), np.zeros(dots.shape[:2])
    with np.errstate(all="ignore"):
        for at in range(dots.shape[2]):
            total = of_x[..., at] * (total + terms[..., at])
    return like(x, total)


def scaled_with_total(run: int, x: Any, weights: Stored, result: Any = "float32") -> Array:
    """The running total is scaled together with the sum of each run."""
    dots, rest, scale = sums_of_runs(run, x, weights)
    factors, total = np.broadcast_to(scale, dots.shape), np.zeros(dots.shape[:2])
    with np.errstate(all="ignore"):
        for at in range(dots.shape[2]):
            total = factors[..., at] * (total + (dots + rest)[..., at])
    return like(x, total)


def begun_with_total(run: int, x: Any, weights: Stored, result: Any = "float32") -> Array:
    """The sum of a run begins with the running total, and is scaled and added to it."""
    dots, rest, scale = sums_of_runs(run, x, weights)
    factors, total = np.broadcast_to(scale, dots.shape), np.zeros(dots.shape[:2])
    with np.errstate(all="ignore"):
        for at in range(dots.shape[2]):
            total = total + factors[..., at] * (total + (dots + rest)[..., at])
    return like(x, total)


def changed_runs(
    change: Callable[[F64], F64], what: str, run: int, x: Any, weights: Stored, result: Any = "float32"
) -> Array:
    """Integer sums of runs, of all terms or of codes alone, are changed before they are scaled.

    Raises:
        ValueError: x is not stored, so that sums are not integers.
    """
    if not isinstance(x, Stored):
        raise ValueError("sums are no integers")
    dots, rest, scale = sums_of_runs(run, x, weights)
    with np.errstate(all="ignore"):
        found = change(dots + rest) if what == "all" else change(dots) + rest
        return like(x, (found * scale).sum(axis=-1))


def truncated_steps(run: int, x: Any, weights: Stored, result: Any = "float32") -> Array:
    """The sum of a run is an integer, because it is rounded towards zero after each term."""
    parts, numbers, of_x = parts_of(weights), numbers_of(x), scale_of_x(x)
    units, codes = parts.units - parts.zero, quotient(numbers, of_x)
    labels = runs_of(run, weights)
    total, part = np.zeros((len(numbers), weights.columns)), np.zeros((len(numbers), weights.columns))
    scale = np.broadcast_to(parts.scale, units.shape)
    with np.errstate(all="ignore"):
        for k, row in enumerate(units):
            part = np.trunc(part + codes[:, [k]] * row)
            if k + 1 == len(units) or labels[k + 1] != labels[k]:
                total, part = total + part * scale[k] * of_x[:, [k]], np.zeros_like(part)
    return like(x, total)


def wrapped_sums_of_x(bits: int, x: Any, weights: Stored, result: Any = "float32") -> Array:
    """The sums of codes of x for zeros wrap in integers of some bits, group by group."""
    terms, groups, of_x = weights.terms, group_of_row(weights), scale_of_x(x)
    numbers, first = numbers_of(x), row_of_group(weights)
    offsets, codes = np.broadcast_to(terms.offsets, terms.products.shape), quotient(numbers, of_x)
    totals = np.stack([codes[:, groups == group].sum(axis=1) for group in range(len(first))], axis=1)
    with np.errstate(all="ignore"):
        return like(x, numbers @ terms.products + (wrapped(bits, totals) * of_x[:, first]) @ offsets[first])


def scale_of_x(x: Any) -> F64:
    """Of each activation, T × K.

    Raises:
        ValueError: x is not stored.
    """
    if not isinstance(x, Stored):
        raise ValueError("x has no scales")
    parts = parts_of(x)
    return np.ascontiguousarray(np.broadcast_to(parts.scale, parts.units.shape).T)


def runs_of(run: int, weights: Stored) -> Array:
    """The number of the run that each row is in. A run has `run` rows; if that is 0, it is a block or a group."""
    if run or weights.table.block:
        return np.arange(weights.rows) // (run or weights.table.block or 1)
    return group_of_row(weights)


def wrapped(bits: int, numbers: F64) -> F64:
    half, most = 2.0 ** (bits - 1), 2.0**bits
    return np.asarray((np.round(numbers) + half) % most - half)


def saturated(bits: int, numbers: F64) -> F64:
    half = 2.0 ** (bits - 1)
    return numbers.clip(-half, half - 1)


CHANGED: tuple[tuple[str, str, Callable[[F64], F64]], ...] = (
    ("wrap-in-16-bits", "wraps around in 16 bits", partial(wrapped, 16)),
    ("wrap-in-8-bits", "wraps around in 8 bits", partial(wrapped, 8)),
    ("saturate-in-16-bits", "saturates in 16 bits", partial(saturated, 16)),
    ("saturate-in-8-bits", "saturates in 8 bits", partial(saturated, 8)),
    ("truncated", "is rounded towards zero to an integer", np.trunc),
    ("rounded-down", "is rounded down to an integer", np.floor),
    ("rounded", "is rounded to an integer", np.rint),
)


def narrow_runs(kind: Any, run: int, x: Any, weights: Stored, result: Any = "float32") -> Array:
    """Sums of runs are rounded to a narrow type before they are scaled."""
    dots, rest, scale = sums_of_runs(run, x, weights)
    with np.errstate(all="ignore"):
        short = (dots + rest).astype(kind).astype(np.float64)
        return like(x, (short * scale).sum(axis=-1))


OVER = {"runs": "of the runs before", "columns": "of all runs and columns before", "vectors": "of all that came before"}


def of_sums() -> Iterator[tuple[str, str, Wrong]]:
    """All kinds of this module."""
    yield from SUMS
    for bits in (8, 16):
        cause = f"Sums of codes of x that meet zeros wrap around in {bits} bits."
        yield f"stored-sums-of-x-wrap-in-{bits}-bits", cause, partial(wrapped_sums_of_x, bits)
    for kind in NARROW:
        for at_each, said in ((True, "after every row"), (False, "once")):
            cause = f"Sums of x that meet zeros are rounded to {kind.name}, {said}."
            yield f"stored-sums-of-x-in-{kind.name}", cause, partial(narrow_sums_of_x, kind, at_each)
    for name, words, order in ORDERS[:11]:
        cause = f"Zeros meet the sums of x of other vectors: taken {words}."
        yield f"stored-zero-times-vectors-{name}", cause, partial(of_other_vectors, order)
    for run in (0, 16, 32):
        said = f"run of {run} rows" if run else "group or block"
        for what in ("all", "products"):
            for over, words in OVER.items():
                terms = "terms" if what == "all" else "products of codes"
                cause = f"The {terms} of a {said} are added to those {words}: the sum is not set to 0."
                yield "stored-sum-not-reset", cause, partial(carried, what, over, run)
        cause = f"The sum of a {said} begins with the total so far."
        yield "stored-sum-not-reset", cause, partial(begun_with_total, run)
        cause = f"The total so far is multiplied by the scale of each {said} as well."
        yield "stored-total-scaled-again", cause, partial(scaled_with_total, run)
        cause = f"The total so far is multiplied by the scale of x after each {said}, and not once."
        yield "x-total-scaled-again", cause, partial(x_scaled_with_total, run)
        for what, terms in (("all", "sum"), ("products", "sum of products of codes")):
            for name, words, change in CHANGED:
                cause = f"The {terms} of a {said} {words} before it is scaled."
                yield f"stored-sums-of-runs-{name}", cause, partial(changed_runs, change, what, run)
        cause = f"The sum of a {said} is kept as an integer: it is rounded towards zero after each term."
        yield "stored-sums-of-runs-in-integers", cause, partial(truncated_steps, run)
        for kind in NARROW:
            cause = f"The sum of a {said} is rounded to {kind.name} before it is scaled."
            yield f"sums-of-runs-in-{kind.name}", cause, partial(narrow_runs, kind, run)
