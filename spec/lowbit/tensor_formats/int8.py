r"""Activations in 8-bit integers: one scale for each token, or for each group of its channels.

Most processors multiply 8-bit integers faster than anything else. So a kernel casts each token of activations to signed
codes and a scale, and multiplies codes. The cast is symmetric: with :math:`m = \max |x|` over the numbers that
share a scale,

.. math:: d = m / 127, \qquad q_k = \mathrm{round}(x_k / d), \qquad x_k \approx d\, q_k .

Codes lie from -127 to 127, so that negation is exact; a stored -128 is valid. A token is a row of N × K numbers here,
so T tokens are a matrix K × T, and a key-value cache in int8 is the same matrix: ``int8-token`` with one scale for each
token, ``int8-group`` with one for each of its heads (a group is then a head).

================== ==================== ========================
format             scale                numbers with one scale
================== ==================== ========================
int8-token         float32              a token
int8-token-f16     float16              a token
int8-token-bf16    bfloat16             a token
int8-group         float32              ``group_size`` channels of a token
================== ==================== ========================

**Where kernels differ**, each is right, and a call keeps to one. All of them compute in float32.

- *Quotient.* vLLM's CUDA kernel multiplies by :math:`127/m`, SmoothQuant divides by *d*, others multiply by
  :math:`1/d`. Where the scale is stored in 16 bits, the divisor is *d* before or after it is rounded.
- *Ties.* vLLM and PyTorch round to even; SGLang's Triton kernel rounds away from 0.
- *Least magnitude.* vLLM's CUDA kernel lets *m* be 0, and gives zeros the scale 0; the Triton kernels take *m* to be
  at least :math:`10^{-10}`.

Where the divisor is a scale that was rounded to 0 in 16 bits, the codes are 0. The Triton kernels for groups convert
:math:`x/d` to int8 without rounding it, which truncates. That is not a choice here, since it costs half a step.

Source: vLLM, ``int8_quant_kernels.cu`` (``dynamic_scaled_int8_quant_kernel``) and ``int8_utils.py``; SGLang,
``int8_kernel.py`` (``per_token_quant_int8``); SmoothQuant, ``fake_quant.py``.
"""

from collections.abc import Mapping
from functools import partial

import numpy as np

from lowbit.arrays import F32, F64, Array
from lowbit.numbers.floats import Name, rounded
from lowbit.tensor_formats.bits import exact
from lowbit.tensor_formats.casts import TIES, Ties, choices, nearest, over
from lowbit.tensor_formats.table import Encode, Field, Format, Sizes, Tensors, Terms

LEVELS = np.float32(127)
LEASTS = {"any m": np.float32(0), "m at least 1e-10": np.float32(1e-10)}
QUOTIENTS = ("x (127/m)", "x / d", "x (1/d)")
ROUNDED = ("x / rounded d", "x (1/rounded d)")
"""Further choices for 16-bit scales."""


def runs(numbers: F64, at: Sizes, size: int) -> F32:
    """K × N numbers as N × groups × size in float32, the last group filled with zeros."""
    rows = np.zeros((at.N, -(-at.K // size) * size), np.float32)
    rows[:, : at.K] = numbers.T
    return rows.reshape(at.N, -1, size)


def divided(x: F32, m: F32, d: F32, levels: np.float32, quotient: str) -> F32:
    """The numbers before rounding, by one of the quotients; 0 where the divisor is 0."""
    if quotient == "x / d":
        return over(x, d)
    return x * (over(levels, m) if quotient == f"x ({levels:g}/m)" else over(np.float32(1), d))


def cast(scale: Name, quotient: str, ties: Ties, least: str, x: F32) -> tuple[Array, Array]:
    """The scale of each group, N × groups, and the codes, N × groups × size."""
    m = np.maximum(np.abs(x).max(axis=-1, keepdims=True), LEASTS[least])
    d: F32 = m / LEVELS
    kept = rounded(exact(d), scale)
    divisor = kept.astype(np.float32) if "rounded" in quotient else d
    codes = nearest(divided(x, m, divisor, LEVELS, quotient.replace("rounded ", "")), ties)
    return kept[..., 0], np.clip(codes, -127, 127).astype(np.int8)


def _encode(scale: Name, quotient: str, ties: Ties, least: str, numbers: F64, at: Sizes) -> dict[str, Array]:
    size = at.options.get("group_size", at.K)
    kept, codes = cast(scale, quotient, ties, least, runs(numbers, at, size))
    return {"codes": np.ascontiguousarray(codes.reshape(at.N, -1)[:, : at.K]), "scale": kept}


def _decode(tensors: Tensors, at: Sizes) -> Terms:
    return Terms((exact(tensors["codes"]) * exact(tensors["scale"])[:, at.group_of_row()]).T)


def _encodes(scale: Name) -> Mapping[str, Encode]:
    quotients = QUOTIENTS if scale == "float32" else QUOTIENTS + ROUNDED
    return choices(partial(_encode, scale), quotients, TIES[::-1], tuple(LEASTS))


SOURCE = "vLLM, int8_quant_kernels.cu; SGLang, int8_kernel.py; SmoothQuant, fake_quant.py"
CODES = Field("codes", "int8", ("N", "K"), "codes", "one row for each token, two's complement")
TRAPS = ("Codes are rounded; a conversion of the quotient to int8 truncates.", "The divisor is 127 and not 128.")


def _of_tokens(name: str, scale: Name) -> Format:
    return Format(
        name=name,
        title=f"int8 with a {scale} scale for each token",
        fields=(CODES, Field("scale", scale, ("N", 1), "scale", "one for each token")),
        decode=_decode,
        encode=_encodes(scale),
        source=SOURCE,
        traps=TRAPS,
    )


INT8_TOKEN = _of_tokens("int8-token", "float32")
INT8_TOKEN_F16 = _of_tokens("int8-token-f16", "float16")
INT8_TOKEN_BF16 = _of_tokens("int8-token-bf16", "bfloat16")
INT8_GROUP = Format(
    name="int8-group",
    title="int8 with a scale for each group of channels",
    fields=(CODES, Field("scale", "float32", ("N", "G"), "scale", "one for each token and group")),
    decode=_decode,
    encode=_encodes("float32"),
    options={"group_size": None},
    source=SOURCE,
    traps=TRAPS,
)
