"""Defects of sums: products left out, too little precision, NaN hidden, rows of x mixed up."""

import numpy as np

from lowbit.arrays import F32, Array
from lowbit.linear import linear
from lowbit.quantization.affine import QuantizedMatrix
from lowbit_conformance import packing
from lowbit_conformance.defects import steps
from lowbit_conformance.defects.defect import MOVES, Defect, arithmetical
from lowbit_conformance.defects.steps import PRODUCTS, stepwise

EXACT = "linear.qgemv/C1 linear.qgemm/C1"
BOUNDED = "linear.qgemv/C2 linear.qgemm/C2"
HIDDEN = "linear.qgemv/C5 linear.qgemm/C4"

# **Products left out**: weights become zero, so that the sum is one product short.


def last_product_dropped(weights: F32, matrix: QuantizedMatrix) -> F32:
    weights[-1, -1] = 0
    return weights


def one_of_thousands_dropped(weights: F32, matrix: QuantizedMatrix) -> F32:
    if len(weights) >= 4096:
        weights[2048, 3] = 0
    return weights


def tail_rows_dropped(weights: F32, matrix: QuantizedMatrix) -> F32:
    weights[len(weights) // 32 * 32 :] = 0
    return weights


def deep_tail_dropped(weights: F32, matrix: QuantizedMatrix) -> F32:
    if matrix.convention == "minimum" and matrix.rows > 512:
        weights[-1] = 0
    return weights


def last_column_of_large(weights: F32, matrix: QuantizedMatrix) -> F32:
    if weights.size >= 200_000:
        weights[:, -1] = 0
    return weights


def tail_columns_dropped(weights: F32, matrix: QuantizedMatrix) -> F32:
    weights[:, weights.shape[1] // 8 * 8 :] = 0
    return weights


def tail_columns_of_another(weights: F32, matrix: QuantizedMatrix) -> F32:
    whole = weights.shape[1] // 8 * 8
    if whole:
        weights[:, whole:] = weights[:, : weights.shape[1] - whole]
    return weights


# **Precision.**


def in_half(x: F32, weights: F32) -> Array:
    """Each product is added to a sum that float16 holds, row after row."""
    total = np.zeros((len(x), weights.shape[1]), np.float16)
    with np.errstate(over="ignore", invalid="ignore"):
        for x_k, row in zip(x.astype(np.float16).T, weights.astype(np.float16), strict=True):
            total += x_k[:, None] * row
    return total.astype(np.float32)


def bfloat16(numbers: F32) -> F32:
    """Rounded to 8 bits of significand, ties away."""
    bits = numbers.view(np.uint32)
    cut = np.where(np.isfinite(numbers), (bits + np.uint32(0x8000)) & np.uint32(0xFFFF0000), bits)
    return cut.astype(np.uint32).view(np.float32)


def of_bfloat16(x: F32, weights: F32) -> Array:
    return steps.product(bfloat16(np.ascontiguousarray(x)), weights)


def of_eight_bits(x: F32, weights: F32) -> Array:
    """Activations become integers of 8 bits in blocks of 32."""
    rounded = x.astype(np.float64)
    with np.errstate(invalid="ignore"):
        for start in range(0, x.shape[1], 32):
            block = rounded[:, start : start + 32]
            step = np.abs(block).max(axis=1, keepdims=True) / 127
            block[...] = np.where(step > 0, np.rint(block / np.where(step > 0, step, 1)) * step, block)
        return steps.product(rounded.astype(np.float32), weights)


def subnormals_flushed(x: F32, weights: F32) -> Array:
    """What the processor does when it is told to take subnormal numbers for zero."""
    tiny = np.float32(np.finfo(np.float32).tiny)
    return steps.product(np.where(np.abs(x) < tiny, np.float32(0), x), weights)


def zero_apart(x: F32, matrix: QuantizedMatrix) -> Array:
    """The sum of codes and the sum of offsets apart, each in float32, and one taken from the other at the end."""
    codes = packing.unpack(matrix.words, matrix.bits).astype(np.float32)
    group, scale = steps.groups(matrix), steps.scales(matrix)
    offset = -scale * steps.zeros(matrix) if matrix.convention == "zero_point" else steps.zeros(matrix)
    with np.errstate(over="ignore", invalid="ignore"):
        of_codes, of_zeros = steps.product(x, scale[group] * codes), steps.product(x, offset[group])
        return (of_codes + of_zeros).astype(np.float32)


# **NaN and infinity.**


def finite(numbers: F32) -> F32:
    return np.nan_to_num(numbers, nan=0, posinf=0, neginf=0)


def hidden_where_deep(x: F32, weights: F32) -> Array:
    return steps.product(finite(x) if len(weights) >= 128 else x, weights)


def zero_weights_skipped(x: F32, weights: F32) -> Array:
    result = steps.product(finite(x), weights)
    for row, place in zip(*np.nonzero(~np.isfinite(x)), strict=True):
        with np.errstate(invalid="ignore"):
            result[row, weights[place] != 0] += x[row, place]
    return result


# **Rows of x.**


def rows_past_64(x: F32, weights: F32) -> Array:
    return steps.product(x[np.arange(len(x)) % 64], weights)


def odd_row_from_neighbour(x: F32, weights: F32) -> Array:
    result = steps.product(x, weights)
    if len(x) % 2 and len(x) > 1:
        result[-1] = result[-2]
    return result


def sum_of_first_row(x: F32, matrix: QuantizedMatrix) -> Array:
    """Equation 2, with the sum of activations of row 0 for every row."""
    offsets = linear.group_offsets(matrix)[steps.groups(matrix)].astype(np.float32)
    right, of_own = steps.product(x, steps.RIGHT.weights(matrix)), steps.product(x, offsets)
    with np.errstate(invalid="ignore", over="ignore"):
        return (right.astype(np.float64) - of_own + of_own[:1]).astype(np.float32)


def largest_of_all_rows(x: F32, weights: F32) -> Array:
    """All rows are rounded with one step, a fraction of the largest number of any row."""
    with np.errstate(invalid="ignore", over="ignore"):
        step = np.float32(np.abs(x).max() * 2.0**-21)
        return steps.product(np.rint(x / step) * step if step > 0 else x, weights)


def forgets_rows(x: F32, weights: F32) -> Array:
    """NaN in one row reaches all: the rows share a sum that is taken off again."""
    result = steps.product(x, weights)
    with np.errstate(invalid="ignore"):
        spoilt: Array = result + (x.sum() - x.sum())
    return spoilt


DEFECTS: tuple[Defect, ...] = (
    stepwise(
        "last-product-dropped",
        "The product of the last row and the last column is left out.",
        EXACT,
        only=PRODUCTS,
        finish=last_product_dropped,
    ),
    stepwise(
        "one-product-of-thousands-dropped",
        "One product of a matrix of 4096 rows and more is left out.",
        EXACT,
        only=PRODUCTS,
        finish=one_of_thousands_dropped,
    ),
    stepwise(
        "tail-rows-dropped",
        "Rows past the last whole 32 are left out.",
        EXACT,
        only=PRODUCTS,
        finish=tail_rows_dropped,
    ),
    stepwise(
        "last-row-of-deep-minimum-dropped",
        "The last of more than 512 rows is left out, under minimum only.",
        EXACT,
        only=PRODUCTS,
        finish=deep_tail_dropped,
    ),
    stepwise(
        "last-column-of-large-dropped",
        "The last column of matrices of 200,000 weights and more stays zero.",
        EXACT,
        only=PRODUCTS,
        finish=last_column_of_large,
    ),
    stepwise(
        "tail-columns-dropped",
        "Columns past the last whole 8 stay zero: a division that should round up.",
        EXACT,
        "https://github.com/ml-explore/mlx/issues/4250",
        only=PRODUCTS,
        finish=tail_columns_dropped,
    ),
    stepwise(
        "tail-columns-from-the-start",
        "Columns past the last whole 8 are those of the first 8.",
        EXACT,
        only=PRODUCTS,
        finish=tail_columns_of_another,
    ),
    stepwise(
        "half-accumulation",
        "Sums are kept in float16 under a declaration of float32.",
        BOUNDED,
        "https://github.com/openvinotoolkit/openvino/pull/34704",
        product=in_half,
    ),
    stepwise("activations-in-bfloat16", "x is rounded to bfloat16 first.", BOUNDED, product=of_bfloat16),
    stepwise(
        "activations-in-8-bits",
        "x is quantised to 8 bits in blocks, and the declaration does not say so.",
        BOUNDED,
        "https://github.com/microsoft/onnxruntime/issues/29849",
        product=of_eight_bits,
    ),
    stepwise(
        "subnormal-activations-flushed",
        "Subnormal activations count as zero.",
        BOUNDED,
        "https://github.com/llvm/llvm-project/issues/57589",
        product=subnormals_flushed,
    ),
    arithmetical(
        "fast-math-reassociation",
        "x (s (q - z)) is computed as x s q - x s z, as a compiler may under -ffast-math.",
        "linear.qgemv/C2 linear.qgemm/C2 linear.qgemv/C4",
        {"linear.qgemv": lambda x, matrix: zero_apart(x[None], matrix)[0], "linear.qgemm": zero_apart},
        "https://github.com/tenstorrent/tt-metal/issues/48708",
    ),
    stepwise(
        "nan-hidden",
        "NaN and infinity become zero on the way, as -ffinite-math-only allows.",
        HIDDEN,
        "https://github.com/ggml-org/llama.cpp/pull/7726",
        product=lambda x, w: steps.product(finite(x), w),
    ),
    stepwise(
        "nan-hidden-where-deep",
        "NaN becomes zero on the way in matrices of 128 rows and more.",
        HIDDEN,
        product=hidden_where_deep,
    ),
    stepwise(
        "zero-weights-skipped",
        "Weights of zero are skipped, so a NaN that meets them is lost.",
        HIDDEN,
        product=zero_weights_skipped,
    ),
    stepwise(
        "rows-past-64-repeated",
        "Rows of X past the 64th are those before them.",
        "linear.qgemm/C1",
        "https://github.com/warpfront/hipfire/issues/732",
        only=("linear.qgemm",),
        product=rows_past_64,
    ),
    stepwise(
        "odd-row-from-neighbour",
        "Rows of X are taken in pairs; an odd last one gets its neighbour's result.",
        "linear.qgemm/C1 linear.qgemm/C4",
        only=("linear.qgemm",),
        product=odd_row_from_neighbour,
    ),
    arithmetical(
        "x-sum-of-first-row",
        "The sum of activations that meets the zeros is that of the first row for all.",
        "linear.qgemm/C1 linear.qgemm/C4",
        {"linear.qgemm": sum_of_first_row},
    ),
    stepwise(
        "one-step-for-all-rows",
        "All rows of X are rounded with one step, so a row depends on its neighbours.",
        "linear.qgemm/C3",
        only=("linear.qgemm",),
        product=largest_of_all_rows,
        verdicts=MOVES,
    ),
    stepwise(
        "nan-reaches-other-rows",
        "A NaN in one row of X spoils every row of Y.",
        "linear.qgemm/C4",
        only=("linear.qgemm",),
        product=forgets_rows,
    ),
)
