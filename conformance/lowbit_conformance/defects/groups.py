"""Defects of groups: which group a row is in, and which scale a group and a column have."""

import numpy as np

from lowbit.arrays import F32
from lowbit.quantization.affine import QuantizedMatrix
from lowbit_conformance.defects import steps
from lowbit_conformance.defects.steps import PRODUCTS, Indices, stepwise, unit_of

CLAUSES = "affine.dequantize/C1 affine.dequantize/C2 linear.qgemv/C1 linear.qgemm/C1"


def next_group(matrix: QuantizedMatrix) -> Indices:
    return np.minimum((np.arange(matrix.rows) + 1) // matrix.group_size, matrix.groups - 1)


def previous_group(matrix: QuantizedMatrix) -> Indices:
    return np.maximum(np.arange(matrix.rows) - 1, 0) // matrix.group_size


def one_row_late(matrix: QuantizedMatrix) -> Indices:
    group = steps.groups(matrix)
    group[matrix.group_size : matrix.group_size + 1] = 0
    return group


def merged(matrix: QuantizedMatrix) -> Indices:
    return np.minimum(steps.groups(matrix), max(matrix.rows // matrix.group_size - 1, 0))


def always_128(matrix: QuantizedMatrix) -> Indices:
    return np.minimum(np.arange(matrix.rows) // 128, matrix.groups - 1)


def at_words(matrix: QuantizedMatrix) -> Indices:
    unit = unit_of(matrix.bits)
    return np.arange(matrix.rows) // unit * unit // matrix.group_size


def even_groups(matrix: QuantizedMatrix) -> Indices:
    return np.minimum(np.arange(matrix.rows) // (matrix.rows // matrix.groups), matrix.groups - 1)


def without_short_group(weights: F32, matrix: QuantizedMatrix) -> F32:
    weights[matrix.rows // matrix.group_size * matrix.group_size :] = 0
    return weights


def reordered(weights: F32, matrix: QuantizedMatrix) -> F32:
    sizes = np.abs(weights).sum(axis=1)
    return weights[np.argsort(-sizes, kind="stable")]


def previous_column(matrix: QuantizedMatrix) -> F32:
    return np.roll(steps.scales(matrix), 1, axis=1)


def transposed(matrix: QuantizedMatrix) -> F32:
    scales = steps.scales(matrix)
    return scales.reshape(scales.shape[::-1]).T


def restarted(matrix: QuantizedMatrix) -> Indices:
    return np.arange(matrix.rows) % 128 // matrix.group_size


def rounded_to_half(matrix: QuantizedMatrix) -> F32:
    with np.errstate(over="ignore"):
        return steps.scales(matrix).astype(np.float16).astype(np.float32)


def subnormal_halves_flushed(matrix: QuantizedMatrix) -> F32:
    tiny = (matrix.scales < 2.0**-14) & (matrix.scales.dtype == np.float16)
    return np.where(tiny, np.float32(0), steps.scales(matrix))


DEFECTS = (
    stepwise(
        "group-one-row-early",
        "The last row of a group takes the scale and zero of the next group.",
        CLAUSES,
        groups=next_group,
    ),
    stepwise(
        "group-one-row-late",
        "The first row of a group takes the scale and zero of the group before.",
        CLAUSES,
        groups=previous_group,
    ),
    stepwise(
        "second-group-one-row-late",
        "The first row of the second group, and no other, is counted to the first.",
        CLAUSES,
        groups=one_row_late,
    ),
    stepwise("short-group-merged", "A short last group is counted to the one before it.", CLAUSES, groups=merged),
    stepwise(
        "short-group-dropped",
        "Only whole groups are computed; the rows of a short last one are left out.",
        CLAUSES,
        finish=without_short_group,
    ),
    stepwise("groups-of-128-always", "The group size is a constant of the kernel.", CLAUSES, groups=always_128),
    stepwise(
        "groups-begin-at-words",
        "All codes of a word take the group of its first.",
        CLAUSES,
        "https://github.com/Comfy-Org/comfy-kitchen/pull/50",
        groups=at_words,
    ),
    stepwise(
        "group-size-from-counts",
        "The group size is taken for rows divided by groups, as if no group were short.",
        CLAUSES,
        groups=even_groups,
    ),
    stepwise(
        "act-order-ignored",
        "The matrix is laid out in an order of its own, and x is not gathered in it.",
        "linear.qgemv/C1 linear.qgemm/C1",
        only=PRODUCTS,
        finish=reordered,
    ),
    stepwise(
        "scale-of-previous-column",
        "A column takes the scales of its left neighbour.",
        CLAUSES,
        "https://github.com/ROCm/composable_kernel/issues/3771",
        scales=previous_column,
    ),
    stepwise("scales-transposed", "Scales are read as N × G.", CLAUSES, scales=transposed),
    stepwise(
        "groups-restart-every-128-rows",
        "The group is counted from the first row of a slice of 128.",
        CLAUSES,
        "https://github.com/neuralmagic/sparseml/pull/2290",
        groups=restarted,
    ),
    stepwise(
        "scales-rounded-to-half",
        "float32 scales are stored as float16.",
        "affine.dequantize/C1 affine.dequantize/C2 linear.qgemv/C2 linear.qgemm/C2",
        scales=rounded_to_half,
    ),
    stepwise(
        "subnormal-halves-flushed",
        "float16 scales below 2^-14 count as zero, as in conversions by hand.",
        "affine.dequantize/C3 linear.qgemv/C2 linear.qgemm/C2",
        "https://github.com/invergent-ai/surogate/issues/162",
        scales=subnormal_halves_flushed,
    ),
)
