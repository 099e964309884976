"""What a model computes besides products with stored matrices, in the vectorised style of numpy."""

from typing import Any

import numpy as np

from lowbit.quantization.affine import QuantizedMatrix
from lowbit.quantization.bfp import Blocks
from lowbit.quantization.bfp_dot import BlockSums

F32 = np.float32


def rope(x: Any, turn: Any) -> Any:
    """Each channel by its cosine, and its partner by the signed sine."""
    wide = x.astype(F32)
    cos, sin = turn.cos.astype(F32)[:, None], turn.sin.astype(F32)[:, None]
    return (wide * cos + wide[..., turn.layout.partner] * sin).astype(x.dtype)


def rms_norm(x: Any, gain: Any, epsilon: float) -> Any:
    """Rows over the root of their mean square, times the gain; squares in float64, where they cannot overflow."""
    wide = x.astype(np.float64)
    mean = (wide * wide).mean(axis=-1, keepdims=True)
    return (wide / np.sqrt(mean + epsilon) * gain.astype(np.float64)).astype(x.dtype)


def swiglu(gate: Any, up: Any) -> Any:
    """``silu(gate) up``."""
    a, b = gate.astype(F32), up.astype(F32)
    return (a / (1 + np.exp(-a)) * b).astype(gate.dtype)


def geglu(gate: Any, up: Any) -> Any:
    """``gelu(gate) up``, by tanh as a quotient."""
    a, b = gate.astype(F32), up.astype(F32)
    z = F32(1.5957691216057308) * (a + F32(0.044715) * a * a * a)
    return (a / (1 + np.exp(-z)) * b).astype(gate.dtype)


def softmax(scores: Any) -> Any:
    """Of each row, in the type of the scores."""
    wide = scores.astype(F32)
    above = np.exp(wide - wide.max(axis=-1, keepdims=True))
    return (above / above.sum(axis=-1, keepdims=True)).astype(scores.dtype)


def gate(x: Any, router: Any, scores: str) -> Any:
    """Scores of the experts."""
    logits = x.astype(F32) @ router.astype(F32)
    return (logits if scores == "logits" else softmax(logits)).astype(x.dtype)


def top_k(scores: Any, k: int) -> Any:
    """The experts of the greatest scores, the lowest of equal ones first."""
    order = np.argsort(-scores.astype(F32), axis=1, kind="stable")
    return np.ascontiguousarray(order[:, :k]).astype(np.int64)


def weights(scores: Any, chosen: Any, softmax: str) -> Any:
    """Of the chosen experts: they sum to 1."""
    own = np.take_along_axis(scores.astype(F32), chosen, axis=1)
    if softmax == "after":
        own = np.exp(own - own.max(axis=1, keepdims=True))
    return (own / own.sum(axis=1, keepdims=True)).astype(scores.dtype)


def sparse(x: Any, gate: Any, up: Any, down: Any, chosen: Any, weights: Any) -> Any:
    """Token by token, the chosen experts in ascending order."""
    y = np.zeros(x.shape, F32)
    for t in range(len(x)):
        token = x[t].astype(F32)
        for place in np.argsort(chosen[t]):
            e = chosen[t, place]
            a, b = token @ gate[e].astype(F32), token @ up[e].astype(F32)
            y[t] += weights[t, place].astype(F32) * ((a / (1 + np.exp(-a)) * b) @ down[e].astype(F32))
    return y.astype(x.dtype)


def bfp_cast(x: Any, format: Any) -> Blocks:
    """Block after block: the exponent from the largest magnitude, then mantissas."""
    mantissas = np.empty(x.shape, format.dtype)
    exponents = np.empty((len(x), format.blocks(x.shape[1])), np.int16)
    for p in range(exponents.shape[1]):
        span = slice(p * format.block, (p + 1) * format.block)
        part = x[:, span].astype(np.float64)
        largest = np.abs(part).max(axis=1)
        e = np.clip(np.frexp(largest)[1] - 1 - (format.mantissa - 2), -format.reach, format.reach)
        e = np.where(largest == 0, -format.reach, e)
        mantissas[:, span] = np.clip(np.rint(np.ldexp(part, -e[:, None])), -format.top, format.top)
        exponents[:, p] = e
    return Blocks(mantissas, exponents, format)


def bfp_dot(a: Any, b: Any) -> BlockSums:
    """Sums of products of mantissas, and sums of exponents."""
    size, count = a.format.block, a.exponents.shape[1]
    left, right = a.mantissas.astype(np.int64), b.mantissas.astype(np.int64)
    spans = [slice(p * size, (p + 1) * size) for p in range(count)]
    sums = np.stack([left[:, span] @ right[:, span].T for span in spans], axis=-1)
    exponents = a.exponents[:, None].astype(np.int32) + b.exponents[None].astype(np.int32)
    return BlockSums(np.ascontiguousarray(sums), np.ascontiguousarray(exponents))


def attention(queries: Any, keys: Any, values: Any, window: int | None) -> Any:
    """Head by head and token by token, over the tokens that each sees; all in float32."""
    tokens, heads, channels = queries.shape
    shared, length = heads // len(keys), keys.shape[1]
    y = np.empty(queries.shape, F32)
    for t in range(tokens):
        end = length - tokens + t + 1
        begin = 0 if window is None else max(0, end - window)
        for h in range(heads):
            j = h // shared
            scores = keys[j, begin:end] @ queries[t, h] / F32(np.sqrt(channels))
            above = np.exp(scores - scores.max())
            y[t, h] = above @ values[j, begin:end] / above.sum()
    return y


def attend(queries: Any, keys: Any, values: Any, window: int | None) -> Any:
    """Attention over keys and values as they are."""
    return attention(queries.astype(F32), keys.astype(F32), values.astype(F32), window).astype(queries.dtype)


def attend_int8(
    queries: Any, keys_codes: Any, keys_scale: Any, values_codes: Any, values_scale: Any, window: int | None
) -> Any:
    """Attention over a cache of 8 bits with a scale for each token."""
    keys = keys_codes.astype(F32) * keys_scale
    values = values_codes.astype(F32) * values_scale
    keys, values = (
        np.ascontiguousarray(each.reshape(len(each), -1, queries.shape[2]).swapaxes(0, 1)) for each in (keys, values)
    )
    return attention(queries.astype(F32), keys, values, window).astype(queries.dtype)


def attend_residual(
    queries: Any,
    keys_codes: Any,
    keys_scale: Any,
    values_codes: Any,
    values_scale: Any,
    newest_keys: Any,
    newest_values: Any,
) -> Any:
    """Attention over a cache of 8 bits with a scale for each token, and over new tokens that are not cast yet."""
    stored_keys, stored_values = keys_codes.astype(F32) * keys_scale, values_codes.astype(F32) * values_scale
    newest = [each.astype(F32).reshape(len(each), -1) for each in (newest_keys, newest_values)]
    keys, values = (
        np.concatenate([old, new]).reshape(len(old) + len(new), -1, queries.shape[2]).swapaxes(0, 1)
        for old, new in zip((stored_keys, stored_values), newest, strict=True)
    )
    return attention(queries.astype(F32), keys, values, None).astype(queries.dtype)


def shifts(bits: int) -> Any:
    return np.arange(0, 32, bits, dtype=np.uint32)[:, None]


def pack(codes: Any, bits: int) -> Any:
    """Words of codes of 2, 4 or 8 bits, the first in the lowest bits."""
    units = codes.reshape(-1, 32 // bits, codes.shape[1]).astype(np.uint32)
    return np.bitwise_or.reduce(units << shifts(bits), axis=1)


def unpack(words: Any, bits: int) -> Any:
    """The codes of words."""
    return (words[:, None] >> shifts(bits) & (2**bits - 1)).reshape(-1, words.shape[1]).astype(np.uint8)


def affine_quantize(weights: Any, bits: int, group_size: int, convention: Any, scale_dtype: str) -> QuantizedMatrix:
    """Groups down each column, with zero-points that are codes."""
    levels, kept = F32(2**bits - 1), np.dtype(scale_dtype)
    codes = np.empty(weights.shape, np.uint8)
    scales, zeros = [], []
    for start in range(0, len(weights), group_size):
        group = weights[start : start + group_size]
        low, high = np.minimum(group.min(axis=0), F32(0)), np.maximum(group.max(axis=0), F32(0))
        scale = ((high - low) / levels).astype(kept)
        scale = np.where(scale > 0, scale, kept.type(1))
        wide = scale.astype(F32)
        zero = np.clip(np.rint(-low / wide), 0, levels)
        codes[start : start + group_size] = np.clip(np.rint(group / wide) + zero, 0, levels)
        scales.append(scale)
        zeros.append(zero.astype(np.uint8))
    stacked = np.stack(scales), np.stack(zeros)
    return QuantizedMatrix(pack(codes, bits), *stacked, bits, len(weights), group_size, convention)


def affine_dequantize(matrix: Any) -> Any:
    """Scale times code less zero, or times code with a minimum added."""
    codes = unpack(matrix.words, matrix.bits).astype(F32)
    group = np.arange(matrix.rows) // matrix.group_size
    scale, zero = matrix.scales.astype(F32)[group], matrix.zeros.astype(F32)[group]
    return scale * codes + zero if matrix.convention == "minimum" else scale * (codes - zero)


def hqq_dequantize(matrix: Any) -> Any:
    """Real zeros; groups of the matrix as files store it, along either axis."""
    flat = np.ascontiguousarray(unpack(matrix.words, matrix.bits).T).reshape(-1).astype(F32)
    scale, zero = matrix.scales.astype(F32), matrix.zeros.astype(F32)
    if matrix.axis == 1:
        numbers = (flat.reshape(len(scale), -1) - zero[:, None]) * scale[:, None]
    else:
        numbers = (flat.reshape(-1, len(scale)) - zero) * scale
    return np.ascontiguousarray(numbers.reshape(-1, matrix.rows).T)


def pool(weights: Any, heads: int, groups: int, method: str) -> Any:
    """The mean or the first of the heads of each group of neighbours."""
    members = weights.reshape(len(weights), groups, heads // groups, -1)
    if method == "first":
        return members[:, :, 0].reshape(len(weights), -1).copy()
    total = members[:, :, 0].astype(np.float64)
    for member in range(1, heads // groups):
        total = total + members[:, :, member]
    return (total / (heads // groups)).astype(F32).reshape(len(weights), -1)
