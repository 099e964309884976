"""Defects of precision in deep products with quantised weights."""

from collections.abc import Callable
from functools import partial

import numpy as np

from lowbit.arrays import F32, Array
from lowbit.quantization import hqq
from lowbit.quantization.affine import QuantizedMatrix
from lowbit.quantization.hqq import HqqMatrix
from lowbit_conformance.defects import reals as real_zeros
from lowbit_conformance.defects import steps
from lowbit_conformance.defects.defect import Defect, Function, of_operation
from lowbit_conformance.defects.roundings import (
    DEEP,
    Rounding,
    bfloat16,
    exactly,
    flushed,
    fourteen_bits,
    half,
    tensor_float,
)
from lowbit_conformance.defects.steps import PRODUCTS, of_step
from lowbit_conformance.defects.sums import in_eight_bits

DEFECTS: list[Defect] = []
of_product, of_finish = of_step(DEFECTS, "product", PRODUCTS), of_step(DEFECTS, "finish", PRODUCTS)
of_scales, of_zeros = of_step(DEFECTS, "scales", PRODUCTS), of_step(DEFECTS, "zeros", PRODUCTS)
of_numbers = real_zeros.of_part(DEFECTS, "numbers")
of_real_product = of_operation(DEFECTS, "hqq.qgemv")


# **Products with quantised weights.**

BOTH = "linear.qgemv/C1 linear.qgemv/C2 linear.qgemm/C1 linear.qgemm/C2"
LATTICE = "linear.qgemv/C1 linear.qgemm/C1"


def operands(of_x: Rounding, of_weights: Rounding = exactly) -> Callable[[F32, F32], Array]:
    """A product that rounds its operands if K is large."""

    def product(x: F32, weights: F32) -> Array:
        deep = len(weights) >= DEEP
        return steps.product(of_x(x) if deep else x, of_weights(weights) if deep else weights)

    return product


def chunks(size: int, narrow: Rounding) -> Callable[[F32, F32], Array]:
    """A sum that is narrow within chunks of rows, and float32 between them."""

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


@of_product(BOTH)
def deep_products_in_half(x: F32, weights: F32) -> Array:
    """Deep products round each product to float16."""
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


def tall(of_x: Rounding) -> Callable[[F32, F32], Array]:
    """x is rounded if it has many rows."""
    return lambda x, weights: steps.product(of_x(x) if len(x) >= 32 else x, weights)


def wide(of_x: Rounding) -> Callable[[F32, F32], Array]:
    """x is rounded if the matrix has many columns."""
    return lambda x, weights: steps.product(of_x(x) if weights.shape[1] >= DEEP else x, weights)


@of_scales(LATTICE)
def deep_subnormal_halves_flushed(matrix: QuantizedMatrix) -> F32:
    """Subnormal float16 scales of deep matrices are 0."""
    tiny = (matrix.scales < 2.0**-14) & (matrix.scales.dtype == np.float16) & (matrix.rows >= DEEP)
    return np.where(tiny, np.float32(0), steps.scales(matrix))


of_product.add(
    "tall-x-in-tf32",
    "x of 32 rows and more is rounded to TF32.",
    "linear.qgemm/C1",
    tall(tensor_float),
    only=("linear.qgemm",),
)
of_product.add(
    "tall-x-in-half",
    "x of 32 rows and more is rounded to float16.",
    "linear.qgemm/C1",
    tall(half),
    only=("linear.qgemm",),
)
of_product.add("wide-x-in-bfloat16", "Products of 1024 columns and more round x to bfloat16.", LATTICE, wide(bfloat16))
of_product.add("deep-subnormals-flushed", "Deep products treat subnormal x as zero.", LATTICE, operands(flushed))
of_product.add(
    "deep-operands-in-tf32", "Deep products round both operands to TF32.", BOTH, operands(tensor_float, tensor_float)
)
of_product.add("deep-x-in-tf32", "Deep products round x to TF32.", BOTH, operands(tensor_float))
of_product.add("deep-x-in-bfloat16", "Deep products round x to bfloat16.", BOTH, operands(bfloat16))
of_product.add("deep-x-in-half", "Deep products round x to float16.", BOTH, operands(half))
of_product.add("deep-x-in-14-bits", "Deep products keep 14 significant bits of x.", LATTICE, operands(fourteen_bits))
of_product.add(
    "deep-x-in-8-bits",
    "Deep products round x to 8 bits in blocks of 32.",
    LATTICE,
    operands(partial(in_eight_bits, 32)),
)
of_finish.add("deep-weights-in-half", "Deep weights are dequantised to float16.", BOTH, weights_rounded(half))
of_finish.add("deep-weights-in-bfloat16", "Deep weights are dequantised to bfloat16.", BOTH, weights_rounded(bfloat16))
of_scales.add("deep-scales-in-half", "Scales of deep matrices are kept in float16.", BOTH, scales_rounded(half))
of_scales.add(
    "deep-scales-in-bfloat16", "Scales of deep matrices are kept in bfloat16.", BOTH, scales_rounded(bfloat16)
)
of_zeros.add("deep-minima-in-half", "Minima of deep matrices are kept in float16.", BOTH, minima_rounded(half))
of_zeros.add("deep-minima-in-bfloat16", "Minima of deep matrices are kept in bfloat16.", BOTH, minima_rounded(bfloat16))
of_product.add("deep-chunks-of-16-in-half", "Chunks of 16 rows are summed in float16.", BOTH, chunks(16, half))
of_product.add("deep-chunks-of-128-in-half", "Chunks of 128 rows are summed in float16.", BOTH, chunks(128, half))
of_product.add(
    "deep-chunks-in-14-bits", "Chunks of 32 rows are summed in 14 significant bits.", LATTICE, chunks(32, fourteen_bits)
)

# **Real zeros.**


def hqq_product(of_x: Rounding, of_weights: Rounding) -> Function:
    def product(x: F32, matrix: HqqMatrix) -> Array:
        weights = hqq.dequantize(matrix)
        if matrix.rows >= DEEP:
            x, weights = of_x(x), of_weights(weights)
        return real_zeros.product(x, weights)

    return product


of_real_product.add(
    "deep-real-zeros-in-tf32",
    "Deep products round both operands to TF32.",
    "C1 C2",
    hqq_product(tensor_float, tensor_float),
)
of_real_product.add(
    "deep-real-zero-weights-in-half", "Deep weights are dequantised to float16.", "C1 C2", hqq_product(exactly, half)
)
of_numbers.add(
    "eight-bit-numbers-rounded-once",
    "8-bit numbers are decoded in float64 and rounded once.",
    "hqq.dequantize/C3",
    real_zeros.eight_bit(lambda q, s, z: s.astype(np.float64) * (q - z.astype(np.float64))),
)
of_numbers.add(
    "eight-bit-numbers-distributed",
    "8-bit numbers are computed as scale' code - scale' zero', each rounded.",
    "hqq.dequantize/C3",
    real_zeros.eight_bit(lambda q, s, z: s * q - s * z),
)
of_numbers.add(
    "eight-bit-numbers-in-half",
    "Numbers in 8 bits are decoded to float16.",
    "hqq.dequantize/C3 hqq.qgemv/C2",
    real_zeros.eight_bit(lambda q, s, z: half(s * (q - z))),
)
of_numbers.add(
    "eight-bit-zeros-rounded",
    "Zeros of numbers in 8 bits are rounded to whole codes.",
    "hqq.dequantize/C3 hqq.qgemv/C2",
    real_zeros.eight_bit(lambda q, s, z: s * (q - np.rint(z))),
)
of_numbers.add(
    "eight-bit-zero-of-the-first",
    "All meta groups use the zero of the first.",
    "hqq.dequantize/C3 hqq.qgemv/C2",
    real_zeros.eight_bit(lambda q, s, z: s * (q - z[:1])),
)
