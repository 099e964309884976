r"""GGUF's types whose codes look up one of 16 numbers: IQ4_NL, IQ4_XS, MXFP4, NVFP4.

A four-bit code is an index into a fixed table, and a weight is the scale times the number at that index. IQ4_NL and
IQ4_XS share a table of 16 integers, `NON_LINEAR`, which are denser near 0. MXFP4 and NVFP4 read a code as a float of
four bits (``float4_e2m1fn`` of the chapter `floats`).

========= ======= ============= =====================================================================
type      block   run           scale
========= ======= ============= =====================================================================
IQ4_NL    32      32            float16 *d*
IQ4_XS    256     32            *d* times a 6-bit integer less 32
MXFP4     32      32            a power of two, ``float8_e8m0fnu``
NVFP4     64      16            ``float8_e4m3fn``, its sign bit 0; one scale for each run
========= ======= ============= =====================================================================

In each *run* of elements, byte :math:`i` of the codes holds element :math:`i` in its low half and the element half a
run later in its high half. OCP MX and NVIDIA's NVFP4 put neighbours into one byte instead.

**Doubled tables.** ggml keeps the 16 floats as integers, twice their value, and halves the scale. The products are the
same. It reads the scale byte 255 of MXFP4, a NaN in the standard, as :math:`2^{128}`, ignores the sign bit of a scale
of NVFP4, and reads its pattern 127, a NaN, as 0. Its writers produce none of these, and lowbit refuses them.

**IQ4_XS has no cast.** Its scales are found by a search over all runs of a block, which is the writer's own, as for the
K-quants (`gguf_encode`).

**The cast to NVFP4** computes in float32 from the largest magnitude *m* of a run: its scale is :math:`m / 6`, and a
code is the nearest number times the scale, ties towards 0, and 0 without a sign. Scales are rounded by a rule of
ggml's own: to nearest with ties upwards, to 448 instead of 256 and more, and to 7 between 7 and 8 subnormal steps.

Source: ggml, ``ggml-common.h``, ``ggml-quants.c``, and ``ggml-impl.h`` (``ggml_e8m0_to_fp32_half`` and
``ggml_ue4m3_to_fp32`` and ``ggml_fp32_to_ue4m3``).
"""

from functools import partial

import numpy as np
import numpy.typing as npt

from lowbit.arrays import F64
from lowbit.errors import ArgumentError
from lowbit.numbers.floats import FLOATS
from lowbit.tensor_formats.bits import exact, looked_up, planes, split
from lowbit.tensor_formats.gguf import QS, D, gguf
from lowbit.tensor_formats.gguf_encode import EXPONENTS, floats_of_4, nvfp4
from lowbit.tensor_formats.gguf_fit import casts_to
from lowbit.tensor_formats.table import Field, Sizes, Tensors, Terms

NON_LINEAR = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float64)
"""The table of IQ4_NL and IQ4_XS, ``kvalues_iq4nl``."""
FLOAT4: F64 = FLOATS["float4_e2m1fn"].values


def scaled(scales: F64, numbers: F64) -> Terms:
    """Each scale, N × blocks × runs, times its run of numbers, N × blocks × elements."""
    return Terms(np.repeat(scales, numbers.shape[-1] // scales.shape[-1], axis=-1) * numbers)


def scales_of_iq4_xs(low: npt.NDArray[np.uint8], high: npt.NDArray[np.uint16]) -> npt.NDArray[np.int64]:
    """The scales of 6 bits, less 32: N × blocks × 8."""
    return (split(low, 4) | split(high[..., None], 2) << 4) - 32


def _iq4_nl(tensors: Tensors, at: Sizes) -> Terms:
    return scaled(exact(tensors["d"])[..., None], looked_up(NON_LINEAR, planes(tensors["qs"], 4, 16)))


def _iq4_xs(tensors: Tensors, at: Sizes) -> Terms:
    scales = scales_of_iq4_xs(tensors["scales_l"], tensors["scales_h"])
    return scaled(exact(tensors["d"])[..., None] * scales, looked_up(NON_LINEAR, planes(tensors["qs"], 4, 16)))


def _mxfp4(tensors: Tensors, at: Sizes) -> Terms:
    return scaled(exact(tensors["e"])[..., None], looked_up(FLOAT4, planes(tensors["qs"], 4, 16)))


def _nvfp4(tensors: Tensors, at: Sizes) -> Terms:
    return scaled(exact(tensors["d"]), looked_up(FLOAT4, planes(tensors["qs"], 4, 8)))


def _check_signs(tensors: Tensors, at: Sizes) -> None:
    if np.signbit(exact(tensors["d"])).any():
        raise ArgumentError("d", "a scale with its sign bit set", "scales of NVFP4 without a sign")


IQ4_NL = gguf(
    "IQ4_NL",
    block=32,
    fields=(D, QS),
    decode=_iq4_nl,
    encode=casts_to(NON_LINEAR),
    traps=("No code is 0: the smallest numbers of the table are 1 and -10.",),
)
IQ4_XS = gguf(
    "IQ4_XS",
    block=256,
    fields=(
        D,
        Field("scales_h", "uint16", (), "scale", "the two high bits of 8 scales, the first in the lowest bits"),
        Field("scales_l", "uint8", (4,), "scale", "the four low bits of 8 scales, the first in the low half of byte 0"),
        Field("qs", "uint8", (128,), "codes", "runs of 16 bytes: 16 elements in low halves, then 16 in high halves"),
    ),
    decode=_iq4_xs,
    traps=(
        "Low nibbles of neighbouring scales share a byte; those of Q3_K do not.",
        "A run of codes is 16 bytes, and in Q4_K it is 32.",
    ),
)
MXFP4 = gguf(
    "MXFP4",
    block=32,
    prefix="gguf-",
    fields=(Field("e", "float8_e8m0fnu", (), "scale", "the scale of the block, a power of two"), QS),
    decode=_mxfp4,
    encode={choice: partial(floats_of_4, exponent) for choice, exponent in EXPONENTS.items()},
    traps=("The order of nibbles is ggml's own, and not that of OCP MX.", "A block has 17 bytes and is never aligned."),
)
NVFP4 = gguf(
    "NVFP4",
    block=64,
    prefix="gguf-",
    fields=(
        Field("d", "float8_e4m3fn", (4,), "scale", "the scale of each run of 16 elements, not negative"),
        Field("qs", "uint8", (32,), "codes", "runs of 8 bytes: 8 elements in low halves, then 8 in high halves"),
    ),
    decode=_nvfp4,
    encode={"reference": nvfp4},
    check=_check_signs,
    traps=("The 4 scales of a block come first, then all codes.", "A run of codes is 8 bytes."),
)
