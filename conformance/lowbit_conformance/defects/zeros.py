"""Defects of zeros: off by one, at the ends of their range, scaled once too often or not at all, of another place."""

import numpy as np

from lowbit.arrays import F32
from lowbit.quantization.affine import Convention, QuantizedMatrix
from lowbit_conformance.defects import steps
from lowbit_conformance.defects.steps import stepwise

MINIMUM = "affine.dequantize/C1 linear.qgemv/C1 linear.qgemm/C1"
POINT = "affine.dequantize/C2 linear.qgemv/C1 linear.qgemm/C1"
EITHER = "affine.dequantize/C1 affine.dequantize/C2 linear.qgemv/C1 linear.qgemm/C1"
V2_AS_V1 = "https://github.com/vllm-project/vllm/pull/38966"
V1_AS_V2 = "https://github.com/intel/auto-round/pull/1434"


def points(matrix: QuantizedMatrix) -> bool:
    return matrix.convention == "zero_point"


def plus_one(matrix: QuantizedMatrix) -> F32:
    return steps.zeros(matrix) + np.float32(points(matrix))


def minus_one(matrix: QuantizedMatrix) -> F32:
    return steps.zeros(matrix) - np.float32(points(matrix))


def replaced(matrix: QuantizedMatrix, old: int, new: int) -> F32:
    zeros = steps.zeros(matrix)
    if points(matrix):
        zeros[zeros == old] = new
    return zeros


def top(matrix: QuantizedMatrix) -> int:
    return int(2**matrix.bits - 1)


def symmetric(matrix: QuantizedMatrix) -> F32:
    zeros = steps.zeros(matrix)
    return np.full_like(zeros, 2 ** (matrix.bits - 1)) if points(matrix) else zeros


def neighbours(matrix: QuantizedMatrix) -> F32:
    columns = np.arange(matrix.columns)
    return steps.zeros(matrix)[:, np.minimum(columns ^ 1, matrix.columns - 1)]


def first_group(matrix: QuantizedMatrix) -> F32:
    zeros = steps.zeros(matrix)
    return np.broadcast_to(zeros[:1], zeros.shape)


def signed_byte(matrix: QuantizedMatrix) -> F32:
    return matrix.zeros.astype(np.int8).astype(np.float32) if points(matrix) else steps.zeros(matrix)


def negative(matrix: QuantizedMatrix) -> F32:
    zeros = steps.zeros(matrix)
    return zeros if points(matrix) else -np.abs(zeros)


def whole_multiples(matrix: QuantizedMatrix) -> F32:
    zeros, scales = steps.zeros(matrix), steps.scales(matrix)
    return zeros if points(matrix) else np.rint(zeros / scales) * scales


def scaled_twice(codes: F32, scale: F32, zero: F32, convention: Convention) -> F32:
    return scale * codes + scale * zero if convention == "minimum" else scale * (codes - scale * zero)


def not_scaled(codes: F32, scale: F32, zero: F32, convention: Convention) -> F32:
    return scale * codes + zero if convention == "minimum" else scale * codes - zero


def subtracted(codes: F32, scale: F32, zero: F32, convention: Convention) -> F32:
    return scale * codes - zero if convention == "minimum" else scale * (codes - zero)


def added(codes: F32, scale: F32, zero: F32, convention: Convention) -> F32:
    return scale * codes + zero if convention == "minimum" else scale * (codes + zero)


def fused(codes: F32, scale: F32, zero: F32, convention: Convention) -> F32:
    if convention == "zero_point":
        return scale * (codes - zero)
    wide: F32 = (scale.astype(np.float64) * codes + zero.astype(np.float64)).astype(np.float32)
    return wide


def distributed(codes: F32, scale: F32, zero: F32, convention: Convention) -> F32:
    return scale * codes + zero if convention == "minimum" else scale * codes - scale * zero


def wrapped_bytes(codes: F32, scale: F32, zero: F32, convention: Convention) -> F32:
    return scale * codes + zero if convention == "minimum" else scale * ((codes - zero) % 256)


def in_half(codes: F32, scale: F32, zero: F32, convention: Convention) -> F32:
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = [part.astype(np.float16) for part in (codes, scale, zero)]
        return steps.value(narrow[0], narrow[1], narrow[2], convention).astype(np.float32)  # type: ignore[arg-type]  # half on purpose


DEFECTS = (
    stepwise(
        "zero-plus-one",
        "A zero-point as it is meant is read as one that was stored less one.",
        POINT,
        V2_AS_V1,
        zeros=plus_one,
    ),
    stepwise(
        "zero-minus-one",
        "A zero-point that was stored less one is used as it is stored.",
        POINT,
        V1_AS_V2,
        zeros=minus_one,
    ),
    stepwise(
        "zero-0-read-as-top",
        "A zero-point of 0 less one wraps to the largest code.",
        POINT,
        "https://github.com/ModelCloud/GPTQModel/issues/2350",
        zeros=lambda matrix: replaced(matrix, 0, top(matrix)),
    ),
    stepwise(
        "zero-0-read-as-16",
        "A zero-point of 0 wraps when it is stored less one, and one is added unmasked.",
        POINT,
        zeros=lambda matrix: replaced(matrix, 0, top(matrix) + 1),
    ),
    stepwise(
        "zero-15-read-as-0",
        "The largest zero-point plus one is masked, and becomes 0.",
        POINT,
        zeros=lambda matrix: replaced(matrix, top(matrix), 0),
    ),
    stepwise(
        "zero-assumed-symmetric", "The zero-point is taken for 2^(b-1), whatever is stored.", POINT, zeros=symmetric
    ),
    stepwise(
        "zeros-of-neighbour-column",
        "Zeros of neighbouring columns change places.",
        EITHER,
        "https://github.com/pie-project/pie/pull/491",
        zeros=neighbours,
    ),
    stepwise("zeros-of-first-group", "Every group takes the zeros of the first.", EITHER, zeros=first_group),
    stepwise("zero-a-signed-byte", "Zero-points of 128 and more are taken for negative.", POINT, zeros=signed_byte),
    stepwise(
        "zero-wraps-in-a-byte",
        "Code less zero-point is computed in uint8, where a negative difference becomes one below 256.",
        POINT,
        value=wrapped_bytes,
    ),
    stepwise("zero-scaled-twice", "The zero is multiplied by the scale once more.", EITHER, value=scaled_twice),
    stepwise(
        "zero-not-scaled",
        "The zero-point is subtracted as if it were a weight: s q - z.",
        POINT,
        "errata Q3, as the paper prints equation 2",
        value=not_scaled,
    ),
    stepwise("minimum-subtracted", "The minimum is subtracted instead of added.", MINIMUM, value=subtracted),
    stepwise("zero-added", "The zero-point is added to the code instead of subtracted.", POINT, value=added),
    stepwise("minimum-taken-for-negative", "Every minimum is taken for a negative number.", MINIMUM, zeros=negative),
    stepwise(
        "minimum-a-whole-multiple",
        "Minima are kept as whole multiples of the scale, like zero-points.",
        MINIMUM,
        zeros=whole_multiples,
    ),
    stepwise(
        "minimum-fused",
        "Scale, code and minimum are rounded once where the specification rounds twice.",
        "affine.dequantize/C1",
        only=("affine.dequantize",),
        value=fused,
    ),
    stepwise(
        "zero-distributed",
        "s q - s z, three roundings, for s (q - z) with one.",
        "affine.dequantize/C2",
        only=("affine.dequantize",),
        value=distributed,
    ),
    stepwise(
        "values-in-half",
        "Weights are computed in float16 and then widened.",
        "affine.dequantize/C1 affine.dequantize/C2 affine.dequantize/C3",
        only=("affine.dequantize",),
        value=in_half,
    ),
)
