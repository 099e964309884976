r"""FP8: ``float8_e4m3fn`` with scales of a tensor, of channels or tokens, of heads, or of blocks of 128 × 128.

Weights are N × K, as PyTorch stores a linear layer, and each is an element times a scale,

.. math:: w_{kn} = s \cdot P_{nk},

where *s* is one number (``fp8-tensor``), one for each output channel n (``fp8-channel``), or one for each block of 128
output channels and 128 inputs (``fp8-block``). The last is the layout of DeepSeek-V3. Its scales are called
``weight_scale_inv``, but elements are multiplied by them. Blocks at the right and lower edge may be smaller.

**Activations** are T rows of K numbers, so N is T: ``fp8-tensor`` has one scale for all tokens, ``fp8-channel`` one for
each token. **Key-value caches** also store each token in a row: ``fp8-tensor`` with one scale for a layer,
``fp8-head`` with one for each head. These scales come from calibration and are the same for all tokens.

**Casts** compute in float32 from :math:`m = \max |x|` over the numbers that share a scale:

.. math:: d = m / 448, \qquad P = \mathrm{round}(x / d),

to nearest, ties to even; numbers beyond 448 saturate. Kernels differ in two choices, and a call makes the same one
throughout:

- *Quotient.* vLLM and compressed-tensors divide by *d* for tokens, vLLM and DeepGEMM multiply by :math:`1/d` for a
  tensor and for blocks; torchao multiplies by :math:`448/m`.
- *Least scale.* For tokens vLLM takes *d* to be at least :math:`1/(448 \cdot 512)`; for a tensor it has no least scale.
  DeepGEMM takes *m* of blocks to be at least :math:`10^{-4}`. compressed-tensors makes a scale of 0 the epsilon of
  float32. Without any of these, numbers that are all 0 have the scale 0 and elements of 0.

Source: compressed-tensors, ``float-quantized``; DeepSeek-V3's ``weight_dequant``; OCP FP8 1.0 for the elements; vLLM,
``fp8/common.cu`` (``dynamic_per_token_scaled_fp8_quant``); DeepGEMM, ``per_block_cast_to_fp8``; torchao,
``float8_utils.py`` (``amax_to_scale``).
"""

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from lowbit.arrays import F32, F64, Array
from lowbit.numbers.floats import rounded
from lowbit.tensor_formats.bits import exact
from lowbit.tensor_formats.casts import choices
from lowbit.tensor_formats.int8 import divided
from lowbit.tensor_formats.table import Field, Format, Sizes, Tensors, Terms

BLOCK = 128
"""Outputs and inputs of a block."""
WEIGHT = Field("weight", "float8_e4m3fn", ("N", "K"), "codes", "the elements, one row for each output")


def _scaled(tensors: Tensors, at: Sizes) -> Terms:
    return Terms((exact(tensors["weight"]) * exact(tensors["weight_scale"])).T)


def _blocks(tensors: Tensors, at: Sizes) -> Terms:
    return Terms((exact(tensors["weight"]) * _of_blocks(exact(tensors["weight_scale_inv"]), at)).T)


def _of_blocks(scales: Array, at: Sizes) -> Array:
    """The scale of each element, N × K."""
    return np.repeat(np.repeat(scales, BLOCK, axis=0), BLOCK, axis=1)[: at.N, : at.K]


def _heads(tensors: Tensors, at: Sizes) -> Terms:
    scales = np.repeat(exact(tensors["scale"]), at["head_dim"])
    return Terms((exact(tensors["elements"]) * scales).T)


# **Casts.**

LARGEST = np.float32(448)
LEAST = np.float32(1 / (448 * 512))
EPSILON = np.float32(2.0**-23)


def _any(m: F32) -> tuple[F32, F32]:
    """m and d as they are."""
    return m, m / LARGEST


def _least_scale(m: F32) -> tuple[F32, F32]:
    return np.maximum(m, LEAST * LARGEST), np.maximum(m / LARGEST, LEAST)


def _no_zero(m: F32) -> tuple[F32, F32]:
    d = m / LARGEST
    return m, np.where(d == 0, EPSILON, d)


def _least_magnitude(m: F32) -> tuple[F32, F32]:
    return _any(np.maximum(m, np.float32(1e-4)))


SCALES: Mapping[str, Callable[[F32], tuple[F32, F32]]] = {
    "any d": _any,
    "d at least 1/(448 512)": _least_scale,
    "a d of 0 is 2^-23": _no_zero,
    "m at least 1e-4": _least_magnitude,
}
"""By name, the functions from the largest magnitudes to the divisors of a cast and the scales."""


def _elements(x: F32, m: Array, d: Array, quotient: str) -> Array:
    return rounded(exact(divided(x, m, d, LARGEST, quotient)), "float8_e4m3fn", "saturate")


def _cast(axis: int | None, quotient: str, least: str, numbers: F64, at: Sizes) -> dict[str, Array]:
    """The elements and scales of K × N numbers: one scale for each column (axis 1), or one for all (None)."""
    x = numbers.T.astype(np.float32)
    m, d = SCALES[least](np.abs(x).max(axis=axis, keepdims=True))
    return {"weight": _elements(x, m, d, quotient), "weight_scale": d if axis == 1 else d.reshape(1)}


def _cast_blocks(quotient: str, least: str, numbers: F64, at: Sizes) -> dict[str, Array]:
    """One scale for each 128 × 128 of N × K numbers."""
    x = numbers.T.astype(np.float32)
    whole = np.zeros([-(-size // BLOCK) * BLOCK for size in x.shape], np.float32)
    whole[: at.N, : at.K] = x
    tiles = whole.reshape(len(whole) // BLOCK, BLOCK, -1, BLOCK)
    m, d = SCALES[least](np.abs(tiles).max(axis=(1, 3)))
    return {"weight": _elements(x, _of_blocks(m, at), _of_blocks(d, at), quotient), "weight_scale_inv": d}


QUOTIENTS = ("x / d", "x (1/d)", "x (448/m)")
OF_TOKENS = choices(partial(_cast, 1), QUOTIENTS, tuple(SCALES)[:3])
OF_TENSOR = choices(partial(_cast, None), QUOTIENTS, tuple(SCALES)[:3])
OF_BLOCKS = choices(_cast_blocks, QUOTIENTS, ("any d", "a d of 0 is 2^-23", "m at least 1e-4"))
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
        Field("weight_scale_inv", "float32", ("N//128", "K//128"), "scale", "the factor of each block"),
    ),
    decode=_blocks,
    encode=OF_BLOCKS,
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
