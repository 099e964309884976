"""Defects of HQQ: real zeros, groups along two axes, numbers in 8 bits, and the halves of the solver."""

from collections.abc import Callable
from functools import partial
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
from lowbit_conformance.defects.defect import COMMON, Declaring, Defect, Function, arithmetical, of_operation
from lowbit_conformance.defects.roundings import finite, half

DEFECTS: list[Defect] = []
of_dequantize = of_operation(DEFECTS, "hqq.dequantize")
of_product = of_operation(DEFECTS, "hqq.qgemv")
of_codes = of_operation(DEFECTS, "hqq.codes")
of_step = of_operation(DEFECTS, "hqq.step")


# **Weights**, in which one step at a time can be replaced.


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
    return np.asarray(steps.product(x[np.newaxis], matrix)[0])


def of_part(into: list[Defect], part: str) -> Declaring:
    """Declares defects of one part of weights, for dequantising and for products."""

    def make(name: str, cause: str, clauses: str, wrong: Function, seen: str = COMMON) -> Defect:
        replaced: dict[str, Any] = {part: wrong}
        own: Callable[[HqqMatrix], F32] = partial(weights, **replaced)
        operations: dict[str, Function] = {
            "hqq.dequantize": own,
            "hqq.qgemv": lambda x, matrix: product(x, own(matrix)),
        }
        return arithmetical(name, cause, clauses, operations, seen)

    return Declaring(into, make)


def eight_bit(
    value: Callable[[Array, F32, F32], Any] = lambda q, s, z: s * (q.astype(np.float32) - z),
    own: Callable[[Array, int], Array] = lambda number, groups: number % groups,
) -> Callable[[Numbers], F32]:
    """8-bit numbers from their codes, scales and zeros by another expression, or with those of other groups."""

    def numbers(given: Numbers) -> F32:
        if not isinstance(given, EightBit):
            return decode(given)
        group = own(np.arange(len(given.codes)), len(given.scales))
        s, z = (part.astype(np.float32)[group] for part in (given.scales, given.zeros))
        return np.asarray(value(given.codes, s, z), np.float32)

    return numbers


of_group, of_numbers = of_part(DEFECTS, "group"), of_part(DEFECTS, "numbers")
of_value, of_zeros = of_part(DEFECTS, "value"), of_part(DEFECTS, "zeros")


@of_group("hqq.dequantize/C2 hqq.qgemv/C1", "https://github.com/casper-hansen/AutoAWQ/issues/275")
def groups_of_k_times_n(matrix: HqqMatrix) -> I64:
    """Groups are cut from K × N instead of N × K."""
    return (np.arange(matrix.rows * matrix.columns) // matrix.group_size).reshape(matrix.rows, matrix.columns)


of_numbers.add(
    "scales-of-scales-in-runs",
    "The 8-bit scales of neighbouring groups share their own scale.",
    "hqq.dequantize/C3 hqq.qgemv/C2",
    eight_bit(own=lambda number, groups: number // (len(number) // groups)),
)
of_numbers.add(
    "zero-of-zeros-missing",
    "The zeros of 8-bit scales and zeros are not subtracted.",
    "hqq.dequantize/C3 hqq.qgemv/C2",
    eight_bit(lambda q, s, z: s * q),
)
of_numbers.add(
    "scale-codes-signed",
    "The codes of 8-bit scales and zeros are read as signed.",
    "hqq.dequantize/C3 hqq.qgemv/C2",
    eight_bit(lambda q, s, z: s * (q.view(np.int8) - z)),
)


@of_numbers("hqq.dequantize/C1 hqq.qgemv/C2")
def real_numbers_in_half(numbers: Numbers) -> F32:
    """Scales and zeros are kept in float16, whatever they came in."""
    return decode(numbers) if isinstance(numbers, EightBit) else half(numbers)


@of_product("C2")
def real_zero_product_in_half(x: F32, matrix: HqqMatrix) -> Array:
    """The product is computed in float16."""
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
    zero: F32 | float = 1.0,
) -> Codes:
    """Right unless a step is replaced; `zero` is a factor of the zeros."""
    with np.errstate(all="ignore"):
        real = rounded(quotient(weights, scales) + np.float32(zero) * zeros)
        if overflow is not None:
            real = np.where(np.abs(real) >= 2.0**31, overflow, real)
        return np.asarray(np.clip(real, 0, 2**bits - 1).astype(np.uint8))


def reciprocal(weights: F32, scales: F32) -> F32:
    return weights * (np.float32(1) / scales)


@of_codes("C1 C2")
def solver_scale_of_neighbour(weights: F32, scales: F32, zeros: F32, bits: int) -> Codes:
    """A column takes the scale of its left neighbour."""
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
    return np.asarray(middle(codes - (weights.astype(np.float64) - sign * kept) / scales, axis=0))


of_kept = of_operation(DEFECTS, "hqq.step", lambda kept_of: partial(step, kept_of=kept_of))


@of_kept("C2")
def shrinkage_soft(d: F64, p: float, beta: float) -> F64:
    """Errors shrink by 1 / beta, whatever p is."""
    return np.sign(d) * np.maximum(0.0, np.abs(d) - 1 / beta)


@of_kept("C1 C2")
def shrinkage_by_p(d: F64, p: float, beta: float) -> F64:
    """Errors shrink by |d|^p / beta and not by |d|^(p-1) / beta."""
    with np.errstate(divide="ignore"):
        return np.sign(d) * np.maximum(0.0, np.abs(d) - np.abs(d) ** p / beta)


@of_kept("C2")
def nothing_shrinks(d: F64, p: float, beta: float) -> F64:
    """The whole error is put down to the zero."""
    return np.zeros_like(d)


of_zeros.add(
    "real-zero-rounded",
    "Real zeros are rounded to whole codes.",
    "hqq.dequantize/C1 hqq.qgemv/C1 hqq.qgemv/C2",
    np.rint,
)
of_value.add(
    "real-zero-added",
    "The weight is scale q + zero, as if the zero were a minimum.",
    "hqq.dequantize/C1 hqq.qgemv/C1",
    lambda q, s, z: s * q + z,
)
of_dequantize.add(
    "real-zero-distributed",
    "The weight is scale q - scale zero, rounded three times.",
    "C1",
    partial(weights, value=lambda q, s, z: s * q - s * z),
)
of_group.add(
    "axes-exchanged",
    "Groups along axis 0 are taken for groups along axis 1, and the other way round.",
    "hqq.dequantize/C1 hqq.dequantize/C2 hqq.qgemv/C1",
    lambda matrix: group_of(matrix, 1 - matrix.axis),
    "https://github.com/huawei-csl/SINQ/pull/8",
)
of_product.add(
    "real-zero-product-hides-nan",
    "NaN and infinity become zero on the way.",
    "C3",
    lambda x, matrix: product(finite(x), weights(matrix)),
)
of_product.add(
    "real-zero-last-row-dropped",
    "The last row is left out.",
    "C1 C2",
    lambda x, matrix: product(x[:-1], weights(matrix)[:-1]),
)

of_codes.add(
    "solver-ties-away", "A tie goes away from zero and not to the even code.", "C1", partial(codes, rounded=away)
)
of_codes.add("solver-codes-truncated", "Codes are cut and not rounded.", "C1 C2", partial(codes, rounded=np.floor))
of_codes.add(
    "solver-scale-inverted",
    "Weights are multiplied by the scale, as HQQ's own code stores 1 / scale.",
    "C1 C2",
    partial(codes, quotient=np.multiply),
)
of_codes.add(
    "solver-reciprocal",
    "Weights are multiplied by 1 / scale, one rounding more.",
    "C1",
    partial(codes, quotient=reciprocal),
)
of_codes.add(
    "solver-overflow-becomes-0", "A quotient that an integer cannot hold becomes 0.", "C2", partial(codes, overflow=0.0)
)
of_step.add("median-for-mean", "The zero is the median and not the mean.", "C1 C2", partial(step, middle=np.median))
of_step.add(
    "kept-error-added",
    "What is kept of the error is added to the weight and not taken off.",
    "C2",
    partial(step, sign=-1.0),
)
for name, cause, sign in (
    ("subtracted", "The zero is subtracted instead of added.", -1),
    ("left-out", "The zero is left out.", 0),
):
    of_codes.add(f"solver-zero-{name}", cause, "C1", partial(codes, zero=sign))
