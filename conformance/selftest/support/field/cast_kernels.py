"""Casts, and products with more formats, in the vectorised style of numpy."""

from typing import Any

import ml_dtypes
import numpy as np

from lowbit.tensor_formats.bitsandbytes import NF4_TABLE as NF4
from lowbit.tensor_formats.stored import Stored


def quotient(above: Any, below: Any) -> Any:
    """A quotient in float32; 0 where the divisor is 0."""
    return np.where(below == 0, np.float32(0), above / np.where(below == 0, np.float32(1), below))


def int8_token(x: Any, format: str, options: Any) -> Stored:
    """Codes of 8 bits with a scale for each token."""
    wide = x.astype(np.float32)
    largest = np.abs(wide).max(axis=1, keepdims=True)
    scale = largest / np.float32(127)
    codes = np.rint(wide * quotient(np.float32(1), scale))
    stored = np.clip(codes, -127, 127).astype(np.int8)
    return Stored(format, x.shape[1], len(x), (stored, scale), options)


def q8_k(x: Any, format: str, options: Any) -> Stored:
    """ggml's Q8_K: the number of largest magnitude becomes -127."""
    runs = x.astype(np.float32).reshape(len(x), -1, 256)
    place = np.abs(runs).argmax(axis=-1)
    extreme = np.take_along_axis(runs, place[..., None], axis=-1)
    factor = -quotient(np.float32(127), extreme)
    codes = np.minimum(np.rint(factor * runs), 127).astype(np.int8)
    d = quotient(np.float32(1), factor).astype(np.float32)
    sums = codes.reshape(*codes.shape[:2], 16, 16).sum(axis=-1, dtype=np.int16)
    blocks = np.concatenate([np.ascontiguousarray(each).view(np.uint8) for each in (d, codes, sums)], axis=-1)
    return Stored(format, x.shape[1], len(x), (blocks.reshape(len(x), -1),), options)


def fp8_token(x: Any, format: str, options: Any) -> Stored:
    """FP8 with a scale for each token."""
    wide = x.astype(np.float32)
    scale = np.abs(wide).max(axis=1, keepdims=True) / np.float32(448)
    elements = quotient(wide, scale).astype(ml_dtypes.float8_e4m3fn)
    return Stored(format, x.shape[1], len(x), (elements, scale.astype(np.float32)), options)


def kivi_keys(x: Any, format: str, options: Any) -> Stored:
    """KIVI's keys: a scale and a minimum for a channel of some tokens, codes of four bits along the tokens."""
    size, bits = dict(options)["tokens"], dict(options)["bits"]
    lines = np.ascontiguousarray(x.astype(np.float32).T)
    count = lines.shape[1]
    groups = np.pad(lines, ((0, 0), (0, -count % size)), "edge").reshape(len(lines), -1, size)
    least = groups.min(axis=-1, keepdims=True)
    scale = (groups.max(axis=-1, keepdims=True) - least) / np.float32(2**bits - 1)
    codes = np.rint(np.clip(quotient(groups - least, scale), 0, 2**bits - 1)).astype(np.uint32)
    codes = codes.reshape(len(lines), -1)[:, :count]
    filled = np.pad(codes, ((0, 0), (0, -count % (32 // bits)))).reshape(len(lines), -1, 32 // bits)
    words = (filled << np.arange(0, 32, bits, dtype=np.uint32)).sum(axis=-1, dtype=np.uint32).view(np.int32)
    kept = (scale[..., 0].astype(np.float16), least[..., 0].astype(np.float16))
    return Stored(format, len(lines), count, (words, *kept), options)


def product(x: Any, weights: Any) -> Any:
    """``x W`` in float32, in the type of x."""
    return (x.astype(np.float32) @ weights.astype(np.float32)).astype(x.dtype)


def gptq_order(x: Any, qweight: Any, qzeros: Any, scales: Any, g_idx: Any, group_size: int) -> Any:
    """GPTQ of 4 bits: rows in the order of their groups, and x in the same order; groups in order need no index."""
    shifts = np.arange(0, 32, 4, dtype=np.int32)
    codes = (qweight[:, None] >> shifts[:, None] & 15).reshape(-1, qweight.shape[1])
    zeros = (qzeros[..., None] >> shifts & 15).reshape(len(scales), -1) + 1
    plain = np.arange(len(codes)) // group_size
    if (g_idx == plain).all():
        group = np.arange(len(codes)) // group_size
        return product(x, scales.astype(np.float32)[group] * (codes - zeros[group]))
    order = np.argsort(g_idx, kind="stable")
    group = g_idx[order]
    weights = scales.astype(np.float32)[group] * (codes[order] - zeros[group])
    return product(x[:, order], weights)


def stream3(words: Any) -> Any:
    """The codes of 3 bits of each row of words: 32 in three words."""
    units = words.view(np.uint32).reshape(len(words), -1, 3)
    codes = np.empty((*units.shape[:2], 32), np.int32)
    for k in range(32):
        word, shift = divmod(3 * k, 32)
        code = units[..., word] >> np.uint32(shift)
        if shift > 29:
            code = code | units[..., word + 1] << np.uint32(32 - shift)
        codes[..., k] = code & 7
    return codes.reshape(len(words), -1)


def gptq_3bit(x: Any, qweight: Any, qzeros: Any, scales: Any, g_idx: Any) -> Any:
    """GPTQ of 3 bits."""
    codes = stream3(np.ascontiguousarray(qweight.T)).T
    zeros = stream3(np.ascontiguousarray(qzeros))[:, : scales.shape[1]] + 1
    return product(x, scales.astype(np.float32)[g_idx] * (codes - zeros[g_idx]))


def q8_0(x: Any, blocks: Any) -> Any:
    """Q8_0 with activations that are not cast."""
    records = blocks.reshape(len(blocks), -1, 34)
    scale = np.ascontiguousarray(records[..., :2]).view(np.float16).astype(np.float32)
    codes = np.ascontiguousarray(records[..., 2:]).view(np.int8)
    return product(x, (scale * codes).reshape(len(blocks), -1).T)


def nf4_double(
    x: Any,
    weight: Any,
    absmax: Any,
    nested_absmax: Any,
    nested_quant_map: Any,
    nested_offset: Any,
    blocksize: int,
    rows: int,
    columns: int,
) -> Any:
    """bitsandbytes NF4 whose scales are stored in 8 bits themselves."""
    codes = np.stack([weight[:, 0] >> 4, weight[:, 0] & 15], axis=1).reshape(-1)
    outer = nested_absmax[np.arange(len(absmax)) // 256]
    scale = nested_quant_map[absmax] * outer + nested_offset[0]
    numbers = NF4[codes] * np.repeat(scale, blocksize)[: len(codes)]
    return product(x, numbers.reshape(columns, rows).T)
