"""Groups, all of them at once: the whole groups of a matrix as one G × g × N block, then the short last group."""

from typing import Any

import numpy as np

from lowbit.arrays import F32, Array
from lowbit.errors import ArgumentError
from lowbit.quantization.affine import Convention, QuantizedMatrix, ScaleDtype, Scales
from lowbit.quantization.packing import Codes
from lowbit_numpy.codes import pack_bits, unpack_bits


def quantize_groups(
    weights: F32,
    *,
    bits: int,
    group_size: int,
    convention: Convention = "minimum",
    scale_dtype: ScaleDtype = "float32",
) -> QuantizedMatrix:
    """Float32 K × N to codes, scales and zeros, as in `lowbit.quantization.affine.quantize`."""
    blocks = [_quantize_block(block, bits, convention, np.dtype(scale_dtype)) for block in _blocks(weights, group_size)]
    codes, scales, zeros = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
    words = pack_bits(codes, bits)
    return QuantizedMatrix(words, scales, zeros, bits, weights.shape[0], group_size, convention)


def dequantize_groups(matrix: QuantizedMatrix) -> F32:
    """Codes, scales and zeros to float32 K × N, as in `lowbit.quantization.affine.dequantize`."""
    codes = unpack_bits(matrix.words, matrix.bits)
    scales, zeros = matrix.scales.astype(np.float32), matrix.zeros.astype(np.float32)
    weights = np.empty(codes.shape, np.float32)
    start = 0
    for block, out in zip(_blocks(codes, matrix.group_size), _blocks(weights, matrix.group_size), strict=True):
        scale, zero = scales[start : start + len(block), None], zeros[start : start + len(block), None]
        start += len(block)
        if matrix.convention == "minimum":
            np.multiply(scale, block, out=out)
            out += zero
        else:
            np.subtract(block, zero, out=out)
            out *= scale
    return weights


def _blocks(matrix: Array, group_size: int) -> list[Array]:
    """Views of K × N as G × g × N: all whole groups together, and the short last group on its own."""
    rows, columns = matrix.shape
    whole = rows - rows % group_size
    blocks = [matrix[:whole].reshape(-1, group_size, columns)] if whole else []
    return [*blocks, matrix[None, whole:]] if whole < rows else blocks


def _quantize_block(block: F32, bits: int, convention: Convention, dtype: np.dtype[Any]) -> tuple[Codes, Scales, Array]:
    """Codes (rows × N), scales and zeros (groups × N) of a G × g × N block."""
    levels = np.float32(2**bits - 1)
    low, high = block.min(axis=1), block.max(axis=1)
    if convention == "zero_point":
        low, high = np.minimum(low, 0), np.maximum(high, 0)
    with np.errstate(over="ignore", under="ignore"):
        scale, minimum = ((high - low) / levels).astype(dtype), low.astype(dtype)
    if not (np.isfinite(scale).all() and (convention == "zero_point" or np.isfinite(minimum).all())):
        given = f"{low.min()} to {high.max()}"
        raise ArgumentError("range of a group of weights", given, f"what a {dtype} scale and minimum can hold")
    scale = np.where(scale > 0, scale, dtype.type(1))
    wide = scale.astype(np.float32)
    zero = minimum if convention == "minimum" else np.clip(np.rint(-low / wide), 0, levels).astype(np.uint8)
    offset, wide = zero.astype(np.float32)[:, None], wide[:, None]
    real = np.rint((block - offset) / wide) if convention == "minimum" else np.rint(block / wide) + offset
    codes = np.clip(real, 0, levels).astype(np.uint8)
    return codes.reshape(-1, block.shape[2]), scale, zero
