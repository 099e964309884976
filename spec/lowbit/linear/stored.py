r"""Products with stored matrices: ``Y = X W`` on the bytes of any format.

The chapter `linear` multiplies by one layout, that of QIGen. Kernels in use multiply by the bytes of GPTQ, GGUF or
NVFP4, with 16-bit activations, and return 16 bits. They compute the same sum,

.. math:: y_{tn} = \sum_{k} x_{tk}\, w_{kn},

with the exact numbers :math:`w_{kn}` that the format's table gives. Nothing here depends on the format: the chapters of
`lowbit.tensor_formats` say what the numbers are, and `stored_bounds` how far a result may lie from the sum.

**Types.** The activations are float32, float16 or bfloat16, and so is the result, independently. A result is the sum,
rounded to its type; a kernel declares what it rounds on the way.

**Activations may be stored too.** Integer kernels cast a row of activations to codes first, for example to Q8_0. A cast
is discontinuous, so it is an operation of its own (`formats.quantize`), and the product starts from its result. No cast
gives the 8-bit code -128. A kernel may rely on that: ggml's kernels for x86 move the sign of a weight to the
activation, and -128 has no negative in 8 bits.

Source: the sum is that of a linear layer; the formats name their owners.
"""

from typing import Annotated, Any

import numpy as np

from lowbit.arrays import F64, Activations
from lowbit.contract.operation import BOUNDED, Parameters, operation
from lowbit.contract.signature import Shape, checked
from lowbit.errors import ArgumentError
from lowbit.linear.elementary import product
from lowbit.tensor_formats.stored import Result, Stored


@checked
def gemv(x: Annotated[Activations, Shape("weights.rows")], weights: Stored, result: Result = "float32") -> F64:
    """``y = x W`` for one vector of activations.

    Args:
        x: float32, float16 or bfloat16, K.
        weights: K × N.
        result: the type of a backend's result.

    Returns:
        float64, N: the value that a backend's result is measured against; not rounded to `result`.

    Raises:
        ArgumentError: `x` is not K contiguous numbers of one of these types; an unknown result.
    """
    total: F64 = product(x[np.newaxis], weights.values)[0]
    return total


@checked
def gemm(x: Annotated[Activations, Shape("T", "weights.rows")], weights: Stored, result: Result = "float32") -> F64:
    """``Y = X W`` for T vectors.

    Args:
        x: float32, float16 or bfloat16, T × K.
        weights: K × N.
        result: the type of a backend's result.

    Returns:
        float64, T × N; row t equals ``gemv(x[t], weights)``.

    Raises:
        ArgumentError: `x` is not T × K contiguous numbers of one of these types; an unknown result.
    """
    return product(x, weights.values)


def _check_cast(x: Stored, weights: Stored, result: Result) -> None:
    if x.rows != weights.rows:
        raise ArgumentError("rows of x", x.rows, f"{weights.rows}, the rows of weights")


@checked(also=_check_cast)
def gemm_cast(x: Stored, weights: Stored, result: Result = "float32") -> F64:
    """``Y = X W`` for activations that are themselves stored in a format.

    Args:
        x: K × T: each vector of activations is one column. A backend promises nothing where a code of 8 bits is -128.
        weights: K × N.
        result: the type of a backend's result.

    Returns:
        float64, T × N.

    Raises:
        ArgumentError: `x` and `weights` differ in K; an unknown result.
    """
    return product(x.values.T, weights.values)


def _parameters(x: Any, weights: Stored, result: Result = "float32") -> Parameters:
    cast = isinstance(x, Stored)
    batch = x.columns if cast else 1 if x.ndim == 1 else len(x)
    activations = x.format if cast else x.dtype.name
    return {**weights.parameters, "activations": activations, "result": result, "batch": batch}


# **What a backend promises.** The bound is derived in the chapter `stored_bounds`.

CLAUSES = {
    "C1": "Where every partial sum is exact in the types that the backend declares, the result equals X W exactly.",
    "C2": "For finite inputs without overflow, each element differs from X W by at most the bound derived from the "
    "declared arithmetic and the type of the result.",
    "C3": "The result has the type that was asked for; row t depends on nothing but row t of X and the matrix.",
}
NAN = {"C4": "A NaN or an infinity in a row of X makes every element of that row of the result NaN or infinite."}

for function, title, clauses in (
    (gemv, "Vector times stored matrix", CLAUSES | NAN),
    (gemm, "Matrix times stored matrix", CLAUSES | NAN),
    (gemm_cast, "Stored activations times stored matrix", CLAUSES),
):
    operation(
        f"linear.{function.__name__}",
        title,
        function,
        promise=BOUNDED,
        source="the owners of the formats",
        parameters=_parameters,
        clauses=clauses,
    )
