"""Defects of precision that appear only in deep or long operations, for which kernels use other code.

A kernel with tensor cores rounds its operands to TF32, half or bfloat16; one that splits a long sum keeps its parts in
half. Most of those here are right below 1024 rows or tokens, so that small cases do not find them.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from lowbit.arrays import F32, I64, Array
from lowbit.quantization.affine import QuantizedMatrix
from lowbit.quantization.bfp import Blocks
from lowbit.quantization.bfp_dot import BlockSums
from lowbit_conformance.defects import activations, block_sums, integers, quantisers
from lowbit_conformance.defects.defect import Defect, of_operation
from lowbit_conformance.defects.integers import Run
from lowbit_conformance.defects.roundings import DEEP, Rounding, half, tensor_float

DEFECTS: list[Defect] = []
of_hessian = of_operation(DEFECTS, "gptq.hessian")
of_targets = of_operation(DEFECTS, "gptq.targets")
of_qgemm_bfp = of_operation(DEFECTS, integers.OPERATION)
of_dot = of_operation(DEFECTS, "bfp.dot")


# **Norm, GPTQ and blocks of integers.**


of_root = of_operation(DEFECTS, "blocks.rms_norm", activations.under)
of_root.add(
    "norm-of-tf32",
    "x is rounded to TF32 for the mean square.",
    "C2",
    lambda x, e: activations.right(tensor_float(x), e),
)
of_root.add(
    "norm-of-half", "x is rounded to float16 for the mean square.", "C2", lambda x, e: activations.right(half(x), e)
)


def where_deep(rounded: Rounding) -> Rounding:
    """Rounds arrays with many rows only."""
    return lambda numbers: rounded(numbers) if len(numbers) >= DEEP else numbers


@of_hessian("C1")
def deep_hessian_in_tf32(x: F32) -> Array:
    """Inputs of long calibrations are rounded to TF32."""
    return quantisers.hessian(where_deep(tensor_float)(x))


of_targets.add(
    "deep-errors-in-tf32",
    "Errors of deep layers are rounded to TF32.",
    "C1",
    partial(quantisers.targets, of_errors=where_deep(tensor_float)),
)
of_targets.add(
    "deep-factor-in-half",
    "The factor of deep layers is rounded to float16.",
    "C1",
    quantisers.spreading(lambda factor: where_deep(half)(quantisers.ratios(factor)).astype(np.float64)),
)


of_qgemm_bfp.add(
    "mantissa-sums-in-16-bits",
    "Sums of the mantissas of a segment wrap in 16 bits.",
    "C1",
    partial(integers.product, of_sums=lambda sums: sums.astype(np.int16)),
)


@of_qgemm_bfp("C1")
def power_of_empty_block_infinite(x: Blocks, matrix: QuantizedMatrix) -> Array:
    """2^e of an empty block is infinite, and 0 times it is NaN."""

    def power(x: Blocks, run: Run) -> Array:
        return np.asarray(np.exp2(x.exponents[:, run[2]].astype(np.float32) + np.float32(1)), np.float64) / 2

    with np.errstate(over="ignore", invalid="ignore"):
        return integers.product(x, matrix, powers=power)


@of_qgemm_bfp("C1")
def deep_integer_scales_in_half(x: Blocks, matrix: QuantizedMatrix) -> Array:
    """Scales of deep matrices are kept in float16."""
    if matrix.rows < DEEP:
        return integers.product(x, matrix)
    return integers.product(x, replace(matrix, scales=half(matrix.scales).astype(matrix.scales.dtype)))


def in_float32(products: I64) -> I64:
    total = np.zeros(products.shape[:-1], np.float32)
    for place in range(products.shape[-1]):
        total += products[..., place].astype(np.float32)
    return total.astype(np.int64)


def narrow_dot(narrow: Callable[[I64], I64]) -> Callable[[Blocks, Blocks], BlockSums]:
    """Sums of short mantissas, of up to 12 bits, in a narrow accumulator."""

    def dot(a: Blocks, b: Blocks) -> BlockSums:
        small = max(a.format.mantissa, b.format.mantissa) <= 12
        return block_sums.dot(a, b, narrow) if small else block_sums.dot(a, b)

    return dot


of_dot.add(
    "small-sums-in-float32", "Sums of products of short mantissas are kept in float32.", "C1", narrow_dot(in_float32)
)
of_dot.add(
    "small-sums-in-32-bits",
    "Sums of products of short mantissas wrap in 32 bits.",
    "C1",
    narrow_dot(partial(block_sums.wrapping, np.int32)),
)
