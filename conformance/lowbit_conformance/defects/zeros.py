"""Defects of zeros, and of the values that codes, scales and zeros give."""

from collections.abc import Callable
from typing import Any

import numpy as np

from lowbit.arrays import F32
from lowbit.quantization.affine import Convention, QuantizedMatrix
from lowbit_conformance.defects import steps
from lowbit_conformance.defects.defect import Defect
from lowbit_conformance.defects.steps import of_step

DEFECTS: list[Defect] = []
of_zeros = of_step(DEFECTS, "zeros")

MINIMUM = "affine.dequantize/C1 linear.qgemv/C1 linear.qgemm/C1"
POINT = "affine.dequantize/C2 linear.qgemv/C1 linear.qgemm/C1"
EITHER = "affine.dequantize/C1 affine.dequantize/C2 linear.qgemv/C1 linear.qgemm/C1"
V2_AS_V1 = "https://github.com/vllm-project/vllm/pull/38966"
V1_AS_V2 = "https://github.com/intel/auto-round/pull/1434"


def points(matrix: QuantizedMatrix) -> bool:
    return matrix.convention == "zero_point"


@of_zeros(POINT, V2_AS_V1)
def zero_plus_one(matrix: QuantizedMatrix) -> F32:
    """A zero-point as it is meant is read as one that was stored less one."""
    return steps.zeros(matrix) + np.float32(points(matrix))


@of_zeros(POINT, V1_AS_V2)
def zero_minus_one(matrix: QuantizedMatrix) -> F32:
    """A zero-point that was stored less one is used as it is stored."""
    return steps.zeros(matrix) - np.float32(points(matrix))


def replaced(matrix: QuantizedMatrix, old: int, new: int) -> F32:
    zeros = steps.zeros(matrix)
    if points(matrix):
        zeros[zeros == old] = new
    return zeros


def top(matrix: QuantizedMatrix) -> int:
    return int(2**matrix.bits - 1)


@of_zeros(POINT)
def zero_assumed_symmetric(matrix: QuantizedMatrix) -> F32:
    """The zero-point is taken for 2^(b-1), whatever is stored."""
    zeros = steps.zeros(matrix)
    return np.full_like(zeros, 2 ** (matrix.bits - 1)) if points(matrix) else zeros


@of_zeros(EITHER, "https://github.com/pie-project/pie/pull/491")
def zeros_of_neighbour_column(matrix: QuantizedMatrix) -> F32:
    """Zeros of neighbouring columns change places."""
    columns = np.arange(matrix.columns)
    return steps.zeros(matrix)[:, np.minimum(columns ^ 1, matrix.columns - 1)]


@of_zeros(EITHER)
def zeros_of_first_group(matrix: QuantizedMatrix) -> F32:
    """Every group takes the zeros of the first."""
    zeros = steps.zeros(matrix)
    return np.broadcast_to(zeros[:1], zeros.shape)


@of_zeros(POINT)
def zero_a_signed_byte(matrix: QuantizedMatrix) -> F32:
    """Zero-points of 128 and more are taken for negative."""
    return matrix.zeros.astype(np.int8).astype(np.float32) if points(matrix) else steps.zeros(matrix)


@of_zeros(MINIMUM)
def minimum_taken_for_negative(matrix: QuantizedMatrix) -> F32:
    """Every minimum is taken for a negative number."""
    return steps.zeros(matrix) if points(matrix) else -np.abs(steps.zeros(matrix))


@of_zeros(MINIMUM)
def minimum_a_whole_multiple(matrix: QuantizedMatrix) -> F32:
    """Minima are kept as whole multiples of the scale, like zero-points."""
    zeros, scales = steps.zeros(matrix), steps.scales(matrix)
    return zeros if points(matrix) else np.rint(zeros / scales) * scales


of_zeros.add(
    "zero-0-read-as-top",
    "A zero-point of 0 less one wraps to the largest code.",
    POINT,
    lambda matrix: replaced(matrix, 0, top(matrix)),
    "https://github.com/ModelCloud/GPTQModel/issues/2350",
)
of_zeros.add(
    "zero-0-read-as-16",
    "A zero-point of 0 wraps when it is stored less one, and one is added unmasked.",
    POINT,
    lambda matrix: replaced(matrix, 0, top(matrix) + 1),
)
of_zeros.add(
    "zero-15-read-as-0",
    "The largest zero-point plus one is masked, and becomes 0.",
    POINT,
    lambda matrix: replaced(matrix, top(matrix), 0),
)

# **Values**, for one convention if the mistake applies to one only.

Value = Callable[[F32, F32, F32], F32]


def valued(minimum: Value | None = None, point: Value | None = None) -> Callable[[F32, F32, F32, Convention], F32]:
    def value(codes: F32, scale: F32, zero: F32, convention: Convention) -> F32:
        own = minimum if convention == "minimum" else point
        with np.errstate(all="ignore"):
            return own(codes, scale, zero) if own else steps.value(codes, scale, zero, convention)

    return value


of_value = of_step(DEFECTS, "value")
of_minimum = of_step(DEFECTS, "value", made=lambda minimum: valued(minimum=minimum))
of_point = of_step(DEFECTS, "value", made=lambda point: valued(point=point))
of_value.add(
    "zero-scaled-twice",
    "The zero is multiplied by the scale once more.",
    EITHER,
    valued(lambda q, s, z: s * q + s * z, lambda q, s, z: s * (q - s * z)),
)
of_point.add(
    "zero-not-scaled",
    "The zero-point is subtracted as if it were a weight: s q - z.",
    POINT,
    lambda q, s, z: s * q - z,
    "errata Q3, as the paper prints equation 2",
)
of_point.add(
    "zero-added", "The zero-point is added to the code instead of subtracted.", POINT, lambda q, s, z: s * (q + z)
)
of_point.add(
    "zero-distributed",
    "s q - s z, three roundings, for s (q - z) with one.",
    "affine.dequantize/C2",
    lambda q, s, z: s * q - s * z,
    only=("affine.dequantize",),
)
of_point.add(
    "zero-wraps-in-a-byte",
    "Code less zero-point is computed in uint8, where a negative difference becomes one below 256.",
    POINT,
    lambda q, s, z: s * ((q - z) % 256),
)
of_minimum.add("minimum-subtracted", "The minimum is subtracted instead of added.", MINIMUM, lambda q, s, z: s * q - z)
of_minimum.add(
    "minimum-fused",
    "Scale, code and minimum are rounded once where the specification rounds twice.",
    "affine.dequantize/C1",
    lambda q, s, z: (s.astype(np.float64) * q + z.astype(np.float64)).astype(np.float32),
    only=("affine.dequantize",),
)
of_value.add(
    "scale-left-out",
    "Codes are not multiplied by their scale.",
    EITHER,
    valued(lambda q, s, z: q + z, lambda q, s, z: q - z),
)
of_value.add(
    "scale-inverted",
    "Codes are divided by their scale.",
    EITHER,
    valued(lambda q, s, z: q / s + z, lambda q, s, z: (q - z) / s),
)
of_value.add(
    "scale-applied-twice",
    "Weights are multiplied by their scale once more.",
    EITHER,
    valued(lambda q, s, z: s * (s * q + z), lambda q, s, z: s * (s * (q - z))),
)
of_value.add(
    "scales-and-zeros-exchanged",
    "Scales and zeros are exchanged.",
    EITHER,
    valued(lambda q, s, z: z * q + s, lambda q, s, z: z * (q - s)),
)
of_minimum.add(
    "minimum-taken-for-zero-point",
    "A minimum is subtracted from the code, as if it were a zero-point.",
    MINIMUM,
    lambda q, s, z: s * (q - z),
)
of_minimum.add(
    "minimum-scaled",
    "A minimum is added to the code before the scale.",
    MINIMUM,
    lambda q, s, z: s * (q + z),
)
of_point.add(
    "zero-point-taken-for-minimum",
    "A zero-point is added to the scaled code, as if it were a minimum.",
    POINT,
    lambda q, s, z: s * q + z,
)
of_value.add(
    "zeros-left-out",
    "Zeros are ignored: the weight is s q.",
    EITHER,
    valued(lambda q, s, z: s * q, lambda q, s, z: s * q),
)
of_minimum.add("minima-left-out", "Minima are not added.", MINIMUM, lambda q, s, z: s * q)
of_point.add("zero-points-left-out", "Zero-points are not subtracted.", POINT, lambda q, s, z: s * q)
of_value.add(
    "zeros-counted-twice",
    "Zeros are applied twice.",
    EITHER,
    valued(lambda q, s, z: s * q + (z + z), lambda q, s, z: s * (q - (z + z))),
)


@of_value("affine.dequantize/C1 affine.dequantize/C2 affine.dequantize/C3", only=("affine.dequantize",))
def values_in_half(codes: F32, scale: F32, zero: F32, convention: Convention) -> F32:
    """Weights are computed in float16 and then widened."""
    narrow: list[Any] = [part.astype(np.float16) for part in (codes, scale, zero)]
    with np.errstate(over="ignore", invalid="ignore"):
        return steps.value(narrow[0], narrow[1], narrow[2], convention).astype(np.float32)
