"""Products with more formats in the vectorised style of numpy."""

from typing import Any

import numpy as np

from lowbit.tensor_formats.bitsandbytes import NF4_TABLE as NF4

FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def product(x: Any, weights: Any) -> Any:
    """``x W`` in float32, in the type of x."""
    return (x.astype(np.float32) @ weights.astype(np.float32)).astype(x.dtype)


def gptq_v2(x: Any, qweight: Any, qzeros: Any, scales: Any, g_idx: Any) -> Any:
    """GPTQ of 4 bits whose stored zeros are the zeros."""
    places = np.arange(0, 32, 4, dtype=np.int32)
    codes = (qweight[:, None] >> places[:, None] & 15).reshape(-1, qweight.shape[1])
    zeros = (qzeros[..., None] >> places & 15).reshape(len(scales), -1)
    scale, zero = scales.astype(np.float32)[g_idx], zeros[g_idx]
    return product(x, scale * (codes - zero))


def awq_factored(x: Any, qweight: Any, qzeros: Any, scales: Any, group_size: int) -> Any:
    """AWQ, group after group: scaled after the sum, zeros by the sum of x."""
    order = np.array([0, 16, 4, 20, 8, 24, 12, 28], np.int32)
    codes = (qweight[..., None] >> order & 15).reshape(len(qweight), -1).astype(np.float32)
    zeros = (qzeros[..., None] >> order & 15).reshape(len(qzeros), -1).astype(np.float32)
    wide, y = x.astype(np.float32), np.zeros((len(x), codes.shape[1]), np.float32)
    for g, scale in enumerate(scales.astype(np.float32)):
        part = slice(g * group_size, (g + 1) * group_size)
        dots, total = wide[:, part] @ codes[part], wide[:, part].sum(axis=1, keepdims=True)
        y += scale * dots - scale * zeros[g] * total
    return y.astype(x.dtype)


def q4_0(x: Any, blocks: Any) -> Any:
    """Q4_0 with activations that are not cast."""
    records = blocks.reshape(len(blocks), -1, 18)
    scale = np.ascontiguousarray(records[..., :2]).view(np.float16).astype(np.float32)
    low, high = records[..., 2:] & 15, records[..., 2:] >> 4
    codes = np.concatenate([low, high], axis=-1).astype(np.float32) - 8
    return product(x, (scale * codes).reshape(len(blocks), -1).T)


def q6_k(x: Any, blocks: Any) -> Any:
    """Q6_K with activations that are not cast."""
    records = blocks.reshape(len(blocks), -1, 210)
    low, high, scales = records[..., :128], records[..., 128:192], records[..., 192:208].view(np.int8)
    d = np.ascontiguousarray(records[..., 208:]).view(np.float16).astype(np.float32)
    codes = np.empty((*records.shape[:2], 2, 4, 32), np.int32)
    for half in range(2):
        ql, qh = low[..., 64 * half : 64 * half + 64], high[..., 32 * half : 32 * half + 32]
        codes[..., half, 0, :] = (ql[..., :32] & 15) | (qh & 3) << 4
        codes[..., half, 1, :] = (ql[..., 32:] & 15) | (qh >> 2 & 3) << 4
        codes[..., half, 2, :] = (ql[..., :32] >> 4) | (qh >> 4 & 3) << 4
        codes[..., half, 3, :] = (ql[..., 32:] >> 4) | (qh >> 6 & 3) << 4
    numbers = codes.reshape(*records.shape[:2], 16, 16) - 32
    weights = (d * scales)[..., None] * numbers
    return product(x, weights.reshape(len(blocks), -1).T)


def nf4(x: Any, weight: Any, absmax: Any, blocksize: int, rows: int, columns: int) -> Any:
    """bitsandbytes NF4: the first of two codes in the high half."""
    codes = np.stack([weight[:, 0] >> 4, weight[:, 0] & 15], axis=1).reshape(-1)
    scale = np.repeat(absmax, blocksize)[: len(codes)]
    return product(x, (NF4[codes] * scale).reshape(columns, rows).T)


def nvfp4(x: Any, weight: Any, weight_scale: Any, weight_scale_2: Any) -> Any:
    """NVFP4: blocks of 16 with an FP8 scale, and a scale of all."""
    values = np.stack([FP4[weight & 15], FP4[weight >> 4]], axis=-1).reshape(len(weight), -1)
    scale = np.repeat(weight_scale.astype(np.float32), 16, axis=1)
    return product(x, (values * scale * weight_scale_2[0]).T)


def hqq(x: Any, W_q: Any, scale: Any, zero: Any, group_size: int, rows: int, columns: int) -> Any:
    """HQQ along axis 1, 4 bits: the upper half of the groups in the high nibbles."""
    codes = np.concatenate([W_q >> 4, W_q & 15]).astype(np.float32)
    weights = (codes - zero.astype(np.float32)) * scale.astype(np.float32)
    return product(x, weights.reshape(columns, rows).T)


def fp8_int8(x_codes: Any, x_scale: Any, weight: Any, weight_scale: Any) -> Any:
    """FP8 with a scale for each output, times int8 with a scale for each token."""
    sums = x_codes.astype(np.float32) @ weight.astype(np.float32).T
    return (sums * x_scale * weight_scale[:, 0]).astype(np.float32)


def q6_k_q8_k(x_blocks: Any, blocks: Any) -> Any:
    """Q6_K times Q8_K: the 32 is subtracted by the sums that the activations carry."""
    w, a = blocks.reshape(len(blocks), -1, 210), x_blocks.reshape(len(x_blocks), -1, 292)
    ql, qh = w[..., :128].reshape(*w.shape[:2], 2, 2, 32), w[..., 128:192].reshape(*w.shape[:2], 2, 1, 32)
    low = np.concatenate([ql & 15, ql >> 4], axis=-2)
    high = np.concatenate([qh >> shift & 3 for shift in (0, 2, 4, 6)], axis=-2)
    codes = (low | high << 4).reshape(*w.shape[:2], 16, 16).astype(np.int32)
    scales = w[..., 192:208].view(np.int8).astype(np.int32)
    d = np.ascontiguousarray(w[..., 208:]).view(np.float16).astype(np.float32)[..., 0]
    d_x = np.ascontiguousarray(a[..., :4]).view(np.float32)[..., 0]
    q = a[..., 4:260].view(np.int8).astype(np.int32).reshape(*a.shape[:2], 16, 16)
    sums = np.ascontiguousarray(a[..., 260:]).view(np.int16).astype(np.int32)
    y = np.zeros((len(a), len(w)), np.float32)
    for t in range(len(a)):
        dots = (codes * q[t]).sum(axis=-1) - 32 * sums[t]
        y[t] = (d_x[t] * d * (scales * dots).sum(axis=-1)).sum(axis=-1)
    return y
