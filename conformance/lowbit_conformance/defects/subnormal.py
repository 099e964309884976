"""Defects of numbers below the least normal one, which a processor or a compiler was told to take for zero."""

from typing import Any

import numpy as np

from lowbit.arrays import F32, Array
from lowbit.operations import OPERATIONS
from lowbit.quantization.affine import QuantizedMatrix
from lowbit.quantization.hqq_numbers import Numbers, decode
from lowbit_conformance.defects import integers, reals, steps
from lowbit_conformance.defects.defect import Defect, Function, arithmetical
from lowbit_conformance.defects.steps import PRODUCTS, stepwise

FLUSHING = "https://github.com/llvm/llvm-project/issues/57589"
VALUES = "affine.dequantize/C1 affine.dequantize/C2 linear.qgemv/C1 linear.qgemm/C1"
MINIMA = "affine.dequantize/C1 linear.qgemv/C1 linear.qgemm/C1"


def flushed(numbers: Array) -> Array:
    """With zeros of the same sign for subnormal numbers of float32."""
    wide = np.asarray(numbers, np.float32)
    return np.where(np.abs(wide) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), wide), wide)


def flushed_minima(matrix: QuantizedMatrix) -> F32:
    return flushed(matrix.zeros.astype(np.float32))


def flushed_numbers(numbers: Numbers) -> F32:
    return flushed(decode(numbers))


def flushed_result(operation: str) -> Function:
    """The right result without its subnormal numbers."""
    own = steps.RIGHT.operations() | {integers.OPERATION: integers.product}
    function = own.get(operation) or OPERATIONS[operation].reference

    def run(*arguments: Any, **choices: Any) -> Array:
        return flushed(function(*arguments, **choices))

    return run


RESULTS = (
    *PRODUCTS,
    integers.OPERATION,
    "hqq.qgemv",
    "routing.gate",
    "routing.expert",
    "attention.attend",
    "rope.rotate",
    "blocks.rms_norm",
    "gptq.hessian",
    "gptq.targets",
)

DEFECTS: tuple[Defect, ...] = (
    stepwise(
        "subnormal-scales-flushed",
        "Scales below the least normal number of float32 are taken for zero.",
        VALUES,
        FLUSHING,
        scales=lambda matrix: flushed(matrix.scales.astype(np.float32)),
    ),
    stepwise(
        "subnormal-minima-flushed",
        "Minima below the least normal number of float32 are taken for zero.",
        MINIMA,
        FLUSHING,
        zeros=flushed_minima,
    ),
    stepwise(
        "subnormal-weights-flushed",
        "Weights below the least normal number of float32 are taken for zero.",
        VALUES,
        FLUSHING,
        finish=lambda weights, matrix: flushed(weights),
    ),
    reals.both(
        "subnormal-scales-of-real-zeros-flushed",
        "Scales beside real zeros are taken for zero below the least normal number.",
        "hqq.dequantize/C1 hqq.qgemv/C1",
        FLUSHING,
        numbers=flushed_numbers,
    ),
    arithmetical(
        "subnormal-results-flushed",
        "Results below the least normal number of float32 are taken for zero.",
        " ".join(f"{operation}/C1" for operation in RESULTS),
        {operation: flushed_result(operation) for operation in RESULTS},
        FLUSHING,
    ),
)
