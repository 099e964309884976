"""Products with stored matrices in numpy, in parts: split K, eight columns interleaved, block after block; one cast."""

from typing import Any

import numpy as np

from lowbit.tensor_formats.stored import Stored

SHIFTS = np.arange(0, 32, 4, dtype=np.int32)
DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int32)


def gptq_split(x: Any, qweight: Any, qzeros: Any, scales: Any, g_idx: Any) -> Any:
    """GPTQ of 4 bits, zeros stored less one: three parts of K, whose sums are added at the end."""
    columns = qweight.shape[1]
    zeros = (qzeros[:, :, None] >> SHIFTS & 15).reshape(-1, columns) + 1
    step = -(-len(qweight) // 3)
    partial = np.zeros((3, len(x), columns), np.float32)
    for part in range(3):
        words, rows = slice(part * step, (part + 1) * step), slice(8 * part * step, 8 * (part + 1) * step)
        codes = (qweight[words, None] >> SHIFTS[:, None] & 15).reshape(-1, columns)
        group = g_idx[rows]
        weights = scales.astype(np.float32)[group] * (codes - zeros[group])
        partial[part] = x[:, rows].astype(np.float32) @ weights.astype(np.float32)
    return partial.sum(axis=0).astype(x.dtype)


def scales_minima(packed: Any) -> tuple[Any, Any]:
    """The eight scales and minima of twelve bytes of Q4_K, along the last axis."""
    first, second, third = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scale = np.concatenate([first & 63, (third & 15) | (first >> 6) << 4], axis=-1)
    minimum = np.concatenate([second & 63, (third >> 4) | (second >> 6) << 4], axis=-1)
    return scale, minimum


def q4_k_eight(x: Any, blocks: Any) -> Any:
    """Q4_K; one vector. Codes of eight columns are interleaved first, eight bytes of each."""
    columns = len(blocks)
    records = np.pad(blocks, ((0, -columns % 8), (0, 0))).reshape(-1, 8, blocks.shape[1] // 144, 144)
    halves = np.ascontiguousarray(records[..., 0:4]).view(np.float16).astype(np.float32)
    octets = records[..., 16:].reshape(*records.shape[:3], 16, 8).transpose(0, 2, 3, 1, 4)
    runs, y = x.astype(np.float32).reshape(-1, 8, 4, 8), np.zeros(records.shape[:2], np.float32)
    for b in range(len(runs)):
        scale, minimum = scales_minima(records[:, :, b, 4:16])
        d, dmin = halves[:, :, b, 0, None], halves[:, :, b, 1, None]
        dots, totals = np.zeros(scale.shape, np.float32), runs[b].sum(axis=(1, 2))
        for step in range(16):
            pair, quarter = step // 4, step % 4
            dots[..., 2 * pair] += (octets[:, b, step] & 15) @ runs[b, 2 * pair, quarter]
            dots[..., 2 * pair + 1] += (octets[:, b, step] >> 4) @ runs[b, 2 * pair + 1, quarter]
        y += (d * scale * dots - dmin * minimum * totals).sum(axis=-1)
    return y.reshape(-1)[:columns].astype(x.dtype)


def mxfp4_int8(x_codes: Any, x_scale: Any, elements: Any, scale: Any) -> Any:
    """MXFP4 times int8: integer sums of doubled elements, block after block."""
    exponents = scale.view(np.uint8).astype(np.int32) - 127
    y = np.zeros((len(x_codes), len(elements)), np.float32)
    for block in range(exponents.shape[1]):
        octets = elements[:, 16 * block : 16 * block + 16]
        codes = np.stack([octets & 15, octets >> 4], axis=-1).reshape(len(octets), 32)
        dots = x_codes[:, 32 * block : 32 * block + 32].astype(np.int32) @ DOUBLED[codes].T
        y += np.ldexp(dots.astype(np.float32), exponents[:, block] - 1)
    return y * x_scale


def q8_0(x: Any, format: str, options: Any) -> Stored:
    """ggml's Q8_0: 32 codes with a float16 scale; a half is rounded away from zero."""
    runs = x.astype(np.float32).reshape(len(x), -1, 32)
    d = np.abs(runs).max(axis=-1, keepdims=True) / np.float32(127)
    inverse = np.divide(np.float32(1), d, out=np.zeros_like(d), where=d != 0)
    numbers = runs * inverse
    whole = np.trunc(numbers)
    codes = (whole + np.trunc(2 * (numbers - whole))).astype(np.int8)
    blocks = np.concatenate([d.astype(np.float16).view(np.uint8), codes.view(np.uint8)], axis=-1)
    return Stored(format, x.shape[1], len(x), (blocks.reshape(len(x), -1),), options)
