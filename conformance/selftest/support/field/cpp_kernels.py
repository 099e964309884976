"""The kernels of kernels.cpp by ctypes; ``kernels.so`` lies beside this file once it has been compiled."""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np


@cache
def library() -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(__file__).with_name("kernels.so")))


def call(name: str, arrays: list[Any], *numbers: int) -> None:
    """Each array by its address, each number as a long but the last, which an int holds as well."""
    getattr(library(), name)(*(each.ctypes.data_as(ctypes.c_void_p) for each in arrays), *map(ctypes.c_long, numbers))


def result(x: Any, columns: int) -> tuple[Any, int, int]:
    """An array for the result, the number of vectors, and what kind of 16 bits they are."""
    return np.empty((*x.shape[:-1], columns), x.dtype), x.size // x.shape[-1], int(x.dtype.name == "bfloat16")


def gptq(x: Any, qweight: Any, qzeros: Any, scales: Any, g_idx: Any, rows: int, columns: int) -> Any:
    y, vectors, kind = result(x, columns)
    call("gptq", [x, qweight, qzeros, scales, g_idx, y], vectors, rows, columns, kind)
    return y


def awq(x: Any, qweight: Any, qzeros: Any, scales: Any, group_size: int, rows: int, columns: int) -> Any:
    y, vectors, kind = result(x, columns)
    call("awq", [x, qweight, qzeros, scales, y], vectors, rows, columns, group_size, kind)
    return y


def q4_k_q8_k(x_blocks: Any, blocks: Any, rows: int, columns: int) -> Any:
    y = np.empty((len(x_blocks), columns), np.float32)
    call("q4_k_q8_k", [x_blocks, blocks, y], len(x_blocks), rows, columns)
    return y


def mxfp4(x: Any, elements: Any, scale: Any, rows: int, columns: int) -> Any:
    y, vectors, kind = result(x, columns)
    call("mxfp4", [x, elements, scale, y], vectors, rows, columns, kind)
    return y


def fp8_block(x: Any, weight: Any, weight_scale_inv: Any, rows: int, columns: int) -> Any:
    y, vectors, kind = result(x, columns)
    call("fp8_block", [x, weight, weight_scale_inv, y], vectors, rows, columns, kind)
    return y
