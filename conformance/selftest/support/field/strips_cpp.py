"""The kernels of strips.cpp by ctypes; ``strips.so`` lies beside this file once it has been compiled."""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np


@cache
def library() -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(__file__).with_name("strips.so")))


def called(name: str, arrays: list[Any], y: Any, *numbers: int) -> Any:
    """y, once the kernel has filled it: arrays by their addresses, numbers as longs."""
    addresses = [each.ctypes.data_as(ctypes.c_void_p) for each in (*arrays, y)]
    getattr(library(), name)(*addresses, *map(ctypes.c_long, numbers))
    return y


def like(x: Any, columns: int) -> Any:
    return np.empty((*x.shape[:-1], columns), x.dtype)


def kind(x: Any) -> int:
    return int(x.dtype.name == "bfloat16")


def gptq_sorted(x: Any, qweight: Any, qzeros: Any, scales: Any, g_idx: Any, rows: int, columns: int) -> Any:
    arrays = [x, qweight, qzeros, scales, g_idx]
    return called("gptq_sorted", arrays, like(x, columns), rows, columns, len(scales), kind(x))


def awq_split(x: Any, qweight: Any, qzeros: Any, scales: Any, group_size: int, rows: int, columns: int) -> Any:
    arrays = [x, qweight, qzeros, scales]
    return called("awq_split", arrays, like(x, columns), rows, columns, group_size, kind(x))


def q4_k_words(x_blocks: Any, blocks: Any, rows: int, columns: int) -> Any:
    y = np.empty((len(x_blocks), columns), np.float32)
    return called("q4_k_words", [x_blocks, blocks], y, len(x_blocks), rows, columns)


def mxfp4_pairs(x: Any, elements: Any, scale: Any, rows: int, columns: int) -> Any:
    return called("mxfp4_pairs", [x, elements, scale], like(x, columns), len(x), rows, columns, kind(x))


def fp8_shifted(x: Any, weight: Any, weight_scale_inv: Any, rows: int, columns: int) -> Any:
    return called("fp8_shifted", [x, weight, weight_scale_inv], like(x, columns), len(x), rows, columns, kind(x))
