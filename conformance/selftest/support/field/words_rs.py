"""The kernels of words.rs by ctypes; ``words.so`` lies beside this file once it has been compiled."""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np


@cache
def library() -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(__file__).with_name("words.so")))


def called(name: str, arrays: list[Any], y: Any, *numbers: int) -> Any:
    """y, once the kernel has filled it: arrays by their addresses, numbers as sizes."""
    addresses = [each.ctypes.data_as(ctypes.c_void_p) for each in (*arrays, y)]
    getattr(library(), name)(*addresses, *map(ctypes.c_size_t, numbers))
    return y


def gptq(x: Any, qweight: Any, qzeros: Any, scales: Any, g_idx: Any, rows: int, columns: int) -> Any:
    y = np.empty((len(x), columns), x.dtype)
    return called("gptq", [x, qweight, qzeros, scales, g_idx], y, len(x), rows, columns)


def awq(x: Any, qweight: Any, qzeros: Any, scales: Any, group_size: int, rows: int, columns: int) -> Any:
    return called("awq", [x, qweight, qzeros, scales], np.empty(columns, x.dtype), rows, columns, group_size)


def q4_k_q8_k(x_blocks: Any, blocks: Any, rows: int, columns: int) -> Any:
    y = np.empty((len(x_blocks), columns), np.float32)
    return called("q4_k_q8_k", [x_blocks, blocks], y, len(x_blocks), rows, columns)
