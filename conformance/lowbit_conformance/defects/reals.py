"""Defects of HQQ: real zeros, groups along two axes, numbers in 8 bits, and the halves of the solver."""

from collections.abc import Callable
from typing import Any

import numpy as np

from lowbit.arrays import F32, F64, I64, Array
from lowbit.quantization import hqq, hqq_solver
from lowbit.quantization.hqq import HqqMatrix
from lowbit.quantization.hqq_numbers import EightBit, Numbers, decode
from lowbit.quantization.packing import Codes
from lowbit_conformance import packing
from lowbit_conformance.defects import steps
from lowbit_conformance.defects.blocks import away
from lowbit_conformance.defects.defect import COMMON, Defect, Function, arithmetical, of

# **Weights**, with one thing at a time to be replaced.


def group_of(matrix: HqqMatrix, axis: int | None = None) -> I64:
    """The group of each weight, K × N."""
    flat = np.arange(matrix.rows * matrix.columns)
    group = flat // matrix.group_size if (axis if axis is not None else matrix.axis) == 1 else flat % matrix.groups
    return group.reshape(matrix.columns, matrix.rows).T


def weights(
    matrix: HqqMatrix,
    group: Callable[[HqqMatrix], I64] = group_of,
    numbers: Callable[[Numbers], F32] = decode,
    value: Callable[[F32, F32, F32], F32] = lambda q, s, z: s * (q - z),
    zeros: Callable[[F32], F32] = lambda z: z,
) -> F32:
    """Right, unless something is replaced."""
    q, g = packing.unpack(matrix.words, matrix.bits).astype(np.float32), group(matrix)
    s, z = numbers(matrix.scales)[g], zeros(numbers(matrix.zeros))[g]
    with np.errstate(over="ignore", invalid="ignore"):
        return np.ascontiguousarray(value(q, s, z), np.float32)


def product(x: F32, matrix: F32) -> Array:
    answer: Array = steps.product(x[np.newaxis], matrix)[0]
    return answer


def both(name: str, cause: str, clauses: str, seen: str = COMMON, **replaced: Any) -> Defect:
    """A defect of weights, when they are given and when they are multiplied."""
    return arithmetical(
        name,
        cause,
        clauses,
        {
            "hqq.dequantize": lambda matrix: weights(matrix, **replaced),
            "hqq.qgemv": lambda x, matrix: product(x, weights(matrix, **replaced)),
        },
        seen,
    )


def product_only(name: str, cause: str, clauses: str, wrong: Function, seen: str = COMMON) -> Defect:
    return of("hqq.qgemv", name, cause, clauses, wrong, seen)


def in_runs(matrix: HqqMatrix) -> I64:
    """Groups run over K × N laid out flat, rows first."""
    return (np.arange(matrix.rows * matrix.columns) // matrix.group_size).reshape(matrix.rows, matrix.columns)


def of_runs(numbers: Numbers) -> F32:
    """Numbers in 8 bits whose own groups are runs."""
    if not isinstance(numbers, EightBit):
        return decode(numbers)
    own = np.arange(len(numbers.codes)) // (len(numbers.codes) // len(numbers.scales))
    s, z = numbers.scales.astype(np.float32)[own], numbers.zeros.astype(np.float32)[own]
    return s * (numbers.codes.astype(np.float32) - z)


def without_own_zero(numbers: Numbers) -> F32:
    if not isinstance(numbers, EightBit):
        return decode(numbers)
    own = np.arange(len(numbers.codes)) % len(numbers.scales)
    return numbers.scales.astype(np.float32)[own] * numbers.codes.astype(np.float32)


def signed_codes(numbers: Numbers) -> F32:
    if not isinstance(numbers, EightBit):
        return decode(numbers)
    own = np.arange(len(numbers.codes)) % len(numbers.scales)
    s, z = numbers.scales.astype(np.float32)[own], numbers.zeros.astype(np.float32)[own]
    return s * (numbers.codes.view(np.int8).astype(np.float32) - z)


def halves_kept(numbers: Numbers) -> F32:
    """Every number that is stored as it is is rounded to float16."""
    return decode(numbers) if isinstance(numbers, EightBit) else numbers.astype(np.float16).astype(np.float32)


def half_product(x: F32, matrix: HqqMatrix) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        return (x.astype(np.float16) @ hqq.dequantize(matrix).astype(np.float16)).astype(np.float32)


# **Codes and steps.**


def codes(
    weights: F32,
    scales: F32,
    zeros: F32,
    bits: int,
    rounded: Callable[[Any], Any] = np.rint,
    quotient: Callable[[Any, Any], Any] = np.divide,
    overflow: float | None = None,
) -> Codes:
    with np.errstate(all="ignore"):
        real = rounded(quotient(weights, scales) + zeros)
        if overflow is not None:
            real = np.where(np.abs(real) >= 2.0**31, overflow, real)
        answer: Codes = np.clip(real, 0, 2**bits - 1).astype(np.uint8)
    return answer


def reciprocal(weights: F32, scales: F32) -> F32:
    return weights * (np.float32(1) / scales)


def coding(**replaced: Any) -> Callable[..., Codes]:
    return lambda weights, scales, zeros, bits: codes(weights, scales, zeros, bits, **replaced)


def previous_scale(weights: F32, scales: F32, zeros: F32, bits: int) -> Codes:
    return codes(weights, np.roll(scales, 1), zeros, bits)


def step(
    weights: F32,
    codes: Codes,
    scales: F32,
    zeros: F32,
    p: float,
    beta: float,
    kept_of: Callable[[F64, float, float], F64] = hqq_solver.shrink,
    middle: Callable[..., Any] = np.mean,
    sign: float = 1.0,
) -> Array:
    kept = kept_of(hqq_solver.residual(weights, codes, scales, zeros), p, beta)
    return middle(codes - (weights.astype(np.float64) - sign * kept) / scales, axis=0)  # type: ignore[no-any-return]  # a mean of float64


def stepping(**replaced: Any) -> Callable[..., Array]:
    return lambda weights, codes, scales, zeros, p, beta: step(weights, codes, scales, zeros, p, beta, **replaced)


def soft(d: F64, p: float, beta: float) -> F64:
    return np.sign(d) * np.maximum(0.0, np.abs(d) - 1 / beta)


def nothing_kept(d: F64, p: float, beta: float) -> F64:
    return np.zeros_like(d)


def power_of_p(d: F64, p: float, beta: float) -> F64:
    with np.errstate(divide="ignore"):
        return np.sign(d) * np.maximum(0.0, np.abs(d) - np.abs(d) ** p / beta)


MATRICES = (
    both(
        "real-zero-rounded",
        "Real zeros are rounded to whole codes.",
        "hqq.dequantize/C1 hqq.qgemv/C1 hqq.qgemv/C2",
        zeros=np.rint,
    ),
    both(
        "real-zero-added",
        "The weight is scale q + zero, as if the zero were a minimum.",
        "hqq.dequantize/C1 hqq.qgemv/C1",
        value=lambda q, s, z: s * q + z,
    ),
    of(
        "hqq.dequantize",
        "real-zero-distributed",
        "The weight is scale q - scale zero, rounded three times.",
        "C1",
        lambda matrix: weights(matrix, value=lambda q, s, z: s * q - s * z),
    ),
    both(
        "axes-exchanged",
        "Groups along axis 0 are taken for groups along axis 1, and the other way round.",
        "hqq.dequantize/C1 hqq.dequantize/C2 hqq.qgemv/C1",
        "https://github.com/huawei-csl/SINQ/pull/8",
        group=lambda matrix: group_of(matrix, 1 - matrix.axis),
    ),
    both(
        "groups-of-k-times-n",
        "Groups are cut from K × N instead of N × K.",
        "hqq.dequantize/C2 hqq.qgemv/C1",
        "https://github.com/casper-hansen/AutoAWQ/issues/275",
        group=in_runs,
    ),
    both(
        "scales-of-scales-in-runs",
        "The 8-bit scales of neighbouring groups share their own scale.",
        "hqq.dequantize/C3 hqq.qgemv/C2",
        numbers=of_runs,
    ),
    both(
        "zero-of-zeros-missing",
        "The zeros of 8-bit scales and zeros are not subtracted.",
        "hqq.dequantize/C3 hqq.qgemv/C2",
        numbers=without_own_zero,
    ),
    both(
        "scale-codes-signed",
        "The codes of 8-bit scales and zeros are read as signed.",
        "hqq.dequantize/C3 hqq.qgemv/C2",
        numbers=signed_codes,
    ),
    both(
        "real-numbers-in-half",
        "Scales and zeros are kept in float16, whatever they came in.",
        "hqq.dequantize/C1 hqq.qgemv/C2",
        numbers=halves_kept,
    ),
    product_only("real-zero-product-in-half", "The product is computed in float16.", "C2", half_product),
    product_only(
        "real-zero-product-hides-nan",
        "NaN and infinity become zero on the way.",
        "C3",
        lambda x, matrix: product(np.nan_to_num(x, nan=0, posinf=0, neginf=0), weights(matrix)),
    ),
    product_only(
        "real-zero-last-row-dropped",
        "The last row is left out.",
        "C1 C2",
        lambda x, matrix: product(x[:-1], weights(matrix)[:-1]),
    ),
)

SOLVER = (
    of(
        "hqq.codes",
        "solver-ties-away",
        "A tie goes away from zero and not to the even code.",
        "C1",
        coding(rounded=away),
    ),
    of("hqq.codes", "solver-codes-truncated", "Codes are cut and not rounded.", "C1 C2", coding(rounded=np.floor)),
    of(
        "hqq.codes",
        "solver-scale-inverted",
        "Weights are multiplied by the scale, as HQQ's own code stores 1 / scale.",
        "C1 C2",
        coding(quotient=np.multiply),
    ),
    of(
        "hqq.codes",
        "solver-reciprocal",
        "Weights are multiplied by 1 / scale, one rounding more.",
        "C1",
        coding(quotient=reciprocal),
    ),
    of(
        "hqq.codes",
        "solver-scale-of-neighbour",
        "A column takes the scale of its left neighbour.",
        "C1 C2",
        previous_scale,
    ),
    of(
        "hqq.codes",
        "solver-overflow-becomes-0",
        "A quotient that an integer cannot hold becomes 0.",
        "C2",
        coding(overflow=0.0),
    ),
    of("hqq.step", "shrinkage-soft", "Errors shrink by 1 / beta, whatever p is.", "C2", stepping(kept_of=soft)),
    of(
        "hqq.step",
        "shrinkage-by-p",
        "Errors shrink by |d|^p / beta and not by |d|^(p-1) / beta.",
        "C1 C2",
        stepping(kept_of=power_of_p),
    ),
    of("hqq.step", "nothing-shrinks", "The whole error is put down to the zero.", "C2", stepping(kept_of=nothing_kept)),
    of("hqq.step", "median-for-mean", "The zero is the median and not the mean.", "C1 C2", stepping(middle=np.median)),
    of(
        "hqq.step",
        "kept-error-added",
        "What is kept of the error is added to the weight and not taken off.",
        "C2",
        stepping(sign=-1.0),
    ),
)

DEFECTS = (*MATRICES, *SOLVER)
