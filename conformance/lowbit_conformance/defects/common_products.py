"""The commonest mistakes in products with quantised weights: codes, groups, values and sums."""

from collections.abc import Callable
from typing import Any

import numpy as np

from lowbit.arrays import F32, Array
from lowbit.quantization.affine import Convention, QuantizedMatrix
from lowbit_conformance import packing
from lowbit_conformance.defects import steps
from lowbit_conformance.defects.defect import MOVES
from lowbit_conformance.defects.steps import PRODUCTS, stepwise
from lowbit_conformance.defects.sums import bfloat16

VALUES = "affine.dequantize/C1 affine.dequantize/C2 linear.qgemv/C1 linear.qgemm/C1"
MINIMUM = "affine.dequantize/C1 linear.qgemv/C1 linear.qgemm/C1"
POINT = "affine.dequantize/C2 linear.qgemv/C1 linear.qgemm/C1"
SUMS = "linear.qgemv/C1 linear.qgemm/C1"
ROUNDED = "linear.qgemv/C2 linear.qgemm/C2"

# **Codes.**


def top_bit_lost(words: Any, bits: int) -> Array:
    return packing.unpack(words, bits) & np.uint8(2 ** (bits - 1) - 1)


def unmasked(words: Any, bits: int) -> Array:
    """What is above a code in its word stays."""
    word, shift = packing.places(len(words) * 32 // bits, bits)
    codes: Array = words[word] >> shift[:, None].astype(np.uint32)
    return codes


def by_columns(words: Any, bits: int) -> Array:
    turned = np.ascontiguousarray(words.ravel().reshape(words.shape[1], -1).T)
    return packing.unpack(turned, bits)


def next_row(words: Any, bits: int) -> Array:
    codes = packing.unpack(words, bits)
    return codes[np.minimum(np.arange(len(codes)) + 1, len(codes) - 1)]


# **Groups.**


def grouped(change: Callable[[Array, int], Array]) -> Callable[[QuantizedMatrix], Array]:
    return lambda matrix: change(steps.groups(matrix), matrix.groups)


def before(rows: Array) -> Array:
    """Each group's numbers are those of the group before."""
    return rows[np.maximum(np.arange(len(rows)) - 1, 0)]


def without_last_group(weights: F32, matrix: QuantizedMatrix) -> F32:
    weights[(matrix.groups - 1) * matrix.group_size :] = 0
    return weights


# **Values**, by convention where only one of them can be mistaken.


def valued(minimum: Any = None, point: Any = None) -> Callable[[F32, F32, F32, Convention], F32]:
    def value(codes: F32, scale: F32, zero: F32, convention: Convention) -> F32:
        own = minimum if convention == "minimum" else point
        with np.errstate(all="ignore"):
            result: F32 = own(codes, scale, zero) if own else steps.value(codes, scale, zero, convention)
        return result

    return value


def finished(change: Callable[[F32], F32]) -> Callable[[F32, QuantizedMatrix], F32]:
    return lambda weights, matrix: change(weights)


def without_rows(rows: Callable[[int], slice]) -> Callable[[F32, QuantizedMatrix], F32]:
    def finish(weights: F32, matrix: QuantizedMatrix) -> F32:
        weights[rows(len(weights))] = 0
        return weights

    return finish


def last_twice(weights: F32, matrix: QuantizedMatrix) -> F32:
    weights[-1] *= 2
    return weights


def halved(numbers: Array) -> F32:
    with np.errstate(over="ignore"):
        return numbers.astype(np.float16).astype(np.float32)


# **Sums.**


def after(change: Callable[[Array], Array]) -> Callable[[F32, F32], Array]:
    """A product whose result is changed."""
    return lambda x, weights: np.ascontiguousarray(change(steps.product(x, weights)))


def pairs(y: Array) -> Array:
    columns = np.arange(y.shape[1]) ^ 1
    return y[:, np.minimum(columns, y.shape[1] - 1)]


def last_column(y: Array) -> Array:
    y[:, -1] = 0
    return y


def last_row(y: Array) -> Array:
    y[-1] = 0
    return y


def running(y: Array) -> Array:
    return np.cumsum(y, axis=0, dtype=np.float32)


def x_by_columns(x: F32, weights: F32) -> Array:
    return steps.product(np.ascontiguousarray(x.ravel().reshape(x.shape[1], -1).T), weights)


WEIGHTS = (
    stepwise(
        "codes-without-top-bit",
        "The mask is one bit short, so that codes lose their top bit.",
        f"packing.unpack/C1 {VALUES}",
        unpack=top_bit_lost,
    ),
    stepwise(
        "codes-not-masked",
        "A code keeps what lies above it in its word.",
        VALUES,
        unpack=unmasked,
        only=steps.VALUES,
    ),
    stepwise("words-by-columns", "Words are read column by column.", f"packing.unpack/C1 {VALUES}", unpack=by_columns),
    stepwise(
        "codes-of-next-row",
        "Row k has the codes of row k + 1.",
        f"packing.unpack/C1 {VALUES}",
        unpack=next_row,
    ),
    stepwise(
        "last-group-dropped",
        "The last group is left out, whether it is whole or not.",
        VALUES,
        finish=without_last_group,
    ),
    stepwise(
        "group-before",
        "Every row takes the scale and zero of the group before its own.",
        VALUES,
        groups=grouped(lambda group, count: np.maximum(group - 1, 0)),
    ),
    stepwise(
        "group-after",
        "Every row takes the scale and zero of the group after its own.",
        VALUES,
        groups=grouped(lambda group, count: np.minimum(group + 1, count - 1)),
    ),
    stepwise(
        "first-group-for-all",
        "Every row takes the scale and zero of the first group.",
        VALUES,
        groups=grouped(lambda group, count: group * 0),
    ),
    stepwise(
        "scales-of-group-before",
        "Every row takes the scale of the group before its own.",
        VALUES,
        scales=lambda matrix: before(steps.scales(matrix)),
    ),
    stepwise(
        "zeros-of-group-before",
        "Every row takes the zero of the group before its own.",
        VALUES,
        zeros=lambda matrix: before(steps.zeros(matrix)),
    ),
    stepwise(
        "scales-of-first-group",
        "Every row takes the scale of the first group.",
        VALUES,
        scales=lambda matrix: steps.scales(matrix)[np.zeros(matrix.groups, np.int64)],
    ),
    stepwise(
        "scale-left-out",
        "Codes are not multiplied by their scale.",
        VALUES,
        value=valued(lambda q, s, z: q + z, lambda q, s, z: q - z),
    ),
    stepwise(
        "scale-inverted",
        "Codes are divided by their scale.",
        VALUES,
        value=valued(lambda q, s, z: q / s + z, lambda q, s, z: (q - z) / s),
    ),
    stepwise(
        "scale-applied-twice",
        "Weights are multiplied by their scale once more.",
        VALUES,
        value=valued(lambda q, s, z: s * (s * q + z), lambda q, s, z: s * (s * (q - z))),
    ),
    stepwise(
        "scales-and-zeros-exchanged",
        "Scales are taken for zeros, and zeros for scales.",
        VALUES,
        value=valued(lambda q, s, z: z * q + s, lambda q, s, z: z * (q - s)),
    ),
    stepwise(
        "minimum-taken-for-zero-point",
        "A minimum is subtracted from the code, as if it were a zero-point.",
        MINIMUM,
        value=valued(minimum=lambda q, s, z: s * (q - z)),
    ),
    stepwise(
        "minimum-scaled",
        "A minimum is added to the code before the scale.",
        MINIMUM,
        value=valued(minimum=lambda q, s, z: s * (q + z)),
    ),
    stepwise(
        "zero-point-taken-for-minimum",
        "A zero-point is added to the scaled code, as if it were a minimum.",
        POINT,
        value=valued(point=lambda q, s, z: s * q + z),
    ),
    stepwise(
        "zeros-left-out",
        "Zeros are not looked at: the weight is s q.",
        VALUES,
        value=valued(lambda q, s, z: s * q, lambda q, s, z: s * q),
    ),
    stepwise("minima-left-out", "Minima are not added.", MINIMUM, value=valued(minimum=lambda q, s, z: s * q)),
    stepwise(
        "zero-points-left-out", "Zero-points are not subtracted.", POINT, value=valued(point=lambda q, s, z: s * q)
    ),
    stepwise(
        "zeros-counted-twice",
        "Zeros meet their codes twice.",
        VALUES,
        value=valued(lambda q, s, z: s * q + (z + z), lambda q, s, z: s * (q - (z + z))),
    ),
    stepwise("weights-negated", "Results have the other sign.", VALUES, finish=finished(np.negative)),
    stepwise("weights-in-half", "Weights are rounded to float16.", ROUNDED, finish=finished(halved), only=PRODUCTS),
    stepwise(
        "weights-in-bfloat16",
        "Weights are rounded to bfloat16.",
        ROUNDED,
        finish=finished(lambda weights: bfloat16(np.ascontiguousarray(weights))),
        only=PRODUCTS,
    ),
    stepwise(
        "last-row-dropped",
        "The loop over rows ends one row early.",
        SUMS,
        finish=without_rows(lambda rows: slice(rows - 1, None)),
        only=PRODUCTS,
    ),
    stepwise(
        "first-row-dropped",
        "The loop over rows begins at the second.",
        SUMS,
        finish=without_rows(lambda rows: slice(0, 1)),
        only=PRODUCTS,
    ),
    stepwise(
        "tail-rows-of-8-dropped",
        "Rows past the last whole 8 are left out.",
        SUMS,
        finish=without_rows(lambda rows: slice(rows // 8 * 8, None)),
        only=PRODUCTS,
    ),
    stepwise(
        "last-row-counted-twice", "The product of the last row is added twice.", SUMS, finish=last_twice, only=PRODUCTS
    ),
    stepwise("last-column-dropped", "The last column stays zero.", SUMS, product=after(last_column)),
    stepwise(
        "columns-exchanged-in-pairs", "Neighbouring columns of the result change places.", SUMS, product=after(pairs)
    ),
    stepwise(
        "columns-one-off",
        "Each result stands one column late.",
        SUMS,
        product=after(lambda y: np.roll(y, 1, axis=1)),
    ),
    stepwise("result-doubled", "Results are twice as large.", SUMS, product=after(lambda y: 2 * y)),
    stepwise("result-in-half", "Results are rounded to float16.", ROUNDED, product=after(halved)),
    stepwise(
        "activations-in-half",
        "x is rounded to float16 first.",
        ROUNDED,
        product=lambda x, weights: steps.product(halved(x), weights),
    ),
    stepwise(
        "first-row-of-x-for-all",
        "Every row of the result is that of the first row of X.",
        "linear.qgemm/C1",
        product=after(lambda y: np.repeat(y[:1], len(y), axis=0)),
        only=("linear.qgemm",),
        verdicts=MOVES,
    ),
    stepwise(
        "sums-carried-over-rows",
        "Sums are not set back to 0 between rows of X.",
        "linear.qgemm/C1",
        product=after(running),
        only=("linear.qgemm",),
        verdicts=MOVES,
    ),
    stepwise(
        "last-row-of-x-dropped",
        "The last row of the result stays zero.",
        "linear.qgemm/C1",
        product=after(last_row),
        only=("linear.qgemm",),
        verdicts=MOVES,
    ),
    stepwise(
        "result-transposed",
        "The result is written column by column.",
        "linear.qgemm/C1",
        product=after(lambda y: np.ascontiguousarray(y.T).reshape(y.shape)),
        only=("linear.qgemm",),
        verdicts=MOVES,
    ),
    stepwise(
        "x-transposed",
        "X is read column by column.",
        "linear.qgemm/C1",
        product=x_by_columns,
        only=("linear.qgemm",),
        verdicts=MOVES,
    ),
)
