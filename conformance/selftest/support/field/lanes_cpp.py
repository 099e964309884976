"""The kernels of lanes.cpp by ctypes; ``lanes.so`` lies beside this file once it has been compiled."""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np


@cache
def library() -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(__file__).with_name("lanes.so")))


def called(name: str, arrays: list[Any], y: Any, *numbers: int) -> Any:
    """y, once the kernel has filled it: arrays by their addresses, numbers as longs."""
    addresses = [each.ctypes.data_as(ctypes.c_void_p) for each in (*arrays, y)]
    getattr(library(), name)(*addresses, *map(ctypes.c_long, numbers))
    return y


def like(x: Any, columns: int) -> Any:
    return np.empty((*x.shape[:-1], columns), x.dtype)


def kind(x: Any) -> int:
    return int(x.dtype.name == "bfloat16")


def gptq_warp(x: Any, qweight: Any, qzeros: Any, scales: Any, g_idx: Any, rows: int, columns: int) -> Any:
    return called("gptq_warp", [x, qweight, qzeros, scales, g_idx], like(x, columns), rows, columns, kind(x))


def gptq_panels(x: Any, qweight: Any, qzeros: Any, scales: Any, g_idx: Any, rows: int, columns: int) -> Any:
    arrays = [x, qweight, qzeros, scales, g_idx]
    return called("gptq_panels", arrays, like(x, columns), len(x), rows, columns, kind(x))


def awq_warp(x: Any, qweight: Any, qzeros: Any, scales: Any, group_size: int, rows: int, columns: int) -> Any:
    return called("awq_warp", [x, qweight, qzeros, scales], like(x, columns), rows, columns, group_size, kind(x))


def awq_lookup(
    x_codes: Any, x_scale: Any, qweight: Any, qzeros: Any, scales: Any, group_size: int, rows: int, columns: int
) -> Any:
    arrays, y = [x_codes, x_scale, qweight, qzeros, scales], np.empty((len(x_codes), columns), np.float32)
    return called("awq_lookup", arrays, y, len(x_codes), rows, columns, group_size)
