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


def qgemv(x: Any, words: Any, scales: Any, zeros: Any, *, bits: int, group_size: int, convention: str) -> Any:
    """The specification's own matrices of 2, 4 or 8 bits; with several vectors also the product of each."""
    shifts = bits * np.arange(32 // bits, dtype=np.uint32)
    codes = (words[:, np.newaxis] >> shifts[:, np.newaxis] & 2**bits - 1).reshape(-1, words.shape[1])
    group = np.arange(len(codes)) // group_size
    scale, zero = scales.astype(np.float64)[group], zeros.astype(np.float64)[group]
    weights = scale * codes + zero if convention == "minimum" else scale * (codes - zero)
    with np.errstate(all="ignore"):
        return (x.astype(np.float64) @ weights).astype(np.float32)


def qgemm_bfp(x_mantissas: Any, x_exponents: Any, x_format: Any, words: Any, **matrix: Any) -> Any:
    """The same with blocks of mantissas."""
    block = np.arange(x_mantissas.shape[1]) // x_format.block
    x = np.ldexp(x_mantissas.astype(np.float64), x_exponents[:, block])
    names = ("scales", "zeros", "bits", "group_size", "convention")
    return qgemv(x, words, **{name: matrix[name] for name in names})
