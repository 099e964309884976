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
from lowbit_conformance.defects.stored_parts import parts_of
from lowbit_conformance.defects.stored_rows import group_of_row, row_of_group

Wrong = Callable[..., Array]


def zeros_alone(of_rows: bool, x: Any, weights: Stored, result: Any = "float32") -> Array:
    """The product where zeros are added without x, once for each group or once for each row."""
    terms = weights.terms
    offsets = np.broadcast_to(terms.offsets, terms.products.shape)
    kept = offsets if of_rows else offsets[row_of_group(weights)]
    with np.errstate(all="ignore"):
        return like(x, numbers_of(x) @ terms.products + kept.sum(axis=0))


def of_all_vectors(x: Any, weights: Stored, result: Any = "float32") -> Array:
    """The product where zeros meet the sum of all vectors."""
    terms, numbers = weights.terms, numbers_of(x)
    offsets = np.broadcast_to(terms.offsets, terms.products.shape)
    with np.errstate(all="ignore"):
        return like(x, numbers @ terms.products + numbers.sum(axis=0) @ offsets)


def of_other_vectors(order: Order, x: Any, weights: Stored, result: Any = "float32") -> Array:
    """The product where zeros meet the sums of another vector."""
    terms, numbers = weights.terms, numbers_of(x)
    offsets, count = np.broadcast_to(terms.offsets, terms.products.shape), len(numbers)
    others = numbers[order(np.arange(count), count) % count]
    with np.errstate(all="ignore"):
        return like(x, numbers @ terms.products + others @ offsets)


def of_vector(part: str, x: Any, weights: Stored, result: Any = "float32") -> Array:
    """The product where vector t meets the scale (or zero) of column t."""
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
    """The product where the sums of x that meet zeros are rounded to a narrow type, at each step or once."""
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
SUMS: tuple[tuple[str, str, Callable[..., Array]], ...] = (
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
    """Of each run of rows: sums of products before they are scaled, what zeros add, and scales; T x N x runs.

    Args:
        run: its rows; 0 for a group, or for a block, which is scaled once where its runs have scales of their own.
        x: the activations.
        weights: the matrix.

    Raises:
        ValueError: scales change inside a run.
    """
    parts, rows = parts_of(weights), np.arange(weights.rows)
    shape = parts.units.shape
    labels = rows // (run or weights.table.block or 1) if run or weights.table.block else group_of_row(weights)
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
    """Sums of runs that begin with what is left of the runs before them: of a column, of all columns, or of all."""
    dots, rest, scale = sums_of_runs(run, x, weights)

    def added(array: F64) -> F64:
        kept = {"runs": array.shape, "columns": (len(array), -1), "vectors": (-1,)}[over]
        return np.asarray(np.cumsum(np.ascontiguousarray(array).reshape(kept), axis=-1).reshape(array.shape))

    with np.errstate(all="ignore"):
        terms = added(dots + rest) if what == "all" else added(dots) + rest
        return like(x, (terms * scale).sum(axis=-1))


def begun_with_total(run: int, x: Any, weights: Stored, result: Any = "float32") -> Array:
    """The sum of a run begins with the total so far, and is scaled and added to it."""
    dots, rest, scale = sums_of_runs(run, x, weights)
    factors, total = np.broadcast_to(scale, dots.shape), np.zeros(dots.shape[:2])
    with np.errstate(all="ignore"):
        for at in range(dots.shape[2]):
            total = total + factors[..., at] * (total + (dots + rest)[..., at])
    return like(x, total)


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
        for kind in NARROW:
            cause = f"The sum of a {said} is rounded to {kind.name} before it is scaled."
            yield f"sums-of-runs-in-{kind.name}", cause, partial(narrow_runs, kind, run)
