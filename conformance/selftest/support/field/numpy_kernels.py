"""Products with stored matrices in the vectorised style of numpy; x in float32, float16 or bfloat16."""

from typing import Any

import numpy as np


def gptq(x: Any, qweight: Any, qzeros: Any, scales: Any, g_idx: Any) -> Any:
    """GPTQ of 4 bits, zeros stored less one."""
    shifts = np.arange(0, 32, 4, dtype=np.int32)
    columns = qweight.shape[1]
    codes = ((qweight[:, None, :] >> shifts[None, :, None]) & 15).reshape(-1, columns)
    zeros = ((qzeros[:, :, None] >> shifts) & 15).reshape(-1, columns) + 1
    weights = scales.astype(np.float32)[g_idx] * (codes - zeros[g_idx])
    y = x.astype(np.float32) @ weights.astype(np.float32)
    return y.astype(x.dtype)


def gptq_factored(x: Any, qweight: Any, qzeros: Any, scales: Any, g_idx: Any) -> Any:
    """The same, with codes summed by group, scaled after the sum, and zeros applied to the sums of x."""
    shifts = np.arange(0, 32, 4, dtype=np.int32)
    columns = qweight.shape[1]
    codes = ((qweight[:, None, :] >> shifts[None, :, None]) & 15).reshape(-1, columns)
    zeros = ((qzeros[:, :, None] >> shifts) & 15).reshape(-1, columns) + 1
    wide = x.astype(np.float32)
    y = np.zeros((*x.shape[:-1], columns), np.float32)
    for group in range(len(scales)):
        rows = np.flatnonzero(g_idx == group)
        part = wide[..., rows] @ codes[rows].astype(np.float32)
        total = wide[..., rows].sum(axis=-1, keepdims=True)
        y += scales[group].astype(np.float32) * (part - total * zeros[group].astype(np.float32))
    return y.astype(x.dtype)


def awq(x: Any, qweight: Any, qzeros: Any, scales: Any, group_size: int) -> Any:
    """AWQ of 4 bits, layout gemm."""
    places = np.array([0, 4, 1, 5, 2, 6, 3, 7], np.int32)
    codes = ((qweight[:, :, None] >> (4 * places)) & 15).reshape(len(qweight), -1)
    zeros = ((qzeros[:, :, None] >> (4 * places)) & 15).reshape(len(qzeros), -1)
    group = np.arange(len(codes)) // group_size
    weights = scales.astype(np.float32)[group] * (codes - zeros[group])
    y = x.astype(np.float32) @ weights.astype(np.float32)
    return y.astype(x.dtype)


def q4_k_parts(blocks: Any) -> Any:
    """Codes, scales and minima of Q4_K: columns x blocks x 8 runs (x 32 codes)."""
    records = blocks.reshape(len(blocks), -1, 144)
    d = np.ascontiguousarray(records[..., 0:2]).view(np.float16).astype(np.float32)
    dmin = np.ascontiguousarray(records[..., 2:4]).view(np.float16).astype(np.float32)
    packed, octets = records[..., 4:16], records[..., 16:]
    scales = np.concatenate([packed[..., 0:4] & 63, (packed[..., 8:12] & 15) | (packed[..., 0:4] >> 6 << 4)], -1)
    minima = np.concatenate([packed[..., 4:8] & 63, (packed[..., 8:12] >> 4) | (packed[..., 4:8] >> 6 << 4)], -1)
    chunks = octets.reshape(*octets.shape[:2], 4, 32)
    codes = np.stack([chunks & 15, chunks >> 4], axis=-2).reshape(*octets.shape[:2], 8, 32)
    return codes, d * scales, dmin * minima


def q4_k(x: Any, blocks: Any) -> Any:
    """Q4_K with activations that are not cast."""
    codes, scales, minima = q4_k_parts(blocks)
    weights = scales[..., None] * codes - minima[..., None]
    y = x.astype(np.float32) @ weights.reshape(len(blocks), -1).T
    return y.astype(x.dtype)


def q4_k_q8_k(x_blocks: Any, blocks: Any) -> Any:
    """Q4_K times Q8_K: integer sums of 32 codes, minima by the sums that the activations carry."""
    codes, scales, minima = q4_k_parts(blocks)
    records = x_blocks.reshape(len(x_blocks), -1, 292)
    d = np.ascontiguousarray(records[..., 0:4]).view(np.float32)
    q = records[..., 4:260].view(np.int8).astype(np.int32).reshape(*records.shape[:2], 8, 32)
    sums = np.ascontiguousarray(records[..., 260:]).view(np.int16).astype(np.int32)
    sums = sums.reshape(*records.shape[:2], 8, 2).sum(axis=-1)
    y = np.zeros((len(x_blocks), len(blocks)), np.float32)
    for t in range(len(x_blocks)):
        dots = (codes.astype(np.int32) * q[t]).sum(axis=-1)
        y[t] = (d[t] * (scales * dots - minima * sums[t])).sum(axis=(1, 2))
    return y


def q4_0_q8_0(x_blocks: Any, blocks: Any) -> Any:
    """Q4_0 times Q8_0: integer sums of a block, both scales after the sum."""
    w, a = (each.reshape(len(each), -1, width) for each, width in ((blocks, 18), (x_blocks, 34)))
    scale_w = np.ascontiguousarray(w[..., :2]).view(np.float16).astype(np.float32)[..., 0]
    scale_a = np.ascontiguousarray(a[..., :2]).view(np.float16).astype(np.float32)[..., 0]
    codes = np.concatenate([w[..., 2:] & 15, w[..., 2:] >> 4], axis=-1).astype(np.int32) - 8
    q = a[..., 2:].view(np.int8).astype(np.int32)
    dots = np.einsum("tbi,nbi->tnb", q, codes).astype(np.float32)
    y: Any = (dots * scale_a[:, None] * scale_w[None]).sum(axis=-1)
    return y.astype(np.float32)


FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def mxfp4(x: Any, elements: Any, scale: Any) -> Any:
    """OCP MXFP4: two elements in a byte, a power of two for each 32."""
    values = np.stack([FP4[elements & 15], FP4[elements >> 4]], axis=-1).reshape(len(elements), -1)
    exponents = scale.view(np.uint8).astype(np.int32) - 127
    weights = np.ldexp(values, np.repeat(exponents, 32, axis=1))
    y = x.astype(np.float32) @ weights.T
    return y.astype(x.dtype)


def fp8_channel(x: Any, weight: Any, weight_scale: Any) -> Any:
    """FP8 with a scale for each output, applied after the sum."""
    sums = x.astype(np.float32) @ weight.astype(np.float32).T
    return (sums * weight_scale[:, 0]).astype(x.dtype)


def fp8_block(x: Any, weight: Any, weight_scale_inv: Any) -> Any:
    """FP8 with scales of blocks of 128 x 128."""
    columns, rows = weight.shape
    scales = np.repeat(np.repeat(weight_scale_inv, 128, axis=0)[:columns], 128, axis=1)[:, :rows]
    weights = weight.astype(np.float32) * scales
    y = x.astype(np.float32) @ weights.T
    return y.astype(x.dtype)
