"""Whether two results have the same bits, and where they differ if not."""

import hashlib
import json
from typing import Any

import numpy as np

from lowbit.backend.wire import encode


def fingerprint(value: Any) -> str:
    """A text that is equal for equal bits only."""
    if isinstance(value, Exception):
        return f"{type(value).__name__}: {value}".partition(" (")[0]
    return json.dumps(encode(value, lambda array: {"bytes": hashlib.sha256(array.tobytes()).hexdigest()}))


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
