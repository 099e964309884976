"""Defects of subnormal numbers, which a processor or a compiler was set to treat as zero."""

import numpy as np

from lowbit.arrays import F32
from lowbit.quantization.affine import QuantizedMatrix
from lowbit.quantization.hqq_numbers import Numbers, decode
from lowbit_conformance.defects import integers, reals
from lowbit_conformance.defects.backends import right
from lowbit_conformance.defects.defect import Defect, Function, arithmetical
from lowbit_conformance.defects.roundings import flushed
from lowbit_conformance.defects.steps import PRODUCTS, of_step

DEFECTS: list[Defect] = []
of_scales, of_zeros = of_step(DEFECTS, "scales"), of_step(DEFECTS, "zeros")
of_finish, of_numbers = of_step(DEFECTS, "finish"), reals.of_part(DEFECTS, "numbers")

FLUSHING = "https://github.com/llvm/llvm-project/issues/57589"
VALUES = "affine.dequantize/C1 affine.dequantize/C2 linear.qgemv/C1 linear.qgemm/C1"
MINIMA = "affine.dequantize/C1 linear.qgemv/C1 linear.qgemm/C1"


@of_zeros(MINIMA, FLUSHING)
def subnormal_minima_flushed(matrix: QuantizedMatrix) -> F32:
    """Minima below the least normal float32 number are treated as zero."""
    return flushed(matrix.zeros.astype(np.float32))


@of_numbers("hqq.dequantize/C1 hqq.qgemv/C1", FLUSHING)
def subnormal_scales_of_real_zeros_flushed(numbers: Numbers) -> F32:
    """Scales beside real zeros are treated as zero below the least normal number."""
    return flushed(decode(numbers))


def flushed_result(operation: str) -> Function:
    """The right result with subnormal numbers replaced by zero."""
    return lambda *arguments, **choices: flushed(right(operation)(*arguments, **choices))


RESULTS = (
    *PRODUCTS,
    integers.OPERATION,
    "hqq.qgemv",
    "routing.gate",
    "routing.expert",
    "attention.attend",
    "attention.attend_shaped",
    "rope.rotate",
    "blocks.rms_norm",
    "gptq.hessian",
    "gptq.targets",
)

of_scales.add(
    "subnormal-scales-flushed",
    "Scales below the least normal number of float32 are taken for zero.",
    VALUES,
    lambda matrix: flushed(matrix.scales.astype(np.float32)),
    FLUSHING,
)
of_finish.add(
    "subnormal-weights-flushed",
    "Weights below the least normal float32 number are treated as zero.",
    VALUES,
    lambda weights, matrix: flushed(weights),
    FLUSHING,
)
DEFECTS.append(
    arithmetical(
        "subnormal-results-flushed",
        "Results below the least normal float32 number are treated as zero.",
        " ".join(f"{operation}/C1" for operation in RESULTS),
        {operation: flushed_result(operation) for operation in RESULTS},
        FLUSHING,
    )
)
