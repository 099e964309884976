r"""NVFP4: 16 numbers of 4 bits with an FP8 scale, and one float32 scale for all.

NVIDIA's format has two levels of scale, because a scale of ``float8_e4m3fn`` has little range: one for each block of 16
elements along K, and one float32 number for the whole tensor. Elements are ``float4_e2m1fn``, two to a byte, the first
in the low half.

Two owners store the number for the tensor in opposite ways:

=================== ======================== =================================================================
format              field                    value
=================== ======================== =================================================================
nvfp4               ``weight_scale_2``       :math:`P \cdot s_{block} \cdot s_2`
nvfp4-pack          ``weight_global_scale``  :math:`P \cdot s_{block} / g`
=================== ======================== =================================================================

The quotient of the second is not a float64 in general; it is rounded to float64, far below any bound.

**Computing in float32**, as both owners do, rounds the scale of a block first, and then its product with the element. A
kernel may do the same for a result of any type.

**Casts** compute in float32 from the largest magnitudes: *a* of the tensor and :math:`m_b` of each block.

=============== =================================== ===============================================================
step            nvfp4                               nvfp4-pack
=============== =================================== ===============================================================
of the tensor   :math:`s_2 = a / 2688`              :math:`g = 2688 / a`
of a block      :math:`m_b / (6 s_2)`               :math:`g \cdot (m_b / 6)`, at most 448
a scale of 0    of zeros: 1                         after rounding: 0.125
an element      :math:`x / (s_{block} \cdot s_2)`    :math:`x / (s_{block} / g)`
=============== =================================== ===============================================================

2688 is 6 · 448, the largest element times the largest scale. Scales and elements are rounded to nearest, ties to even;
elements beyond 6 saturate. Where ModelOpt rounds the scale of a block to 0, its elements are worth 0 whatever they are.
For a tensor of zeros :math:`s_2` is 0 here, where ModelOpt has no rule; *g* is 1 where the quotient is infinite. vLLM's
CUDA kernel takes approximate reciprocals, which no standard defines to the bit.

Source: ModelOpt's ``NVFP4QTensor`` (``nvfp4``); compressed-tensors, ``nvfp4-pack-quantized``, ``calculate_qparams`` and
``generate_gparam`` (``nvfp4-pack``).
"""

import numpy as np

from lowbit.arrays import F32, F64, Array
from lowbit.errors import ArgumentError
from lowbit.numbers.floats import decode, round_to, rounded
from lowbit.tensor_formats.bits import exact, join, split
from lowbit.tensor_formats.casts import over
from lowbit.tensor_formats.table import Field, Format, Sizes, Tensors, Terms

BLOCK = 16


def _elements_of(name: str, tensors: Tensors, at: Sizes) -> F64:
    """N × blocks × 16."""
    codes = split(tensors[name], 4).astype(np.uint8)
    return decode(codes.reshape(-1), "float4_e2m1fn").reshape(at.N, -1, BLOCK)


def _in_blocks(name: str, tensors: Tensors, at: Sizes) -> F64:
    """N × K elements, each times the scale of its block."""
    products: F64 = _elements_of(name, tensors, at) * exact(tensors["weight_scale"])[..., np.newaxis]
    return products.reshape(at.N, at.K)


def _multiplied(tensors: Tensors, at: Sizes) -> Terms:
    return Terms((_in_blocks("weight", tensors, at) * exact(tensors["weight_scale_2"])).T)


def _divided(tensors: Tensors, at: Sizes) -> Terms:
    return Terms((_in_blocks("weight_packed", tensors, at) / exact(tensors["weight_global_scale"])).T)


def _in_float32(name: str, scales: F64, tensors: Tensors, at: Sizes) -> Array:
    kept = exact(rounded(scales, "float32"))[..., np.newaxis]
    return rounded(_elements_of(name, tensors, at) * kept, "float32").reshape(at.N, at.K).T


def _multiplied_stepwise(tensors: Tensors, at: Sizes) -> Array:
    return _in_float32("weight", exact(tensors["weight_scale"]) * exact(tensors["weight_scale_2"]), tensors, at)


def _divided_stepwise(tensors: Tensors, at: Sizes) -> Array:
    scales = exact(tensors["weight_scale"]) / exact(tensors["weight_global_scale"])
    return _in_float32("weight_packed", scales, tensors, at)


def _not_zero(tensors: Tensors, at: Sizes) -> None:
    if (tensors["weight_global_scale"] == 0).any():
        raise ArgumentError("weight_global_scale", 0, "a number that is not 0, since it is divided by")


# **Casts.**

LARGEST = np.float32(6)
OF_TENSOR = np.float32(6 * 448)


def _magnitudes(numbers: F64, at: Sizes) -> tuple[F32, F32, F32]:
    """The numbers, N × blocks × 16, and the largest magnitudes of all and of each block, N × blocks × 1."""
    x = np.ascontiguousarray(numbers.T, np.float32).reshape(at.N, -1, BLOCK)
    of_blocks = np.abs(x).max(axis=-1, keepdims=True)
    return x, of_blocks.max().reshape(1), of_blocks


def _elements(x: F32, scales: F32, at: Sizes) -> Array:
    """Two elements a byte: the numbers over the scale of each; infinities saturate, and 0 over 0 is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        quotients = np.where(x == 0, x, x / scales)
    codes = round_to(exact(quotients).reshape(-1), "float4_e2m1fn").reshape(at.N, at.K)
    return join(codes, 4, np.uint8)


def _of_model_opt(numbers: F64, at: Sizes) -> dict[str, Array]:
    x, largest, of_blocks = _magnitudes(numbers, at)
    second: F32 = largest / OF_TENSOR
    scales = over(of_blocks, np.broadcast_to(LARGEST * second, of_blocks.shape))
    kept = rounded(exact(np.where(scales == 0, np.float32(1), scales)), "float8_e4m3fn", "saturate")
    elements = _elements(x, kept.astype(np.float32) * second, at)
    return {"weight": elements, "weight_scale": kept[..., 0], "weight_scale_2": second}


def _of_compressed_tensors(numbers: F64, at: Sizes) -> dict[str, Array]:
    x, largest, of_blocks = _magnitudes(numbers, at)
    with np.errstate(divide="ignore", over="ignore"):
        factor: F32 = OF_TENSOR / largest
    factor = np.where(np.isinf(factor), np.float32(1), factor)
    scales = rounded(exact(factor * (of_blocks / LARGEST)), "float8_e4m3fn", "saturate")
    kept = np.where(scales == 0, np.asarray(0.125, scales.dtype), scales)
    elements = _elements(x, kept.astype(np.float32) / factor, at)
    return {"weight_packed": elements, "weight_scale": kept[..., 0], "weight_global_scale": factor}


SCALE = Field("weight_scale", "float8_e4m3fn", ("N", "K/16"), "scale", "the scale of each 16 elements of a row")
NVFP4 = Format(
    name="nvfp4",
    title="NVFP4 of ModelOpt",
    fields=(
        Field("weight", "uint8", ("N", "K/2"), "codes", "two elements a byte, the first in the low half"),
        SCALE,
        Field("weight_scale_2", "float32", (1,), "scale", "multiplied by every scale"),
    ),
    decode=_multiplied,
    stepwise=_multiplied_stepwise,
    encode={"reference": _of_model_opt},
    source="ModelOpt, NVFP4QTensor",
)
NVFP4_PACK = Format(
    name="nvfp4-pack",
    title="NVFP4 of compressed-tensors",
    fields=(
        Field("weight_packed", "uint8", ("N", "K/2"), "codes", "two elements a byte, the first in the low half"),
        SCALE,
        Field("weight_global_scale", "float32", (1,), "scale", "divides every scale"),
    ),
    decode=_divided,
    stepwise=_divided_stepwise,
    encode={"reference": _of_compressed_tensors},
    check=_not_zero,
    source="compressed-tensors, nvfp4-pack-quantized",
    traps=("weight_global_scale divides; ModelOpt's weight_scale_2 multiplies.",),
)
