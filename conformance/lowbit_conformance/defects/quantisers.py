"""Defects of quantisers: ranges, scales, rounding, and the parts of GPTQ."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from lowbit.arrays import F32, F64, Array
from lowbit.quantization import gptq
from lowbit.quantization.affine import Convention, QuantizedMatrix, ScaleDtype
from lowbit_conformance import packing
from lowbit_conformance.defects import steps
from lowbit_conformance.defects.blocks import away
from lowbit_conformance.defects.defect import Defect, Function, of_operation, unchecked
from lowbit_conformance.defects.roundings import Rounding, exactly, half

DEFECTS: list[Defect] = []
of_quantize = of_operation(DEFECTS, "affine.quantize")
of_hessian = of_operation(DEFECTS, "gptq.hessian")
of_factor = of_operation(DEFECTS, "gptq.factor")


REFUSED = ("WRONG", "RAISED")
"""The verdicts if a changed matrix may no longer be positive definite."""

# **Affine quantisation**, in which one step at a time can be replaced.


def quantize(
    weights: F32,
    *,
    bits: int,
    group_size: int,
    convention: Convention = "minimum",
    scale_dtype: ScaleDtype = "float32",
    rounded: Rounding = np.rint,
    zero_rounded: Rounding = np.rint,
    levels: int = 0,
    extended: bool = True,
    stored_first: bool = True,
    zero_stored_first: bool = False,
    vanishing: bool = False,
    no_range: float | None = None,
    wrapped: bool = False,
    mirrored: bool = False,
    zero_inside: bool = False,
    scale_changed: Callable[[F32], F32] = lambda scale: scale,
) -> QuantizedMatrix:
    """Right unless a step is replaced; `levels` is added to 2^b − 1."""
    rows, columns = weights.shape
    dtype, top = np.dtype(scale_dtype), 2**bits - 1
    codes, scales, zeros = np.empty((rows, columns), np.uint8), [], []
    for start in range(0, rows, group_size):
        group = weights[start : start + group_size]
        low, high = group.min(axis=0), group.max(axis=0)
        if mirrored:
            high = np.maximum(np.abs(low), np.abs(high))
            low = -high
        if convention == "zero_point" and extended:
            low, high = np.minimum(low, np.float32(0)), np.maximum(high, np.float32(0))
        with np.errstate(all="ignore"):
            fine = ((high - low) / np.float32(top + levels)).astype(np.float32)
            fine = scale_changed(fine)
            scale = fine.astype(dtype)
            least = dtype.type(1) if no_range is None else dtype.type(no_range)
            scale = np.where(scale > 0, scale, least)
            ranged = high > low if vanishing else fine > 0
            used = scale.astype(np.float32) if stored_first else np.where(ranged, fine, np.float32(least))
            if convention == "minimum":
                zero: Any = low.astype(dtype)
                real = rounded((group - (zero.astype(np.float32) if stored_first else low)) / used)
            else:
                by = scale.astype(np.float32) if zero_stored_first else used
                zero = np.clip(zero_rounded(-low / by), 0, top).astype(np.uint8)
                point = zero.astype(np.float32)
                real = rounded(group / used + point) if zero_inside else rounded(group / used) + point
            real = np.nan_to_num(real)
            codes[start : start + group_size] = real.astype(np.int64) & top if wrapped else np.clip(real, 0, top)
        scales.append(scale)
        zeros.append(zero)
    return matrix_of(codes, np.stack(scales), np.stack(zeros), bits, rows, group_size, convention)


def matrix_of(
    codes: Array, scales: Array, zeros: Array, bits: int, rows: int, group_size: int, convention: Convention
) -> QuantizedMatrix:
    """A matrix, constructed without checks."""
    return unchecked(
        QuantizedMatrix,
        words=packing.pack(codes.astype(np.uint8), bits),
        scales=scales,
        zeros=zeros,
        bits=bits,
        rows=rows,
        group_size=group_size,
        convention=convention,
    )


def requantized(
    right: QuantizedMatrix, weights: F32, scales: Array, zeros: Array, inverse: bool = False
) -> QuantizedMatrix:
    """The matrix with codes recomputed for other scales and zeros."""
    group = steps.groups(right)
    scale, zero = scales.astype(np.float32)[group], zeros.astype(np.float32)[group]
    minimum = right.convention == "minimum"
    with np.errstate(all="ignore"):
        above = weights - zero if minimum else weights
        real = np.rint(above * (np.float32(1) / scale) if inverse else above / scale) + (0 if minimum else zero)
    codes = np.clip(np.nan_to_num(real), 0, 2**right.bits - 1)
    return matrix_of(codes, scales, zeros, right.bits, right.rows, right.group_size, right.convention)


@of_quantize("C1 C4")
def short_group_quantized_with_the_last(weights: F32, **choices: Any) -> QuantizedMatrix:
    """A short last group takes the scale of the one before."""
    right = quantize(weights, **choices)
    if len(weights) % right.group_size == 0 or right.groups < 2:
        return right
    right.scales[-1], right.zeros[-1] = right.scales[-2], right.zeros[-2]
    return requantized(right, weights, right.scales, right.zeros)


@of_quantize("C1 C2 C4")
def one_range_for_all_columns(weights: F32, **choices: Any) -> QuantizedMatrix:
    """The columns of a group share one range."""
    right = quantize(np.ascontiguousarray(weights.max(axis=1, keepdims=True)), **choices)
    scales, zeros = (np.repeat(each, weights.shape[1], axis=1) for each in (right.scales, right.zeros))
    return requantized(right, weights, scales, zeros)


@of_quantize("C2")
def reciprocal_of_scale(weights: F32, **choices: Any) -> QuantizedMatrix:
    """Weights are multiplied by 1 / scale, one rounding more."""
    right = quantize(weights, **choices)
    return requantized(right, weights, right.scales, right.zeros, inverse=True)


# **GPTQ.**


def hessian(x: F32) -> F64:
    wide = x.astype(np.float64)
    return wide.T @ wide


@of_hessian("C1")
def last_input_dropped(x: F32) -> Array:
    """The last input is left out."""
    return hessian(x[:-1])


@of_hessian("C2")
def hessian_in_half(x: F32) -> Array:
    """Inputs are rounded to float16."""
    return np.asarray(half(x).T @ half(x), np.float64)


@of_factor("C1 C2", verdicts=REFUSED)
def factor_of_the_wrong_side(hessian: Array) -> Array:
    """Cholesky's L, transposed: M^T M and not M M^T is H."""
    return np.linalg.cholesky(hessian.astype(np.float64)).T


@of_factor("C1 C2", "https://github.com/cactus-compute/cactus/pull/807", REFUSED)
def factor_of_the_inverse(hessian: Array) -> Array:
    """The factor is that of the inverse."""
    try:
        return np.linalg.cholesky(np.linalg.inv(hessian.astype(np.float64))).T
    except np.linalg.LinAlgError:
        return np.linalg.cholesky(hessian.astype(np.float64)).T


@of_factor("C1 C2 C3")
def factor_not_cleared(hessian: Array) -> Array:
    """What was below the diagonal stays there."""
    return np.triu(gptq.factor(hessian)) + np.tril(hessian.astype(np.float64), -1)


@of_factor("C1 C3")
def factor_negative(hessian: Array) -> Array:
    """The diagonal is negative; the product is right all the same."""
    return -gptq.factor(hessian)


@of_factor("C1 C2", accumulator="float64")
def factor_in_float32(hessian: Array) -> Array:
    """The factor is computed in float32, although float64 is declared."""
    rest = hessian.astype(np.float32)
    result = np.zeros_like(rest)
    with np.errstate(invalid="ignore", divide="ignore"):  # NaN if it finds no pivot
        for k in reversed(range(len(rest))):
            column = rest[: k + 1, k] / np.sqrt(rest[k, k])
            result[: k + 1, k] = column
            rest = rest[:k, :k] - np.outer(column[:k], column[:k])
    return result


@of_factor("C1", verdicts=REFUSED, accumulator="float64")
def hessian_narrowed_first(hessian: Array) -> Array:
    """A Hessian in float64 is rounded to float32 before it is factored."""
    return gptq.factor(np.ascontiguousarray(hessian.astype(np.float32)))


@of_factor("C1 C2")
def factor_with_unit_diagonal(hessian: Array) -> Array:
    """Columns are divided by their pivot: the factor of L D L^T."""
    factor = gptq.factor(hessian)
    return factor / np.diagonal(factor)


def ratios(factor: F64) -> F64:
    return np.triu(factor / np.diagonal(factor), 1)


def targets(
    weights: F32, factor: F32, values: F32, spread: Callable[[F64], Array] = ratios, of_errors: Rounding = exactly
) -> F64:
    """The targets; right unless errors are spread by other ratios, or rounded."""
    wide = weights.astype(np.float64)
    errors = of_errors(wide - values).astype(np.float64)
    return np.asarray(wide + spread(factor.astype(np.float64)).T @ errors)


def spreading(spread: Callable[[F64], Array]) -> Function:
    return partial(targets, spread=spread)


of_ratios = of_operation(DEFECTS, "gptq.targets", spreading)


@of_ratios("C1 C2")
def errors_forgotten_between_slices(factor: F64) -> F64:
    """Errors do not cross from one slice of 32 rows to the next."""
    slices = np.arange(len(factor)) // 32
    return np.where(slices[:, None] == slices, ratios(factor), 0)


@of_ratios("C1")
def errors_reach_next_row_only(factor: F64) -> F64:
    """An error changes the next row and no later one."""
    return np.asarray(ratios(factor) * np.eye(len(factor), k=1))


@of_ratios("C1 C2 C3")
def own_value_changes_target(factor: F64) -> F64:
    """A row's own value changes its target."""
    return ratios(factor) + 0.125 * np.eye(len(factor))


of_quantize.add(
    "levels-2-to-the-b", "The range is divided by 2^b and not by 2^b - 1.", "C1 C4", partial(quantize, levels=1)
)
of_quantize.add(
    "range-without-zero",
    "The range of zero-point quantisation is not extended to hold 0.",
    "C1 C2",
    partial(quantize, extended=False),
)
of_quantize.add(
    "range-mirrored",
    "The range is from -m to m, with m the largest magnitude.",
    "C1 C2 C4",
    partial(quantize, mirrored=True),
)
of_quantize.add(
    "zero-point-truncated", "The zero-point is cut and not rounded.", "C1", partial(quantize, zero_rounded=np.floor)
)
of_quantize.add("codes-truncated", "Codes are cut and not rounded.", "C1 C2", partial(quantize, rounded=np.floor))
of_quantize.add(
    "code-ties-away",
    "A tie goes away from zero and not to the even code.",
    "C2",
    partial(quantize, rounded=away),
    "https://github.com/tenstorrent/tt-metal/issues/56525",
)
of_quantize.add(
    "scale-rounded-too-late",
    "Codes are found with the scale before it is rounded for storage.",
    "C1",
    partial(quantize, stored_first=False),
    "https://github.com/antirez/ds4/pull/844",
)
of_quantize.add(
    "codes-wrap",
    "A code beyond its range wraps and is not clamped.",
    "C1 C2",
    partial(quantize, wrapped=True),
    "https://github.com/ModelCloud/GPTQModel/pull/2963",
)
of_quantize.add(
    "no-range-tiny-scale",
    "A group without a range has a scale of 1e-5 instead of 1.",
    "C3",
    partial(quantize, no_range=1e-5),
    "https://github.com/ModelCloud/GPTQModel/pull/1531",
)
of_quantize.add(
    "no-range-zero-scale",
    "A group without a range has a scale of 0.",
    "C3",
    partial(quantize, no_range=0.0),
    "https://github.com/apple/coremltools/pull/2851",
)

of_hessian.add(
    "hessian-times-2",
    "The factor 2 of the squared error is left in.",
    "C1 C2",
    lambda x: 2 * hessian(x),
    "https://github.com/IST-DASLab/gptq/issues/51",
)
of_hessian.add(
    "hessian-averaged",
    "The sum is divided by the number of inputs.",
    "C1 C2",
    lambda x: hessian(x) / len(x),
    "https://github.com/IST-DASLab/gptq/issues/51",
)
of_hessian.add(
    "hessian-half-filled", "Only the part above the diagonal is filled.", "C1 C2", lambda x: np.triu(hessian(x))
)
of_hessian.add(
    "inputs-past-2048-left-out",
    "Only the first 2048 inputs are summed.",
    "C1",
    lambda x: hessian(np.ascontiguousarray(x[:2048])),
)
of_ratios.add("error-not-divided", "An error is not divided by the diagonal.", "C1 C2", lambda f: np.triu(f, 1))
of_ratios.add(
    "error-divided-by-own-row",
    "An error is divided by the diagonal of its own row.",
    "C1 C2",
    lambda f: np.triu(f / np.diagonal(f)[:, None], 1),
    "https://github.com/cactus-compute/cactus/pull/807",
)
of_ratios.add(
    "error-with-other-sign",
    "Errors are taken off where they are to be added.",
    "C1 C2",
    lambda f: -ratios(f),
)
