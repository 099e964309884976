"""Mistakes in addresses: element (i, j) of an array of J columns lies at ``i J + j``, and is read from elsewhere.

The address is a step for each row and one for each column. A wrong one takes another size for a step, or another index,
which comes to the same: a step of 0 for one index and the sum of both for the other. So every array of a format has
these mistakes, whatever it holds.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product as pairs

import numpy as np

from lowbit.arrays import Array
from lowbit.tensor_formats.stored import FORMATS, Stored
from lowbit.tensor_formats.table import Terms
from lowbit_conformance.defects.stored_codes import reread, run_of

Numbers = Callable[[Stored], Terms]
Size = Callable[[int, int, int, int, int, int], int]
"""Steps from the rows and columns of the array, from K and N, and from the number of groups with and without a short
last one."""

STEPS: dict[str, Size] = {
    "0": lambda i, j, k, n, g, w: 0,
    "1": lambda i, j, k, n, g, w: 1,
    "2": lambda i, j, k, n, g, w: 2,
    "J": lambda i, j, k, n, g, w: j,
    "J + 1": lambda i, j, k, n, g, w: j + 1,
    "J - 1": lambda i, j, k, n, g, w: j - 1,
    "2 J": lambda i, j, k, n, g, w: 2 * j,
    "4 J": lambda i, j, k, n, g, w: 4 * j,
    "8 J": lambda i, j, k, n, g, w: 8 * j,
    "J / 2": lambda i, j, k, n, g, w: j // 2,
    "J / 4": lambda i, j, k, n, g, w: j // 4,
    "J / 8": lambda i, j, k, n, g, w: j // 8,
    "I": lambda i, j, k, n, g, w: i,
    "K": lambda i, j, k, n, g, w: k,
    "N": lambda i, j, k, n, g, w: n,
    "G": lambda i, j, k, n, g, w: g,
    "K / 8": lambda i, j, k, n, g, w: k // 8,
    "N / 8": lambda i, j, k, n, g, w: n // 8,
}
OF_ROWS = tuple(STEPS)


def whole(width: int, up: bool, i: int, j: int, k: int, n: int, g: int, w: int) -> int:
    return -(-j // width) * width if up else j // width * width


for _width in (2, 4, 8, 16, 32, 64, 128):
    STEPS[f"J rounded down to {_width}"] = partial(whole, _width, False)
    STEPS[f"J rounded up to {_width}"] = partial(whole, _width, True)
for _width in (2, 4, 16, 32, 64, 128, 256):
    STEPS[f"K / {_width}"] = partial(lambda by, i, j, k, n, g, w: k // by, _width)
    STEPS[f"N / {_width}"] = partial(lambda by, i, j, k, n, g, w: n // by, _width)
STEPS |= {
    "the whole groups of K": lambda i, j, k, n, g, w: w,
    "the whole groups of K and one": lambda i, j, k, n, g, w: w + 1,
    "G / 8": lambda i, j, k, n, g, w: g // 8,
    "G / 8, rounded up": lambda i, j, k, n, g, w: -(-g // 8),
    "J + 2": lambda i, j, k, n, g, w: j + 2,
    "J - 2": lambda i, j, k, n, g, w: j - 2,
    "3 J": lambda i, j, k, n, g, w: 3 * j,
    "16 J": lambda i, j, k, n, g, w: 16 * j,
}
WHOLE = tuple(STEPS)[len(OF_ROWS) :]
"""Row steps in whole tiles of columns or of other sizes."""
OF_COLUMNS = ("1", "0", "2", "I", "J", "J + 1", "K", "N")
SHIFTS = (1, -1)


def read_at(row: str, column: str, shift: int, array: Array, sizes: tuple[int, ...]) -> Array:
    """The array with its rows and columns read at other addresses, which wrap at the end.

    Args:
        row, column: the names of the steps.
        shift: what is added to each address.
        array: of rows and columns.
        sizes: what `sizes_of` says of the matrix.

    Raises:
        ValueError: the array has no rows and columns.
    """
    if array.ndim < 2:
        raise ValueError("no matrix")
    i, j = array.shape[:2]
    at = np.arange(i)[:, np.newaxis] * STEPS[row](i, j, *sizes) + np.arange(j) * STEPS[column](i, j, *sizes) + shift
    return np.asarray(array.reshape(i * j, *array.shape[2:])[at % (i * j)])


def sizes_of(weights: Stored) -> tuple[int, ...]:
    """K, N, the number of groups including a short last one, and the number of whole groups."""
    run = run_of(weights)
    return weights.rows, weights.columns, -(-weights.rows // run), weights.rows // run


def with_array(name: str, row: str, column: str, shift: int, weights: Stored) -> Terms:
    """The numbers with one field read at other addresses, or whole blocks if no field is named.

    Raises:
        ValueError: the format has no such field.
    """
    fields = weights.table.fields_of(weights.by_name)
    if name and name not in fields:
        raise ValueError(f"no {name}")
    own = {each: np.ascontiguousarray(fields[each]) for each in ([name] if name else fields)}
    sizes = sizes_of(weights)
    return reread(weights, {each: read_at(row, column, shift, array, sizes) for each, array in own.items()})


def ways() -> Iterator[tuple[str, str, int]]:
    """Wrong steps and shifts; those with one right step come first."""
    steps = [pair for pair in pairs(OF_ROWS, OF_COLUMNS) if pair != ("J", "1")]
    for row, column in sorted(steps, key=lambda pair: (pair[0] != "J") + (pair[1] != "1")):
        yield row, column, 0
    for row in WHOLE:
        yield row, "1", 0
    for shift in SHIFTS:
        yield "J", "1", shift


def written(row: str, column: str, shift: int) -> str:
    """The address.

    >>> written("J / 2", "1", 0), written("0", "J + 1", 0), written("J", "1", -1)
    ('(J / 2) i + j', '(J + 1) j', 'J i + j - 1')
    """

    def times(step: str, index: str) -> list[str]:
        return (
            [] if step == "0" else [index if step == "1" else f"({step}) {index}" if " " in step else f"{step} {index}"]
        )

    total = " + ".join(times(row, "i") + times(column, "j")) or "0"
    return total + (f" {'+' if shift > 0 else '-'} {abs(shift)}" if shift else "")


def of_addresses(format: str) -> Iterator[tuple[str, str, Numbers]]:
    table = FORMATS[format]
    names = [(row.name, f"the field {row.name}", row.role) for row in table.fields]
    whole = [("", "the array of blocks", "blocks")] if table.block is not None and len(names) > 1 else []
    for name, said, role in (*whole, *names):
        if table.block is None and len(next(row.shape for row in table.fields if row.name == name)) != 2:
            continue
        for row, column, shift in ways():
            cause = f"Element (i, j) of {said}, which has I x J, is read at {written(row, column, shift)}."
            yield f"stored-{role}-of-another-stride", cause, partial(with_array, name, row, column, shift)
