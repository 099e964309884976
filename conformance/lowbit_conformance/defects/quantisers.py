"""Defects of quantisers: ranges, scales, rounding, and the parts of GPTQ."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from lowbit.arrays import F32, F64, Array
from lowbit.quantization import gptq
from lowbit.quantization.affine import Convention, QuantizedMatrix, ScaleDtype
from lowbit_conformance import packing
from lowbit_conformance.defects.blocks import away
from lowbit_conformance.defects.defect import of, unchecked

Rounding = Callable[[Any], Any]

# **Affine quantisation**, with one thing at a time to be replaced.


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
    no_range: float | None = None,
    wrapped: bool = False,
    mirrored: bool = False,
    zero_inside: bool = False,
    scale_changed: Callable[[F32], F32] = lambda scale: scale,
) -> QuantizedMatrix:
    """Right, unless something is replaced; `levels` is added to 2^b − 1."""
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
            used = scale.astype(np.float32) if stored_first else np.where(fine > 0, fine, np.float32(least))
            if convention == "minimum":
                zero: Any = low.astype(dtype)
                real = rounded((group - (zero.astype(np.float32) if stored_first else low)) / used)
            else:
                zero = np.clip(zero_rounded(-low / used), 0, top).astype(np.uint8)
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
    """A matrix without the checks of its construction."""
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


def replacing(**replaced: Any) -> Callable[..., QuantizedMatrix]:
    return lambda weights, **choices: quantize(weights, **choices, **replaced)


def short_group_merged(weights: F32, **choices: Any) -> QuantizedMatrix:
    """A short last group takes the scale and zero of the one before it."""
    right, size = quantize(weights, **choices), choices["group_size"]
    if len(weights) % size == 0 or right.groups < 2:
        return right
    right.scales[-1], right.zeros[-1] = right.scales[-2], right.zeros[-2]
    top = 2**right.bits - 1
    scale, zero = right.scales[-1].astype(np.float32), right.zeros[-1].astype(np.float32)
    tail = weights[(right.groups - 1) * size :]
    real = np.rint((tail - zero) / scale) if right.convention == "minimum" else np.rint(tail / scale) + zero
    codes = packing.unpack(right.words, right.bits)
    codes[len(weights) - len(tail) :] = np.clip(real, 0, top)
    return matrix_of(codes, right.scales, right.zeros, right.bits, right.rows, size, right.convention)


def along_rows(weights: F32, **choices: Any) -> QuantizedMatrix:
    """One scale and zero for all columns of a group of rows."""
    right = quantize(np.ascontiguousarray(weights.max(axis=1, keepdims=True)), **choices)
    scales = np.ascontiguousarray(np.repeat(right.scales, weights.shape[1], axis=1))
    zeros = np.ascontiguousarray(np.repeat(right.zeros, weights.shape[1], axis=1))
    group = np.arange(len(weights)) // choices["group_size"]
    scale, zero = scales.astype(np.float32)[group], zeros.astype(np.float32)[group]
    real = np.rint((weights - zero) / scale) if right.convention == "minimum" else np.rint(weights / scale) + zero
    codes = np.clip(real, 0, 2**right.bits - 1)
    return matrix_of(codes, scales, zeros, right.bits, right.rows, right.group_size, right.convention)


def by_reciprocal(weights: F32, **choices: Any) -> QuantizedMatrix:
    """Weights are multiplied by 1 / scale, which rounds once more."""
    right = quantize(weights, **choices)
    group = np.arange(len(weights)) // choices["group_size"]
    with np.errstate(over="ignore", invalid="ignore"):
        inverse = (np.float32(1) / right.scales.astype(np.float32))[group]
        zero = right.zeros.astype(np.float32)[group]
        minimum = right.convention == "minimum"
        real = np.rint((weights - zero) * inverse) if minimum else np.rint(weights * inverse) + zero
    codes = np.clip(np.nan_to_num(real), 0, 2**right.bits - 1)
    return matrix_of(codes, right.scales, right.zeros, right.bits, right.rows, right.group_size, right.convention)


# **GPTQ.**


def hessian(x: F32) -> F64:
    wide = x.astype(np.float64)
    return wide.T @ wide


def hessian_in_half(x: F32) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        half = x.astype(np.float16).astype(np.float32)
        return (half.T @ half).astype(np.float64)


def lower_for_upper(hessian: Array) -> Array:
    """The usual factor L, turned round: L^T L^T^T is another matrix."""
    return np.linalg.cholesky(hessian.astype(np.float64)).T


def factor_of_inverse(hessian: Array) -> Array:
    try:
        return np.linalg.cholesky(np.linalg.inv(hessian.astype(np.float64))).T
    except np.linalg.LinAlgError:
        return np.linalg.cholesky(hessian.astype(np.float64)).T


def not_cleared(hessian: Array) -> Array:
    return np.triu(gptq.factor(hessian)) + np.tril(hessian.astype(np.float64), -1)


def negative(hessian: Array) -> Array:
    return -gptq.factor(hessian)


def in_float32(hessian: Array) -> Array:
    """The right algorithm with every number in float32; NaN where it finds no pivot."""
    rest = hessian.astype(np.float32)
    result = np.zeros_like(rest)
    with np.errstate(invalid="ignore", divide="ignore"):
        for k in reversed(range(len(rest))):
            column = rest[: k + 1, k] / np.sqrt(rest[k, k])
            result[: k + 1, k] = column
            rest = rest[:k, :k] - np.outer(column[:k], column[:k])
    return result


def stored_in_float32(hessian: Array) -> Array:
    """A Hessian in float64 is rounded to float32 before anything else."""
    return gptq.factor(np.ascontiguousarray(hessian.astype(np.float32)))


def unit_diagonal(hessian: Array) -> Array:
    factor = gptq.factor(hessian)
    return factor / np.diagonal(factor)


def targets(weights: F32, factor: F32, values: F32, spread: Callable[..., F64]) -> F64:
    wide = weights.astype(np.float64)
    errors = wide - values.astype(np.float64)
    return wide + spread(factor.astype(np.float64)).T @ errors


def ratios(factor: F64) -> F64:
    return np.triu(factor / np.diagonal(factor), 1)


def within_slices(factor: F64) -> F64:
    """Errors stay inside slices of 32 rows: those of a slice are forgotten when the next begins."""
    slices = np.arange(len(factor)) // 32
    return np.where(slices[:, None] == slices, ratios(factor), 0)


def own_row_too(weights: F32, factor: F32, values: F32) -> F64:
    """A row's own error changes its own target."""
    return targets(weights, factor, values, lambda f: ratios(f) + 0.125 * np.eye(len(f)))


def spreading(spread: Callable[[F64], F64]) -> Callable[[F32, F32, F32], F64]:
    return lambda weights, factor, values: targets(weights, factor, values, spread)


AFFINE = (
    of(
        "affine.quantize",
        "levels-2-to-the-b",
        "The range is divided by 2^b and not by 2^b - 1.",
        "C1 C4",
        replacing(levels=1),
    ),
    of(
        "affine.quantize",
        "range-without-zero",
        "The range of zero-point quantisation is not extended to hold 0.",
        "C1 C2",
        replacing(extended=False),
    ),
    of(
        "affine.quantize",
        "range-mirrored",
        "The range is from -m to m, with m the largest magnitude.",
        "C1 C2 C4",
        replacing(mirrored=True),
    ),
    of(
        "affine.quantize",
        "zero-point-truncated",
        "The zero-point is cut and not rounded.",
        "C1",
        replacing(zero_rounded=np.floor),
    ),
    of("affine.quantize", "codes-truncated", "Codes are cut and not rounded.", "C1 C2", replacing(rounded=np.floor)),
    of(
        "affine.quantize",
        "code-ties-away",
        "A tie goes away from zero and not to the even code.",
        "C2",
        replacing(rounded=away),
        "https://github.com/tenstorrent/tt-metal/issues/56525",
    ),
    of(
        "affine.quantize",
        "scale-rounded-too-late",
        "Codes are found with the scale before it is rounded for storage.",
        "C1",
        replacing(stored_first=False),
        "https://github.com/antirez/ds4/pull/844",
    ),
    of(
        "affine.quantize",
        "codes-wrap",
        "A code beyond its range wraps and is not clamped.",
        "C1 C2",
        replacing(wrapped=True),
        "https://github.com/ModelCloud/GPTQModel/pull/2963",
    ),
    of(
        "affine.quantize",
        "no-range-tiny-scale",
        "A group without a range has a scale of 1e-5 instead of 1.",
        "C3",
        replacing(no_range=1e-5),
        "https://github.com/ModelCloud/GPTQModel/pull/1531",
    ),
    of(
        "affine.quantize",
        "no-range-zero-scale",
        "A group without a range has a scale of 0.",
        "C3",
        replacing(no_range=0.0),
        "https://github.com/apple/coremltools/pull/2851",
    ),
    of(
        "affine.quantize",
        "short-group-quantized-with-the-last",
        "A short last group takes the scale of the one before.",
        "C1 C4",
        short_group_merged,
    ),
    of(
        "affine.quantize",
        "one-range-for-all-columns",
        "The columns of a group share one range.",
        "C1 C2 C4",
        along_rows,
    ),
    of(
        "affine.quantize",
        "reciprocal-of-scale",
        "Weights are multiplied by 1 / scale, one rounding more.",
        "C2",
        by_reciprocal,
    ),
)

GPTQ = (
    of(
        "gptq.hessian",
        "hessian-times-2",
        "The factor 2 of the squared error is left in.",
        "C1 C2",
        lambda x: 2 * hessian(x),
        "https://github.com/IST-DASLab/gptq/issues/51",
    ),
    of(
        "gptq.hessian",
        "hessian-averaged",
        "The sum is divided by the number of inputs.",
        "C1 C2",
        lambda x: hessian(x) / len(x),
        "https://github.com/IST-DASLab/gptq/issues/51",
    ),
    of(
        "gptq.hessian",
        "hessian-half-filled",
        "Only the part above the diagonal is filled.",
        "C1 C2",
        lambda x: np.triu(hessian(x)),
    ),
    of(
        "gptq.hessian",
        "inputs-past-2048-left-out",
        "Only the first 2048 inputs are summed.",
        "C1",
        lambda x: hessian(np.ascontiguousarray(x[:2048])),
    ),
    of("gptq.hessian", "hessian-in-half", "Inputs are rounded to float16.", "C2", hessian_in_half),
    of(
        "gptq.factor",
        "factor-of-the-wrong-side",
        "Cholesky's L, transposed: M^T M and not M M^T is H.",
        "C1 C2",
        lower_for_upper,
        verdicts=("WRONG", "RAISED"),  # from the other end a Hessian may not be positive definite in float64
    ),
    of(
        "gptq.factor",
        "factor-of-the-inverse",
        "The factor is that of the inverse.",
        "C1 C2",
        factor_of_inverse,
        "https://github.com/cactus-compute/cactus/pull/807",
        verdicts=("WRONG", "RAISED"),  # the inverse of an inverse may not be positive definite any more
    ),
    replace(
        of(
            "gptq.factor",
            "factor-in-float32",
            "The factor is computed in float32 where float64 was declared.",
            "C1 C2",
            in_float32,
        ),
        accumulator="float64",
    ),
    replace(
        of(
            "gptq.factor",
            "hessian-narrowed-first",
            "A Hessian in float64 is rounded to float32 before it is factored.",
            "C1",
            stored_in_float32,
            verdicts=("WRONG", "RAISED"),  # what is rounded may not be positive definite any more
        ),
        accumulator="float64",
    ),
    of("gptq.factor", "factor-not-cleared", "What was below the diagonal stays there.", "C1 C2 C3", not_cleared),
    of(
        "gptq.factor",
        "factor-negative",
        "The diagonal is negative; the product is right all the same.",
        "C1 C3",
        negative,
    ),
    of(
        "gptq.factor",
        "factor-with-unit-diagonal",
        "Columns are divided by their pivot: the factor of L D L^T.",
        "C1 C2",
        unit_diagonal,
    ),
    of(
        "gptq.targets",
        "error-not-divided",
        "An error is not divided by the diagonal.",
        "C1 C2",
        spreading(lambda f: np.triu(f, 1)),
    ),
    of(
        "gptq.targets",
        "error-divided-by-own-row",
        "An error is divided by the diagonal of its own row.",
        "C1 C2",
        spreading(lambda f: np.triu(f / np.diagonal(f)[:, None], 1)),
        "https://github.com/cactus-compute/cactus/pull/807",
    ),
    of(
        "gptq.targets",
        "errors-forgotten-between-slices",
        "Errors do not cross from one slice of 32 rows to the next.",
        "C1 C2",
        spreading(within_slices),
    ),
    of(
        "gptq.targets",
        "error-with-other-sign",
        "Errors are taken off where they are to be added.",
        "C1 C2",
        spreading(lambda f: -ratios(f)),
    ),
    of("gptq.targets", "own-value-changes-target", "A row's own value changes its target.", "C1 C2 C3", own_row_too),
)

DEFECTS = (*AFFINE, *GPTQ)
