r"""FP8: ``float8_e4m3fn`` with scales of a tensor, of channels or tokens, of heads, or of blocks of 128 × 128.

Weights are N × K, as PyTorch stores a linear layer, and each is an element times a scale,

.. math:: w_{kn} = s \cdot P_{nk},

where *s* is one number (``fp8-tensor``), one for each output channel n (``fp8-channel``), or one for each block of 128
output channels and 128 inputs (``fp8-block``). The last is the layout of DeepSeek-V3: its field is called
``weight_scale_inv`` and is multiplied by, although its name says otherwise. Blocks at the right and lower edge may be
smaller.

**Activations** are T rows of K numbers, so N is T: ``fp8-tensor`` has one scale for all tokens, ``fp8-channel`` one for
each token. **Key-value caches** store a token in a row, too: ``fp8-tensor`` with one scale for a layer, ``fp8-head``
with one for each head, the same for all tokens, as models are calibrated.

**Casts with dynamic scales** compute in float32 from :math:`m = \max |x|` over the numbers that share a scale:

.. math:: d = m / 448, \qquad P = \mathrm{round}(x / d),

to nearest, ties to even; numbers beyond 448 saturate. Kernels differ in two choices, and a call keeps to one:

- *Quotient.* vLLM divides by *d* for tokens and multiplies by :math:`1/d` for a tensor; torchao multiplies by
  :math:`448/m`.
- *Least scale.* vLLM takes *d* for tokens to be at least :math:`1/(448 \cdot 512)`, so that no scale is subnormal. For
  a tensor it does not. Without it, zeros have the scale 0, and elements of 0.

Source: compressed-tensors, ``float-quantized``; DeepSeek-V3's ``weight_dequant``; OCP FP8 1.0 for the elements; vLLM,
``fp8/common.cu`` (``dynamic_per_token_scaled_fp8_quant``); torchao, ``float8_utils.py`` (``amax_to_scale``).
"""

from functools import partial

import numpy as np

from lowbit.arrays import F32, F64, Array
from lowbit.numbers.floats import rounded
from lowbit.tensor_formats.bits import exact
from lowbit.tensor_formats.casts import choices
from lowbit.tensor_formats.int8 import divided
from lowbit.tensor_formats.table import Field, Format, Sizes, Tensors, Terms

WEIGHT = Field("weight", "float8_e4m3fn", ("N", "K"), "codes", "the elements, one row for each output")


def _scaled(tensors: Tensors, at: Sizes) -> Terms:
    return Terms((exact(tensors["weight"]) * exact(tensors["weight_scale"])).T)


def _blocks(tensors: Tensors, at: Sizes) -> Terms:
    scales: Array = exact(tensors["weight_scale_inv"])
    wide = np.repeat(np.repeat(scales, 128, axis=0), 128, axis=1)[: at.N, : at.K]
    return Terms((exact(tensors["weight"]) * wide).T)


def _heads(tensors: Tensors, at: Sizes) -> Terms:
    scales = np.repeat(exact(tensors["scale"]), at["head_dim"])
    return Terms((exact(tensors["elements"]) * scales).T)


# **Casts.**

LARGEST = np.float32(448)
LEASTS = {"any d": np.float32(0), "d at least 1/(448 512)": np.float32(1 / (448 * 512))}


def _cast(axis: int | None, quotient: str, least: str, numbers: F64, at: Sizes) -> dict[str, Array]:
    """One scale for each row of N × K numbers, or with the axis None for all."""
    x = numbers.T.astype(np.float32)
    m: F32 = np.abs(x).max(axis=axis, keepdims=True)
    d: F32 = np.maximum(m / LARGEST, LEASTS[least])
    if quotient == "x (448/m)":
        m = np.maximum(m, LEASTS[least] * LARGEST)
    elements = rounded(exact(divided(x, m, d, LARGEST, quotient)), "float8_e4m3fn", "saturate")
    return {"weight": elements, "weight_scale": d if axis == 1 else d.reshape(1)}


QUOTIENTS = ("x / d", "x (1/d)", "x (448/m)")
OF_TOKENS = choices(partial(_cast, 1), QUOTIENTS, tuple(LEASTS))
OF_TENSOR = choices(partial(_cast, None), QUOTIENTS, tuple(LEASTS))
SOURCE = "compressed-tensors, float-quantized"
FP8_TENSOR = Format(
    name="fp8-tensor",
    title="FP8 with one scale",
    fields=(WEIGHT, Field("weight_scale", "float32", (1,), "scale", "the scale of all weights")),
    decode=_scaled,
    encode=OF_TENSOR,
    source=SOURCE,
)
FP8_CHANNEL = Format(
    name="fp8-channel",
    title="FP8 with a scale for each output",
    fields=(WEIGHT, Field("weight_scale", "float32", ("N", 1), "scale", "the scale of each output channel")),
    decode=_scaled,
    encode=OF_TOKENS,
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
FP8_HEAD = Format(
    name="fp8-head",
    title="FP8 with a scale for each head",
    fields=(
        Field("elements", "float8_e4m3fn", ("N", "K"), "codes", "one row for each token, head after head"),
        Field("scale", "float32", ("K/head_dim",), "scale", "the scale of each head, for all tokens"),
    ),
    decode=_heads,
    options={"head_dim": None},
    source="vLLM, attention with calibrated k_scale and v_scale of heads",
)
