"""Functions that `lowbit bench` times in tests; they import no backend, as the suite asks of them."""

from typing import Any

import numpy as np


def gemv(x: Any, blocks: Any, rows: int, columns: int) -> Any:
    """Q8_0 in float64."""
    records = blocks.reshape(columns, -1, 34)
    scales = np.ascontiguousarray(records[..., :2]).view(np.float16).astype(np.float64)
    weights = (scales * records[..., 2:].view(np.int8)).reshape(columns, rows)
    with np.errstate(all="ignore"):
        return (weights @ x.astype(np.float64)).astype(np.float32)


def wrong(x: Any, blocks: Any, rows: int, columns: int) -> Any:
    """The same twice as large."""
    return 2 * gemv(x, blocks, rows, columns)


def narrow(x: Any, blocks: Any, rows: int, columns: int) -> Any:
    """Wrong for fewer than 32 columns only."""
    return (wrong if columns < 32 else gemv)(x, blocks, rows, columns)
