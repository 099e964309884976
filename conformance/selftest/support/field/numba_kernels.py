"""Products with stored matrices with numba: loops over blocks, as llama.cpp's kernels form them."""

from typing import Any

import numba
import numpy as np


@numba.njit
def q4_k_totals(w, d, x, q, d_x, sums, y):
    for t in range(len(x)):
        for n in range(len(w)):
            found = np.float32(0)
            for b in range(w.shape[1]):
                scales, codes = w[n, b, 4:16], w[n, b, 16:]
                dots = minima = np.int32(0)
                for j in range(8):
                    if j < 4:
                        scale, minimum = scales[j] & 63, scales[j + 4] & 63
                    else:
                        scale = (scales[j + 4] & 15) | (scales[j - 4] >> 6) << 4
                        minimum = (scales[j + 4] >> 4) | (scales[j] >> 6) << 4
                    dot = np.int32(0)
                    for i in range(32):
                        octet = codes[32 * (j // 2) + i]
                        dot += np.int32(octet >> 4 if j % 2 else octet & 15) * np.int32(q[t, b, 32 * j + i])
                    dots += np.int32(scale) * dot
                    minima += np.int32(minimum) * (np.int32(sums[t, b, 2 * j]) + np.int32(sums[t, b, 2 * j + 1]))
                found += d_x[t, b] * (d[n, b, 0] * np.float32(dots) - d[n, b, 1] * np.float32(minima))
            y[t, n] = found


def q4_k_q8_k(x_blocks: Any, blocks: Any) -> Any:
    """Q4_K times Q8_K: integer sums of 32 codes."""
    w, x = blocks.reshape(len(blocks), -1, 144), x_blocks.reshape(len(x_blocks), -1, 292)
    d = np.ascontiguousarray(w[..., :4]).view(np.float16).astype(np.float32)
    d_x = np.ascontiguousarray(x[..., :4]).view(np.float32)[..., 0]
    sums = np.ascontiguousarray(x[..., 260:]).view(np.int16)
    y = np.empty((len(x), len(w)), np.float32)
    q4_k_totals(w, d, x, np.ascontiguousarray(x[..., 4:260]).view(np.int8), d_x, sums, y)
    return y


@numba.njit
def q4_0_totals(w, d, q, d_x, y):
    for t in range(len(q)):
        for n in range(len(w)):
            found = np.float32(0)
            for b in range(w.shape[1]):
                dot = np.int32(0)
                for i in range(16):
                    octet = w[n, b, i]
                    dot += (np.int32(octet & 15) - 8) * np.int32(q[t, b, i])
                    dot += (np.int32(octet >> 4) - 8) * np.int32(q[t, b, i + 16])
                found += np.float32(dot) * d[n, b] * d_x[t, b]
            y[t, n] = found


def q4_0_q8_0(x_blocks: Any, blocks: Any) -> Any:
    """Q4_0 times Q8_0."""
    w, x = blocks.reshape(len(blocks), -1, 18), x_blocks.reshape(len(x_blocks), -1, 34)
    d = np.ascontiguousarray(w[..., :2]).view(np.float16).astype(np.float32)[..., 0]
    d_x = np.ascontiguousarray(x[..., :2]).view(np.float16).astype(np.float32)[..., 0]
    y = np.empty((len(x), len(w)), np.float32)
    q4_0_totals(np.ascontiguousarray(w[..., 2:]), d, np.ascontiguousarray(x[..., 2:]).view(np.int8), d_x, y)
    return y
