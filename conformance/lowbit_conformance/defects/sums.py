"""Defects of sums: products left out, too little precision, NaN hidden, rows of x mixed up."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from lowbit.arrays import F32, Array
from lowbit.linear import linear
from lowbit.quantization.affine import QuantizedMatrix
from lowbit_conformance import packing
from lowbit_conformance.defects import steps
from lowbit_conformance.defects.defect import MOVES, Defect, arithmetical, of_operation
from lowbit_conformance.defects.roundings import finite, flushed, half, in_steps
from lowbit_conformance.defects.steps import PRODUCTS, of_step

DEFECTS: list[Defect] = []
EXACT = "linear.qgemv/C1 linear.qgemm/C1"
BOUNDED = "linear.qgemv/C2 linear.qgemm/C2"
HIDDEN = "linear.qgemv/C5 linear.qgemm/C4"
ROWS = ("linear.qgemm",)


def with_x(change: Callable[[F32], F32]) -> Callable[[F32, F32], Array]:
    """A product with other activations."""
    return lambda x, weights: steps.product(change(x), weights)


def after(change: Callable[[Array], Array]) -> Callable[[F32, F32], Array]:
    """A product whose result is changed."""
    return lambda x, weights: np.ascontiguousarray(change(steps.product(x, weights)))


of_finish = of_step(DEFECTS, "finish", PRODUCTS)
of_product, of_gemm = of_step(DEFECTS, "product"), of_step(DEFECTS, "product", ROWS)
of_x, of_rows_of_x = of_step(DEFECTS, "product", made=with_x), of_step(DEFECTS, "product", ROWS, with_x)
of_result, of_rows = of_step(DEFECTS, "product", made=after), of_step(DEFECTS, "product", ROWS, after)

# **Products left out**: weights become zero, so that a sum lacks a product.


def without(places: Callable[[int, int], Any]) -> Callable[[F32, QuantizedMatrix], F32]:
    """Weights with zeros at some places, in a matrix of K rows and N columns."""

    def finish(weights: F32, matrix: QuantizedMatrix) -> F32:
        weights[places(*weights.shape)] = 0
        return weights

    return finish


of_places = of_step(DEFECTS, "finish", PRODUCTS, without)
of_places.add(
    "last-product-dropped",
    "The product of the last row and the last column is left out.",
    EXACT,
    lambda k, n: (-1, -1),
)
of_places.add(
    "one-product-of-thousands-dropped",
    "One product of a matrix of 4096 rows and more is left out.",
    EXACT,
    lambda k, n: (slice(2048, 2049 if k >= 4096 else 2048), min(3, n - 1)),
)
of_places.add("last-row-dropped", "The loop over rows ends one row early.", EXACT, lambda k, n: -1)
of_places.add("first-row-dropped", "The loop over rows begins at the second.", EXACT, lambda k, n: 0)
of_places.add(
    "tail-rows-of-8-dropped",
    "Rows past the last whole 8 are left out.",
    EXACT,
    lambda k, n: slice(k // 8 * 8, None),
)
of_places.add(
    "tail-rows-dropped",
    "Rows past the last whole 32 are left out.",
    EXACT,
    lambda k, n: slice(k // 32 * 32, None),
)
of_places.add(
    "tail-columns-dropped",
    "Columns past the last whole 8 stay zero: a division that should round up.",
    EXACT,
    lambda k, n: (slice(None), slice(n // 8 * 8, None)),
    "https://github.com/ml-explore/mlx/issues/4250",
)
of_places.add(
    "last-column-of-large-dropped",
    "The last column of matrices of 200,000 weights and more stays zero.",
    EXACT,
    lambda k, n: (slice(None), slice(n - (k * n >= 200_000), None)),
)


@of_finish(EXACT)
def last_row_of_deep_minimum_dropped(weights: F32, matrix: QuantizedMatrix) -> F32:
    """The last of more than 512 rows is left out, under minimum only."""
    if matrix.convention == "minimum" and matrix.rows > 512:
        weights[-1] = 0
    return weights


@of_finish(EXACT)
def tail_columns_from_the_start(weights: F32, matrix: QuantizedMatrix) -> F32:
    """Columns past the last whole 8 are those of the first 8."""
    whole = weights.shape[1] // 8 * 8
    if whole:
        weights[:, whole:] = weights[:, : weights.shape[1] - whole]
    return weights


@of_finish(EXACT)
def last_row_counted_twice(weights: F32, matrix: QuantizedMatrix) -> F32:
    """The product of the last row is added twice."""
    weights[-1] *= 2
    return weights


# **Precision.**


@of_product(BOUNDED, "https://github.com/openvinotoolkit/openvino/pull/34704")
def half_accumulation(x: F32, weights: F32) -> Array:
    """Sums are kept in float16 under a declaration of float32."""
    total = np.zeros((len(x), weights.shape[1]), np.float16)
    with np.errstate(over="ignore", invalid="ignore"):
        for x_k, row in zip(x.astype(np.float16).T, weights.astype(np.float16), strict=True):
            total += x_k[:, None] * row
    return total.astype(np.float32)


def bfloat16(numbers: F32) -> F32:
    """Rounded to 8 bits of significand, ties away from zero."""
    bits = np.ascontiguousarray(numbers).view(np.uint32)
    cut = np.where(np.isfinite(numbers), (bits + np.uint32(0x8000)) & np.uint32(0xFFFF0000), bits)
    return cut.astype(np.uint32).view(np.float32)


of_x.add("activations-in-bfloat16", "x is rounded to bfloat16 first.", BOUNDED, bfloat16)
of_x.add("activations-in-half", "x is rounded to float16 first.", BOUNDED, half)
of_x.add(
    "subnormal-activations-flushed",
    "Subnormal activations count as zero.",
    BOUNDED,
    flushed,
    "https://github.com/llvm/llvm-project/issues/57589",
)
of_finish.add("weights-in-half", "Weights are rounded to float16.", BOUNDED, lambda weights, matrix: half(weights))
of_finish.add(
    "weights-in-bfloat16", "Weights are rounded to bfloat16.", BOUNDED, lambda weights, matrix: bfloat16(weights)
)
of_result.add("result-in-half", "Results are rounded to float16.", BOUNDED, half)


def in_eight_bits(size: int, x: F32) -> F32:
    """Integers of 8 bits with one scale for each run of columns."""
    blocks = np.pad(x, ((0, 0), (0, -x.shape[1] % size))).reshape(len(x), -1, size).astype(np.float64)
    with np.errstate(invalid="ignore"):
        step = np.abs(blocks).max(axis=2, keepdims=True) / 127
        near = np.where(step > 0, np.rint(blocks / np.where(step > 0, step, 1)) * step, blocks)
    return np.asarray(near.reshape(len(x), -1)[:, : x.shape[1]], np.float32)


of_x.add(
    "activations-in-8-bits",
    "x is quantised to 8 bits in blocks, and the declaration does not say so.",
    BOUNDED,
    partial(in_eight_bits, 32),
    "https://github.com/microsoft/onnxruntime/issues/29849",
)


def zero_apart(x: F32, matrix: QuantizedMatrix) -> Array:
    """The sums of codes and of offsets are computed separately in float32 and subtracted at the end."""
    codes = packing.unpack(matrix.words, matrix.bits).astype(np.float32)
    group, scale = steps.groups(matrix), steps.scales(matrix)
    offset = -scale * steps.zeros(matrix) if matrix.convention == "zero_point" else steps.zeros(matrix)
    with np.errstate(over="ignore", invalid="ignore"):
        of_codes, of_zeros = steps.product(x, scale[group] * codes), steps.product(x, offset[group])
        return (of_codes + of_zeros).astype(np.float32)


DEFECTS.append(
    arithmetical(
        "fast-math-reassociation",
        "x (s (q - z)) is computed as x s q - x s z, as a compiler may under -ffast-math.",
        "linear.qgemv/C2 linear.qgemm/C2 linear.qgemv/C4",
        {"linear.qgemv": lambda x, matrix: zero_apart(x[None], matrix)[0], "linear.qgemm": zero_apart},
        "https://github.com/tenstorrent/tt-metal/issues/48708",
    )
)

# **NaN and infinity.**


of_x.add(
    "nan-hidden",
    "NaN and infinity become zero on the way, as -ffinite-math-only allows.",
    HIDDEN,
    finite,
    "https://github.com/ggml-org/llama.cpp/pull/7726",
)


@of_product(HIDDEN)
def nan_hidden_where_deep(x: F32, weights: F32) -> Array:
    """NaN becomes zero on the way in matrices of 128 rows and more."""
    return steps.product(finite(x) if len(weights) >= 128 else x, weights)


@of_product(HIDDEN)
def zero_weights_skipped(x: F32, weights: F32) -> Array:
    """Weights of zero are skipped, so a NaN that meets them is lost."""
    result = steps.product(finite(x), weights)
    for row, place in zip(*np.nonzero(~np.isfinite(x)), strict=True):
        with np.errstate(invalid="ignore"):
            result[row, weights[place] != 0] += x[row, place]
    return result


# **Rows of x.**


of_rows_of_x.add(
    "rows-past-64-repeated",
    "Rows of X past the 64th are those before them.",
    "linear.qgemm/C1",
    lambda x: x[np.arange(len(x)) % 64],
    "https://github.com/warpfront/hipfire/issues/732",
)
of_rows_of_x.add(
    "one-step-for-all-rows",
    "All rows of X are rounded with one step, so a row depends on its neighbours.",
    "linear.qgemm/C3",
    in_steps,
    verdicts=MOVES,
)
of_rows_of_x.add(
    "x-transposed",
    "X is read column by column.",
    "linear.qgemm/C1",
    lambda x: np.ascontiguousarray(x.ravel().reshape(x.shape[1], -1).T),
    verdicts=MOVES,
)
of_rows.add(
    "first-row-of-x-for-all",
    "Every row of the result is that of the first row of X.",
    "linear.qgemm/C1",
    lambda y: np.repeat(y[:1], len(y), axis=0),
    verdicts=MOVES,
)
of_rows.add(
    "sums-carried-over-rows",
    "Sums are not set back to 0 between rows of X.",
    "linear.qgemm/C1",
    lambda y: np.cumsum(y, axis=0, dtype=np.float32),
    verdicts=MOVES,
)
of_rows.add(
    "result-transposed",
    "The result is written column by column.",
    "linear.qgemm/C1",
    lambda y: np.ascontiguousarray(y.T).reshape(y.shape),
    verdicts=MOVES,
)


@of_rows("linear.qgemm/C1", verdicts=MOVES)
def last_row_of_x_dropped(y: Array) -> Array:
    """The last row of the result stays zero."""
    y[-1] = 0
    return y


@of_rows("linear.qgemm/C1 linear.qgemm/C4")
def odd_row_from_neighbour(y: Array) -> Array:
    """Rows of X are taken in pairs; an odd last one gets its neighbour's result."""
    if len(y) % 2 and len(y) > 1:
        y[-1] = y[-2]
    return y


@of_gemm("linear.qgemm/C4")
def nan_reaches_other_rows(x: F32, weights: F32) -> Array:
    """A NaN in one row of X spoils every row of Y."""
    result = steps.product(x, weights)
    with np.errstate(invalid="ignore"):
        return np.asarray(result + (x.sum() - x.sum()))  # the rows share a sum that is subtracted again


@of_operation(DEFECTS, "linear.qgemm")("C1 C4")
def x_sum_of_first_row(x: F32, matrix: QuantizedMatrix) -> Array:
    """The sum of activations that meets the zeros is that of the first row for all."""
    offsets = linear.group_offsets(matrix)[steps.groups(matrix)].astype(np.float32)
    right, of_own = steps.product(x, steps.RIGHT.weights(matrix)), steps.product(x, offsets)
    with np.errstate(invalid="ignore", over="ignore"):
        return (right.astype(np.float64) - of_own + of_own[:1]).astype(np.float32)


# **Columns and signs of the result.**

of_result.add("columns-one-off", "Each result is one column late.", EXACT, lambda y: np.roll(y, 1, axis=1))
of_result.add("result-doubled", "Results are twice as large.", EXACT, lambda y: 2 * y)
of_step(DEFECTS, "finish").add(
    "weights-negated",
    "Results have the other sign.",
    f"affine.dequantize/C1 affine.dequantize/C2 {EXACT}",
    lambda weights, matrix: -weights,
)


@of_result(EXACT)
def last_column_dropped(y: Array) -> Array:
    """The last column stays zero."""
    y[:, -1] = 0
    return y


@of_result(EXACT)
def columns_exchanged_in_pairs(y: Array) -> Array:
    """Neighbouring columns of the result change places."""
    columns = np.arange(y.shape[1]) ^ 1
    return y[:, np.minimum(columns, y.shape[1] - 1)]
