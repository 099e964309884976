"""Scales whose bytes are read as numbers of a shorter type: some bytes of each, or an array of shorter numbers."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from lowbit.arrays import Array
from lowbit.numbers.floats import FLOATS
from lowbit.tensor_formats.stored import Stored
from lowbit.tensor_formats.table import Field

Change = Callable[[Field, Array, Stored], Array]
SHORTER = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


def part_of(kind: np.dtype[Any], place: int, row: Field, array: Array, weights: Stored) -> Array:
    """Each number from one part of its own bytes."""
    parts = np.ascontiguousarray(array).view(kind).reshape(*array.shape, -1)
    return np.asarray(parts[..., place].astype(np.float64))


def packed(kind: np.dtype[Any], row: Field, array: Array, weights: Stored) -> Array:
    """The array as if its numbers had the shorter type, one after the other."""
    numbers = np.ascontiguousarray(array).view(kind).reshape(-1)
    return np.asarray(numbers[: array.size].reshape(array.shape).astype(np.float64))


def of_views(row: Field) -> Iterator[tuple[str, str, Change]]:
    """Names, words and changes of a field of floats."""
    own = row.numpy_dtype
    for name in SHORTER if row.dtype in FLOATS or own.kind == "f" else ():
        kind = np.dtype(FLOATS[name].dtype)
        for place in range(own.itemsize // kind.itemsize) if kind.itemsize < own.itemsize else ():
            words = f"as {name} from byte {place * kind.itemsize} of each number where it is {row.dtype}"
            yield f"read-as-{name}", words, partial(part_of, kind, place)
        if kind.itemsize < own.itemsize:
            yield f"read-as-{name}", f"as an array of {name} where it is one of {row.dtype}", partial(packed, kind)
