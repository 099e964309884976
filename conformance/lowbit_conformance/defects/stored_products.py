"""Mistakes of products with stored matrices: rows that are left out, zeros that meet another sum, columns reordered."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np
import numpy.typing as npt

from lowbit.arrays import F64, Array
from lowbit.linear.elementary import product
from lowbit.tensor_formats.stored import Stored
from lowbit_conformance.defects.stored_codes import run_of

Rows = npt.NDArray[np.int64]
INTERLEAVED = (0, 2, 4, 6, 1, 3, 5, 7)
ORDERS = (INTERLEAVED, tuple(int(i) for i in np.argsort(INTERLEAVED)))
"""Orders in which kernels place and find the eight codes of a word."""
Sum = Callable[[F64, Stored], F64]
Kept = Callable[[Rows, Stored], Array]


def without(kept: Kept, x: F64, weights: Stored) -> F64:
    return product(x * kept(np.arange(weights.rows), weights), weights.values)


def kept_rows(kind: str, count: int, place: int, rows: Rows, weights: Stored) -> Array:
    """The rows that a sum includes.

    Raises:
        ValueError: there are none.
    """
    kept: Mapping[str, Array] = {
        "one-in": rows % count != place,
        "last": rows < max(weights.rows - count, 1),
        "past": rows < weights.rows // count * count,
        "all-but-last": rows // count == (weights.rows - 1) // count,
        "all-but-first": rows < count,
    }
    if not kept[kind].any():
        raise ValueError("no row is left")
    return kept[kind]


def last_group(rows: Rows, weights: Stored) -> Array:
    group = weights.by_name["g_idx"] if "g_idx" in weights.by_name else rows // run_of(weights)
    return np.asarray((group < group.max()) | (group.max() == 0))


def zeros_times_the_whole_sum(x: F64, weights: Stored) -> F64:
    """Each group applies its zero to the sum of all of x."""
    terms, run = weights.terms, run_of(weights)
    offsets = np.broadcast_to(terms.offsets, (weights.rows, weights.columns))
    if "g_idx" in weights.by_name:
        _, one_each = np.unique(weights.by_name["g_idx"], return_index=True)
    else:
        one_each = np.arange(0, weights.rows, run)
    total: F64 = product(x, terms.products) + x.sum(axis=1, keepdims=True) * offsets[one_each].sum(axis=0)
    return total


def columns_reordered(order: tuple[int, ...], x: F64, weights: Stored) -> F64:
    found = product(x, weights.values)
    return found.reshape(len(x), -1, 8)[..., list(order)].reshape(found.shape)


def of_sums() -> Iterator[tuple[str, str, Sum]]:
    def rows(kind: str, count: int, place: int = 0) -> Sum:
        return partial(without, partial(kept_rows, kind, count, place))

    for count in (2, 4, 8, 16):
        for place in range(count):
            cause = f"One of {count} rows is left out of each sum."
            yield f"stored-one-row-in-{count}-left-out", cause, rows("one-in", count, place)
    for count in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        yield f"stored-last-{count}-rows-left-out", f"The last {count} rows are left out.", rows("last", count)
        yield f"stored-rows-past-whole-{count}-left-out", f"Rows past whole {count} are left out.", rows("past", count)
        yield "stored-last-block-only", f"Only the last block of {count} rows counts.", rows("all-but-last", count)
        yield "stored-first-block-only", f"Only the first block of {count} rows counts.", rows("all-but-first", count)
    yield "stored-last-group-left-out", "The last group is left out.", partial(without, last_group)
    yield (
        "stored-zero-times-the-whole-sum",
        "Each zero is multiplied by the sum of all of x.",
        zeros_times_the_whole_sum,
    )
    for order in ORDERS:
        change = partial(columns_reordered, order)
        yield "stored-result-in-another-order", "Eight columns of a result are in the order of a word.", change
