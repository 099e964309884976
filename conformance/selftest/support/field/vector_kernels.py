"""Products of one vector with stored matrices, and matrices decoded from bits, in the style of numpy."""

from typing import Any

import numpy as np

FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def half(octets: Any) -> Any:
    """Pairs of bytes that are float16, as float32."""
    return np.ascontiguousarray(octets).view(np.float16).astype(np.float32)[..., 0]


# **One vector.**


def gptq_words(x: Any, qweight: Any, qzeros: Any, scales: Any, g_idx: Any, rows: int, columns: int) -> Any:
    """GPTQ of 4 bits, zeros stored less one: word after word of K."""
    shifts = np.arange(0, 32, 4, dtype=np.int32)
    zeros = ((qzeros[:, :, None] >> shifts) & 15).reshape(-1, columns) + 1
    wide, y = x.astype(np.float32), np.zeros(columns, np.float32)
    for word in range(rows // 8):
        for i, shift in enumerate(shifts):
            group = g_idx[8 * word + i]
            code = qweight[word] >> shift & 15
            y += wide[8 * word + i] * (scales[group].astype(np.float32) * (code - zeros[group]))
    return y.astype(x.dtype)


def scale_min(packed: Any, j: int) -> tuple[Any, Any]:
    """The scale and the minimum of run j of Q4_K, for each column."""
    if j < 4:
        return packed[:, j] & 63, packed[:, j + 4] & 63
    scale = (packed[:, j + 4] & 15) | (packed[:, j - 4] >> 6) << 4
    minimum = (packed[:, j + 4] >> 4) | (packed[:, j] >> 6) << 4
    return scale, minimum


def q4_k_blocks(x: Any, blocks: Any) -> Any:
    """Q4_K: block after block, and run after run of 32."""
    runs, y = x.astype(np.float32).reshape(-1, 8, 32), np.zeros(len(blocks), np.float32)
    for b in range(len(runs)):
        block = blocks[:, 144 * b : 144 * b + 144]
        d, dmin = half(block[:, 0:2]), half(block[:, 2:4])
        for j in range(8):
            scale, minimum = scale_min(block[:, 4:16], j)
            octets = block[:, 16 + 32 * (j // 2) : 48 + 32 * (j // 2)]
            codes = octets >> 4 if j % 2 else octets & 15
            weights = (d * scale)[:, None] * codes - (dmin * minimum)[:, None]
            y += weights @ runs[b, j]
    return y.astype(x.dtype)


def mxfp4_columns(x: Any, elements: Any, scale: Any) -> Any:
    """OCP MXFP4: eight columns at once."""
    columns = len(elements)
    wide, y = x.astype(np.float32), np.zeros(columns, np.float32)
    for first in range(0, columns, 8):
        octets = elements[first : first + 8]
        codes = np.stack([octets & 15, octets >> 4], axis=-1).reshape(len(octets), -1, 32)
        exponents = scale[first : first + 8].view(np.uint8).astype(np.int32) - 127
        weights = np.ldexp(FP4[codes], exponents[..., None])
        y[first : first + 8] = weights.reshape(len(octets), -1) @ wide
    return y.astype(x.dtype)


def fp8_vector(x: Any, weight: Any, weight_scale: Any) -> Any:
    """FP8 with a scale for each output."""
    numbers = weight.astype(np.float32)
    return (numbers @ x.astype(np.float32) * weight_scale[:, 0]).astype(x.dtype)


def fp8_block_vector(x: Any, weight: Any, weight_scale_inv: Any) -> Any:
    """FP8 with scales of blocks of 128 x 128: the sum of a block of K is scaled."""
    columns, rows = weight.shape
    wide, y = x.astype(np.float32), np.zeros(columns, np.float32)
    part = np.zeros(columns, np.float32)
    for block in range(-(-rows // 128)):
        part[:] = 0
        for k in range(128 * block, min(rows, 128 * block + 128)):
            part += wide[k] * weight[:, k].astype(np.float32)
        y += part * np.repeat(weight_scale_inv[:, block], 128)[:columns]
    return y.astype(x.dtype)


# **Decoded from bits.**


def product(x: Any, weights: Any) -> Any:
    """``x W`` in float32, in the type of x."""
    return (x.astype(np.float32) @ weights.astype(np.float32)).astype(x.dtype)


def gptq_8bit(x: Any, qweight: Any, qzeros: Any, scales: Any, g_idx: Any) -> Any:
    """GPTQ of 8 bits, zeros stored less one: codes and zeros are the bytes of the words."""
    codes = np.ascontiguousarray(qweight.T).view(np.uint8).T.astype(np.int32)
    zeros = qzeros.view(np.uint8).astype(np.int32) + 1
    group = g_idx
    return product(x, scales.astype(np.float32)[group] * (codes - zeros[group]))


def awq_repeated(x: Any, qweight: Any, qzeros: Any, scales: Any, group_size: int) -> Any:
    """AWQ of 4 bits, layout gemm: nibbles in their order, then columns put into theirs."""
    order = np.array([0, 4, 1, 5, 2, 6, 3, 7])
    nibbles = np.arange(0, 32, 4, dtype=np.int32)
    codes = (qweight[..., None] >> nibbles & 15)[..., order].reshape(len(qweight), -1)
    zeros = (qzeros[..., None] >> nibbles & 15)[..., order].reshape(len(qzeros), -1)
    scale, zero = (np.repeat(each, group_size, axis=0) for each in (scales.astype(np.float32), zeros))
    return product(x, scale * (codes - zero))


def q4_k_masks(x: Any, blocks: Any) -> Any:
    """Q4_K: four scales or minima at once, by masks of words."""
    records = blocks.reshape(len(blocks), -1, 144)
    d, dmin = half(records[..., 0:2]), half(records[..., 2:4])
    first, second, third = np.moveaxis(np.ascontiguousarray(records[..., 4:16]).view(np.uint32), -1, 0)
    low, high = np.uint32(0x3F3F3F3F), np.uint32(0x03030303)
    nibbles, four, six = np.uint32(0x0F0F0F0F), np.uint32(4), np.uint32(6)
    scales = [first & low, (third & nibbles) | (first >> six & high) << four]
    minima = [second & low, (third >> four & nibbles) | (second >> six & high) << four]
    scale, minimum = (np.stack(each, axis=-1).view(np.uint8).astype(np.float32) for each in (scales, minima))
    octets = records[..., 16:].reshape(*records.shape[:2], 4, 1, 32)
    codes = np.concatenate([octets & 15, octets >> 4], axis=-2).reshape(*records.shape[:2], 8, 32)
    weights = (d[..., None] * scale)[..., None] * codes - (dmin[..., None] * minimum)[..., None]
    return product(x, weights.reshape(len(blocks), -1).T)


def mxfp4_bits(x: Any, elements: Any, scale: Any) -> Any:
    """OCP MXFP4: elements by their sign, exponent and mantissa."""
    codes = np.stack([elements & 15, elements >> 4], axis=-1).reshape(len(elements), -1).astype(np.int32)
    sign, exponent, mantissa = codes >> 3, codes >> 1 & 3, codes & 1
    normal = np.ldexp(np.float32(1) + mantissa * np.float32(0.5), exponent - 1)
    size = np.where(exponent > 0, normal, mantissa * np.float32(0.5))
    exponents = scale.view(np.uint8).astype(np.int32) - 127
    weights = np.ldexp(np.where(sign, -size, size), np.repeat(exponents, 32, axis=1))
    return product(x, weights.T)
