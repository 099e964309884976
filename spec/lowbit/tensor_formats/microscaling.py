r"""OCP Microscaling (MX): 32 small numbers with one power of two.

The Open Compute Project's MX formats share a scale :math:`X = 2^{c - 127}`, a pattern *c* of the type
``float8_e8m0fnu``, among :math:`k = 32` elements :math:`P_i` of a small type:

.. math:: v_i = X \cdot P_i .

============ ======================== ============================ =============================================
format       element                  largest element              exponent of the largest, :math:`e_{max}`
============ ======================== ============================ =============================================
mxfp8-e5m2   ``float8_e5m2``          57344                        15
mxfp8-e4m3   ``float8_e4m3fn``        448                          8
mxfp6-e3m2   ``float6_e3m2fn``        28                           4
mxfp6-e2m3   ``float6_e2m3fn``        7.5                          2
mxfp4        ``float4_e2m1fn``        6                            2
mxint8       int8 of 1/64 each        127/64                       0
============ ======================== ============================ =============================================

**Conversion** follows the standard's §6.3. With :math:`m = \max |V_i|` of the block,

.. math:: X = 2^{\lfloor \log_2 m \rfloor - e_{max}}, \qquad P_i = \mathrm{round}(V_i / X),

where numbers beyond the largest element saturate, and rounding is to nearest, ties to even. The standard leaves two
choices open. For a block of zeros we take the least scale. The standard leaves the conversion of NaN to the
implementation; here NaN is refused.

**The scale rounded up** is the other choice in use, and also conforms: with the largest element :math:`P_{max}`,

.. math:: X = 2^{\lceil \log_2 (m / P_{max}) \rceil},

so that nothing saturates. torchao's ``RCEIL`` and the conversions of NVIDIA's Blackwell compute it from the float32
quotient :math:`m / P_{max}`.

**The largest number rounded first** is the third. With *m* rounded to :math:`b` bits of mantissa, ties upwards,

.. math:: X = 2^{\lfloor \log_2 \mathrm{round}_b(m) \rfloor - e_{max}} .

torchao's ``EVEN`` takes for *b* the mantissa of the element; so does compressed-tensors, except for MXFP8, where it
takes that of MXFP4, 1 bit. **The exponent rounded up**, torchao's ``CEIL``, is the last, :math:`X = 2^{\lceil \log_2 m
\rceil - e_{max}}`. Each of these is right, and a call makes the same choice throughout.

``mxint8`` uses -127 to 127, so that negation stays exact; a stored -128 is valid and means -2.

**Layout.** The standard does not define a memory layout. This one is that of compressed-tensors and of the GPU
libraries: a row of N holds its elements along K and apart from them its scales; two codes of 4 bits share a byte, the
first in the low half; four codes of 6 bits share three bytes, little-endian.

Source: OCP Microscaling Formats (MX) Specification 1.0, §5.1 to §5.3, §6.1, §6.3; the layout as in compressed-tensors,
``mxfp4``, ``mxfp6`` and ``mxfp8``; torchao, ``mx_tensor.py`` (``to_mx``); compressed-tensors, ``mxfp_utils.py``
(``generate_mx_scales``).
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from lowbit.arrays import F64, Array
from lowbit.numbers.floats import FLOATS, Name, round_to
from lowbit.tensor_formats.bits import end_to_end, exact, looked_up, stream
from lowbit.tensor_formats.table import Field, Format, Sizes, Tensors, Terms

BLOCK = 32
"""Elements of a block, the standard's *k*."""
SOURCE = "OCP Microscaling Formats (MX) 1.0"
SCALE = Field("scale", "float8_e8m0fnu", ("N", "K/32"), "scale", "a power of two for each 32 elements of a row")


def scaled(elements: F64, scales: Array, at: Sizes) -> Terms:
    """The terms of N × K elements with a scale for each block."""
    products = elements.reshape(at.N, -1, BLOCK) * exact(scales)[..., np.newaxis]
    return Terms(products.reshape(at.N, at.K).T)


Scaling = Callable[[F64, float], Array]
"""Returns the pattern of X for each block, N × blocks, given blocks of numbers, N × blocks × 32, and the largest
element."""


def rounded_down(blocks: F64, largest_element: float) -> Array:
    """The standard's X: exponents are read from the float, never computed by a logarithm."""
    largest = np.abs(blocks).max(axis=-1)
    _, exponents = np.frexp(largest)  # 2^(e−1) ≤ m < 2^e
    chosen = np.where(largest > 0, exponents - np.frexp(largest_element)[1], -127)
    return (np.clip(chosen, -127, 127) + 127).astype(np.uint8)


def rounded_up(blocks: F64, largest_element: float) -> Array:
    """The power of two at or above the quotient."""
    largest = np.abs(blocks).max(axis=-1).astype(np.float32)
    quotients = (largest / np.float32(largest_element)).astype(np.float64)
    return round_to(quotients.reshape(-1), "float8_e8m0fnu", direction="up").reshape(quotients.shape)


def exponent_rounded_up(blocks: F64, largest_element: float) -> Array:
    """The standard's X of the power of two at or above the largest number."""
    fraction, exponents = np.frexp(np.abs(blocks).max(axis=-1, keepdims=True))
    return rounded_down(np.ldexp(np.ceil(fraction), exponents - (fraction == 0.5)), largest_element)


def first_rounded(bits: int, blocks: F64, largest_element: float) -> Array:
    """The standard's X of the largest number rounded to `bits` bits of mantissa, ties upwards."""
    fraction, exponents = np.frexp(np.abs(blocks).max(axis=-1, keepdims=True))
    steps = np.floor(np.ldexp(fraction, bits + 1) + 0.5)
    return rounded_down(np.ldexp(steps, exponents - (bits + 1)), largest_element)


BOTH: dict[str, Scaling] = {"standard": rounded_down, "scale rounded up": rounded_up}
"""The choices that every format has."""


def scalings(*mantissas: int) -> dict[str, Scaling]:
    """The choices for floats, with the bits of mantissa to which tools round the largest number."""
    rounding = {f"largest rounded to bits of mantissa: {bits}": partial(first_rounded, bits) for bits in mantissas}
    return BOTH | {"exponent rounded up": exponent_rounded_up} | rounding


def divided(scaling: Scaling, largest_element: float, weights: F64, at: Sizes) -> tuple[F64, Array]:
    """The numbers over the X of their blocks, N × K, and each X, N × blocks."""
    blocks = np.ascontiguousarray(weights.T).reshape(at.N, -1, BLOCK)
    scale = scaling(blocks, largest_element)
    quotients = np.ldexp(blocks, 127 - scale.astype(np.int64)[..., np.newaxis])
    return quotients.reshape(at.N, at.K), scale.view(FLOATS["float8_e8m0fnu"].dtype)


BYTES = {8: "K", 6: "K*3/4", 4: "K/2"}
"""The bytes of a row, by the bits of an element; rows are streams of elements, the first in the lowest bits."""


def of_floats(name: str, element: Name, *other: int) -> Format:
    """An MX format of floats; tools round the largest number to as many bits as the element has, or to `other`."""
    kind = FLOATS[element]
    stored = kind.dtype if kind.bits == 8 else np.dtype(np.uint8)

    def read(tensors: Tensors, at: Sizes) -> Terms:
        codes = stream(tensors["elements"].view(np.uint8), kind.bits, at.K)
        return scaled(looked_up(kind.values, codes), tensors["scale"], at)

    def write(scaling: Scaling, weights: F64, at: Sizes) -> dict[str, Array]:
        quotients, scale = divided(scaling, kind.largest, weights, at)
        codes = round_to(quotients.reshape(-1), element).reshape(at.N, at.K)
        return {"elements": end_to_end(codes, kind.bits, np.uint8).view(stored), "scale": scale}

    return Format(
        name=name,
        title=f"OCP MX with elements of {element}",
        fields=(Field("elements", stored.name, ("N", BYTES[kind.bits]), "codes", f"{element} along K"), SCALE),
        decode=read,
        encode={choice: partial(write, scaling) for choice, scaling in scalings(kind.mantissa, *other).items()},
        source=SOURCE,
        traps=("The scale of a block is a power of two that is rounded down or up, and never to the nearest of both.",),
    )


def _integers(tensors: Tensors, at: Sizes) -> Terms:
    return scaled(exact(tensors["elements"]) / 64, tensors["scale"], at)


def _to_integers(scaling: Scaling, weights: F64, at: Sizes) -> dict[str, Array]:
    quotients, scale = divided(scaling, 127 / 64, weights, at)
    return {"elements": np.clip(np.rint(64 * quotients), -127, 127).astype(np.int8), "scale": scale}


MXFP8_E5M2 = of_floats("mxfp8-e5m2", "float8_e5m2")
MXFP8_E4M3 = of_floats("mxfp8-e4m3", "float8_e4m3fn", FLOATS["float4_e2m1fn"].mantissa)
MXFP6_E3M2 = of_floats("mxfp6-e3m2", "float6_e3m2fn")
MXFP6_E2M3 = of_floats("mxfp6-e2m3", "float6_e2m3fn")
MXFP4 = of_floats("mxfp4", "float4_e2m1fn")
MXINT8 = Format(
    name="mxint8",
    title="OCP MX with elements of 8-bit integers",
    fields=(Field("elements", "int8", ("N", "K"), "codes", "64ths along K, two's complement"), SCALE),
    decode=_integers,
    encode={choice: partial(_to_integers, scaling) for choice, scaling in BOTH.items()},
    source=SOURCE,
)
