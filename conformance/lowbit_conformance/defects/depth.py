"""Defects of precision that show in deep or long operations alone, as kernels have that take another way there.

A kernel with tensor cores rounds its operands to TF32, half or bfloat16; one that splits a long sum keeps its parts in
half. Most of those here are right below 1024 rows or tokens, so that small cases do not find them.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from lowbit.arrays import F32, I64, Array
from lowbit.quantization.affine import QuantizedMatrix
from lowbit.quantization.bfp import Blocks
from lowbit.quantization.bfp_dot import BlockSums
from lowbit_conformance.defects import block_sums, integers, quantisers
from lowbit_conformance.defects.defect import Function, of
from lowbit_conformance.defects.depth_layers import ATTENTION, ROUTES
from lowbit_conformance.defects.depth_products import LINEAR, REAL_ZEROS
from lowbit_conformance.defects.depth_roundings import (
    DEEP,
    Rounding,
    exactly,
    half,
    tensor_float,
)
from lowbit_conformance.defects.integers import Run, runs_of

# **Norm, GPTQ and blocks of integers.**


def square_of_narrow(narrow: Rounding) -> Function:
    """The mean square is that of a narrow x."""

    def norm(x: F32, gain: F32, epsilon: float) -> Array:
        with np.errstate(all="ignore"):
            square = np.mean(np.square(narrow(x).astype(np.float64)), axis=1, keepdims=True)
            answer: Array = gain.astype(np.float64) * (x.astype(np.float64) / np.sqrt(square + epsilon))
        return answer

    return norm


def deep_hessian(x: F32) -> Array:
    return quantisers.hessian(tensor_float(x) if len(x) >= DEEP else x)


def targets(of_errors: Rounding, of_ratios: Rounding) -> Function:
    def answer(weights: F32, factor: F32, values: F32) -> Array:
        wide = weights.astype(np.float64)
        ratios, errors = quantisers.ratios(factor.astype(np.float64)), wide - values
        if len(weights) >= DEEP:
            ratios, errors = of_ratios(ratios).astype(np.float64), of_errors(errors).astype(np.float64)
        goals: Array = wide + ratios.T @ errors
        return goals

    return answer


def sixteen_bits(mantissas: Array, matrix: QuantizedMatrix, x: Blocks) -> Array:
    scales, zeros = matrix.scales.astype(np.float64), matrix.zeros.astype(np.float64)
    offsets = zeros if matrix.convention == "minimum" else -scales * zeros
    y = np.zeros((x.rows, matrix.columns))
    codes = integers.codes_of(matrix)
    for first, last, block, group in runs_of(matrix.rows, x.format.block, matrix.group_size):
        power, own = np.exp2(x.exponents[:, block].astype(np.float64))[:, None], mantissas[:, first:last]
        y += power * (own @ codes[first:last]) * scales[group]
        sums = own.sum(axis=1, keepdims=True).astype(np.int16).astype(np.float64)
        y += power * sums * offsets[group]
    return y


def sums_of_16_bits(x: Blocks, matrix: QuantizedMatrix) -> Array:
    return sixteen_bits(integers.plain(x), matrix, x)


def power_of_float32(x: Blocks, run: Run) -> Array:
    """2^e, infinite beyond what float32 holds."""
    with np.errstate(over="ignore"):
        power: Array = np.exp2(x.exponents[:, run[2]].astype(np.float32) + np.float32(1))
    return power.astype(np.float64) / 2


def with_infinite_power(x: Blocks, matrix: QuantizedMatrix) -> Array:
    with np.errstate(invalid="ignore"):
        return integers.product(x, matrix, powers=power_of_float32)


def scales_of_half(x: Blocks, matrix: QuantizedMatrix) -> Array:
    if matrix.rows < DEEP:
        return integers.product(x, matrix)
    return integers.product(x, replace(matrix, scales=half(matrix.scales).astype(matrix.scales.dtype)))


def in_float32(products: I64) -> I64:
    total = np.zeros(products.shape[:-1], np.float32)
    for place in range(products.shape[-1]):
        total += products[..., place].astype(np.float32)
    return total.astype(np.int64)


def in_32_bits(products: I64) -> I64:
    total: I64 = products.sum(axis=-1).astype(np.int32).astype(np.int64)
    return total


def narrow_dot(
    narrow: Callable[[I64], I64],
) -> Callable[[Blocks, Blocks], BlockSums]:
    """Sums of bytes, that is of mantissas of up to 12 bits, in a narrow accumulator."""

    def dot(a: Blocks, b: Blocks) -> BlockSums:
        small = max(a.format.mantissa, b.format.mantissa) <= 12
        return block_sums.dot(a, b, narrow) if small else block_sums.dot(a, b)

    return dot


OTHERS = (
    of(
        "blocks.rms_norm",
        "norm-of-tf32",
        "The mean square is that of x rounded to TF32.",
        "C2",
        square_of_narrow(tensor_float),
    ),
    of(
        "blocks.rms_norm",
        "norm-of-half",
        "The mean square is that of x rounded to float16.",
        "C2",
        square_of_narrow(half),
    ),
    of("gptq.hessian", "deep-hessian-in-tf32", "Inputs of long calibrations are rounded to TF32.", "C1", deep_hessian),
    of(
        "gptq.targets",
        "deep-errors-in-tf32",
        "Errors of deep layers are rounded to TF32.",
        "C1",
        targets(tensor_float, exactly),
    ),
    of(
        "gptq.targets",
        "deep-factor-in-half",
        "The factor of deep layers is rounded to float16.",
        "C1",
        targets(exactly, half),
    ),
    of(
        integers.OPERATION,
        "mantissa-sums-in-16-bits",
        "Sums of the mantissas of a segment wrap in 16 bits.",
        "C1",
        sums_of_16_bits,
    ),
    of(
        integers.OPERATION,
        "power-of-empty-block-infinite",
        "2^e of an empty block is infinite, and 0 times it is NaN.",
        "C1",
        with_infinite_power,
    ),
    of(
        integers.OPERATION,
        "deep-integer-scales-in-half",
        "Scales of deep matrices are kept in float16.",
        "C1",
        scales_of_half,
    ),
    of(
        "bfp.dot",
        "small-sums-in-float32",
        "Sums of products of short mantissas are kept in float32.",
        "C1",
        narrow_dot(in_float32),
    ),
    of(
        "bfp.dot",
        "small-sums-in-32-bits",
        "Sums of products of short mantissas wrap in 32 bits.",
        "C1",
        narrow_dot(in_32_bits),
    ),
)

DEFECTS = (*LINEAR, *REAL_ZEROS, *ROUTES, *ATTENTION, *OTHERS)
