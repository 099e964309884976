"""The kernels of kernels.rs by ctypes; ``kernels_rs.so`` lies beside this file once it has been compiled."""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np


@cache
def library() -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(__file__).with_name("kernels_rs.so")))


def call(name: str, arrays: list[Any], *numbers: int) -> None:
    """Each array by its address, each number as a size."""
    getattr(library(), name)(*(each.ctypes.data_as(ctypes.c_void_p) for each in arrays), *map(ctypes.c_size_t, numbers))


def mxfp4(x: Any, elements: Any, scale: Any, rows: int, columns: int) -> Any:
    y = np.empty((len(x), columns), x.dtype)
    call("mxfp4", [x, elements, scale, y], len(x), rows, columns)
    return y


def fp8_channel(x: Any, weight: Any, weight_scale: Any, rows: int, columns: int) -> Any:
    y = np.empty((len(x), columns), x.dtype)
    call("fp8_channel", [x, weight, weight_scale, y], len(x), rows, columns)
    return y


def q4_0_q8_0(x_blocks: Any, blocks: Any, rows: int, columns: int) -> Any:
    y = np.empty((len(x_blocks), columns), np.float32)
    call("q4_0_q8_0", [x_blocks, blocks, y], len(x_blocks), rows, columns)
    return y
