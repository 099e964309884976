r"""FP8 weights: ``float8_e4m3fn`` with scales of a tensor, of channels, or of blocks of 128 × 128.

The weights are N × K, as PyTorch stores a linear layer, and each is an element times a scale,

.. math:: w_{kn} = s \cdot P_{nk},

where *s* is one number (``fp8-tensor``), one for each output channel n (``fp8-channel``), or one for each block of 128
output channels and 128 inputs (``fp8-block``). The last is the layout of DeepSeek-V3: its field is called
``weight_scale_inv`` and is multiplied by, although its name says otherwise. Blocks at the right and lower edge may be
smaller.

Source: compressed-tensors, ``float-quantized``; DeepSeek-V3's ``weight_dequant``; OCP FP8 1.0 for the elements.
"""

import numpy as np

from lowbit.arrays import Array
from lowbit.tensor_formats.bits import exact
from lowbit.tensor_formats.table import Field, Format, Sizes, Tensors, Terms

WEIGHT = Field("weight", "float8_e4m3fn", ("N", "K"), "codes", "the elements, one row for each output")


def _scaled(tensors: Tensors, at: Sizes) -> Terms:
    return Terms((exact(tensors["weight"]) * exact(tensors["weight_scale"])).T)


def _blocks(tensors: Tensors, at: Sizes) -> Terms:
    scales: Array = exact(tensors["weight_scale_inv"])
    wide = np.repeat(np.repeat(scales, 128, axis=0), 128, axis=1)[: at.N, : at.K]
    return Terms((exact(tensors["weight"]) * wide).T)


SOURCE = "compressed-tensors, float-quantized"
FP8_TENSOR = Format(
    name="fp8-tensor",
    title="FP8 with one scale",
    fields=(WEIGHT, Field("weight_scale", "float32", (1,), "scale", "the scale of all weights")),
    decode=_scaled,
    source=SOURCE,
)
FP8_CHANNEL = Format(
    name="fp8-channel",
    title="FP8 with a scale for each output",
    fields=(WEIGHT, Field("weight_scale", "float32", ("N", 1), "scale", "the scale of each output channel")),
    decode=_scaled,
    source=SOURCE,
)
FP8_BLOCK = Format(
    name="fp8-block",
    title="FP8 with scales of blocks of 128 × 128",
    fields=(
        WEIGHT,
        Field("weight_scale_inv", "float32", ("N//128", "K//128"), "scale", "the scale of each block; multiplied by"),
    ),
    decode=_blocks,
    source="DeepSeek-V3, inference/kernel.py",
    traps=("weight_scale_inv is multiplied by, not divided by.",),
)
