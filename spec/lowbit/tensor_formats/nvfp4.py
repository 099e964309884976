r"""NVFP4: 16 numbers of 4 bits with an FP8 scale, and one float32 scale for all.

NVIDIA's format has two levels of scale, because a scale of ``float8_e4m3fn`` has little range: one for each block of 16
elements along K, and one float32 number for the whole tensor. Elements are ``float4_e2m1fn``, two to a byte, the first
in the low half.

Two owners store the number for the tensor the other way round:

=================== ======================== =================================================================
format              field                    value
=================== ======================== =================================================================
nvfp4               ``weight_scale_2``       :math:`P \cdot s_{block} \cdot s_2`
nvfp4-pack          ``weight_global_scale``  :math:`P \cdot s_{block} / g`
=================== ======================== =================================================================

The quotient of the second is no float64 in general; it is rounded there, far below any bound.

Source: ModelOpt's NVFP4 (``nvfp4``); compressed-tensors, ``nvfp4-pack-quantized`` (``nvfp4-pack``).
"""

import numpy as np

from lowbit.arrays import F64
from lowbit.errors import ArgumentError
from lowbit.numbers.floats import decode
from lowbit.tensor_formats.bits import exact
from lowbit.tensor_formats.microscaling import from_pairs
from lowbit.tensor_formats.table import Field, Format, Sizes, Tensors, Terms

BLOCK = 16


def _in_blocks(name: str, tensors: Tensors, at: Sizes) -> F64:
    """N × K elements, each times the scale of its block."""
    codes = from_pairs(tensors[name])
    elements = decode(np.ascontiguousarray(codes).reshape(-1), "float4_e2m1fn").reshape(at.N, -1, BLOCK)
    products: F64 = elements * exact(tensors["weight_scale"])[..., np.newaxis]
    return products.reshape(at.N, at.K)


def _multiplied(tensors: Tensors, at: Sizes) -> Terms:
    return Terms((_in_blocks("weight", tensors, at) * exact(tensors["weight_scale_2"])).T)


def _divided(tensors: Tensors, at: Sizes) -> Terms:
    return Terms((_in_blocks("weight_packed", tensors, at) / exact(tensors["weight_global_scale"])).T)


def _not_zero(tensors: Tensors, at: Sizes) -> None:
    if (tensors["weight_global_scale"] == 0).any():
        raise ArgumentError("weight_global_scale", 0, "a number that is not 0, since it is divided by")


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
    check=_not_zero,
    source="compressed-tensors, nvfp4-pack-quantized",
    traps=("weight_global_scale divides; ModelOpt's weight_scale_2 multiplies.",),
)
