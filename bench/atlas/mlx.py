"""MLX: its CPU build, MX and affine weights. Affine ones are what KIVI stores for values: codes, scale and minimum.

Sums are declared as float32, as for the other projects: MLX's documentation says nothing about them.

Source: ``mlx.core.dequantize`` and ``quantized_matmul``, with their documentation.
"""

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from atlas.entry import RESULTS, Entry, Project, library
from lowbit.arrays import Array
from lowbit.backend import Range

mx = library("mlx.core")

BITS = {"mxfp4": 4, "mxfp8-e4m3": 8}
MODES = {"mxfp4": "mxfp4", "mxfp8-e4m3": "mxfp8"}
AFFINE = {"kivi-values": "float16", "kivi-values-bf16": "bfloat16"}
GROUPS = (32, 64, 128)


def given(array: Array) -> Any:
    """An array of MLX; bfloat16 by its patterns."""
    if array.dtype == ml_dtypes.bfloat16:
        return mx.array(array.view(np.uint16)).view(mx.bfloat16)
    return mx.array(array)


def taken(result: Any) -> Array:
    """What numpy makes of a result."""
    if result.dtype == mx.bfloat16:
        return np.ascontiguousarray(np.array(result.view(mx.uint16))).view(ml_dtypes.bfloat16)
    return np.ascontiguousarray(np.array(result))


def arguments(weights: Any, elements: Array, scale: Array) -> tuple[tuple[Any, Any], dict[str, Any]]:
    words = given(np.ascontiguousarray(elements).view(np.uint32))
    named = {"group_size": 32, "bits": BITS[weights.format], "mode": MODES[weights.format]}
    return (words, given(scale.view(np.uint8))), named


def microscaled(weights: Any, elements: Array, scale: Array, result: str) -> Array:
    tensors, named = arguments(weights, elements, scale)
    return taken(mx.dequantize(*tensors, **named, dtype=getattr(mx, result)).T)


def microscaled_product(x: Array, weights: Any, elements: Array, scale: Array) -> Array:
    tensors, named = arguments(weights, elements, scale)
    return taken(mx.quantized_matmul(given(x), *tensors, transpose=True, **named))


def affine(codes: Array, scale: Array, minimum: Array, bits: int, group_size: int) -> Array:
    words = given(codes.view(np.uint32))
    return taken(mx.dequantize(words, given(scale), given(minimum), group_size=group_size, bits=bits).T)


def affine_product(x: Array, codes: Array, scale: Array, minimum: Array, bits: int, group_size: int) -> Array:
    tensors = (given(codes.view(np.uint32)), given(scale), given(minimum))
    return taken(mx.quantized_matmul(given(x), *tensors, transpose=True, group_size=group_size, bits=bits))


def entries() -> Iterator[Entry]:
    """Each product is also tried with one row."""
    sizes: dict[str, object] = {"group_size": GROUPS, "rows": Range(128)}
    for format in MODES:
        limits: dict[str, object] = {"format": format, "result": RESULTS}
        yield Entry("dequantize", "microscaled", "formats.dequantize", limits, arrays="numpy")
    for format, scales in AFFINE.items():
        limits = {"format": format, "result": scales} | sizes
        yield Entry("dequantize, affine", "affine", "formats.dequantize", limits, arrays="numpy")
    for operation in ("linear.gemv", "linear.gemm"):
        for format in MODES:
            for type in RESULTS:
                limits = {"format": format, "activations": type, "result": type}
                yield Entry("quantized_matmul", "microscaled_product", operation, limits, arrays="numpy")
        for format, scales in AFFINE.items():
            limits = {"format": format, "activations": scales, "result": scales} | sizes
            yield Entry("quantized_matmul, affine", "affine_product", operation, limits, arrays="numpy")


PROJECT = Project("MLX", ("mlx", "mlx-cpu"), tuple(entries()))
