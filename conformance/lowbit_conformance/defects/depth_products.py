"""Defects of precision in deep products with quantised weights."""

from collections.abc import Callable
from typing import Any

import numpy as np

from lowbit.arrays import F32, Array
from lowbit.quantization import hqq
from lowbit.quantization.affine import QuantizedMatrix
from lowbit.quantization.hqq import HqqMatrix
from lowbit.quantization.hqq_numbers import EightBit, Numbers, decode
from lowbit_conformance.defects import reals as real_zeros
from lowbit_conformance.defects import steps
from lowbit_conformance.defects.defect import Defect, Function, of
from lowbit_conformance.defects.depth_roundings import (
    DEEP,
    Rounding,
    bfloat16,
    exactly,
    fourteen_bits,
    half,
    tensor_float,
)
from lowbit_conformance.defects.steps import PRODUCTS, stepwise

# **Products with quantised weights.**

BOTH = "linear.qgemv/C1 linear.qgemv/C2 linear.qgemm/C1 linear.qgemm/C2"
LATTICE = "linear.qgemv/C1 linear.qgemm/C1"


def operands(of_x: Rounding, of_weights: Rounding = exactly) -> Callable[[F32, F32], Array]:
    """A product of operands that are rounded where it is deep."""

    def product(x: F32, weights: F32) -> Array:
        deep = len(weights) >= DEEP
        return steps.product(of_x(x) if deep else x, of_weights(weights) if deep else weights)

    return product


def eight_bits(size: int) -> Callable[[F32, F32], Array]:
    """Activations become 8-bit integers, with one scale for each run of them, where the product is deep."""

    def product(x: F32, weights: F32) -> Array:
        if len(weights) < DEEP:
            return steps.product(x, weights)
        blocks = np.pad(x, ((0, 0), (0, -x.shape[1] % size))).reshape(len(x), -1, size).astype(np.float64)
        with np.errstate(invalid="ignore"):
            step = np.abs(blocks).max(axis=2, keepdims=True) / 127
            blocks = np.where(step > 0, np.rint(blocks / np.where(step > 0, step, 1)) * step, blocks)
        return steps.product(blocks.reshape(len(x), -1)[:, : x.shape[1]].astype(np.float32), weights)

    return product


def chunks(size: int, narrow: Rounding) -> Callable[[F32, F32], Array]:
    """A sum that is narrow within chunks of rows, and of float32 from one to the next."""

    def product(x: F32, weights: F32) -> Array:
        if len(weights) < DEEP:
            return steps.product(x, weights)
        total = np.zeros((len(x), weights.shape[1]), np.float32)
        padding = -len(weights) % size
        wide, deep = np.pad(x, ((0, 0), (0, padding))), np.pad(weights, ((0, padding), (0, 0)))
        with np.errstate(over="ignore", invalid="ignore"):
            parts = np.zeros((wide.shape[1] // size, *total.shape))
            for place in range(size):
                terms = wide[:, place::size].T[:, :, None].astype(np.float64) * deep[place::size][:, None]
                parts = narrow((parts + terms).astype(np.float32)).astype(np.float64)
            for part in parts:
                total += part.astype(np.float32)
        return total

    return product


def terms_in_half(x: F32, weights: F32) -> Array:
    """Each product is rounded to float16, and their sum is wide."""
    result = steps.product(x, weights)
    if len(weights) >= DEEP:
        with np.errstate(over="ignore", invalid="ignore"):
            for row, own in enumerate(x):
                used = np.flatnonzero(own)
                result[row] = half(own[used, None] * weights[used]).sum(axis=0, dtype=np.float64)
    return result


def weights_rounded(narrow: Rounding) -> Callable[[F32, QuantizedMatrix], F32]:
    return lambda weights, matrix: narrow(weights) if matrix.rows >= DEEP else weights


def scales_rounded(narrow: Rounding) -> Callable[[QuantizedMatrix], F32]:
    return lambda matrix: narrow(steps.scales(matrix)) if matrix.rows >= DEEP else steps.scales(matrix)


def minima_rounded(narrow: Rounding) -> Callable[[QuantizedMatrix], F32]:
    def zeros(matrix: QuantizedMatrix) -> F32:
        deep = matrix.rows >= DEEP and matrix.convention == "minimum"
        return np.asarray(narrow(steps.zeros(matrix)) if deep else steps.zeros(matrix))

    return zeros


def deep(name: str, cause: str, clauses: str = BOTH, **replaced: Any) -> Defect:
    return stepwise(name, cause, clauses, only=PRODUCTS, **replaced)


def tall(of_x: Rounding) -> Callable[[F32, F32], Array]:
    """x is rounded where it has many rows."""
    return lambda x, weights: steps.product(of_x(x) if len(x) >= 32 else x, weights)


def wide(of_x: Rounding) -> Callable[[F32, F32], Array]:
    """x is rounded where the matrix has many columns."""
    return lambda x, weights: steps.product(of_x(x) if weights.shape[1] >= DEEP else x, weights)


def flushed(numbers: Array) -> Array:
    return np.where(np.abs(numbers) < np.float32(2.0**-126), np.float32(0), numbers)


def deep_halves_flushed(matrix: QuantizedMatrix) -> F32:
    tiny = (matrix.scales < 2.0**-14) & (matrix.scales.dtype == np.float16) & (matrix.rows >= DEEP)
    return np.where(tiny, np.float32(0), steps.scales(matrix))


LINEAR = (
    stepwise(
        "tall-x-in-tf32",
        "x of 32 rows and more is rounded to TF32.",
        "linear.qgemm/C1",
        only=("linear.qgemm",),
        product=tall(tensor_float),
    ),
    stepwise(
        "tall-x-in-half",
        "x of 32 rows and more is rounded to float16.",
        "linear.qgemm/C1",
        only=("linear.qgemm",),
        product=tall(half),
    ),
    deep(
        "wide-x-in-bfloat16", "Products of 1024 columns and more round x to bfloat16.", LATTICE, product=wide(bfloat16)
    ),
    deep("deep-subnormals-flushed", "Deep products take subnormal x for zero.", LATTICE, product=operands(flushed)),
    deep(
        "deep-subnormal-halves-flushed",
        "Subnormal float16 scales of deep matrices are 0.",
        LATTICE,
        scales=deep_halves_flushed,
    ),
    deep(
        "deep-operands-in-tf32",
        "Deep products round both operands to TF32.",
        product=operands(tensor_float, tensor_float),
    ),
    deep("deep-x-in-tf32", "Deep products round x to TF32.", product=operands(tensor_float)),
    deep("deep-x-in-bfloat16", "Deep products round x to bfloat16.", product=operands(bfloat16)),
    deep("deep-x-in-half", "Deep products round x to float16.", product=operands(half)),
    deep("deep-x-in-14-bits", "Deep products keep 14 significant bits of x.", LATTICE, product=operands(fourteen_bits)),
    deep("deep-x-in-8-bits", "Deep products round x to 8 bits in blocks of 32.", LATTICE, product=eight_bits(32)),
    deep("deep-weights-in-half", "Deep weights are dequantised to float16.", finish=weights_rounded(half)),
    deep("deep-weights-in-bfloat16", "Deep weights are dequantised to bfloat16.", finish=weights_rounded(bfloat16)),
    deep("deep-scales-in-half", "Scales of deep matrices are kept in float16.", scales=scales_rounded(half)),
    deep("deep-scales-in-bfloat16", "Scales of deep matrices are kept in bfloat16.", scales=scales_rounded(bfloat16)),
    deep("deep-minima-in-half", "Minima of deep matrices are kept in float16.", zeros=minima_rounded(half)),
    deep("deep-minima-in-bfloat16", "Minima of deep matrices are kept in bfloat16.", zeros=minima_rounded(bfloat16)),
    deep("deep-products-in-half", "Deep products round each product to float16.", product=terms_in_half),
    deep("deep-chunks-of-16-in-half", "Chunks of 16 rows are summed in float16.", product=chunks(16, half)),
    deep("deep-chunks-of-128-in-half", "Chunks of 128 rows are summed in float16.", product=chunks(128, half)),
    deep(
        "deep-chunks-in-14-bits",
        "Chunks of 32 rows are summed in 14 significant bits.",
        LATTICE,
        product=chunks(32, fourteen_bits),
    ),
)

# **Real zeros.**


def hqq_product(of_x: Rounding, of_weights: Rounding) -> Function:
    def product(x: F32, matrix: HqqMatrix) -> Array:
        weights = hqq.dequantize(matrix)
        if matrix.rows >= DEEP:
            x, weights = of_x(x), of_weights(weights)
        return real_zeros.product(x, weights)

    return product


def eight_bit(value: Callable[[F32, F32, F32], Any]) -> Callable[[Numbers], F32]:
    """Numbers in 8 bits from their codes, scales and zeros by another expression."""

    def numbers(given: Numbers) -> F32:
        if not isinstance(given, EightBit):
            return decode(given)
        own = np.arange(len(given.codes)) % len(given.scales)
        parts = given.codes.astype(np.float32), given.scales.astype(np.float32)[own]
        return np.asarray(value(*parts, given.zeros.astype(np.float32)[own]), np.float32)

    return numbers


def both_of(name: str, cause: str, numbers: Callable[[Numbers], F32], clauses: str) -> Defect:
    return real_zeros.both(name, cause, clauses, numbers=numbers)


REAL_ZEROS = (
    of(
        "hqq.qgemv",
        "deep-real-zeros-in-tf32",
        "Deep products round both operands to TF32.",
        "C1 C2",
        hqq_product(tensor_float, tensor_float),
    ),
    of(
        "hqq.qgemv",
        "deep-real-zero-weights-in-half",
        "Deep weights are dequantised to float16.",
        "C1 C2",
        hqq_product(exactly, half),
    ),
    both_of(
        "eight-bit-numbers-rounded-once",
        "Numbers in 8 bits are decoded in float64 and rounded once.",
        eight_bit(lambda q, s, z: s.astype(np.float64) * (q.astype(np.float64) - z)),
        "hqq.dequantize/C3",
    ),
    both_of(
        "eight-bit-numbers-distributed",
        "Numbers in 8 bits are scale' code less scale' zero', each rounded.",
        eight_bit(lambda q, s, z: s * q - s * z),
        "hqq.dequantize/C3",
    ),
    both_of(
        "eight-bit-numbers-in-half",
        "Numbers in 8 bits are decoded to float16.",
        eight_bit(lambda q, s, z: half(s * (q - z))),
        "hqq.dequantize/C3 hqq.qgemv/C2",
    ),
    both_of(
        "eight-bit-zeros-rounded",
        "Zeros of numbers in 8 bits are rounded to whole codes.",
        eight_bit(lambda q, s, z: s * (q - np.rint(z))),
        "hqq.dequantize/C3 hqq.qgemv/C2",
    ),
    both_of(
        "eight-bit-zero-of-the-first",
        "All meta groups take the zero of the first.",
        eight_bit(lambda q, s, z: s * (q - z[:1])),
        "hqq.dequantize/C3 hqq.qgemv/C2",
    ),
)
