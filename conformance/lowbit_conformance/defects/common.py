"""The commonest mistakes of a first version: a term left out or counted twice, the wrong group, row or order."""

from collections.abc import Callable
from typing import Any

import numpy as np

from lowbit.arrays import F32, Array
from lowbit.quantization.bfp import Blocks, block_exponent
from lowbit.quantization.bfp_dot import BlockSums, total
from lowbit_conformance.defects.block_sums import decode, dot
from lowbit_conformance.defects.common_layers import HEADS, LAYERS
from lowbit_conformance.defects.common_products import WEIGHTS
from lowbit_conformance.defects.defect import Defect, of
from lowbit_conformance.defects.heads import members

# **Blocks, orders, Hessians, solvers.**


def rounded_down(x: F32, format: Any) -> Blocks:
    mantissas = np.empty(x.shape, format.dtype)
    exponents = np.empty((len(x), format.blocks(x.shape[1])), np.int16)
    for number, span in enumerate(format.spans(x.shape[1])):
        part = x[:, span].astype(np.float64)
        e = block_exponent(np.abs(part).max(axis=1), format)
        mantissas[:, span] = np.clip(np.floor(np.ldexp(part, -e[:, None])), -format.top, format.top)
        exponents[:, number] = e
    return Blocks(mantissas, exponents, format)


def one_low(blocks: Blocks) -> F32:
    return decode(blocks, blocks.exponents - np.int16(1))


def of_first_block(blocks: Blocks) -> F32:
    return decode(blocks, np.repeat(blocks.exponents[:, :1], blocks.exponents.shape[1], axis=1))


def without_sign(blocks: Blocks) -> F32:
    return decode(Blocks(np.abs(blocks.mantissas), blocks.exponents, blocks.format))


def difference(a: Array, b: Array) -> Array:
    return np.subtract(a, b)


def without_last_block(blocks: BlockSums) -> Array:
    if blocks.sums.shape[2] == 1:
        return np.zeros(blocks.sums.shape[:2], np.float32)
    sums, exponents = np.ascontiguousarray(blocks.sums[:, :, :-1]), np.ascontiguousarray(blocks.exponents[:, :, :-1])
    return total(BlockSums(sums, exponents))


def pooled(answer: Callable[[Array, str], Array]) -> Callable[..., Array]:
    def run(weights: F32, heads: int, groups: int, method: str = "mean") -> Array:
        parts = members(weights, heads, groups).astype(np.float64)
        result: Array = np.ascontiguousarray(answer(parts, method).reshape(len(weights), -1), np.float32)
        return result

    return run


def first_of(parts: Array, method: str) -> Array:
    first: Array = parts[:, :, 0]
    return first


def mean_of(parts: Array, method: str) -> Array:
    mean: Array = sum(parts[:, :, n] for n in range(parts.shape[2])) / parts.shape[2]
    return mean


def summed(parts: Array, method: str) -> Array:
    return mean_of(parts, method) * parts.shape[2] if method == "mean" else first_of(parts, method)


def without_last_input(x: F32) -> Array:
    wide = x[:-1].astype(np.float64)
    return wide.T @ wide


def next_row_only(weights: F32, factor: F32, values: F32) -> Array:
    wide = factor.astype(np.float64)
    share = np.diag(np.diagonal(wide, 1) / np.diagonal(wide)[1:], 1) if len(wide) > 1 else np.zeros((1, 1))
    return weights.astype(np.float64) + share.T @ (weights.astype(np.float64) - values)


def solved(quotient: Callable[[F32, F32, F32], Array]) -> Callable[..., Array]:
    def run(weights: F32, scales: F32, zeros: F32, bits: int) -> Array:
        with np.errstate(all="ignore"):
            return np.clip(quotient(weights, scales, zeros), 0, 2**bits - 1).astype(np.uint8)

    return run


OTHERS = (
    of("bfp.cast", "mantissas-rounded-down", "Mantissas are rounded down and not to the nearest.", "C2", rounded_down),
    of("bfp.decode", "exponent-one-low-in-decode", "A value is 2^(e-1) M.", "C1", one_low),
    of(
        "bfp.decode",
        "exponent-of-first-block",
        "All blocks of a row have the exponent of the first.",
        "C1",
        of_first_block,
    ),
    of("bfp.decode", "mantissas-without-sign", "Values are never negative.", "C1", without_sign),
    of(
        "bfp.dot",
        "exponents-subtracted",
        "The exponents of a product are subtracted and not added.",
        "C2",
        lambda a, b: dot(a, b, joined=difference),
    ),
    of("bfp.total", "last-block-not-added", "The last block is left out.", "C1", without_last_block),
    of(
        "pooling.pool",
        "sums-for-means",
        "The sum of the heads is not divided, after it was right otherwise.",
        "C1",
        pooled(summed),
    ),
    of(
        "pooling.pool",
        "first-for-mean",
        "The first head is copied where the mean is asked for.",
        "C1",
        pooled(first_of),
    ),
    of(
        "pooling.pool",
        "mean-for-first",
        "The mean comes back where the first head is asked for.",
        "C2",
        pooled(mean_of),
    ),
    of("gptq.hessian", "last-input-dropped", "The last input is left out.", "C1", without_last_input),
    of(
        "gptq.targets",
        "errors-reach-next-row-only",
        "An error changes the next row and no later one.",
        "C1",
        next_row_only,
    ),
    of(
        "hqq.codes",
        "solver-zero-subtracted",
        "The zero is subtracted and not added.",
        "C1",
        solved(lambda w, s, z: np.rint(w / s - z)),
    ),
    of("hqq.codes", "solver-zero-left-out", "The zero is left out.", "C1", solved(lambda w, s, z: np.rint(w / s))),
)

DEFECTS: tuple[Defect, ...] = (*WEIGHTS, *HEADS, *LAYERS, *OTHERS)
