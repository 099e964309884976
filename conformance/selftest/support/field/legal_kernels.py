"""Sums and weights in unusual but legal ways, for GPTQ's 4 bits; `legal` says what each of them declares."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

F32, F16, BF16 = np.float32, np.float16, ml_dtypes.bfloat16
Sum = Callable[[Any, Any], Any]
"""Of x, T x K, and weights, K x N, to T x N."""


def parts(qweight: Any, qzeros: Any, scales: Any, g_idx: Any) -> tuple[Any, Any, Any]:
    """Codes, zeros and scales of each row: K x N."""
    shifts, columns = np.arange(0, 32, 4, dtype=np.int32), qweight.shape[1]
    codes = ((qweight[:, None, :] >> shifts[None, :, None]) & 15).reshape(-1, columns)
    zeros = ((qzeros[:, :, None] >> shifts) & 15).reshape(-1, columns) + 1
    return codes, zeros[g_idx], scales.astype(F32)[g_idx]


# **Sums.**


def in_order(order: Callable[[int], Any], x: Any, w: Any) -> Any:
    total = np.zeros((len(x), w.shape[1]), F32)
    for k in order(len(w)):
        total += x[:, k, None] * w[k]
    return total


def kahan(x: Any, w: Any) -> Any:
    total = lost = np.zeros((len(x), w.shape[1]), F32)
    for k in range(len(w)):
        term = x[:, k, None] * w[k] - lost
        new = total + term
        lost, total = (new - total) - term, new
    return total


def split(pieces: int, x: Any, w: Any) -> Any:
    size = -(-len(w) // pieces)
    ends = [(begin, begin + size) for begin in range(0, len(w), size)]
    return sum((x[:, a:b] @ w[a:b] for a, b in ends), np.zeros((len(x), w.shape[1]), F32))


def lanes(count: int, x: Any, w: Any) -> Any:
    return sum((x[:, lane::count] @ w[lane::count] for lane in range(count)), np.zeros((len(x), w.shape[1]), F32))


def pairwise(x: Any, w: Any) -> Any:
    terms = x[:, :, None] * w
    while terms.shape[1] > 1:
        if terms.shape[1] % 2:
            terms = np.concatenate([terms, np.zeros_like(terms[:, :1])], axis=1)
        terms = terms[:, 0::2] + terms[:, 1::2]
    return terms[:, 0]


def fused(x: Any, w: Any) -> Any:
    """A product and a sum with one rounding: the product of two float32 numbers is exact in float64."""
    total = np.zeros((len(x), w.shape[1]), F32)
    for k in range(len(w)):
        total = (x[:, k, None].astype(np.float64) * w[k] + total).astype(F32)
    return total


def double(x: Any, w: Any) -> Any:
    return x.astype(np.float64) @ w.astype(np.float64)


def promoted(length: int, x: Any, w: Any) -> Any:
    """Products and sums in float16, added to float32 after so many."""
    total = np.zeros((len(x), w.shape[1]), F32)
    for begin in range(0, len(w), length):
        short = np.zeros(total.shape, F16)
        for k in range(begin, min(begin + length, len(w))):
            short = short + x[:, k, None].astype(F16) * w[k].astype(F16)
        total += short
    return total


def by_size(x: Any, w: Any) -> Any:
    return in_order(lambda rows: np.argsort(np.abs(w).max(axis=1), kind="stable"), x, w)


# **Weights.**


def in_type(kind: Any, codes: Any, zeros: Any, scales: Any) -> Any:
    return (scales * (codes - zeros).astype(F32)).astype(kind).astype(F32)


def in_three_steps(codes: Any, zeros: Any, scales: Any) -> Any:
    """Code times scale and zero times scale in float16, and their difference in float16."""
    half = scales.astype(F16)
    return (half * codes.astype(F16) - half * zeros.astype(F16)).astype(F32)


def gptq(weights: Callable[..., Any], total: Sum, x: Any, qweight: Any, qzeros: Any, scales: Any, g_idx: Any) -> Any:
    w = weights(*parts(qweight, qzeros, scales, g_idx))
    with np.errstate(over="ignore", invalid="ignore"):
        return total(x.astype(F32), w).astype(x.dtype)


def scale_on_x(x: Any, qweight: Any, qzeros: Any, scales: Any, g_idx: Any) -> Any:
    """The scale is multiplied into x, and codes are subtracted from zeros in integers."""
    codes, zeros, scale = parts(qweight, qzeros, scales, g_idx)
    wide, difference = x.astype(F32), (codes - zeros).astype(F32)
    with np.errstate(over="ignore", invalid="ignore"):
        y = np.stack([(wide * scale[:, n]) @ difference[:, n] for n in range(scale.shape[1])], axis=-1)
    return y.astype(x.dtype)


PLAIN = partial(in_type, F32)
KERNELS = SimpleNamespace(
    sums_of_32=partial(gptq, PLAIN, partial(promoted, 32)),
    sums_of_16=partial(gptq, PLAIN, partial(promoted, 16)),
    kahan=partial(gptq, PLAIN, kahan),
    ordered=partial(gptq, PLAIN, partial(in_order, range)),
    reversed=partial(gptq, PLAIN, partial(in_order, lambda rows: range(rows)[::-1])),
    shuffled=partial(gptq, PLAIN, partial(in_order, lambda rows: np.random.default_rng(5).permutation(rows))),
    smallest_first=partial(gptq, PLAIN, by_size),
    split_in_4=partial(gptq, PLAIN, partial(split, 4)),
    split_in_7=partial(gptq, PLAIN, partial(split, 7)),
    lanes_8=partial(gptq, PLAIN, partial(lanes, 8)),
    lanes_64=partial(gptq, PLAIN, partial(lanes, 64)),
    pairwise=partial(gptq, PLAIN, pairwise),
    fused=partial(gptq, PLAIN, fused),
    double=partial(gptq, PLAIN, double),
    half_weights=partial(gptq, partial(in_type, F16), partial(split, 1)),
    brain_weights=partial(gptq, partial(in_type, BF16), partial(split, 1)),
    weights_in_three_steps=partial(gptq, in_three_steps, partial(split, 1)),
    scale_on_x=scale_on_x,
)
