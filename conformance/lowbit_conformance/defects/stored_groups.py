"""Mistakes in the groups of a stored matrix: which rows belong together, and by which group each is scaled."""

from functools import partial

import numpy as np
import numpy.typing as npt

from lowbit.tensor_formats.stored import Stored
from lowbit.tensor_formats.table import Terms
from lowbit_conformance.defects.places import Order
from lowbit_conformance.defects.stored_codes import run_of
from lowbit_conformance.defects.stored_parts import FEW, PLACED, Named, Numbers, Where, parts_of

Rows = npt.NDArray[np.int64]
SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)


# **Groups of another size**, tiles with the group of their first row, and words of another axis.


def group_of_row(weights: Stored) -> Rows:
    if "g_idx" in weights.by_name:
        return weights.by_name["g_idx"].astype(np.int64)
    return np.arange(weights.rows) // run_of(weights)


def row_of_group(weights: Stored) -> Rows:
    """One row of each group; for an empty group, that of the nearest lower group."""
    groups = group_of_row(weights)
    first = np.zeros(int(groups.max()) + 1, np.int64)
    found, rows = np.unique(groups, return_index=True)
    first[found] = rows
    return first


def of_rows_like(where: Where, rows: Rows, weights: Stored) -> Terms:
    """Each row uses what belongs to another."""
    parts = parts_of(weights)
    return where(parts, lambda array: np.asarray(np.broadcast_to(array, parts.units.shape)[rows]))


def of_size(where: Where, size: int, weights: Stored) -> Terms:
    """Row k uses what belongs to group ``k // size``, or to the last group past its end."""
    of_group = row_of_group(weights)
    wrong = np.minimum(np.arange(weights.rows) // size, len(of_group) - 1)
    return of_rows_like(where, of_group[wrong], weights)


def of_size_modulo(where: Where, size: int, weights: Stored) -> Terms:
    """Row k uses what belongs to group ``k // size`` modulo the number of groups."""
    of_group = row_of_group(weights)
    return of_rows_like(where, of_group[np.arange(weights.rows) // size % len(of_group)], weights)


def of_near_size(where: Where, by: int, weights: Stored) -> Terms:
    """Groups with some more or fewer rows."""
    return of_size(where, max(1, run_of(weights) + by), weights)


def of_equal_size(where: Where, weights: Stored) -> Terms:
    """Groups of the size that makes all equally long."""
    return of_size(where, -(-weights.rows // len(row_of_group(weights))), weights)


def where_in_order(change: Numbers, weights: Stored) -> Terms:
    """A mistake in a kernel's path for rows in the order of their groups.

    Raises:
        ValueError: there is no index of groups.
    """
    if "g_idx" not in weights.by_name:
        raise ValueError("there is no g_idx")
    index = weights.by_name["g_idx"]
    return change(weights) if (np.diff(index) >= 0).all() else weights.terms


def of_interleaved(where: Where, weights: Stored) -> Terms:
    """Row k uses what belongs to group k mod G."""
    of_group = row_of_group(weights)
    return of_rows_like(where, of_group[np.arange(weights.rows) % len(of_group)], weights)


def of_words(words_first: bool, where: Where, weights: Stored) -> Terms:
    """Row k is in word k mod W, at place k mod 8; or in word k / 8, at place k / W.

    Raises:
        ValueError: there are no whole words.
    """
    rows = np.arange(weights.rows)
    if weights.rows % 8:
        raise ValueError("there are no whole words")
    words = weights.rows // 8
    return of_rows_like(where, rows % words * 8 + rows % 8 if words_first else rows // 8 * 8 + rows // words, weights)


def of_index(where: Where, way: str, weights: Stored) -> Terms:
    """One part in the order of the rows, the others by the index of groups.

    Raises:
        ValueError: there is no index.
    """
    if "g_idx" not in weights.by_name:
        raise ValueError("there is no g_idx")
    of_group, rows = row_of_group(weights), np.arange(weights.rows)
    groups = {
        "sorted": np.sort(group_of_row(weights)),
        "divided": rows // max(1, run_of(weights)),
        "equal": rows * len(of_group) // len(rows),
    }[way]
    return of_rows_like(where, of_group[np.minimum(groups, len(of_group) - 1)], weights)


def of_tiles(where: Where, size: int, weights: Stored) -> Terms:
    """Row k uses what belongs to the first row of its tile."""
    return of_rows_like(where, np.arange(weights.rows) // size * size, weights)


def of_flat_size(size: int, weights: Stored) -> Terms:
    """Blocks that run along the rows of the matrix N x K as one vector, of another size.

    Raises:
        ValueError: blocks do not run so.
    """
    shapes = [row.shape[0] for row in weights.table.fields if row.role == "scale" and row.shape]
    own = run_of(weights)
    if not any(str(each).startswith("N*K") for each in shapes):
        raise ValueError("blocks do not run so")
    parts, flat = parts_of(weights), np.arange(weights.rows * weights.columns)
    taken = np.minimum(flat // size, flat[-1] // own) * own
    scale = parts.scale.T.reshape(-1)[taken].reshape(weights.columns, weights.rows).T
    return Terms(parts.units * scale, parts.offsets)


def by_place(where: Where, along: int, width: int, weights: Stored) -> Terms:
    """What is in words along one axis is found by the place along the other.

    Raises:
        ValueError: there are no whole words.
    """
    parts = parts_of(weights)
    rows, columns = np.indices(parts.units.shape)
    if parts.units.shape[along] % width:
        raise ValueError("there are no whole words")
    if along == 1:
        columns = columns // width * width + rows % width
    else:
        rows = rows // width * width + columns % width
    return where(parts, lambda array: np.asarray(np.broadcast_to(array, parts.units.shape)[rows, columns]))


def of_column_place(where: Where, width: int, weights: Stored) -> Terms:
    """Among groups that share an integer, the one at the place of the column is used."""
    of_group, groups, columns = row_of_group(weights), group_of_row(weights), np.arange(weights.columns)
    taken = groups[:, np.newaxis] // width * width + columns % width
    rows = of_group[np.minimum(taken, len(of_group) - 1)]
    return where(
        parts_of(weights),
        lambda array: np.take_along_axis(np.broadcast_to(array, (weights.rows, weights.columns)), rows, axis=0),
    )


def of_groups() -> Named:
    for what, ways in PLACED.items():
        said = what.replace("-", " ")
        for where in ways:
            for along, axis in enumerate(("rows", "columns")):
                for width in (2, 4, 8):
                    cause = f"Of {width} {axis} in an integer, the place along the other axis counts: the {said}."
                    yield f"stored-{what}-at-the-place-of-the-other-axis", cause, partial(by_place, where, along, width)
            for width in (2, 4, 8) if "codes" not in what else ():
                cause = f"Of {width} groups in an integer, the place of the column counts: the {said}."
                yield f"stored-{what}-at-the-place-of-the-column", cause, partial(of_column_place, where, width)
            for first in (False, True):
                cause = f"Words and places of rows are mistaken: the {said}."
                yield f"stored-{what}-of-another-word", cause, partial(of_words, first, where)
            for way in ("sorted", "divided", "equal") if "codes" not in what else ():
                cause = f"Only the {said} without g_idx, which the rest is taken by."
                yield f"stored-{what}-without-the-index", cause, partial(of_index, where, way)
            for name, words, order in FEW if "codes" not in what else ():
                change = partial(of_groups_in_order, where, order)
                yield f"stored-{what}-{name}-along-groups", f"Taken {words}, along the groups: the {said}.", change
            if "codes" not in what:
                cause = f"Row k uses what belongs to group k mod G: the {said}."
                yield f"stored-{what}-interleaved", cause, partial(of_interleaved, where)
            for by in (1, -1) if "codes" not in what else ():
                cause = f"Groups are taken to be a row {'longer' if by > 0 else 'shorter'}: the {said}."
                yield f"stored-{what}-of-groups-of-another-size", cause, partial(of_near_size, where, by)
            if "codes" not in what:
                cause = f"Groups are taken to have K over their number of rows: the {said}."
                yield f"stored-{what}-of-groups-of-another-size", cause, partial(of_equal_size, where)
            for size in SIZES if "codes" not in what else ():
                cause = f"Groups are taken to have {size} rows: the {said}."
                change = partial(of_size, where, size)
                yield f"stored-{what}-of-groups-of-{size}", cause, change
                cause = f"Groups are taken to have {size} rows, and the groups begin again after the last: the {said}."
                yield f"stored-{what}-of-groups-of-{size}", cause, partial(of_size_modulo, where, size)
                said_then = (
                    f"Where rows are in the order of their groups, these are taken to have {size} rows: the {said}."
                )
                yield f"stored-{what}-of-groups-of-{size}", said_then, partial(where_in_order, change)
                cause = f"All of {size} rows take what belongs to the first of them: the {said}."
                yield f"stored-{what}-of-the-first-of-{size}-rows", cause, partial(of_tiles, where, size)
    for way, said in (("the end", "from their group to the end"), ("the start", "from the start to their group")):
        yield "stored-zero-times-a-longer-sum", f"Zeros meet the sum of x {said}.", partial(added_up, way)
    yield "stored-scale-of-blocks-interleaved", "Number f has the scale of block f mod blocks.", of_flat_places
    cause = "Number f of n has the scale of number n - 1 - f: the scales of all numbers are reversed."
    yield "stored-scale-of-numbers-reversed", cause, of_flat_reversed
    yield "stored-zero-times-the-mean", "The zeros meet the mean of x in a group, and not its sum.", mean_of_x
    for size in SIZES:
        cause = f"Blocks are taken to have {size} numbers."
        yield f"stored-scale-of-blocks-of-{size}", cause, partial(of_flat_size, size)


def of_flat_places(weights: Stored) -> Terms:
    """Blocks that run along the rows of the matrix N x K as one vector: number f has the scale of block f mod blocks.

    Raises:
        ValueError: blocks do not run so.
    """
    shapes = [row.shape[0] for row in weights.table.fields if row.role == "scale" and row.shape]
    if not any(str(each).startswith("N*K") for each in shapes):
        raise ValueError("blocks do not run so")
    parts, flat, own = parts_of(weights), np.arange(weights.rows * weights.columns), run_of(weights)
    taken = flat % -(-len(flat) // own) * own
    scale = parts.scale.T.reshape(-1)[taken].reshape(weights.columns, weights.rows).T
    return Terms(parts.units * scale, -scale * parts.zero)


def of_flat_reversed(weights: Stored) -> Terms:
    """The same with number f of n, which has the scale of number n - 1 - f: scales are repeated, and then reversed.

    Raises:
        ValueError: blocks do not run so.
    """
    shapes = [row.shape[0] for row in weights.table.fields if row.role == "scale" and row.shape]
    if not any(str(each).startswith("N*K") for each in shapes):
        raise ValueError("blocks do not run so")
    parts = parts_of(weights)
    scale = parts.scale.T.reshape(-1)[::-1].reshape(weights.columns, weights.rows).T
    return Terms(parts.units * scale, -scale * parts.zero)


def added_up(way: str, weights: Stored) -> Terms:
    """Zeros multiplied by sums of x over more than their own group."""
    terms, groups = weights.terms, group_of_row(weights)
    first = np.broadcast_to(terms.offsets, terms.products.shape)[row_of_group(weights)]
    total = np.cumsum(first, axis=0) if way == "the end" else np.cumsum(first[::-1], axis=0)[::-1]
    return Terms(terms.products, total[groups])


def of_groups_in_order(where: Where, order: Order, weights: Stored) -> Terms:
    """Each group uses what belongs to another, by the index of groups."""
    of_group, groups = row_of_group(weights), group_of_row(weights)
    taken = order(np.arange(len(of_group)), len(of_group)) % len(of_group)
    return of_rows_like(where, of_group[taken[groups]], weights)


def mean_of_x(weights: Stored) -> Terms:
    """The zeros meet the mean of x in a group, and not its sum."""
    terms, groups = weights.terms, group_of_row(weights)
    sizes = np.bincount(groups)[groups][:, np.newaxis]
    return Terms(terms.products, np.broadcast_to(terms.offsets, terms.products.shape) / sizes)
