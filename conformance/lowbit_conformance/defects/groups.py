"""Defects of groups: which group a row is in, and which scale a group and a column have."""

from collections.abc import Callable

import numpy as np

from lowbit.arrays import F32
from lowbit.quantization.affine import QuantizedMatrix
from lowbit_conformance.defects import steps
from lowbit_conformance.defects.defect import Defect
from lowbit_conformance.defects.roundings import half
from lowbit_conformance.defects.steps import PRODUCTS, Indices, of_step, unit_of

DEFECTS: list[Defect] = []
of_groups, of_finish = of_step(DEFECTS, "groups"), of_step(DEFECTS, "finish")
of_scales, of_zeros = of_step(DEFECTS, "scales"), of_step(DEFECTS, "zeros")

CLAUSES = "affine.dequantize/C1 affine.dequantize/C2 linear.qgemv/C1 linear.qgemm/C1"


@of_groups(CLAUSES)
def group_one_row_early(matrix: QuantizedMatrix) -> Indices:
    """The last row of a group takes the scale and zero of the next group."""
    return np.minimum((np.arange(matrix.rows) + 1) // matrix.group_size, matrix.groups - 1)


@of_groups(CLAUSES)
def group_one_row_late(matrix: QuantizedMatrix) -> Indices:
    """The first row of a group takes the scale and zero of the group before."""
    return np.maximum(np.arange(matrix.rows) - 1, 0) // matrix.group_size


@of_groups(CLAUSES)
def second_group_one_row_late(matrix: QuantizedMatrix) -> Indices:
    """The first row of the second group, and no other, is counted to the first."""
    group = steps.groups(matrix)
    group[matrix.group_size : matrix.group_size + 1] = 0
    return group


@of_groups(CLAUSES)
def short_group_merged(matrix: QuantizedMatrix) -> Indices:
    """A short last group is counted to the one before it."""
    return np.minimum(steps.groups(matrix), max(matrix.rows // matrix.group_size - 1, 0))


@of_groups(CLAUSES)
def groups_of_128_always(matrix: QuantizedMatrix) -> Indices:
    """The group size is a constant of the kernel."""
    return np.minimum(np.arange(matrix.rows) // 128, matrix.groups - 1)


@of_groups(CLAUSES, "https://github.com/Comfy-Org/comfy-kitchen/pull/50")
def groups_begin_at_words(matrix: QuantizedMatrix) -> Indices:
    """All codes of a word take the group of its first."""
    unit = unit_of(matrix.bits)
    return np.arange(matrix.rows) // unit * unit // matrix.group_size


@of_groups(CLAUSES)
def group_size_from_counts(matrix: QuantizedMatrix) -> Indices:
    """The group size is taken for rows divided by groups, as if no group were short."""
    return np.minimum(np.arange(matrix.rows) // (matrix.rows // matrix.groups), matrix.groups - 1)


@of_finish(CLAUSES)
def short_group_dropped(weights: F32, matrix: QuantizedMatrix) -> F32:
    """Only whole groups are computed; the rows of a short last one are left out."""
    weights[matrix.rows // matrix.group_size * matrix.group_size :] = 0
    return weights


@of_finish("linear.qgemv/C1 linear.qgemm/C1", only=PRODUCTS)
def act_order_ignored(weights: F32, matrix: QuantizedMatrix) -> F32:
    """The matrix is laid out in an order of its own, and x is not gathered in it."""
    sizes = np.abs(weights).sum(axis=1)
    return weights[np.argsort(-sizes, kind="stable")]


@of_scales(CLAUSES, "https://github.com/ROCm/composable_kernel/issues/3771")
def scale_of_previous_column(matrix: QuantizedMatrix) -> F32:
    """A column takes the scales of its left neighbour."""
    return np.roll(steps.scales(matrix), 1, axis=1)


@of_scales(CLAUSES)
def scales_transposed(matrix: QuantizedMatrix) -> F32:
    """Scales are read as N × G."""
    scales = steps.scales(matrix)
    return scales.reshape(scales.shape[::-1]).T


@of_groups(CLAUSES, "https://github.com/neuralmagic/sparseml/pull/2290")
def groups_restart_every_128_rows(matrix: QuantizedMatrix) -> Indices:
    """The group is counted from the first row of a slice of 128."""
    return np.arange(matrix.rows) % 128 // matrix.group_size


@of_scales("affine.dequantize/C1 affine.dequantize/C2 linear.qgemv/C2 linear.qgemm/C2")
def scales_rounded_to_half(matrix: QuantizedMatrix) -> F32:
    """float32 scales are stored as float16."""
    return half(steps.scales(matrix))


@of_scales(
    "affine.dequantize/C3 linear.qgemv/C2 linear.qgemm/C2", "https://github.com/invergent-ai/surogate/issues/162"
)
def subnormal_halves_flushed(matrix: QuantizedMatrix) -> F32:
    """float16 scales below 2^-14 count as zero, as in conversions by hand."""
    tiny = (matrix.scales < 2.0**-14) & (matrix.scales.dtype == np.float16)
    return np.where(tiny, np.float32(0), steps.scales(matrix))


@of_finish(CLAUSES)
def last_group_dropped(weights: F32, matrix: QuantizedMatrix) -> F32:
    """The last group is left out, whole or not."""
    weights[(matrix.groups - 1) * matrix.group_size :] = 0
    return weights


def grouped(change: Callable[[Indices, int], Indices]) -> Callable[[QuantizedMatrix], Indices]:
    """Weights with another group for each row, from its own group and the number of groups."""
    return lambda matrix: change(steps.groups(matrix), matrix.groups)


def before(numbers: F32) -> F32:
    """Each group has the numbers of the previous group."""
    return numbers[np.maximum(np.arange(len(numbers)) - 1, 0)]


of_own = of_step(DEFECTS, "groups", made=grouped)
of_own.add(
    "group-before",
    "Every row uses the scale and zero of the previous group.",
    CLAUSES,
    lambda group, count: np.maximum(group - 1, 0),
)
of_own.add(
    "group-after",
    "Every row uses the scale and zero of the next group.",
    CLAUSES,
    lambda group, count: np.minimum(group + 1, count - 1),
)
of_own.add(
    "first-group-for-all",
    "Every row uses the scale and zero of the first group.",
    CLAUSES,
    lambda group, count: group * 0,
)
of_scales.add(
    "scales-of-group-before",
    "Every row uses the scale of the previous group.",
    CLAUSES,
    lambda matrix: before(steps.scales(matrix)),
)
of_zeros.add(
    "zeros-of-group-before",
    "Every row uses the zero of the previous group.",
    CLAUSES,
    lambda matrix: before(steps.zeros(matrix)),
)
of_scales.add(
    "scales-of-first-group",
    "Every row uses the scale of the first group.",
    CLAUSES,
    lambda matrix: steps.scales(matrix)[np.zeros(matrix.groups, np.int64)],
)
