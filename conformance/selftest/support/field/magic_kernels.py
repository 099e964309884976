"""A product that decodes codes by the bits of float16, as GPU kernels do, in numpy."""

from typing import Any

import numpy as np


def gptq_magic(x: Any, qweight: Any, qzeros: Any, scales: Any, g_idx: Any) -> Any:
    """GPTQ of 4 bits, zeros stored less one: a code is the mantissa of a float16 number from 1024 to 2047."""
    columns = qweight.shape[1]
    halves = np.stack([qweight & 0xFFFF, qweight >> 16 & 0xFFFF], axis=1).astype(np.uint16)
    codes = np.empty((len(qweight), 2, 4, columns), np.float32)
    for pair in range(2):
        octets = halves >> np.uint16(8 * pair)
        low = (octets & np.uint16(0x000F)) | np.uint16(0x6400)
        high = (octets & np.uint16(0x00F0)) | np.uint16(0x6400)
        codes[:, :, 2 * pair] = low.view(np.float16).astype(np.float32) - 1024
        codes[:, :, 2 * pair + 1] = high.view(np.float16).astype(np.float32) / 16 - 64
    shifts = np.arange(0, 32, 4, dtype=np.int32)
    zeros = (qzeros[:, :, None] >> shifts & 15).reshape(-1, columns) + 1
    weights = scales.astype(np.float32)[g_idx] * (codes.reshape(-1, columns) - zeros[g_idx])
    return (x.astype(np.float32) @ weights.astype(np.float32)).astype(x.dtype)
