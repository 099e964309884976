"""The kernels of more.cpp by ctypes; ``more.so`` lies beside this file once it has been compiled."""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np


@cache
def library() -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(__file__).with_name("more.so")))


def called(name: str, arrays: list[Any], y: Any, *numbers: int) -> Any:
    """y, once the kernel has filled it: arrays by their addresses, numbers as longs."""
    addresses = [each.ctypes.data_as(ctypes.c_void_p) for each in (*arrays, y)]
    getattr(library(), name)(*addresses, *map(ctypes.c_long, numbers))
    return y


def like(x: Any, columns: int) -> Any:
    return np.empty((*x.shape[:-1], columns), x.dtype)


def single(tokens: int, columns: int) -> Any:
    return np.empty((tokens, columns), np.float32)


def kind(x: Any) -> int:
    return int(x.dtype.name == "bfloat16")


def gptq_tiled(x: Any, qweight: Any, qzeros: Any, scales: Any, g_idx: Any, rows: int, columns: int) -> Any:
    arrays = [x, qweight, qzeros, scales, g_idx]
    return called("gptq_tiled", arrays, like(x, columns), len(x), rows, columns, kind(x))


def gptq_int8(
    x_codes: Any, x_scale: Any, qweight: Any, qzeros: Any, scales: Any, g_idx: Any, rows: int, columns: int
) -> Any:
    arrays, tokens = [x_codes, x_scale, qweight, qzeros, scales, g_idx], len(x_codes)
    return called("gptq_int8", arrays, single(tokens, columns), tokens, rows, columns, len(scales))


def awq_int8(
    x_codes: Any, x_scale: Any, qweight: Any, qzeros: Any, scales: Any, group_size: int, rows: int, columns: int
) -> Any:
    arrays, tokens = [x_codes, x_scale, qweight, qzeros, scales], len(x_codes)
    return called("awq_int8", arrays, single(tokens, columns), tokens, rows, columns, group_size)


def awq_vector(x: Any, qweight: Any, qzeros: Any, scales: Any, group_size: int, rows: int, columns: int) -> Any:
    arrays = [x, qweight, qzeros, scales]
    return called("awq_vector", arrays, like(x, columns), rows, columns, group_size, kind(x))


def q4_k(x: Any, blocks: Any, rows: int, columns: int) -> Any:
    return called("q4_k", [x, blocks], like(x, columns), len(x), rows, columns, kind(x))


def mxfp4_q8_0(x_blocks: Any, elements: Any, scale: Any, rows: int, columns: int) -> Any:
    tokens = len(x_blocks)
    return called("mxfp4_q8_0", [x_blocks, elements, scale], single(tokens, columns), tokens, rows, columns)


def mxfp4_int8(x_codes: Any, x_scale: Any, elements: Any, scale: Any, rows: int, columns: int) -> Any:
    arrays, tokens = [x_codes, x_scale, elements, scale], len(x_codes)
    return called("mxfp4_int8", arrays, single(tokens, columns), tokens, rows, columns)


def fp8_tiled(x: Any, weight: Any, weight_scale: Any, rows: int, columns: int) -> Any:
    return called("fp8_tiled", [x, weight, weight_scale], like(x, columns), len(x), rows, columns, kind(x))


def fp8_block_int8(x_codes: Any, x_scale: Any, weight: Any, weight_scale_inv: Any, rows: int, columns: int) -> Any:
    arrays, tokens = [x_codes, x_scale, weight, weight_scale_inv], len(x_codes)
    return called("fp8_block_int8", arrays, single(tokens, columns), tokens, rows, columns)
