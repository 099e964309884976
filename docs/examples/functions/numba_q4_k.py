"""Q4_K times Q8_K with numba: integer sums of 32 codes, as llama.cpp's kernels form them.

``lowbit conformance --function numba_q4_k:product --profile lowbit-1.1/q4_k-q8_k``
"""

import numba
import numpy as np


@numba.njit
def total(weights, activations, d, dmin, d_x, sums):
    found = np.float32(0)
    for b in range(len(d)):
        scales, codes, q = weights[b, 4:16], weights[b, 16:], activations[b]
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
                dot += np.int32(octet >> 4 if j % 2 else octet & 15) * np.int32(q[32 * j + i])
            dots += np.int32(scale) * dot
            minima += np.int32(minimum) * (np.int32(sums[b, 2 * j]) + np.int32(sums[b, 2 * j + 1]))
        found += d_x[b] * (d[b] * np.float32(dots) - dmin[b] * np.float32(minima))
    return found


@numba.njit
def all_totals(w, d, x, q, d_x, sums, y):
    for t in range(len(x)):
        for n in range(len(w)):
            y[t, n] = total(w[n], q[t], d[n, :, 0], d[n, :, 1], d_x[t], sums[t])


def product(x_blocks, blocks):
    w, x = blocks.reshape(len(blocks), -1, 144), x_blocks.reshape(len(x_blocks), -1, 292)
    d = np.ascontiguousarray(w[..., :4]).view(np.float16).astype(np.float32)
    d_x = np.ascontiguousarray(x[..., :4]).view(np.float32)[..., 0]
    sums = np.ascontiguousarray(x[..., 260:]).view(np.int16)
    y = np.empty((len(x), len(w)), np.float32)
    all_totals(w, d, x, np.ascontiguousarray(x[..., 4:260]).view(np.int8), d_x, sums, y)
    return y
