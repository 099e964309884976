"""Whether two results have the same bits, and where they differ if not.

Sums in the blocks of stored activations are not compared. They say what the codes say already, a result with a wrong
one is refused, and in a block of zeros, where they have no effect, ggml leaves them as they were.
"""

import hashlib
import json
from typing import Any

import numpy as np

from lowbit.backend.wire import encode
from lowbit.tensor_formats.stored import Stored


def fingerprint(value: Any) -> str:
    """A text that is equal for equal bits only."""
    if isinstance(value, Exception):
        return f"{type(value).__name__}: {value}".partition(" (")[0]
    if isinstance(value, Stored):
        value = without_sums(value)
    return json.dumps(encode(value, lambda array: {"bytes": hashlib.sha256(array.tobytes()).hexdigest()}))


def without_sums(value: Stored) -> Any:
    """The part of a stored matrix that is compared: all of it, or its fields without the sums."""
    if all(row.role != "sum" for row in value.table.fields):
        return value
    fields = value.table.fields_of(value.by_name)
    arrays = tuple(np.ascontiguousarray(fields[row.name]) for row in value.table.fields if row.role != "sum")
    return (value.format, value.rows, value.columns, value.options, arrays)


def same(first: Any, second: Any) -> bool:
    """Whether two results have the same bits."""
    if first is second:
        return True
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        return (first.dtype, first.shape) == (second.dtype, second.shape) and first.tobytes() == second.tobytes()
    return fingerprint(first) == fingerprint(second)


def difference(first: Any, second: Any) -> str:
    """Where two results differ, in a few words."""
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        if (first.dtype, first.shape) != (second.dtype, second.shape):
            return f"{first.dtype} {first.shape} and {second.dtype} {second.shape}"
        unsigned = f"u{first.dtype.itemsize}"
        places = np.flatnonzero(first.ravel().view(unsigned) != second.ravel().view(unsigned))
        index = [int(i) for i in np.unravel_index(places[0], first.shape)]
        values = f"{first.ravel()[places[0]]!s} and {second.ravel()[places[0]]!s}"
        return f"{len(places)} of {first.size} elements, first at {index}: {values}"
    return f"{str(first)[:120]} and {str(second)[:120]}"
