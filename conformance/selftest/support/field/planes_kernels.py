"""Products with stored matrices in numpy: low and high halves of bytes as two planes, blocks and strips in turn."""

from typing import Any

import ml_dtypes
import numpy as np

DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int32)
E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def gptq_planes(x_codes: Any, x_scale: Any, qweight: Any, qzeros: Any, scales: Any, g_idx: Any) -> Any:
    """GPTQ of 4 bits, zeros stored less one, times int8: the zero of a group meets the sum of its codes of x."""
    octets, pairs = np.ascontiguousarray(qweight.T).view(np.uint8), qzeros.view(np.uint8)
    codes = np.empty((len(octets), x_codes.shape[1]), np.int32)
    codes[:, 0::2], codes[:, 1::2] = octets & 15, octets >> 4
    zeros = np.empty(scales.shape, np.int32)
    zeros[:, 0::2] = (pairs & 15) + 1
    zeros[:, 1::2] = (pairs >> 4) + 1
    y = np.zeros((len(x_codes), len(octets)), np.float32)
    for group, scale in enumerate(scales.astype(np.float32)):
        rows = np.flatnonzero(g_idx == group)
        own = x_codes[:, rows].astype(np.int32)
        sums = own @ codes[:, rows].T - own.sum(axis=1, keepdims=True) * zeros[group]
        y += sums.astype(np.float32) * scale
    return y * x_scale


def q4_k_chosen(x: Any, blocks: Any) -> Any:
    """Q4_K: block after block, its scales and minima chosen from both places of the twelve bytes."""
    records = blocks.reshape(len(blocks), -1, 144)
    run = np.arange(8)
    place = run % 4
    y = np.zeros((len(x), len(blocks)), np.float32)
    for b in range(records.shape[1]):
        block = records[:, b]
        d, dmin = np.ascontiguousarray(block[:, :4]).view(np.float16).astype(np.float32).T
        first, second, third = (block[:, start + place] for start in (4, 8, 12))
        scale = np.where(run < 4, first & 63, (third & 15) | (first >> 6) << 4)
        minimum = np.where(run < 4, second & 63, (third >> 4) | (second >> 6) << 4)
        octets = block[:, 16:].reshape(-1, 4, 1, 32)
        codes = np.concatenate([octets & 15, octets >> 4], axis=2).reshape(-1, 8, 32)
        weights = (d[:, None] * scale)[..., None] * codes - (dmin[:, None] * minimum)[..., None]
        y += x[:, 256 * b : 256 * b + 256].astype(np.float32) @ weights.reshape(-1, 256).T
    return y.astype(x.dtype)


def mxfp4_planes(x_codes: Any, x_scale: Any, elements: Any, scale: Any) -> Any:
    """MXFP4 times int8: even rows meet the low halves of bytes, odd rows the high halves."""
    octets = elements.reshape(len(elements), -1, 16)
    runs = x_codes.reshape(len(x_codes), -1, 16, 2).astype(np.int32)
    even, odd = runs[..., 0], runs[..., 1]
    low, high = DOUBLED[octets & 15], DOUBLED[octets >> 4]
    dots = np.einsum("tbi,nbi->tnb", even, low) + np.einsum("tbi,nbi->tnb", odd, high)
    exponents = scale.view(np.uint8).astype(np.int32) - 128
    sums = np.ldexp(dots.astype(np.float32), exponents)
    return sums.sum(axis=2) * x_scale


def fp8_strips(x_codes: Any, x_scale: Any, weight: Any, weight_scale: Any) -> Any:
    """FP8 with a scale for each output, times int8: numbers by a table of 256, strips of 32 columns."""
    octets = weight.view(np.uint8)
    y = np.empty((len(x_codes), len(octets)), np.float32)
    wide = x_codes.astype(np.float32)
    for first in range(0, len(octets), 32):
        strip = slice(first, first + 32)
        sums = wide @ E4M3[octets[strip]].T
        y[:, strip] = sums * weight_scale[strip, 0]
    return y * x_scale
