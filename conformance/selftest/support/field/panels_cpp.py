"""The kernels of panels.cpp by ctypes; ``panels.so`` lies beside this file once it has been compiled."""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from lowbit.tensor_formats.stored import Stored


@cache
def library() -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(__file__).with_name("panels.so")))


def called(name: str, arrays: list[Any], y: Any, *numbers: int) -> Any:
    """y, once the kernel has filled it: arrays by their addresses, numbers as longs."""
    addresses = [each.ctypes.data_as(ctypes.c_void_p) for each in (*arrays, y)]
    getattr(library(), name)(*addresses, *map(ctypes.c_long, numbers))
    return y


def like(x: Any, columns: int) -> Any:
    return np.empty((*x.shape[:-1], columns), x.dtype)


def single(x: Any, columns: int) -> Any:
    return np.empty((len(x), columns), np.float32)


def kind(x: Any) -> int:
    return int(x.dtype.name == "bfloat16")


def cast(name: str, x: Any, octets: int, block: int) -> Any:
    """The blocks of x as bytes, a row for each block."""
    wide = np.ascontiguousarray(x.astype(np.float32))
    y = np.empty((len(x), x.shape[1] // block * octets), np.uint8)
    return called(name, [wide], y, *x.shape)


def q4_k_interleaved(x_blocks: Any, blocks: Any, rows: int, columns: int) -> Any:
    return called("q4_k_interleaved", [x_blocks, blocks], single(x_blocks, columns), len(x_blocks), rows, columns)


def q4_k_halves(x: Any, blocks: Any, rows: int, columns: int) -> Any:
    return called("q4_k_halves", [x, blocks], like(x, columns), rows, columns, kind(x))


def cast_q8_k(x: Any, format: str, options: Any) -> Stored:
    return Stored(format, x.shape[1], len(x), (cast("cast_q8_k", x, 292, 256),), options)


def mxfp4_warp(x: Any, elements: Any, scale: Any, rows: int, columns: int) -> Any:
    return called("mxfp4_warp", [x, elements, scale], like(x, columns), rows, columns, kind(x))


def mxfp4_twos(x_blocks: Any, elements: Any, scale: Any, rows: int, columns: int) -> Any:
    arrays = [x_blocks, elements, scale]
    return called("mxfp4_twos", arrays, single(x_blocks, columns), len(x_blocks), rows, columns)


def cast_q8_0(x: Any, format: str, options: Any) -> Stored:
    return Stored(format, x.shape[1], len(x), (cast("cast_q8_0", x, 34, 32),), options)


def fp8_registers(x: Any, weight: Any, weight_scale: Any, rows: int, columns: int) -> Any:
    return called("fp8_registers", [x, weight, weight_scale], like(x, columns), len(x), rows, columns, kind(x))


def fp8_workspace(x: Any, weight: Any, weight_scale_inv: Any, rows: int, columns: int) -> Any:
    return called("fp8_workspace", [x, weight, weight_scale_inv], like(x, columns), rows, columns, kind(x))
