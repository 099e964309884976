"""Backends and functions that `lowbit bench` times in tests."""

import os
from typing import Any

import numpy as np

from lowbit.backend import Backend, Capabilities, Declaration
from lowbit.contract.rounding import Arithmetic
from lowbit_numpy import NumpyBackend


class Dies(NumpyBackend):
    """It ends its process when it is given a matrix."""

    name = "dies"

    def prepare(self, matrix: Any) -> Any:
        os.abort()


class Narrow(Backend):
    """It declares one width."""

    name = "narrow"

    def capabilities(self) -> Capabilities:
        return Capabilities({"linear.qgemv": Declaration({"bits": (2,)}, Arithmetic("dequantised"))})


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
